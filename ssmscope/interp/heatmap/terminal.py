"""Scored tokens in a terminal: coloured text, or a table of the top tokens where there is no colour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ssmscope.show.tokens import CIVIDIS, bounds, ink, ramp, shades, shorten, visible, written

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.interp.heatmap.result import ScoredText, SelectionHeatmap

TABLE_TOKENS = 10
"""How many top tokens the colourless table shows when the rationale is shorter."""


def terminal_view(heatmap: SelectionHeatmap, *, coloured: bool) -> Iterator[RenderableType]:
    """Per text: the answer, the tokens coloured by score (or a table of the top ones), and a row per layer if
    asked.

    `coloured` needs a terminal of 256 colours or more.
    """
    yield Text(heatmap.headline, style="bold")
    if coloured:
        yield _legend(heatmap)
    for number, text in enumerate(heatmap, start=1):
        yield Text("")
        heading = Text.assemble((f"{number}  ", "dim"), ("answer ", "dim"), (f"“{visible(text.answer)}”", "bold"))
        heading.append(f" (p = {text.probability:.3f})")
        heading.append(f"   {heatmap.score_name} {bounds(text.mean, text.special)}", style="dim")
        yield heading
        yield _coloured(text) if coloured else _table(text, heatmap)
        if heatmap.by_layer:
            yield _layers(text, heatmap, coloured=coloured)


def _legend(heatmap: SelectionHeatmap) -> Text:
    legend = Text("lowest ", style="dim")
    for colour in ramp(CIVIDIS, 12):
        legend.append(" ", style=f"on {colour}")
    legend.append(f" highest {heatmap.score_name} of each text   ", style="dim")
    return legend.append("rationale", style="bold underline").append(f": the top {heatmap.size}", style="dim")


def _coloured(text: ScoredText) -> Text:
    colours = ramp(CIVIDIS)
    line = Text()
    levels = shades(text.mean[None], text.special)[0]
    for index, (gap, token) in enumerate(written(text.tokens, text.words)):
        style = "dim" if levels[index] < 0 else f"{ink(colours[levels[index]])} on {colours[levels[index]]}"
        line.append(" " if gap else "")
        line.append(token, style=f"bold underline {style}" if index in text.rationale else style)
    return line


def _table(text: ScoredText, heatmap: SelectionHeatmap) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, justify in (("rank", "right"), ("position", "right"), ("token", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column(heatmap.score, justify="right")
    table.add_column("rationale")
    for rank, (position, token, score) in enumerate(text.top(max(heatmap.size, TABLE_TOKENS)), start=1):
        marked = "yes" if position in text.rationale else ""
        table.add_row(str(rank), str(position), Text(shorten(visible(token).strip(" "), 40)), f"{score:.4f}", marked)
    return table


def _layers(text: ScoredText, heatmap: SelectionHeatmap, *, coloured: bool) -> Table:
    """One row per layer: its range and its highest tokens."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("range")
    table.add_column(f"highest {heatmap.size}")
    colours = ramp(CIVIDIS)
    for layer, scores, levels in zip(heatmap.layers, text.scores, shades(text.scores, text.special), strict=True):
        cell = Text()
        for position, token, _ in text.top(heatmap.size, scores):
            colour = colours[levels[position]]
            cell.append(shorten(visible(token).strip(" "), 40), style=f"{ink(colour)} on {colour}" if coloured else "")
            cell.append("  ")
        table.add_row(str(layer), bounds(scores, text.special), cell)
    return table
