"""Attention maps in a terminal: a row of readouts per map, and the text in the colours of its last query."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ssmscope.interp.attention.maps import coarse, heads_name, limit, span_name, strongest, title
from ssmscope.show.signed import STEPS, brief, levels, shades
from ssmscope.show.tokens import ink, shorten, visible, written

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.interp.attention.result import AttendedText, ImplicitAttention

ROWS = 40
"""How many maps of a text the table has."""
STRONGEST = 5
"""How many keys of the last query a row has."""
COLOURED_TOKENS = 400
"""Up to how many tokens a text of a single map is written out in colour."""


def terminal_view(result: ImplicitAttention, *, coloured: bool) -> Iterator[RenderableType]:
    """Per text the answer, its tokens in the colours of the last query (of a single map, where there is colour), and
    the readouts of its maps.

    `coloured` needs a terminal of 256 colours or more.
    """
    yield Text(visible(result.headline), style="bold")
    yield Text(
        f"{heads_name(result)}. Shares of |weight|: recent, on the last {result.top} tokens of each query; sink,"
        f" on the first {result.top} and the state before them; outside, off the marked tokens. Distance in tokens.",
        style="dim",
    )
    if remark := coarse(result):
        yield Text(remark, style="dim")
    for number, text in enumerate(result):
        yield Text("")
        heading = Text.assemble((f"{number}  ", "dim"), ("answer ", "dim"), (f"“{visible(text.answer)}”", "bold"))
        heading.append(f" (p = {text.probability:.3f})")
        heading.append(f"   {span_name(text)}", style="dim")
        yield heading
        if coloured and len(text.maps) == 1 and text.edges is None and len(text) <= COLOURED_TOKENS:
            yield _coloured(text)
        yield _table(text)
        if len(text.maps) > ROWS:
            yield Text(f"{ROWS} of {len(text.maps)} maps; summary() has all", style="dim")


def _coloured(text: AttendedText) -> Text:
    """The tokens up to the last query in the colours of its row, the query underlined, the marked ones bold."""
    (only,) = text.maps
    colours = shades()
    query = int(text.queries[-1])
    end, _ = limit(only, text)
    found = levels(only.values[-1], end)
    line = Text()
    if only.sink is not None:
        line.append("state", style=f"italic {_style(levels(only.sink[-1:], end)[0], colours)}").append("  ")
    for index, (gap, token) in enumerate(written(text.tokens, text.words)):
        style = "dim" if index > query else _style(found[index], colours)
        if index == query:
            style = f"underline {style}"
        if text.span is not None and text.span[0] <= index < text.span[1]:
            style = f"bold {style}"
        line.append(" " if gap else "")
        line.append(token, style=style.strip())
    line.append(f"\n−{brief(end)} ", style="dim")
    for level in range(-STEPS, STEPS + 1, 4):
        line.append(" ", style=_style(level, colours))
    return line.append(f" {brief(end)}: weight of each token for the last query, underlined", style="dim")


def _style(level: int, colours: list[str]) -> str:
    """Zero has the terminal's own background, which nobody knows."""
    colour = colours[level + STEPS]
    return f"{ink(colour)} on {colour}" if level else ""


def _table(text: AttendedText) -> Table:
    """A row per map: its name, its readouts, the strongest keys of its last query."""
    query = int(text.queries[-1]) if len(text.queries) else 0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [shorten(title(map_), 36) for map_ in text.maps[:ROWS]]
    table.add_column("map", no_wrap=True)
    names = ("distance", "recent", "sink", "outside")[: 3 if text.span is None else 4]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    pooled = "cells" if text.edges is not None else "keys"
    asked = shorten(visible(text.tokens[query]).strip(" "), 20) if text.tokens else ""
    # Only this column gives way where the terminal is narrow: it may wrap, and its cells are cut instead.
    heading = Text(f"strongest {pooled} of {query} “{asked}”", no_wrap=True, overflow="ellipsis")
    table.add_column(heading, overflow="ellipsis")
    for name, map_ in zip(shown, text.maps):
        numbers = [getattr(map_.readouts, name) for name in names]
        cells = ["–" if math.isnan(n) else f"{n:.1f}" if i == 0 else f"{n:.3f}" for i, n in enumerate(numbers)]
        keys = strongest(map_, -1, text, STRONGEST) if len(text.queries) else []
        named = "  ".join(f"{_key(key, text)}:{brief(weight)}" for key, weight in keys)
        table.add_row(Text(name), *cells, Text(named, no_wrap=True, overflow="ellipsis"))
    return table


def _key(key: int, text: AttendedText) -> str:
    if key < 0:
        return "[state]"
    if text.edges is not None:
        return f"{text.edges[key]}–{text.edges[key + 1] - 1}"
    return shorten(visible(text.tokens[key]).strip(" "), 16)
