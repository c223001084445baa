"""Two texts and what a model made of them as a figure: coloured tokens, bars of attention, distance along the text.

Everything is placed in inches, so that nothing overlaps at any number of tokens or layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ssmscope.interp.heatmap.views import FLAT_REMARK
from ssmscope.interp.heatmap.words import is_selective
from ssmscope.render.blocks import TokenRow, TokenText
from ssmscope.render.figure import INK, SOFT, plain
from ssmscope.render.token_figure import (
    BAR,
    BOX,
    MARGIN,
    MARK,
    Box,
    colour_bar,
    draw_boxes,
    drawable,
    families,
    fill,
    sheet_of,
    wrap,
    write,
)
from ssmscope.render.tokens import BLUES, evenly_apart, ramp, short_token, shorten, span_of, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.attacks.effect.result import AttackEffect, Side

BOX_TOKENS = 300
"""How many tokens of each text are written out; the distances are of all."""
NAMED_TOKENS = 60
"""Up to how many tokens the axis of the distances names them."""
LINES = 6
"""How many layers the legend names."""

LEFT, HEADING = 0.75, 0.3
BARS, BETWEEN, HEADER, RIGHT = 0.3, 0.32, 1.15, 1.15
"""In inches: the tallest bar, what follows a line of bars, the head of the sheet, and what is right of the tokens."""
CURVES, NAME = 2.1, 0.062
"""In inches: the height of the distances, and a character of a token's name under them."""


def draw(result: AttackEffect) -> Figure:
    """The head, both texts, and the distances."""
    sides = (("before", result.before), ("after", result.after))
    lines = [wrap(side.text.tokens, side.text.words, BOX_TOKENS) for _, side in sides]
    line = max([6.2, *(boxes[-1].left + boxes[-1].width for side in lines for boxes in side)])
    step = BOX + 0.04 + BARS + BETWEEN
    tops = [HEADER, HEADER + HEADING + step * len(lines[0])]
    below = tops[1] + HEADING + step * len(lines[1])
    width = LEFT + line + RIGHT
    height = below + 0.35 + CURVES + _names(result)
    sheet = sheet_of(width, height)
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    _header(sheet, result, width)
    scale = max(float(side.mean_attention.max()) for _, side in sides) or 1.0
    for (name, side), boxes, top in zip(sides, lines, tops):
        write(sheet, MARGIN, top + 0.05, name, size=8.5, weight="bold", va="top")
        answer = f"answer “{shorten(visible(side.text.answer), 40)}”, p = {side.text.probability:.3f}"
        if len(side) > BOX_TOKENS:
            answer += f"; the first {BOX_TOKENS} of {len(side)} tokens"
        write(sheet, LEFT, top + 0.05, answer, size=8.5, weight="bold", va="top")
        for number, row in enumerate(boxes):
            y = top + HEADING + number * step
            draw_boxes(sheet, row, LEFT, y, *coloured(side, ends(result)))
            _attended(sheet, row, side, result.size, scale, y + BOX + 0.04 + BARS)
    write(
        sheet,
        MARGIN,
        below + 0.05,
        "relative distance of the vectors at the tokens of both texts",
        size=8.5,
        weight="bold",
        va="top",
    )
    place = (LEFT / width, 1 - (below + 0.35 + CURVES) / height, line / width, CURVES / height)
    _distances(figure.add_axes(place), result)
    return figure


def draw_distances(result: AttackEffect) -> Figure:
    """The distances alone."""
    width, height = LEFT + 7.5 + RIGHT, 0.15 + CURVES + _names(result)
    figure = Figure(figsize=(width, height), facecolor="white")
    place = (LEFT / width, _names(result) / height, 7.5 / width, CURVES / height)
    _distances(figure.add_axes(place), result)
    return figure


def colours(result: AttackEffect) -> tuple[list[int], list[int]]:
    """The shade of every token of both texts, −1 of special ones, in the range that they have together."""
    before, after = (coloured(side, ends(result))[1].shades().tolist() for side in (result.before, result.after))
    return before, after


def coloured(side: Side, ends: tuple[float, float]) -> tuple[TokenText, TokenRow]:
    """A text and its retention as a row of coloured tokens, the changed ones marked."""
    text, changed = side.text, np.flatnonzero(side.changed).tolist()
    row = TokenRow("retention", text.mean, ends, outside=text.special, marked=changed)
    return TokenText(text.tokens, text.words, (row,), text.answer, text.probability), row


def ends(result: AttackEffect) -> tuple[float, float]:
    """The range of both texts together; one point where they are flat, so that noise has no colours."""
    every = _ordinary(result)
    if not every.size:
        return 0.0, 0.0
    return (float(every.min()), float(every.max())) if is_selective(1 - every) else (float(every.mean()),) * 2


def span(result: AttackEffect) -> str:
    """The range in figures, with a word where it is flat."""
    every = _ordinary(result)
    if not every.size:
        return "no scores"
    return span_of(float(every.min()), float(every.max())) + f", {FLAT_REMARK}" * (not is_selective(1 - every))


def _ordinary(result: AttackEffect) -> np.ndarray:
    """The retention of both texts' tokens, special ones apart."""
    return np.concatenate([text.mean[~text.special] for text in (result.before.text, result.after.text)])


def _header(sheet: Axes, result: AttackEffect, width: float) -> None:
    model = shorten(visible(result.model_name), 40)
    write(sheet, MARGIN, 0.2, f"Effect of a change on {model}", size=10.5, weight="bold", va="top")
    write(sheet, MARGIN, 0.42, result.answer_name, size=8, color=SOFT, va="top")
    on = (
        f", which have {100 * float(result.after.on_changed.mean()):.0f} % of the attention"
        if result.after.changed.any()
        else ""
    )
    write(sheet, MARGIN, 0.59, f"{result.changed_name}{on}", size=8, color=SOFT, va="top")
    legend = "underlined: changed tokens; bars: share of the last position's attention, the highest in %"
    write(sheet, MARGIN, 0.78, legend, size=7, color=SOFT, va="top")
    colour_bar(sheet, width - RIGHT - BAR, BLUES, ("lowest", "highest"), f"retention, {span(result)}")


def _attended(sheet: Axes, boxes: Sequence[Box], side: Side, size: int, scale: float, base: float) -> None:
    """Under each token its share of the last position's attention, on the line `base`."""
    shares, named = side.mean_attention, set(side.top(size))
    sheet.plot([LEFT, LEFT + boxes[-1].left + boxes[-1].width], [base, base], color=SOFT, linewidth=0.4)
    places = []
    for box in boxes:
        middle, share = LEFT + box.left + box.width / 2, float(shares[box.position])
        wide, tall = min(box.width, 0.14), BARS * share / scale
        colour = MARK if side.changed[box.position] else BLUES[3]
        places.append((Rectangle((middle - wide / 2, base - tall), wide, tall), colour))
        if box.position in named and share > 0:
            write(sheet, middle, base + 0.02, f"{100 * share:.0f}", size=6, color=SOFT, va="top", ha="center")
    fill(sheet, places, edge="none")


def _names(result: AttackEffect) -> float:
    """The inches that the axis of the distances needs for its names."""
    tokens = result.after.text.tokens
    if len(tokens) > NAMED_TOKENS:
        return 0.55
    return 0.4 + NAME * max(len(_name(token)) for token in tokens)


def _name(token: str) -> str:
    return drawable(short_token(token, 14))


def _distances(axes: Axes, result: AttackEffect) -> None:
    plain(axes, grid="y", size=7.5)
    number = len(result.after)
    for position in np.flatnonzero(result.after.changed).tolist():
        axes.axvspan(position - 0.5, position + 0.5, color=MARK, alpha=0.13, linewidth=0)
    for between in _deletions(result):
        axes.axvline(between, color=MARK, linewidth=1, linestyle=(0, (1, 1.5)))
    depth = ramp(BLUES[2:], max(len(result.layers), 2))[-len(result.layers) :]
    kept = evenly_apart(len(result.layers), LINES)
    positions = result.pairs[:, 1]
    shared: dict[str, Any] = dict(marker="." if number <= NAMED_TOKENS else "", markersize=4)
    for row, (layer, colour) in enumerate(zip(result.layers, depth)):
        label = f"layer {layer}" if row in kept else None
        axes.plot(positions, result.distance[row], color=colour, linewidth=1.2, label=label, **shared)
    axes.plot(positions, result.distance[-1], color=INK, linewidth=1.4, linestyle=(0, (4, 2)), label="head", **shared)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=7, frameon=False, labelcolor=SOFT, handlelength=1.6
    )
    axes.set_xlim(-0.5, number - 0.5)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("‖u′ − u‖ / ‖u‖", color=SOFT, size=7.5)
    if number > NAMED_TOKENS:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.set_xlabel("position after the change", fontsize=7.5, color=SOFT, labelpad=1)
        return
    axes.set_xticks(range(number), [_name(token) for token in result.after.text.tokens], rotation=90)
    for text, changed in zip(axes.get_xticklabels(), result.after.changed):
        text.set(fontsize=7, family=families(), color=MARK if changed else INK, parse_math=False)


def _deletions(result: AttackEffect) -> list[float]:
    """Where tokens are gone and nothing is in their place, between the positions after the change."""
    ends = np.array([[len(result.before), len(result.after)]])
    pairs = np.concatenate([[[-1, -1]], result.pairs, ends])
    gone, new = np.diff(pairs, axis=0).T - 1
    return [float(at) + 0.5 for at in pairs[:-1, 1][(gone > 0) & (new == 0)]]
