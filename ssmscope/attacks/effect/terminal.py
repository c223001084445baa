"""What a change of a text did, in a terminal: both texts in colour; and the tables and remarks of all views."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.text import Text

from ssmscope.attacks.effect.figure import colours, span
from ssmscope.render.table import Cell, Line, Table, plain, table
from ssmscope.render.tokens import CIVIDIS, evenly_apart, ink, ramp, short_token, visible, written

if TYPE_CHECKING:
    from ssmscope.attacks.effect.result import AttackEffect, Side

LAYERS = 8
"""How many layers the table has where not all were asked for."""


def texts(result: AttackEffect, coloured: bool) -> Iterator[Text]:
    """The answers, and on a terminal of 256 colours or more the tokens."""
    if coloured:
        yield _legend(result)
    for name, side, levels in zip(("before", "after"), (result.before, result.after), colours(result)):
        heading = Text.assemble((f"{name}  ", "dim"), ("answer ", "dim"), (f"“{visible(side.text.answer)}”", "bold"))
        heading.append(f" (p = {side.text.probability:.3f})")
        if side.changed.any():
            heading.append(f"   {100 * side.on_changed.mean():.1f} % of the attention on changed tokens", style="dim")
        yield heading
        if coloured:
            yield _coloured(side, levels)


def _legend(result: AttackEffect) -> Text:
    legend = Text("lowest ", style="dim")
    for colour in ramp(CIVIDIS, 12):
        legend.append(" ", style=f"on {colour}")
    legend.append(f" highest retention, {span(result)}   ", style="dim")
    return legend.append("changed", style="bold underline").append(" tokens", style="dim")


def _coloured(side: Side, levels: Sequence[int]) -> Text:
    shade = ramp(CIVIDIS)
    line = Text()
    for at, (gap, token) in enumerate(written(side.text.tokens, side.text.words)):
        style = "dim" if levels[at] < 0 else f"{ink(shade[levels[at]])} on {shade[levels[at]]}"
        line.append(" " if gap else "")
        line.append(token, style=f"bold underline {style}" if side.changed[at] else style)
    return line


def attended(name: str, side: Side, size: int) -> Table:
    """The tokens to which the last position attends most."""
    lines = []
    for at in side.top(size):
        cells = {
            "attention in %": number(100 * float(side.mean_attention[at]), 1),
            "retention": number(float(side.text.mean[at]), 4),
            "changed": Cell(text="yes" if side.changed[at] else ""),
        }
        lines.append(Line((str(at), short_token(side.text.tokens[at], 40)), cells))
    return replace(table(("position", "token"), lines), title=f"{name}: what the last position attends to most")


def layers(result: AttackEffect) -> Table:
    """A row per layer, or for some of them, and one for the head."""
    frame, lines = result.summary(), []
    every = result.by_layer or len(result.layers) <= LAYERS
    shown = range(len(result.layers)) if every else evenly_apart(len(result.layers), LAYERS)
    for at in (*shown, len(result.layers)):
        row = frame.iloc[at]
        cells = {
            "state cosine": number(row["state_cosine"]),
            "hidden cosine": number(row["hidden_cosine"]),
            "on new tokens in %": number(100 * row["on_new"], 1),
            "Δ retention": number(row["retention_change"], 4),
            "distance": Cell(text="0" if math.isnan(row["remains"]) else f"{row['peak']:.3f} at {row['peak_at']}"),
            "at the end": number(row["last"]),
        }
        lines.append(Line((str(row["layer"]),), cells))
    note = (
        "Cosines: of both texts' final states, and of what the layer reads at their last tokens; on new tokens: the "
        "last position's attention. At the tokens of both texts: Δ retention, the mean absolute change; distance, of "
        "what the layer reads, ‖u′ − u‖ / ‖u‖, where it is largest and at the last of them."
    )
    return table(("layer",), lines, note=note)


def number(value: float, digits: int = 3) -> Cell:
    return replace(plain(value), digits=digits)


def remarks(result: AttackEffect) -> Sequence[str]:
    lines = []
    if all(map(math.isnan, result.state_cosine.tolist())):
        lines.append("No layer has a recurrent memory: nothing is kept, and there are no states to compare.")
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
