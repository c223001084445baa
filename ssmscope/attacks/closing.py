"""Tables of numbers with intervals, and the last blocks of the views of attacks on data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.core.bootstrap import Estimate, interval_columns, with_intervals
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.html import folded_away
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, frame_table

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


def closing(result: Result, notes: Iterable[str]) -> Iterator[Block]:
    """Yield the data, the notes and, on pages, the whole table folded away."""
    data = result.provenance["data"]
    examples = f"{counted(data['examples'], 'example')} of {data['name']} ({data['split']})"
    yield Prose(f"{examples}; 95 % bootstrap intervals.")
    yield from (Prose(f"Note: {note}.", "note") for note in notes)
    yield folded_away("All numbers", lambda: frame_table(result.to_frame(), limit=TABLE_ROWS))
