"""Parts that results of attacks on data share: accuracies of each step, tables with intervals, and the last blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.core.bootstrap import INTERVALS, Estimate, interval_columns, with_intervals
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.html import folded_away
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, frame_table, value_cell

if TYPE_CHECKING:
    from pandas import DataFrame


def tidy(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> DataFrame:
    """Return rows as a table, an estimate followed by its interval's ends in columns ending in _low and _high.

    Args:
        columns: their order, as far as rows have them; by default that of the rows.
    """
    import pandas as pd

    found = dict.fromkeys(name for row in rows for name in row)
    estimates = {name for row in rows for name, value in row.items() if isinstance(value, Estimate)}
    flat = []
    for row in rows:
        numbers = with_intervals(**{name: row[name] for name in row if name in estimates})
        flat.append({name: value for name, value in row.items() if name not in estimates} | numbers)
    ordered = [name for name in columns or found if name in found]
    ends = [interval_columns([name]) if name in estimates else [name] for name in ordered]
    return pd.DataFrame(flat, columns=[name for each in ends for name in each])


def percent(found: Estimate) -> Cell:
    """Return a share as a cell in percent."""
    return Cell(found.times(100), digits=1)


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Accuracy on changed texts."""

    accuracy: Estimate
    drop: Estimate
    """1 − accuracy / clean accuracy."""

    def cells(self) -> dict[str, Cell]:
        """Return the numbers as cells of a table."""
        return {"accuracy": Cell(self.accuracy), "drop in %": percent(self.drop)}

    def row(self, **own: Any) -> dict[str, Any]:
        """Return all fields and `own` as a row for `tidy`, with the drop in percent."""
        return {**vars(self), "drop": self.drop.times(100), **own}


@dataclass(frozen=True, kw_only=True)
class Flips(Accuracy):
    """Accuracy on changed texts, answers that the change flips, and its effect on the log-odds."""

    flipped: Estimate
    """Share of the examples answered correctly when clean whose answer changes."""
    log_odds_change: Estimate | None = None
    """Mean change of log p / (1 − p) of the true class, in natural logarithms; None for generated answers."""

    def cells(self) -> dict[str, Cell]:
        cells = super().cells() | {"flipped": value_cell(self.flipped)}
        return cells if self.log_odds_change is None else {**cells, "change of log-odds": Cell(self.log_odds_change)}


@dataclass(frozen=True, kw_only=True)
class AccuracyCurve(Result):
    """Base of results with the accuracy on texts whose change grows or moves step by step."""

    clean: Estimate
    notes: tuple[str, ...] = ()
    right: np.ndarray | None = None
    """(1 + steps, examples): 1 for a right answer to the clean texts and at each step, 0 for a wrong one, −1 for an
    example that is left out."""


def closing(result: Result, notes: Iterable[str]) -> Iterator[Block]:
    """Yield the data, the notes and, on pages, the whole table folded away."""
    data = result.provenance["data"]
    examples = f"{counted(data['examples'], 'example')} of {data['name']} ({data['split']})"
    yield Prose(f"{examples}; {INTERVALS}.")
    yield from (Prose(f"Note: {note}.", "note") for note in notes)
    yield folded_away("All numbers", lambda: frame_table(result.to_frame(), limit=TABLE_ROWS))
