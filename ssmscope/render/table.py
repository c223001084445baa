"""Tables: cells that are numbers with intervals, or words.

`table` makes one in which models and methods stand beside one another, the best marked; `folded` turns any tidy table
into one: a number and the ends of its interval, three columns of it, become one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.core.bootstrap import Estimate
from ssmscope.render.numbers import brackets, number
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from pandas import DataFrame

BEST, WORST = "★", "▼"
"""The marks of the best and the worst, beside bold and underlined."""

SMALL = 0.01
"""Shares below it show too little in three digits behind the point."""

LONGEST = 200
"""As many characters as a cell shows."""


@dataclass(frozen=True)
class Cell:
    """A number with its interval, or words."""

    found: Estimate | None = None
    """None for words; an estimate without ends has no interval."""
    text: str = ""
    """The words; of a number, how it is written where its digits alone would not do."""
    digits: int | None = 3
    """Behind the point; None for four significant ones."""
    best: bool = False
    worst: bool = False

    @property
    def is_number(self) -> bool:
        return self.found is not None

    @property
    def value(self) -> str:
        """The number alone, or the words; "–" for a number that is not defined."""
        if self.found is None or self.text:
            return shorten(visible(self.text), LONGEST)
        return number(self.found.value, self.digits, significant=4)

    @property
    def interval(self) -> str:
        """The ends, "[0.1, 0.2]", or nothing."""
        return "" if self.found is None else brackets(self.found, self.digits, significant=4).strip()


def written(found: Estimate) -> str:
    """A number with its interval."""
    return "not defined" if math.isnan(found.value) else number(found.value, 3) + brackets(found, 3)


def in_percent(found: Estimate, *, interval: bool = True, sign: bool = True) -> str:
    """A share in percent, with its interval, where it has one, and the sign % unless they are not wanted."""
    if math.isnan(found.value):
        return "not defined"
    value, low, high = (f"{round(100 * each, 1) + 0.0:.1f}" for each in (found.value, found.low, found.high))
    ends = f" [{low}, {high}]" if interval and found.has_interval else ""
    return f"{value}{' %' if sign else ''}{ends}".replace("-", "−")


def as_share(value: float) -> str:
    """An accuracy or another share from 0 to 1, without an interval; a small one has three significant digits."""
    return "not defined" if math.isnan(value) else number(value, 3 if value == 0 or value >= SMALL else None)


def digits_of(shares: Iterable[Estimate]) -> int | None:
    """How many digits behind the point show shares: 3, or None, for significant ones, where all are small."""
    return 3 if any(abs(found.value) >= SMALL for found in shares) else None


def plain(value: float) -> Cell:
    """A number without an interval."""
    return Cell(Estimate(float(value), math.nan, math.nan), digits=None)


def short(value: float, text: str = "") -> Cell:
    """A number without an interval in three significant digits, or written as `text`."""
    return Cell(Estimate(float(value), math.nan, math.nan), text or number(value))


def bare(found: Estimate, digits: int | None = 3) -> Cell:
    """An estimate without its interval, where there is no room for it."""
    return Cell(Estimate(found.value, math.nan, math.nan), digits=digits)


ROWS = 200
"""How many rows a comparison has that no kind of result lays out for itself."""

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Columns of labels, and columns of cells."""

    heads: Labels
    """The headings of the columns of labels."""
    columns: Labels
    rows: tuple[tuple[Labels, tuple[Cell, ...]], ...]
    note: str = ""
    """What stands below it."""
    title: str = ""
    every: int = 0
    """How many rows there are, where these are the first of more."""
    brief: int | None = None
    """How many rows a terminal and a notebook show; None for all."""
    wide: bool = False
    """Whether it has too much in it for a terminal, which leaves it out."""

    @property
    def remarks(self) -> str:
        """The note, and before it how many rows there are of which these are the first."""
        cut = f"{len(self.rows):,} of {self.every:,} rows." if self.every > len(self.rows) else ""
        return " ".join(filter(None, (cut, self.note)))

    def head(self, rows: int | None) -> Table:
        """The first rows; None for all."""
        return replace(self, rows=self.rows[:rows], every=max(self.every, len(self.rows)))

    @property
    def numbers(self) -> tuple[bool, ...]:
        """Which columns hold numbers."""
        return tuple(any(cells[at].is_number for _, cells in self.rows) for at in range(len(self.columns)))


@dataclass
class Line:
    """A row in the making. Numbers of the same column are compared between lines of the same peers."""

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
    """The lines with the best of each column marked: of the columns `more` the largest, of `less` the smallest.

    Columns are those of any line, in their order. Where all that are compared are equal none is best. Of more
    than `most` lines the first are shown, and the remarks say so.
    """
    every, lines = len(lines), lines[:most]
    columns = list(dict.fromkeys(name for line in lines for name in line.cells))
    better: dict[str, Callable[..., float]] = {**dict.fromkeys(more, max), **dict.fromkeys(less, min)}
    arrows = {max: " ↑", min: " ↓"}
    marked = False
    rows = []
    for line in lines:
        cells = []
        for name in columns:
            cell = line.cells.get(name, Cell())
            if name in better and cell.found is not None:
                beside = [one.cells[name].found for one in lines if one.peers == line.peers and name in one.cells]
                values = {one.value for one in beside if one is not None and not math.isnan(one.value)}
                if len(values) > 1 and cell.found.value == better[name](values):
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
    shown = tuple(name + arrows.get(better.get(name), "") for name in columns)  # type: ignore[arg-type]
    return Table(tuple(heads), shown, tuple(rows), " ".join(notes), every=every)


def folded(frame: DataFrame, *, heads: Sequence[str] = (), limit: int | None = None) -> Table:
    """Any tidy table: NAME, NAME_low and NAME_high, or value, low and high, as one column; `heads` are its labels.

    A column `model` that is the same in all rows is left out: what the table stands in names the model; and so is a
    column that is missing in all rows. Numbers have four significant digits. Of more than `limit` rows the first are
    shown, and the remarks say so.
    """
    frame = frame if "model" in heads else _of_one_model(frame)
    ends = interval_columns(frame)
    hidden = {end for pair in ends.values() for end in pair}
    empty = {name for name in frame.columns if len(frame) and frame[name].isna().all()}
    columns = [name for name in frame.columns if name not in hidden and name not in heads and name not in empty]
    shown = frame.head(limit) if limit is not None else frame
    values = {name: shown[name].tolist() for name in shown.columns}
    numbers = {name for name in columns if frame[name].dtype.kind in "iuf"}
    rows = []
    for at in range(len(shown)):
        cells = tuple(_cell(name, at, values, ends, name in numbers) for name in columns)
        rows.append((tuple(str(values[name][at]) for name in heads), cells))
    note = "In brackets: the 95 % interval." if any(cell.interval for _, cells in rows for cell in cells) else ""
    return Table(tuple(heads), tuple(map(str, columns)), tuple(rows), note, every=len(frame))


def _of_one_model(frame: DataFrame) -> DataFrame:
    """The table without the column `model`, unless it is of several."""
    return frame.drop(columns="model") if "model" in frame and frame["model"].nunique() <= 1 else frame


def interval_columns(frame: DataFrame) -> Mapping[str, tuple[str, str]]:
    """The columns that hold the ends of another's interval, by its name."""
    names = list(frame.columns)
    pairs = {name: (f"{name}_low", f"{name}_high") for name in names}
    if {"low", "high"} <= set(names):
        at = names.index("low")
        if at and names[at + 1 : at + 2] == ["high"]:
            pairs[names[at - 1]] = ("low", "high")
    return {name: ends for name, ends in pairs.items() if set(ends) <= set(names)}


def _cell(name: str, at: int, values: Mapping[str, list], ends: Mapping[str, tuple[str, str]], number: bool) -> Cell:
    value = values[name][at]
    if _missing(value):
        return Cell(Estimate(math.nan, math.nan, math.nan)) if number else Cell(text="–")
    if isinstance(value, bool | np.bool_):
        return Cell(text="yes" if value else "no")
    if isinstance(value, int | np.integer):
        return Cell(Estimate(int(value), math.nan, math.nan), digits=0)
    if isinstance(value, float | np.floating):
        low, high = (values[end][at] for end in ends.get(name, ())) if name in ends else (math.nan, math.nan)
        low, high = (math.nan if _missing(end) else float(end) for end in (low, high))
        return Cell(Estimate(float(value), low, high), digits=None)
    return Cell(text=str(value))


def _missing(value: Any) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float | np.floating) and math.isnan(value))


def shown_names(label: Sequence[str], own: Sequence[str]) -> list[str]:
    """What the models of a result of several are called beside others: by its label, which has a name for each of
    them, else as the result calls them itself."""
    return list(label if len(label) == len(own) else own)


def of_frames(frames: Sequence[DataFrame], labels: Sequence[str]) -> Table:
    """Tidy tables of several results as one, with a column that says which each row is of."""
    if len(frames) == 1:
        return folded(frames[0], limit=ROWS)
    import pandas as pd

    share = max(ROWS // len(frames), 10)
    parts = [_of_one_model(frame).head(share).assign(of=label) for frame, label in zip(frames, labels)]
    made = folded(pd.concat(parts, ignore_index=True), heads=["of"])
    return replace(made, heads=("model",), every=sum(map(len, frames)))
