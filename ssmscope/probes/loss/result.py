"""Result of the loss by position: curves, bins and slopes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import Result
from ssmscope.api.scores import LOWER, Score, ScoreMaker
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, Table, shown_names, table, with_interval

SETTLED_FROM = 16
"""Position from which on the figure's axis holds the curves, which are steep before."""


@dataclass(frozen=True)
class Summary:
    """Summary of a model's losses, or of the first model's minus another's."""

    mean: Estimate
    """Mean over all positions: the model's cross-entropy on the windows."""
    slope: Estimate
    """Slope per doubling of the position after the first 100; not defined with fewer than two more positions."""
    bins: tuple[Estimate, ...]
    """Mean in each bin of positions."""


@dataclass(frozen=True)
class Remembrance:
    """Effect of all but the last `span` tokens of a window."""

    span: int
    variation: Estimate
    """Total variation of the next token's distribution when they are left out, 0 to 1."""
    attention: Estimate
    """The same when softmax attention alone is cut off from them; NaN without attention."""
    kept: Estimate
    """Their share of the recurrent states; NaN without any."""


@dataclass(frozen=True)
class TokenLoss(Result, kind="loss"):
    """Loss of the next token by its position, of one or several models on the same windows."""

    models: tuple[str, ...]
    unit: str
    smooth: int
    positions: tuple[int, ...]
    """Positions of the curves: the number of tokens read."""
    losses: np.ndarray
    """(models, length): the mean over the windows at every position, not smoothed."""
    bins: tuple[tuple[int, int], ...]
    """(after, up to) positions."""
    summaries: tuple[Summary, ...]
    differences: tuple[Summary, ...]
    """Paired differences of the first model minus each of the others."""
    curves: np.ndarray
    """(models, positions, 3): the smoothed loss and its interval."""
    notes: tuple[str, ...]
    remembrance: tuple[tuple[Remembrance, ...], ...] = ()
    """Remembrance of each model by its span, where it was asked for."""

    @property
    def shown(self) -> tuple[float, float]:
        """Ends of the figure's axis: the range of the curves from position 16 on, with some room."""
        curves = self.curves[:, np.array(self.positions) >= min(SETTLED_FROM, self.length)]
        low, high = float(np.nanmin(curves)), float(np.nanmax(curves))
        spread = max(high - low, 1e-3)
        return low - 0.06 * spread, high + 0.1 * spread

    @property
    def outside(self) -> str:
        """Say what lies outside the figure's axes; empty if nothing does."""
        means, (low, high) = self.curves[..., 0], self.shown
        beyond = np.flatnonzero(((means < low) | (means > high)).any(0))
        if not len(beyond):
            return ""
        first, last = (self.positions[beyond[end]] for end in (0, -1))
        most = number(float(np.nanmax(means[:, beyond])))
        where = f"position {first}" if first == last else f"positions {first} to {last}"
        return f"outside the axes: up to {most} {self.unit} at {where}"

    @property
    def length(self) -> int:
        """Tokens per window."""
        return self.losses.shape[1]

    def verdict(self, at: int = 0) -> str:
        return f"{with_interval(self.summaries[at].mean)} {self.unit} a token"

    def _trend(self, at: int) -> str:
        """Say how the loss changes as the context doubles, where that is known."""
        found = self.summaries[at].slope
        if math.isnan(found.value):
            return ""
        if found.low <= 0 <= found.high or not found.has_interval:
            return f", not clearly falling as the context doubles ({with_interval(found)})"
        return f", {'falling' if found.value < 0 else 'rising'} by {number(abs(found.value), 3)} as the context doubles"

    @classmethod
    def compare(cls, results: Sequence[TokenLoss], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        less: list[str] = []
        for result, label in zip(results, labels):
            for name, each in zip(shown_names(label, result.models), result.summaries):
                cells = {f"{result.unit} a token": Cell(each.mean)}
                cells |= {f"at {bin_name(edges)}": Cell(part) for edges, part in zip(result.bins, each.bins)}
                less += cells
                lines.append(Line((name,), cells, result.provenance.get("data", {}).get("name")))
        return table(("model",), lines, less=less)

    @property
    def headline(self) -> str:
        found = [
            f"{name} {one.mean.value:.3f}{self._trend(at)}"
            for at, (name, one) in enumerate(zip(self.models, self.summaries))
        ]
        for at, each in enumerate(self.remembrance):
            found[at] += f", of which all but the last {each[-1].span:,} tokens move the next by"
            found[at] += f" {number(each[-1].variation.value)}"
        if len(found) == 2:
            found.append(f"difference {with_interval(self.differences[0].mean)}")
        return f"Loss by position, {self.unit} a token over {self.length:,} tokens: {'; '.join(found)}"

    @property
    def counted(self) -> str:
        """Description of the windows, such as "12 windows of 2,048 tokens of wikitext2"."""
        data = self.provenance["data"]
        return f"{counted(data['windows'], 'window')} of {self.length:,} tokens of {data['name']}"

    def summary(self) -> pd.DataFrame:
        """Return a row per quantity of each model and difference: columns name, quantity (mean, slope, or a bin such as
        "129–512"), value, low and high."""
        names = [*self.models, *(f"{self.models[0]} − {other}" for other in self.models[1:])]
        quantities = ["mean", "slope", *map(bin_name, self.bins)]
        rows = [
            (name, quantity, found.value, found.low, found.high)
            for name, one in zip(names, (*self.summaries, *self.differences))
            for quantity, found in zip(quantities, (one.mean, one.slope, *one.bins))
        ]
        return pd.DataFrame(rows, columns=["name", "quantity", "value", "low", "high"])

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        for at, one in enumerate(self.summaries):
            make = ScoreMaker(self, models, at)
            yield make("loss", one.mean, LOWER, self.unit)
            yield make("loss.slope", one.slope, LOWER, f"{self.unit} per doubling")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        return curve("loss by position", self.curves[at, :, 0])

    def to_frame(self) -> pd.DataFrame:
        """Return a row per model and position of its curve: columns model, position, loss (smoothed) with its 95 %
        interval in loss_low and loss_high, and raw, the mean over windows at this position alone. `summary()` has the
        bins."""
        rows = [
            (name, position, *found, losses[position - 1])
            for name, curve, losses in zip(self.models, self.curves, self.losses)
            for position, found in zip(self.positions, curve)
        ]
        return pd.DataFrame(rows, columns=["model", "position", "loss", "loss_low", "loss_high", "raw"])

    def blocks(self) -> Iterable[Block]:
        said = f"In the picture, {self.outside}." if self.outside else ""
        yield from self.opening(f"{self.counted}; {self.unit} a token.", *filter(None, [said]), notes=self.notes)
        yield self._table()
        if self.remembrance:
            yield self._remembrance()

    def _remembrance(self) -> Table:
        lines = []
        for name, spans in zip(self.models, self.remembrance):
            for one in spans:
                shown = {"total variation": one.variation, "attention alone": one.attention, "in the states": one.kept}
                lines.append(Line((name, f"{one.span:,}"), {each: Cell(found) for each, found in shown.items()}))
        note = (
            "Total variation of the next token's distribution when all but the last tokens are left out, or attention"
        )
        note += " alone is cut off from them; in the states: their share after the last token, mean over layers."
        return table(("model", "last tokens"), lines, note=note)

    def _table(self) -> Table:
        every = (*self.summaries, *self.differences)
        names = (*self.models, *(f"minus {other}" for other in self.models[1:]))
        found = [(bin_name(edges), [one.bins[at] for one in every]) for at, edges in enumerate(self.bins)]
        found.append(("all", [one.mean for one in every]))
        note = "Intervals: 95 %, bootstrap over windows"
        if not math.isnan(every[0].slope.value):
            found.append(("per doubling", [one.slope for one in every]))
            note += "; per doubling: slope on log₂ position after the first 100"
        rows = tuple(((name,), tuple(map(Cell, row))) for name, row in found)
        note += "."
        if self.differences:
            note = f"minus: the loss of {self.models[0]} minus that of another; below 0 it is better. {note}"
        return Table(("positions",), names, rows, note)


def bin_name(edges: tuple[int, int]) -> str:
    """Name of a bin by its first and last position, counted from 1."""
    return f"{edges[0] + 1:,}–{edges[1]:,}" if edges[0] + 1 < edges[1] else f"{edges[1]:,}"
