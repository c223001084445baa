"""What a change of a text did, in a terminal: both texts in colour, or their top tokens, and a table of the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from ssmscope.attacks.effect_figure import colours, span
from ssmscope.interp.views.tokens import CIVIDIS, ink, ramp, shorten, visible, written

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.attacks.effect import AttackEffect, Side

LAYERS = 8
"""How many layers the table has where not all were asked for."""


def terminal_view(result: AttackEffect, *, coloured: bool) -> Iterator[RenderableType]:
    """The answers, both texts, the tokens to which the last position attends most, and the layers.

    `coloured` needs a terminal of 256 colours or more.
    """
    yield Text(result.headline, style="bold")
    if coloured:
        yield _legend(result)
    for name, side, levels in zip(("before", "after"), (result.before, result.after), colours(result)):
        yield Text("")
        heading = Text.assemble((f"{name}  ", "dim"), ("answer ", "dim"), (f"“{visible(side.text.answer)}”", "bold"))
        heading.append(f" (p = {side.text.probability:.3f})")
        if side.changed.any():
            heading.append(f"   {100 * side.on_changed.mean():.1f} % of the attention on changed tokens", style="dim")
        yield heading
        if coloured:
            yield _coloured(side, levels)
        yield _attended(side, result.size)
    yield Text("")
    yield _layers(result)
    yield from (Text(line) for line in _remarks(result))


def _legend(result: AttackEffect) -> Text:
    legend = Text("lowest ", style="dim")
    for colour in ramp(CIVIDIS, 12):
        legend.append(" ", style=f"on {colour}")
    legend.append(f" highest retention, {span(result)}   ", style="dim")
    return legend.append("changed", style="bold underline").append(" tokens", style="dim")


def _coloured(side: Side, levels: np.ndarray) -> Text:
    shade = ramp(CIVIDIS)
    line = Text()
    for at, (gap, token) in enumerate(written(side.text.tokens, side.text.words)):
        style = "dim" if levels[at] < 0 else f"{ink(shade[levels[at]])} on {shade[levels[at]]}"
        line.append(" " if gap else "")
        line.append(token, style=f"bold underline {style}" if side.changed[at] else style)
    return line


def _attended(side: Side, size: int) -> Table:
    """The tokens to which the last position attends most."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("position", justify="right")
    table.add_column("the last position attends to")
    for heading in ("attention in %", "retention"):
        table.add_column(heading, justify="right")
    table.add_column("changed")
    for at in side.top(size):
        token = Text(shorten(visible(side.text.tokens[at]).strip(" "), 40))
        numbers = (f"{100 * side.mean_attention[at]:.1f}", f"{side.text.mean[at]:.4f}")
        table.add_row(str(at), token, *numbers, "yes" if side.changed[at] else "")
    return table


def _layers(result: AttackEffect) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("layer", "state cosine", "hidden cosine", "new tokens %", "Δ retention", "distance", "at the end"):
        table.add_column(heading, justify="right", no_wrap=True)
    frame = result.summary()
    for at in _shown(len(result.layers), result.by_layer) + [len(result.layers)]:
        row = frame.iloc[at]
        peak = "0" if math.isnan(row["remains"]) else f"{row['peak']:.3f} at {row['peak_at']}"
        numbers = [_cell(row["state_cosine"]), _cell(row["hidden_cosine"]), _cell(100 * row["on_new"], 1)]
        table.add_row(str(row["layer"]), *numbers, _cell(row["retention_change"], 4), peak, _cell(row["last"]))
    return table


def _shown(layers: int, every: bool) -> list[int]:
    if every or layers <= LAYERS:
        return list(range(layers))
    return np.linspace(0, layers - 1, LAYERS).round().astype(int).tolist()


def _cell(value: float, digits: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _remarks(result: AttackEffect) -> Sequence[str]:
    lines = []
    if not result.by_layer and len(result.layers) > LAYERS:
        lines.append(f"{LAYERS} of {len(result.layers)} layers; layers='all' shows every one.")
    head = result.spreads[-1]
    if result.first_changed is None:
        lines.append("The texts have the same tokens.")
    elif head.first is None:
        lines.append(
            f"The texts differ from token {result.first_changed} on; at the tokens of both, the head reads the same."
        )
    else:
        lines.append(
            f"The texts differ from token {result.first_changed} on. What the head reads is furthest away at token "
            f"{head.peak_at}; {100 * head.remains:.0f} % of that is left at the last token of both texts."
        )
    if result.before.text.answer != result.after.text.answer:
        lines.append(f"The first answer has p = {result.kept:.3f} after the change.")
    return lines
