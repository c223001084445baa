"""Grids of patched runs: the answer by layer and token, or by head; means over pairs; and their views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.interp.edited_texts import EditedText, text_blocks
from ssmscope.render.blocks import Block, Picture, Prose
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, Table, short_cell, table
from ssmscope.render.tokens import short_token, shorten, visible

SITES = {
    "state": "states after a token",
    "output": "mixers' outputs",
    "residual": "the residual stream before a block",
    "convolution": "convolutions' inputs",
    "head": "heads' outputs",
}
METRICS = {
    "normalised": "share of the way to the other run",
    "difference": "difference of logits",
    "probability": "probability of the answer",
}
"""Sites and metrics by name, with their names in the views."""
NAMED_CELLS = 10


@dataclass(frozen=True)
class Patching(Result, kind="patch"):
    """Answers of one text's run with single activations of another's."""

    clean: tuple[str, ...]
    corrupted: tuple[str, ...]
    """Tokens of the two texts."""
    site: str
    direction: str
    metric: str
    positions: tuple[int, ...]
    answer: str
    contrast: str
    base: np.ndarray
    """(2,): the answer's probability and the difference of logits in the run that is patched, with nothing patched."""
    other: np.ndarray
    """(2,): the same in the run that the patches are from."""
    values: np.ndarray
    """(layers + 1, positions, 2), the last row with all layers patched; for heads (layers, heads, 2). With the method
    "gradient" the approximation, without probabilities and without the last row."""
    attributed: np.ndarray
    """(layers, positions or heads): the gradient's approximation of the change of the difference of logits; no layer
    where it was not requested."""
    agreement: tuple[float, float]
    """Pearson's and Spearman's correlation of `attributed` with the change by patching; NaN without both."""
    partners: tuple[int, ...] = ()
    """Positions in the corrupted text of the tokens at `positions`; none if they are the same."""
    numbers: tuple[int, ...] = ()
    """Numbers of the layers in the model's list of layers; none if they are 0, 1, …"""
    written: tuple[EditedText, ...] = ()
    """Continuations, where asked for: of the patched text (0), without and with patches, and of the other (1)."""

    @property
    def headline(self) -> str:
        return f"Patching {SITES[self.site]} on {self.model_name}: {self.asked}, {self.flipped}"

    @property
    def flipped(self) -> str:
        """Name the first token, or head, whose patch flips the answer to the other run's."""
        heads = self.site == "head"
        rows = self.values[-1:] if self.is_exact and not heads else self.values
        cells = np.argwhere((np.sign(rows[..., 1]) == -np.sign(self.base[1])).T)
        if not len(cells):
            return f"flipped by no {'head' if heads else 'token'}"
        column, row = cells[0]
        return f"flipped first {f'by {self.name(row, column)}' if heads else f'at token {self.place(column)}'}"

    @property
    def asked(self) -> str:
        return f"“{shorten(visible(self.answer), 20)}” or “{shorten(visible(self.contrast), 20)}”"

    @property
    def metric_name(self) -> str:
        return METRICS[self.metric]

    @property
    def layers(self) -> int:
        return len(self.values) - (self.site != "head")

    @property
    def is_exact(self) -> bool:
        """True if cells were run, not approximated."""
        return bool(np.isfinite(self.values[..., 0]).any())

    def approximated(self) -> np.ndarray:
        """Return the gradient's approximation, in the form of `effects`."""
        share = self.attributed / (self.other[1] - self.base[1])
        return share if self.metric == "normalised" else self.base[1] + self.attributed

    def effects(self, metric: str | None = None) -> np.ndarray:
        """Return the values, (rows, columns), by a metric: "probability", "difference", or "normalised", (m − m_base) /
        (m_other − m_base) of the difference: 0 where nothing changed, 1 for the other run's answer."""
        metric = metric or self.metric
        if metric == "probability":
            return self.values[..., 0]
        found = self.values[..., 1]
        return found if metric == "difference" else (found - self.base[1]) / (self.other[1] - self.base[1])

    def verdict(self, at: int = 0) -> str:
        (row, column), value = self.strongest(1)[0]
        return f"most in {self.name(row, column)}: {number(value)} ({self.metric_name})"

    def strongest(self, count: int) -> list[tuple[tuple[int, int], float]]:
        """Return the cells of single layers that change the most."""
        found = self.effects()[: self.layers]
        output, base = ("probability", self.base[0]) if self.metric == "probability" else ("difference", self.base[1])
        size = float(np.nanmax(np.abs([base, *self.effects(output)[: self.layers].flat])))
        plain = base
        if self.metric == "normalised":
            plain, size = 0.0, size / float(abs(self.other[1] - base))
        order = descending(np.abs(found - plain).ravel(), size)[:count]
        places = zip(*np.unravel_index(order, found.shape))
        return [((int(row), int(column)), float(found[row, column])) for row, column in places]

    def name(self, row: int, column: int) -> str:
        """Name a cell."""
        return f"layer {self.number(row)}, {f'head {column}' if self.site == 'head' else self.place(column)}"

    def number(self, row: int) -> int:
        """Return the number of a row's layer."""
        return self.numbers[row] if self.numbers else row

    def place(self, column: int) -> str:
        """Name the token of a column by its position."""
        return f"{self.positions[column]} “{self.token(column, 20)}”"

    def token(self, column: int, width: int) -> str:
        """Return the token of a column, both where the texts differ."""
        place, other = self.positions[column], (self.partners or self.positions)[column]
        own = [short_token(self.clean[place], width), short_token(self.corrupted[other], width)]
        return own[0] if self.clean[place] == self.corrupted[other] else "/".join(own)

    def to_frame(self) -> pd.DataFrame:
        """Return a row per cell; layer is empty where all are patched together. `attributed` is the gradient's
        approximation of the change of the difference of logits."""
        shares = self.effects("normalised")
        rows = []
        for (row, column), share in np.ndenumerate(shares):
            layer, of_head = self.number(row) if row < self.layers else None, self.site == "head"
            where = (None, column, "") if of_head else (self.positions[column], None, self.token(column, 40))
            near = self.attributed[row, column] if len(self.attributed) and layer is not None else np.nan
            rows.append((layer, *where, *map(float, (*self.values[row, column], share, near))))
        columns = ["layer", "position", "head", "token", "probability", "difference", "normalised", "attributed"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.astype({"layer": "Int64", "position": "Int64", "head": "Int64"})

    @classmethod
    def compare(cls, results: Sequence[Patching], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            (row, column), value = result.strongest(1)[0]
            cells = {"most in": Cell(text=result.name(row, column)), result.metric_name: short_cell(value)}
            lines.append(Line((label, result.site), cells))
        return table(("model", "site"), lines)

    def blocks(self) -> Iterable[Block]:
        names = ("corrupted", "clean") if self.direction == "denoise" else ("clean", "corrupted")
        ends = "; ".join(
            f"{name}: probability {value[0]:.3f}, difference of logits {number(value[1])}"
            for name, value in zip(names, (self.base, self.other))
        )
        near = "Approximated by a gradient, to first order: attribution patching."
        yield from self.opening(f"{self.asked}; {ends}.", *([] if self.is_exact else [near]))
        if self.is_exact and len(self.attributed):
            own, ranks = (f"{each:.3f}".replace("-", "−") for each in self.agreement)
            yield Prose(f"Correlation of the gradient's approximation with it: {own} (Pearson), {ranks} (Spearman).")
            yield Picture(partial(self.figure, approximated=True), f"{self.headline}, approximated")
        top = self.strongest(NAMED_CELLS)
        lines = [Line((self.name(*cell),), {self.metric_name: short_cell(value)}) for cell, value in top]
        into = f"Values of the {names[1]} run in the {names[0]} one; the cells of single layers that change the most."
        yield table(("patched",), lines, note=into)
        yield from text_blocks(self.written, dict(enumerate(names)))


@dataclass(frozen=True)
class PairPatching(Result, kind="patch-pairs"):
    """Share of the way to the other run that a patched cell goes, mean over pairs."""

    pairs: int
    direction: str
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    """Site and layer of each row."""
    classes: tuple[str, ...]
    base: float
    other: float
    """Mean difference of logits of the run that is patched, and of the one that the patches are from."""
    values: np.ndarray
    """(rows, classes, 3): mean change of the difference of logits, relative to that between both runs, and its
    interval; NaN where nothing is patched."""

    drawn_by = "pair_figure"

    @property
    def headline(self) -> str:
        (row, column), found = self.strongest(1)[0]
        said = f"{found}".replace("-", "−")
        return (
            f"Patching of {counted(self.pairs, 'pair')} on {self.model_name}: most in {self.name(row, column)}: {said}"
        )

    def strongest(self, count: int) -> list[tuple[tuple[int, int], Estimate]]:
        """Return the cells that change the most."""
        sizes = np.nan_to_num(np.abs(self.values[..., 0]), nan=-1.0)
        order = descending(sizes.ravel())[:count]
        places = [(int(row), int(column)) for row, column in zip(*np.unravel_index(order, sizes.shape))]
        return [(place, Estimate(*map(float, self.values[place]))) for place in places if sizes[place] >= 0]

    def name(self, row: int, column: int) -> str:
        """Name a cell."""
        return f"{self.sites[row]} of layer {self.layers[row]} at {self.classes[column]}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per cell that is patched."""
        rows = [
            (self.sites[row], self.layers[row], self.classes[column], *map(float, self.values[row, column]))
            for row, column in np.ndindex(self.values.shape[:2])
            if np.isfinite(self.values[row, column, 0])
        ]
        return pd.DataFrame(rows, columns=["site", "layer", "position", "share", "share_low", "share_high"])

    @classmethod
    def compare(cls, results: Sequence[PairPatching], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            place, found = result.strongest(1)[0]
            lines.append(Line((label,), {"most in": Cell(text=result.name(*place)), "share": Cell(found)}))
        return table(("model",), lines)

    def blocks(self) -> Iterable[Block]:
        names = ("corrupted", "clean") if self.direction == "denoise" else ("clean", "corrupted")
        ends = "; ".join(f"{name}: {number(end)}" for name, end in zip(names, (self.base, self.other)))
        # Set by position_classes where neither a column nor a position is common to all pairs.
        unequal = "The texts differ in length: for words other than the changed ones, name them in a column."
        yield from self.opening(f"Mean difference of logits, {ends}.", *[unequal] * ("changed" in self.classes))
        lines = []
        for (row, column), found in self.strongest(NAMED_CELLS):
            lines.append(Line((self.sites[row], str(self.layers[row]), self.classes[column]), {"share": Cell(found)}))
        into = f"Share of the way to the {names[1]} run when its values are put into the {names[0]} one."
        yield table(("site", "layer", "position"), lines, note=into)
