"""Outlines of records: a few lines in a terminal, a folded tree in a notebook; arrays by dtype, shape and first values.

A dataclass that holds arrays is `Outlined`, a named tuple `@outlined`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, TypeVar

T = TypeVar("T")

MAX_LINE_CHARACTERS = 100
MAX_VALUE_CHARACTERS = 88
FIRST_VALUES = 3
"""Number of values of an array, and of items of a sequence, that a line shows."""
MAX_ITEMS = 12
"""Number of items of a sequence that a tree shows."""
MAX_UNFOLDED = 200
"""Number of values that a tree unfolds; further ones have their line alone."""


class Outlined:
    """Mixin of a dataclass: its outlines in place of all its numbers, unless it has a repr of its own."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # @dataclass writes a repr unless the class has one.
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return lines(self)

    def _repr_html_(self) -> str:
        return tree(self)


def outlined(cls: type[T]) -> type[T]:
    """Give a named tuple its outlines."""
    cls.__repr__ = lines  # type: ignore[method-assign]
    cls._repr_html_ = tree  # type: ignore[attr-defined]
    return cls


def lines(record: Any) -> str:
    """Return a record as `Name(field=value, …)`, in one line or a line for each field, without those that are None."""
    pairs = [(field, each) for field, each in fields(record) if each is not None]
    name, shown = type(record).__name__, [f"{field}={value(each)}" for field, each in pairs]
    line = f"{name}({', '.join(shown)})"
    return line if len(line) <= MAX_LINE_CHARACTERS else f"{name}(\n  " + ",\n  ".join(shown) + ",\n)"


def tree(record: Any) -> str:
    """Return a record as HTML, folded below its name, or its own repr."""
    return titled_tree(type(record).__name__ if _is_outlined(record) else repr(record), record)


def titled_tree(title: str, record: Any) -> str:
    """Return a record or a mapping as HTML, folded below a title."""
    node = f"<details><summary>{escape(title)}</summary>{_parts_html(record, iter(range(MAX_UNFOLDED)))}</details>"
    return f'<div class="ssmscope-outline" style="font: 13px/1.6 ui-monospace, monospace">{node}</div>'


def value(found: Any) -> str:
    """Describe a value in one short line."""
    if _is_array(found):
        text = _array(found)
    elif _is_outlined(found):
        inner = ", ".join(f"{name}={value(each)}" for name, each in fields(found) if each is not None)
        text = f"{type(found).__name__}({inner})"
    elif isinstance(found, Mapping):
        text = f"{{{_first([f'{key!r}: {value(found[key])}' for key in list(found)[:FIRST_VALUES]], len(found))}}}"
    elif isinstance(found, tuple | list):
        shown = _first(list(map(_item, found[:FIRST_VALUES])), len(found))
        text = f"({shown}{',' * (len(found) == 1)})"
    elif isinstance(found, float):
        text = f"{found:.6g}"
    elif callable(found) and hasattr(found, "__qualname__"):
        text = found.__qualname__
    else:
        text = repr(found[: 2 * MAX_VALUE_CHARACTERS] if isinstance(found, str) else found)
    text = " ".join(text.split())
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[: MAX_VALUE_CHARACTERS - 1]}…"


def fields(record: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass that its repr has, or of a named tuple; [] for other values."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return [(each.name, getattr(record, each.name)) for each in dataclasses.fields(record) if each.repr]
    return list(zip(record._fields, record)) if isinstance(record, tuple) and hasattr(record, "_fields") else []


def _item(found: Any) -> str:
    """Describe an item of a sequence: an array without its values, a record by its name."""
    if _is_array(found):
        return _shape(found)
    return f"{type(found).__name__}(…)" if _is_outlined(found) else value(found)


def _first(shown: list[str], count: int) -> str:
    """Join the first of `count` items, and say how many there are if that is more."""
    return ", ".join(shown) + f", … {count:,} in all" * (count > len(shown))


def _is_outlined(found: Any) -> bool:
    return type(found).__repr__ is Outlined.__repr__ or (isinstance(found, tuple) and hasattr(found, "_fields"))


def _is_array(found: Any) -> bool:
    return all(hasattr(found, name) for name in ("shape", "dtype", "ndim")) and not isinstance(found, type)


def _array(found: Any) -> str:
    """Describe a tensor or an array: "float32 (6, 24): 0.0118, 0.0523, 0.111, …"; no value is read on a GPU."""
    if str(getattr(found, "device", "cpu")) != "cpu" or 0 in found.shape:
        return _shape(found)
    # The first row alone: flattening copies an array that is not contiguous.
    row = found[(0,) * (found.ndim - 1)][:FIRST_VALUES] if found.ndim else found.reshape(1)
    shown = [f"{each:.3g}" if isinstance(each, float) else str(each) for each in row.tolist()]
    return f"{_shape(found)}: {', '.join(shown)}" + ", …" * (math.prod(found.shape) > len(shown))


def _shape(found: Any) -> str:
    device = str(getattr(found, "device", "cpu"))
    return f"{str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}" + f" on {device}" * (device != "cpu")


def _parts_html(found: Any, room: Iterator[int]) -> str:
    """Return the parts of a value as a list, each unfolded while there is room."""
    pairs = _parts(found)
    most = len(pairs) if isinstance(found, Mapping) or fields(found) else MAX_ITEMS
    shown = "".join(f"<li>{_part_html(name, each, room)}</li>" for name, each in pairs[:most])
    rest = f"<li>… {len(pairs):,} in all</li>" if len(pairs) > most else ""
    return f'<ul style="list-style: none; margin: 0; padding-inline-start: 1.5em">{shown}{rest}</ul>'


def _part_html(name: str, found: Any, room: Iterator[int]) -> str:
    line = f"{escape(name)} = {escape(value(found))}"
    plain = all(isinstance(each, str | int | float | None) for _, each in _parts(found))
    if plain and not fields(found) and not isinstance(found, Mapping) or next(room, None) is None:
        return line
    return f"<details><summary>{line}</summary>{_parts_html(found, room)}</details>"


def _parts(found: Any) -> list[tuple[str, Any]]:
    """Return the named parts of a record, mapping or sequence; [] for what is shown in one line."""
    if isinstance(found, Mapping):
        return [(str(key), each) for key, each in found.items()]
    if named := fields(found):
        return named
    return [(f"[{at}]", each) for at, each in enumerate(found)] if isinstance(found, tuple | list) else []
