"""Result of precision: what a state in few bits costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.api.scores import LOWER, Score, ScoreMaker
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import brackets, counted, number
from ssmscope.render.table import Cell, Line, short_cell, table

MARGIN = 0.01
"""Loss in nats a token that would not matter."""


@dataclass(frozen=True)
class Arm:
    """A rounding of the carried state against the run without."""

    name: str
    bits: int
    every: int
    """It is rounded after so many tokens."""
    stochastic: bool
    change: Estimate
    """Change of the mean loss, nats a token."""
    size: Estimate
    """Mean |change| of a token's loss."""
    accuracy: Estimate
    """Share of next tokens that are the likeliest."""
    less: Estimate
    """Change of the accuracy."""
    by_distance: tuple[Estimate, ...]
    """Change of the accuracy on repeated pairs, by distance."""

    @property
    def label(self) -> str:
        every = f", every {self.every} tokens" * (self.every > 1)
        return self.name + every + ", stochastic" * self.stochastic


@dataclass(frozen=True)
class Precision(Result, kind="precision"):
    """Loss and accuracy with the recurrent state rounded while it is carried."""

    loss: float
    """Mean loss without rounding, nats a token."""
    accuracy: float
    arms: tuple[Arm, ...]
    distances: tuple[str, ...]
    repeated: tuple[float, ...]
    """Accuracy without rounding on repeated pairs, by distance."""
    heads: np.ndarray
    """(layers, heads): mean |change| where each head alone is rounded, NaN beyond a layer's; empty if not asked."""
    heads_in: str
    """Rounding of these heads."""
    layers: tuple[int, ...]

    @property
    def control(self) -> Arm | None:
        """Arm of the state set to zero."""
        return next((each for each in self.arms if not each.bits), None)

    @property
    def roundings(self) -> tuple[Arm, ...]:
        return tuple(each for each in self.arms if each.bits)

    @property
    def digits(self) -> int:
        """Decimal places that show the largest change by a rounding, 4 to 6."""
        largest = max(max(abs(each.change.value), each.size.value) for each in self.roundings)
        return next((digits for digits in (4, 5) if largest >= 10 ** (1 - digits)), 6)

    @property
    def narrowest(self) -> Arm | None:
        """Arm of the fewest bits whose loss rises by less than `MARGIN`, its interval included."""
        safe = [each for each in self.roundings if max(each.change.value, each.change.high) < MARGIN]
        return min(safe, key=lambda each: (each.bits, each.size.value), default=None)

    @property
    def headline(self) -> str:
        worst = max(self.roundings, key=lambda each: each.change.value)
        found, zero, said = self.narrowest, self.control, f"Precision of {self.model_name}:"
        without = "" if zero is None else f"{self._cost(zero)} nats a token with the state set to zero"
        if zero is not None and max(map(abs, (zero.change.value, zero.change.low, zero.change.high))) < MARGIN:
            return f"{said} the state is hardly used on these texts: {without}"
        without = without and f"; {without}"
        if found is None:
            cost = f"{worst.label} {self._cost(worst)}"
            return f"{said} every rounding may cost {MARGIN} nats a token or more, {cost}{without}"
        told = f"{said} the state may be kept in {found.label} ({self._cost(found)} nats a token)"
        told += "" if worst.change.value < MARGIN else f", but {worst.label} costs {self._cost(worst)}"
        return told + without

    def _cost(self, each: Arm) -> str:
        shown = number(each.change.value, self.digits) + brackets(each.change, self.digits)
        return "+" * (each.change.value >= 0) + shown

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make = ScoreMaker(self, models, 0)
        for each in self.roundings:
            yield make(f"precision[{each.label}]", each.change, LOWER, "nats")

    def to_frame(self) -> pd.DataFrame:
        """Return a row per rounding: columns rounding, bits, every, stochastic, change of the loss, size (mean of its
        absolute value), accuracy and its change `less`, then `at DISTANCE`, the change on repeated pairs, each with
        _low and _high."""
        rows = []
        for each in self.arms:
            line = {"rounding": each.name, "bits": each.bits, "every": each.every, "stochastic": each.stochastic}
            at = {f"at {name}": found for name, found in zip(self.distances, each.by_distance)}
            found = with_intervals(change=each.change, size=each.size, accuracy=each.accuracy, less=each.less, **at)
            rows.append({**line, **found})
        return pd.DataFrame(rows)

    def blocks(self) -> Iterable[Block]:
        data = self.provenance["data"]
        count = f"{counted(data['windows'], 'window')} of {data['length']:,} tokens of {data['name']}"
        plain = f"without rounding {self.loss:.3f} nats a token, accuracy {self.accuracy:.3f}"
        yield from self.opening(f"{count}; {plain}.")
        lines = []
        for each in self.arms:
            cells = {
                "loss": Cell(each.change, digits=self.digits),
                "mean |change|": Cell(each.size, digits=self.digits),
            }
            cells |= {"accuracy": Cell(each.less, digits=4)}
            at = zip(self.distances, each.by_distance)
            lines.append(Line((each.label,), cells | {f"at {name}": Cell(found, digits=3) for name, found in at}))
        note = "Changes against the state in the model's dtype; at: accuracy on tokens whose pair with the one before"
        yield table(("state",), lines, note=f"{note} occurred so many tokens earlier.")
        if self.heads.size:
            yield self._heads()

    def _heads(self) -> Block:
        every, lines = np.nansum(self.heads), []
        for at in np.argsort(-np.nan_to_num(self.heads, nan=-1), axis=None)[:10].tolist():
            layer, head = divmod(at, self.heads.shape[1])
            size = self.heads[layer, head]
            cells = {"mean |change|": short_cell(size), "share of all": short_cell(size / every if every else 0.0)}
            lines.append(Line((str(self.layers[layer]), str(head)), cells))
        return table(("layer", "head"), lines, note=f"Each head alone in {self.heads_in}; the ten that change most.")
