"""First lines of a result in a terminal: title, notes, and as many rows of its tables and texts as fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.text import Text
from ssmscope.core.bootstrap import Estimate
from ssmscope.render import terminal, token_rows
from ssmscope.render.blocks import Block, Custom, Picture, Prose, TokenRows
from ssmscope.render.table import Cell, Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MAX_LINES = 23
"""Lines of a result, unless all are asked for; with the names of its files the command line prints 25."""
MAX_PROSE_LINES = 12
MIN_LINES = 4
"""Lines that every table or text gets while there is room: a table's head and three rows."""

TABLE_LINES = 8
"""Lines that every table or text gets before the notes after the last one."""


@dataclass
class _Section:
    """Part of a view: `fixed` lines, and what `fit` shows of a table or of texts within a number of lines."""

    fixed: list[Text] = field(default_factory=list)
    fit: Callable[[int], list[RenderableType]] | None = None
    wanted: int = 0
    has_gap: bool = True


def brief(blocks: Iterable[Block], console: Console, more: str) -> Iterator[RenderableType]:
    """Yield the first lines of blocks, without definitions.

    Prose comes first, at most `MAX_PROSE_LINES` of it, and notes at the end after `TABLE_LINES` of every table; tables
    and texts share what is left, in their order, and one without room is left out with its heading. The last line says
    `more`, how to see the rest, if there is any.
    """
    shown = [block for block in blocks if not isinstance(block, Picture)]
    every = list(_sections(shown, console))
    sections = _kept(every, console)
    cut = len(sections) < len(every) or any(_has_definition(block) for block in shown)
    room = MAX_LINES - sum(_height(part.fixed, console) + part.has_gap for part in sections if part.fit is None)
    fitted: dict[int, list[RenderableType]] = {}
    for number, part in enumerate(sections):
        left = room - _height(part.fixed, console) - (part.has_gap and number > 0)
        if part.fit is None or min(part.wanted, left) < min(part.wanted, MIN_LINES - 1):
            continue
        made = part.fit(min(part.wanted, MIN_LINES, left))
        if (height := _height(made, console)) <= left or not fitted:  # A head or a row may take several lines.
            fitted[number], room = made, left - height
    # Those that lack a line or two become whole first.
    for number in sorted(fitted, key=lambda each: sections[each].wanted > MIN_LINES + 2):
        height = _height(fitted[number], console)
        fitted[number] = sections[number].fit(min(sections[number].wanted, height + room))  # type: ignore[misc]
        room += height - _height(fitted[number], console)
        cut |= _height(fitted[number], console) < sections[number].wanted
    first = True
    for number, part in enumerate(sections):
        if part.fit is not None and number not in fitted:
            cut = True
            continue
        made = [*part.fixed, *fitted.get(number, ())]
        if made and part.has_gap and not first:
            yield Text("")
        yield from made
        first = first and not made
    if cut:
        yield Text(f"More: {more}", style="dim")


def _kept(every: Sequence[_Section], console: Console) -> list[_Section]:
    """Return the sections without prose for which there is no room, and without the last notes, which tables need."""
    prose, sections = 0, list[_Section]()
    for part in every:
        prose += _height(part.fixed, console) if part.fit is None else 0
        sections += [part] if part.fit is not None or prose <= MAX_PROSE_LINES or not sections else []
    heights = [_height(part.fixed, console) + part.has_gap + min(part.wanted, TABLE_LINES) for part in sections]
    tables = any(part.fit is not None for part in sections)
    while tables and sections[-1].fit is None and sum(heights) > MAX_LINES:
        del sections[-1], heights[-1]
    return sections


def _sections(blocks: Sequence[Block], console: Console) -> Iterator[_Section]:
    colours = console.color_system in ("256", "truecolor") and not console.no_color
    heading: list[Text] = []
    before: Block | None = None
    for block in blocks:
        if isinstance(block, Prose):
            if block.kind == "definition":
                continue
            text = terminal.prose(block)
            if block.kind == "heading":
                heading.append(text)
                continue
            close = isinstance(before, Prose) and block.kind == "note"
            yield _Section([*heading, text], has_gap=not close)
        else:
            parts = block.terminal(colours) if isinstance(block, Custom) and block.terminal is not None else ()
            if isinstance(shown := block if isinstance(block, Table) else parts, Table):
                table = _with_whole_intervals(replace(shown, note=""), console)
                yield _Section(heading, _rows_of(table, console), _height(terminal.grid(table, console), console))
            elif found := list(token_rows.terminal(block, colours) if isinstance(block, TokenRows) else shown):
                yield _Section(heading, _first_of(found, console), _height(found, console))
            else:
                continue
        before, heading = block, []


def _has_definition(block: Block) -> bool:
    return bool(getattr(block, "note", "")) or (isinstance(block, Prose) and block.kind == "definition")


def _with_whole_intervals(table: Table, console: Console) -> Table:
    """Return the table without its intervals if the console is too narrow for them."""
    lines = [line for part in terminal.grid(table, console) for line in console.render_lines(part, pad=False)]
    shown = "\n".join("".join(piece.text for piece in line) for line in lines)
    if all(cell.interval in shown for _, cells in table.rows for cell in cells):
        return table
    return replace(table, rows=tuple((names, tuple(map(_alone, cells))) for names, cells in table.rows))


def _alone(cell: Cell) -> Cell:
    return cell if cell.found is None else replace(cell, found=Estimate(cell.found.value, math.nan, math.nan))


def _rows_of(table: Table, console: Console) -> Callable[[int], list[RenderableType]]:
    def fit(lines: int) -> list[RenderableType]:
        rows = min(len(table.rows), lines)
        while True:
            found = list(terminal.grid(table.head(rows), console))
            height = _height(found, console)
            if height <= lines or rows <= 1:
                return found
            rows = max(1, rows - max(1, (height - lines) * rows // height))

    return fit


def _first_of(parts: Sequence[RenderableType], console: Console) -> Callable[[int], list[RenderableType]]:
    def fit(lines: int) -> list[RenderableType]:
        found: list[RenderableType] = []
        for part in parts:
            lines -= _height([part], console)
            if lines < 0 and found:
                break
            found.append(part)
        while len(found) > 1 and isinstance(found[-1], Text) and not found[-1].plain:
            found.pop()
        return found

    return fit


def _height(parts: Iterable[RenderableType], console: Console) -> int:
    return sum(len(console.render_lines(part, pad=False)) for part in parts)
