"""Result of parity: the tensors of another runtime against the model's, and the likely fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, number_cell, table
from ssmscope.render.tokens import short_token

MODE = "logits of "
"""Beginning of the names of what the model's own library computes in a mode."""


@dataclass(frozen=True)
class Compared:
    """A tensor of the file against the model's."""

    name: str
    error: float
    """Largest rms of a row's difference / rms of the model's tensor; `allowed`: that which rounding may cause."""
    allowed: float
    over: int
    """Number of rows with a larger one, of `rows`; text, position and token of the first, −1 and "" for none."""
    rows: int
    text: int
    position: int
    token: str

    @classmethod
    def of(
        cls, name: str, errors: np.ndarray, allowed: float, places: Sequence[tuple[int, int]], tokens: Any
    ) -> Compared:
        """Return a tensor with its errors at these places, (text, position) each, of texts of these tokens."""
        over = [place for place, error in zip(places, errors.tolist()) if error > allowed]
        text, position = min(over, default=(-1, -1))
        token = tokens[text][position] if over else ""
        return cls(name, float(errors.max()), allowed, len(over), len(places), text, position, token)

    @property
    def times(self) -> float:
        """Error in multiples of what is allowed."""
        return self.error / self.allowed if self.allowed else float("inf") if self.error else 0.0

    @property
    def where(self) -> str:
        """Name in words: "the state of layer 3"."""
        place, _, tensor = self.name.rpartition(".")
        parts = self.name.split(".")
        if parts[0] not in ("layers", "attention"):
            return f"the {self.name}"
        kind = {"residual": "the input of the block", "conv": "the convolution's last inputs", "output": "the output"}
        found = "the state" if parts[2] == "state" else kind.get(parts[2], f"the {tensor}")
        return f"{found} of {'attention in ' * (parts[0] == 'attention')}layer {parts[1]}"


@dataclass(frozen=True)
class Parity(Result, kind="parity"):
    """Tensors that another runtime dumped against the model's, in the order in which a model computes them."""

    file: str
    ran_in: str
    """Dtype that the other runtime computes in."""
    tensors: tuple[Compared, ...]
    fault: str
    """Likely fault behind the first difference; "" if none explains it, or nothing differs."""

    @property
    def first(self) -> Compared | None:
        """First tensor that differs."""
        return next((each for each in self.tensors if each.over), None)

    @property
    def failed(self) -> bool:  # type: ignore[override]
        """True if anything differs."""
        return self.first is not None

    @property
    def unit(self) -> str:
        """Kind of what is compared: tensors of a file, or modes of the model's own library."""
        return "mode" if self.tensors[0].name.startswith(MODE) else "tensor"

    @property
    def headline(self) -> str:
        first, said = self.first, f"Parity of {self.model_name}: {self.file}"
        worst = max(self.tensors, key=lambda each: each.times)
        if first is None:
            count = counted(len(self.tensors), self.unit)
            told = (
                f"{count} agree{'s' * (len(self.tensors) == 1)}, with at most {number(worst.times)} of the error that"
            )
            return f"{said} is of the same model: {told} rounding in {self.ran_in} allows"
        if self.unit == "mode":
            over = [each.name.removeprefix(MODE) for each in self.tensors if each.over]
            by = f"by up to {number(worst.error)} of the logits' size, {number(worst.times)} × what rounding allows"
            return f"{said} differs in {len(over)} of {len(self.tensors)} modes ({'; '.join(over)}), {by}"
        token = f"token {first.position} “{short_token(first.token, 24)}” of text {first.text}"
        by = f"{number(first.error)} of its size, {number(first.times)} × what {self.ran_in} allows"
        likely = f"; likely, {self.fault}" if self.fault else "; no known fault explains it"
        return f"{said} first differs in {first.where}, after {token}, by {by}{likely}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per tensor: columns tensor, error, allowed, times, over, rows, text, position, token. Text,
        position and token are those of the first row that differs, missing where none does."""
        names = ["tensor", "error", "allowed", "times", "over", "rows", "text", "position", "token"]
        rows = [{**vars(each), "tensor": each.name, "times": each.times} for each in self.tensors]
        frame = pd.DataFrame(rows, columns=names).astype({"text": "Int64", "position": "Int64", "token": "string"})
        return frame.assign(**{name: frame[name].mask(frame.over == 0) for name in names[-3:]})

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        lines = []
        for each in self.tensors:
            cells = {"error": number_cell(each.error), "allowed": number_cell(each.allowed)}
            cells["differ"] = Cell(text=f"{each.over} of {each.rows}" if each.over else "no")
            cells["first text"] = Cell(text=str(each.text) if each.over else "")
            cells["token"] = Cell(text=str(each.position) if each.over else "")
            lines.append(Line((each.name.removeprefix(MODE),), cells))
        note = "error: rms of a row's difference / rms of the model's tensor, at worst; allowed: 8 × the rounding "
        note += f"measured in {self.ran_in}; differ: rows with a larger error."
        yield replace(table((self.unit,), lines, note=note), brief=TABLE_ROWS)
