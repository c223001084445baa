"""Blocks in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.table import Table as Grid
from rich.text import Text
from ssmscope.render import token_rows
from ssmscope.render.blocks import Block, Custom, Picture, Prose, TokenRows
from ssmscope.render.table import BEST, WORST, Cell, Table
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

UNBOUNDED_COLUMNS = 10_000
STYLES = {"title": "bold", "heading": "bold", "note": "dim", "text": "", "definition": "dim"}
SMALL = ("note", "definition")


def prose(block: Prose) -> Text:
    return Text(visible(block.text), style=STYLES[block.kind])


def render(blocks: Iterable[Block], console: Console) -> Iterator[RenderableType]:
    """Yield everything that a console prints for blocks, with an empty line between them."""
    colours = console.color_system in ("256", "truecolor") and not console.no_color
    before: Block | None = None
    for block in blocks:
        if isinstance(block, Picture) or (isinstance(block, Custom) and block.terminal is None):
            continue
        if before is not None and not (isinstance(block, Prose) and block.kind in SMALL and isinstance(before, Prose)):
            yield Text("")
        if isinstance(block, Prose):
            yield prose(block)
        elif isinstance(block, Table):
            yield from grid(block.head(block.brief), console)
        elif isinstance(block, TokenRows):
            yield from token_rows.terminal(block, colours)
        elif block.terminal is not None:
            found = block.terminal(colours)
            yield from grid(found, console) if isinstance(found, Table) else found
        before = block


def grid(table: Table, console: Console | None = None) -> Iterator[RenderableType]:
    """Yield a table with numbers aligned right, and its remarks.

    If the table is wider than the console, intervals are written below their numbers.
    """
    shown = _grid(table, " ")
    if console is not None:
        unbounded = console.options.update(max_width=UNBOUNDED_COLUMNS)
        if console.measure(shown, options=unbounded).maximum > console.width:
            shown = _grid(table, "\n")
    if table.title:
        yield Text(visible(table.title), style="bold")
    yield shown
    if table.remarks:
        yield Text(visible(table.remarks), style="dim")


def _grid(table: Table, between: str) -> Grid:
    shown = Grid(box=None, pad_edge=False)
    for name in table.heads:
        shown.add_column(Text(name), overflow="fold")
    for at, (name, numbers) in enumerate(zip(table.columns, table.numbers)):
        widest = max(len(cells[at].value) for _, cells in table.rows) if numbers else None  # Numbers are never broken.
        shown.add_column(Text(name), justify="right" if numbers else "left", min_width=widest)
    for labels, cells in table.rows:
        shown.add_row(*(Text(visible(label)) for label in labels), *(cell_text(cell, between) for cell in cells))
    return shown


def cell_text(cell: Cell, between: str = " ") -> Text:
    """Return a cell: the number, marked if it is the best or the worst, the text `between`, and the interval."""
    mark = f"{BEST} " if cell.best else f"{WORST} " if cell.worst else ""
    text = Text(f"{mark}{cell.value}", style="bold" if cell.best else "underline" if cell.worst else "")
    return text.append(f"{between}{cell.interval}", style="not bold dim") if cell.interval else text
