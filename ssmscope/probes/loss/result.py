"""The loss of the next token by its position: curves, bins and slopes, and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, Table, shown_names, table, written

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Summary:
    """The losses of a model, or those of the first model less another's, in few numbers."""

    mean: Estimate
    """Over all positions: the model's cross-entropy on the windows."""
    slope: Estimate
    """Per doubling of the position, after the first 100; not defined where there are fewer than two more."""
    bins: tuple[Estimate, ...]
    """The mean in each bin of positions."""


@dataclass(frozen=True)
class TokenLoss(Result, kind="loss"):
    """The loss of the next token by its position, of one model or several on the same windows."""

    models: tuple[str, ...]
    unit: str
    """"nats" or "bits"."""
    smooth: int
    """Over how many positions the curves are averaged."""
    positions: tuple[int, ...]
    """Those of the curves: how many tokens have been read."""
    losses: np.ndarray
    """(models, length): the mean over the windows at every position, not smoothed."""
    bins: tuple[tuple[int, int], ...]
    """(after, up to) positions."""
    summaries: tuple[Summary, ...]
    """Of each model."""
    differences: tuple[Summary, ...]
    """Of the first model less each of the others, paired."""
    curves: np.ndarray
    """(models, positions, 3): the smoothed loss and its interval."""
    notes: tuple[str, ...]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.losses.shape[1]

    def verdict(self, at: int = 0) -> str:
        return f"{written(self.summaries[at].mean)} {self.unit} a token"

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
        found = [f"{name} {one.mean.value:.3f}" for name, one in zip(self.models, self.summaries)]
        return f"Loss by position, {self.unit} a token over {self.length:,} tokens: {'; '.join(found)}"

    @property
    def counted(self) -> str:
        """What was read."""
        data = self.provenance["data"]
        number = data["windows"]
        return f"{counted(number, 'window')} of {self.length:,} tokens of {data['name']}"

    def summary(self) -> DataFrame:
        """A row per model, then per difference, and quantity: name, quantity (mean, slope, or a bin as "129–512"),
        value, low and high."""
        import pandas as pd

        names = [*self.models, *(f"{self.models[0]} − {other}" for other in self.models[1:])]
        rows = []
        for name, one in zip(names, (*self.summaries, *self.differences)):
            compute_terms = ["mean", "slope", *map(bin_name, self.bins)]
            for quantity, found in zip(compute_terms, (one.mean, one.slope, *one.bins)):
                row = {"name": name, "quantity": quantity, "value": found.value}
                rows.append({**row, "low": found.low, "high": found.high})
        return pd.DataFrame(rows)

    def to_frame(self) -> DataFrame:
        """A row per model and position of its curve: model, position, loss (smoothed) with its 95 % interval in
        loss_low and loss_high, and raw, the mean over windows at this position alone. `summary()` has the bins."""
        import pandas as pd

        rows = []
        for number, name in enumerate(self.models):
            for position, (value, low, high) in zip(self.positions, self.curves[number]):
                row: dict[str, Any] = {"model": name, "position": position, "loss": value}
                row |= {"loss_low": low, "loss_high": high, "raw": self.losses[number, position - 1]}
                rows.append(row)
        return pd.DataFrame(rows)

    def blocks(self) -> Iterable[Block]:
        yield from self.opening(f"{self.counted}; {self.unit} a token.", notes=self.notes)
        yield self._table()

    def _table(self) -> Table:
        """The bins, the mean and the slope in rows, with a column for every model and every difference."""
        every = (*self.summaries, *self.differences)
        names = (*self.models, *(f"less {other}" for other in self.models[1:]))
        found = [(bin_name(edges), [one.bins[at] for one in every]) for at, edges in enumerate(self.bins)]
        found.append(("all", [one.mean for one in every]))
        note = "Intervals: 95 %, bootstrap over windows"
        if not math.isnan(every[0].slope.value):
            found.append(("per doubling", [one.slope for one in every]))
            note += "; per doubling: slope on log₂ position after the first 100"
        rows = tuple(((name,), tuple(map(Cell, row))) for name, row in found)
        note += "."
        if self.differences:
            note = f"less: the loss of {self.models[0]} less that of another; below 0 it is the better one. {note}"
        return Table(("positions",), names, rows, note)


def bin_name(edges: tuple[int, int]) -> str:
    """The first and the last position of a bin; positions count from 1."""
    return f"{edges[0] + 1:,}–{edges[1]:,}" if edges[0] + 1 < edges[1] else f"{edges[1]:,}"
