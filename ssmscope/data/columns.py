"""Columns of users' files and tables in place of those that the package reads: text=sentence,label=sentiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ssmscope.data.labels import COLUMNS
from ssmscope.errors import InputError, did_you_mean

NAMES = """text label label_name label_index rationale clean corrupted target contrast
context question answer distractors series step labels label_names""".split()
"""Columns that the package reads."""
_given: ContextVar[tuple[Mapping[str, str], list[Any]]] = ContextVar("columns", default=({}, []))
"""Columns that are read in their place, and the places where they were."""


@contextmanager
def reading(columns: Any) -> Iterator[None]:
    """Read `columns`, {"text": "sentence"} or "text=sentence", in place of `NAMES` within the context; None changes
    nothing. Raise InputError for other names, or a name that is given twice."""
    if not isinstance(columns, Mapping | None):
        listed = columns if isinstance(columns, list | tuple) else str(columns).split(",")
        pairs = [(name.strip(), column) for name, _, column in (str(each).partition("=") for each in listed)]
        columns = dict(pairs)
        if twice := next((name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at])), None):
            raise InputError(f"columns=… has {twice} twice; keep one")
    for name, column in (columns or {}).items():
        if name not in NAMES or not (isinstance(column, str) and column):
            allowed = f"allowed are {', '.join(NAMES)}, each with the name of a column"
            near = "" if name in NAMES else did_you_mean(str(name), NAMES)
            raise InputError(f"columns=… has {f'{name}={column}':.60}; {allowed}{near}")
    token = _given.set(_given.get() if columns is None else (columns, []))
    try:
        yield
    finally:
        _given.reset(token)


def check_read() -> None:
    """Raise InputError if columns are given, and no file or table was read."""
    columns, read = _given.get()
    if columns and not read:
        raise InputError("columns=… is for a file or a table of your own, and none was read; leave it out")


def renamed(rows: Sequence[Mapping[str, Any]], place: Any) -> Sequence[Mapping[str, Any]]:
    """Return rows with the columns that are given under their names. Raise InputError if no row has one of them."""
    given, read = _given.get()
    if not given:
        return rows
    read.append(place)
    if absent := [column for column in given.values() if not any(column in row for row in rows)]:
        refuse_absent(absent[0], rows[0], place)
    other = {*given, *given.values(), *(COLUMNS if {*given} & {*COLUMNS} else ())}
    kept = [{name: row[name] for name in row if name not in other} for row in rows]
    return [{**own, **{name: row[given[name]] for name in given if given[name] in row}} for own, row in zip(kept, rows)]


def refuse_absent(column: str, row: Mapping[str, Any], place: Any) -> None:
    """Raise InputError for a column that rows lack, with those they have."""
    names = [str(name) for name in row if name]
    if column not in row:
        near = did_you_mean(column, names)
        raise InputError(f"{place} has no column {column!r:.60}; it has {', '.join(names):.300}{near}")
