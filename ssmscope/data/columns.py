"""Columns of users' files and tables in place of those that the package reads: text=sentence,label=sentiment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ssmscope.errors import InputError, did_you_mean

NAMES = """text label label_name label_index rationale clean corrupted target contrast
context question answer distractors series step labels label_names""".split()
"""Columns that the package reads."""
_given: ContextVar[tuple[Mapping[str, str], list[Any]]] = ContextVar("columns", default=({}, []))
"""Columns that are read in their place, and the places where they were."""


@contextmanager
def reading(columns: Mapping[str, str] | Sequence[str] | None, *, needed: bool = False) -> Iterator[None]:
    """Read `columns`, {"text": "sentence"} or "text=sentence", in place of `NAMES` within the context; None changes
    nothing. Raise InputError for other names, and at the end if they are `needed` and nothing was read."""
    if columns is None:
        yield
        return
    listed = columns.split(",") if isinstance(columns, str) else columns
    if not isinstance(listed, Mapping):
        listed = dict(str(each).partition("=")[::2] for each in (listed if isinstance(listed, list) else [listed]))
    for name, column in listed.items():
        if name not in NAMES or not (isinstance(column, str) and column):
            allowed = f"allowed are {', '.join(NAMES)}, each with the name of a column"
            raise InputError(f"columns=… has {f'{name}={column}':.60}; {allowed}{did_you_mean(str(name), NAMES)}")
    token = _given.set((listed, []))
    try:
        yield
        if needed and not _given.get()[1]:
            raise InputError("columns=… is for a file or a table, and none was read; leave it out")
    finally:
        _given.reset(token)


def refuse_columns(data: Any, known: Collection[str]) -> None:
    """Raise InputError if columns are given for data of a known name."""
    if _given.get()[0] and isinstance(data, str) and data in known:
        raise InputError(f"{data} has columns of its own; leave columns=… out")


def column_of(name: str) -> str:
    """Return the column that is read under a name."""
    return _given.get()[0].get(name, name)


def renamed(rows: Sequence[Mapping[str, Any]], place: Any) -> Sequence[Mapping[str, Any]]:
    """Return rows with the columns that are given under their names. Raise InputError if no row has one of them."""
    given, read = _given.get()
    for column in given.values():
        if not any(column in row for row in rows):
            raise absent(column, rows[0], place)
    read.append(place)
    if not given:
        return rows
    other = {*given, *given.values()}
    return [
        {name: value for name, value in row.items() if name not in other}
        | {name: row[column] for name, column in given.items() if column in row}
        for row in rows
    ]


def absent(column: str, row: Mapping[str, Any], place: Any) -> InputError:
    """Return the error of a column that rows lack, with those they have."""
    names = [str(name) for name in row if name]
    return InputError(
        f"{place} has no column {column!r:.60}; it has {', '.join(names):.300}{did_you_mean(column, names)}"
    )
