"""Tables of numbers with intervals, or words.

`table` compares models and methods and marks the best; `folded` makes a table of any tidy data frame, merging a number
and the two ends of its interval into one column.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import highest
from ssmscope.render.numbers import brackets, number
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from pandas import DataFrame

BEST, WORST = "★", "▼"
"""Marks of the best and the worst value, in addition to bold and underlined."""

SMALL_SHARE = 0.01
"""Share below which three decimal places show too little."""

MAX_CELL_CHARACTERS = 200


@dataclass(frozen=True)
class Cell:
    """Number with its interval, or words.

    Attributes:
        found: the number; None for words. An estimate without ends has no interval.
        text: the words, or the text of a number that is not written as its digits.
        digits: decimal places; None for four significant digits.
    """

    found: Estimate | None = None
    text: str = ""
    digits: int | None = 3
    best: bool = False
    worst: bool = False

    @property
    def is_number(self) -> bool:
        return self.found is not None

    @property
    def value(self) -> str:
        """The number without its interval, or the words; "–" for an undefined number."""
        if self.found is None or self.text:
            return shorten(visible(self.text), MAX_CELL_CHARACTERS)
        return number(self.found.value, self.digits, significant=4)

    @property
    def interval(self) -> str:
        """The interval "[0.1, 0.2]"; empty if there is none."""
        return "" if self.found is None else brackets(self.found, self.digits, significant=4).strip()


def with_interval(found: Estimate) -> str:
    """Format a number with its interval."""
    return "not defined" if math.isnan(found.value) else number(found.value, 3) + brackets(found, 3)


def in_percent(found: Estimate, *, interval: bool = True, sign: bool = True) -> str:
    """Format a share in percent, optionally with its interval and the sign %."""
    if math.isnan(found.value):
        return "not defined"
    value, low, high = (f"{round(100 * each, 1) + 0.0:.1f}" for each in (found.value, found.low, found.high))
    ends = f" [{low}, {high}]" if interval and found.has_interval else ""
    return f"{value}{' %' if sign else ''}{ends}".replace("-", "−")


def as_share(value: float) -> str:
    """Format a share from 0 to 1, such as an accuracy; a small one has three significant digits."""
    return "not defined" if math.isnan(value) else number(value, 3 if value == 0 or value >= SMALL_SHARE else None)


def digits_of(shares: Iterable[Estimate]) -> int | None:
    """Return the decimal places for shares: 3, or None (significant digits) if all are small."""
    return 3 if any(abs(found.value) >= SMALL_SHARE for found in shares) else None


def number_cell(value: float) -> Cell:
    """Return a cell of a number without an interval."""
    return Cell(Estimate(float(value), math.nan, math.nan), digits=None)


def short_cell(value: float, text: str = "") -> Cell:
    """Return a cell of a number without an interval, in three significant digits or written as `text`."""
    return Cell(Estimate(float(value), math.nan, math.nan), text or number(value))


def value_cell(found: Estimate, digits: int | None = 3) -> Cell:
    return Cell(Estimate(found.value, math.nan, math.nan), digits=digits)


MAX_COMPARED_ROWS = 200
"""Maximum rows of a comparison that a kind of result does not lay out itself."""

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Table with columns of labels, then columns of cells, and a note below.

    Attributes:
        every: number of all rows, if these are the first of more.
        brief: maximum rows in a terminal and a notebook; None for all.
    """

    heads: Labels
    columns: Labels
    rows: tuple[tuple[Labels, tuple[Cell, ...]], ...]
    note: str = ""
    title: str = ""
    every: int = 0
    brief: int | None = None

    @property
    def cut(self) -> str:
        """The number of rows if the table is cut."""
        return f"{len(self.rows):,} of {self.every:,} rows." if self.every > len(self.rows) else ""

    @property
    def remarks(self) -> str:
        """The note, preceded by the number of rows if the table is cut."""
        return " ".join(filter(None, (self.cut, self.note)))

    def head(self, rows: int | None) -> Table:
        """Return the table with its first rows only; None for all."""
        return replace(self, rows=self.rows[:rows], every=max(self.every, len(self.rows)))

    @property
    def numbers(self) -> tuple[bool, ...]:
        """One bool per column, True if it holds numbers."""
        return tuple(any(cells[at].is_number for _, cells in self.rows) for at in range(len(self.columns)))


@dataclass
class Line:
    """A row for `table`, which compares numbers of the same column between lines with equal `peers`."""

    labels: Labels
    cells: dict[str, Cell]
    peers: Hashable = field(default_factory=object)


def table(
    heads: Sequence[str],
    lines: Sequence[Line],
    *,
    more: Iterable[str] = (),
    less: Iterable[str] = (),
    note: str = "",
    most: int | None = None,
) -> Table:
    """Make a table of at most `most` lines, with the best value of each column marked.

    The columns are those of any line, in their order. If all compared values are equal, none is marked. The largest
    value is best in the columns `more`, the smallest in `less`.
    """
    every, lines = len(lines), lines[:most]
    columns = list(dict.fromkeys(name for line in lines for name in line.cells))
    better = {**dict.fromkeys(more, 1), **dict.fromkeys(less, -1)}
    arrows = {1: " ↑", -1: " ↓"}
    marked = False
    rows = []
    for line in lines:
        cells = []
        for name in columns:
            cell = line.cells.get(name, Cell())
            if name in better and cell.found is not None:
                beside = [one.cells[name].found for one in lines if one.peers == line.peers and name in one.cells]
                values = np.array([one.value for one in beside if one is not None and not math.isnan(one.value)])
                first = highest(better[name] * values)
                if not first.all() and cell.found.value in values[first]:
                    cell, marked = replace(cell, best=True), True
            cells.append(cell)
        rows.append((line.labels, tuple(cells)))
    notes = [note] if note else []
    if marked:
        notes.append(f"{BEST} and bold: the best mean of those compared.")
    if any(cell.worst for line in lines for cell in line.cells.values()):
        notes.append(f"{WORST} and underlined: the worst of its row.")
    if any(cell.interval for line in lines for cell in line.cells.values()):
        notes.append("In brackets: the 95 % interval.")
    shown = tuple(name + arrows.get(better.get(name, 0), "") for name in columns)
    return Table(tuple(heads), shown, tuple(rows), " ".join(notes), every=every)


def frame_table(frame: DataFrame, *, heads: Sequence[str] = (), limit: int | None = None) -> Table:
    """Make a table of a tidy data frame, with NAME, NAME_low, NAME_high (or value, low, high) as one column.

    A column `model` with only one value is left out, as are columns without values. Numbers have four significant
    digits. The columns `heads` become labels; beyond `limit` rows the table is cut, and its remarks say so.
    """
    frame = frame if "model" in heads else _of_one_model(frame)
    ends = interval_columns(frame)
    hidden = {*heads, *(end for pair in ends.values() for end in pair)}
    columns = [name for name in frame.columns if name not in hidden and not (len(frame) and frame[name].isna().all())]
    numbers = {name for name in columns if frame[name].dtype.kind in "iuf"}
    rows = []
    for row in frame.iloc[:limit].to_dict("records"):
        cells = tuple(_cell(row[name], [row[end] for end in ends.get(name, ())], name in numbers) for name in columns)
        rows.append((tuple(str(row[name]) for name in heads), cells))
    note = "In brackets: the 95 % interval." if any(cell.interval for _, cells in rows for cell in cells) else ""
    return Table(tuple(heads), tuple(map(str, columns)), tuple(rows), note, every=len(frame))


def _of_one_model(frame: DataFrame) -> DataFrame:
    return frame.drop(columns="model") if "model" in frame and frame["model"].nunique() <= 1 else frame


def interval_columns(frame: DataFrame) -> Mapping[str, tuple[str, str]]:
    """Return, by column, the names of the two columns with the ends of its interval."""
    names = list(frame.columns)
    pairs = {name: (f"{name}_low", f"{name}_high") for name in names}
    if {"low", "high"} <= set(names):
        at = names.index("low")
        if at and names[at + 1 : at + 2] == ["high"]:
            pairs[names[at - 1]] = ("low", "high")
    return {name: ends for name, ends in pairs.items() if set(ends) <= set(names)}


def _cell(value: Any, ends: Sequence[Any], number: bool) -> Cell:
    if _missing(value):
        return Cell(Estimate(math.nan, math.nan, math.nan)) if number else Cell(text="–")
    if isinstance(value, bool | np.bool_):
        return Cell(text="yes" if value else "no")
    if isinstance(value, int | np.integer):
        return Cell(Estimate(int(value), math.nan, math.nan), digits=0)
    if isinstance(value, float | np.floating):
        low, high = (math.nan if _missing(end) else float(end) for end in ends or (math.nan, math.nan))
        return Cell(Estimate(float(value), low, high), digits=None)
    return Cell(text=str(value))


def _missing(value: Any) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float | np.floating) and math.isnan(value))


def shown_names(label: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the names of a result's models in a comparison: those of the label if it names each, else its own."""
    return list(label if len(label) == len(own) else own)


def frames_table(frames: Sequence[DataFrame], labels: Sequence[str]) -> Table:
    """Combine the tidy tables of several results in one, with a column of their labels."""
    if len(frames) == 1:
        return frame_table(frames[0], limit=MAX_COMPARED_ROWS)
    import pandas as pd

    share = max(MAX_COMPARED_ROWS // len(frames), 10)
    parts = [_of_one_model(frame).head(share).assign(of=label) for frame, label in zip(frames, labels)]
    made = frame_table(pd.concat(parts, ignore_index=True), heads=["of"])
    return replace(made, heads=("model",), every=sum(map(len, frames)))
