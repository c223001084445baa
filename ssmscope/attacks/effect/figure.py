"""Figure of a change: both texts in coloured rows, and the distance of the vectors along the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ssmscope.render.drawing import MARGIN, MARK, drawable, families, write
from ssmscope.render.figure import INK, SOFT, Sheet, plain
from ssmscope.render.token_figure import HEADING_HEIGHT, MIN_LABEL_WIDTH, RIGHT_WIDTH, Panel, panel, stack
from ssmscope.render.tokens import BLUES, evenly_apart, ramp, short_token

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.attacks.effect.result import AttackEffect

MAX_TOKEN_LABELS = 60
"""Largest number of tokens that the axis of the distances names."""
MAX_LEGEND_LAYERS = 6

CURVES_WIDTH, CURVES_HEIGHT, CHARACTER_WIDTH = 7.5, 2.1, 0.062
"""In inches: the axes of the distances, and a character of a token's name below them."""


def draw(result: AttackEffect) -> Figure:
    """Draw both texts, and below them the distances."""
    block = result.token_rows()
    panels: list[Panel] = [panel(number, text) for number, text in enumerate(block.texts)]
    bars = [(BLUES, ("lowest", "highest"), block.score)]
    title = ("Effect of a change on ", result.model_name, "")
    said = (f"{result.answer_name}; {result.changed_name}", f"underlined: {block.marked}")
    return stack(title, said, [*panels, _Distances(result)], bars)


def draw_distances(result: AttackEffect) -> Figure:
    """Draw the distances alone."""
    width, height = 0.75 + CURVES_WIDTH + 1.15, 0.15 + CURVES_HEIGHT + _label_height(result)
    figure = Figure(figsize=(width, height), facecolor="white")
    place = (0.75 / width, _label_height(result) / height, CURVES_WIDTH / width, CURVES_HEIGHT / height)
    _draw_curves(figure.add_axes(place), result)
    return figure


class _Distances(Panel):
    """The curves of all layers below a heading."""

    def __init__(self, result: AttackEffect) -> None:
        self.result = result
        self.left, self.width = MIN_LABEL_WIDTH, MIN_LABEL_WIDTH + CURVES_WIDTH + RIGHT_WIDTH
        self.height = HEADING_HEIGHT + CURVES_HEIGHT + _label_height(result)

    def draw(self, sheet: Sheet, top: float, line: float) -> None:
        heading = "relative distance of the vectors at the tokens of both texts"
        write(sheet.paper, MARGIN, top + 0.05, heading, size=8.5, weight="bold", va="top")
        self.draw_inner(sheet, top + HEADING_HEIGHT, line)

    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        _draw_curves(sheet.panel(self.left, top, line - self.left - RIGHT_WIDTH, CURVES_HEIGHT), self.result)


def _label_height(result: AttackEffect) -> float:
    """Return the inches that the names of the tokens need below the axis."""
    tokens = result.after.text.tokens
    if len(tokens) > MAX_TOKEN_LABELS:
        return 0.55
    return 0.4 + CHARACTER_WIDTH * max(len(_name(token)) for token in tokens)


def _name(token: str) -> str:
    return drawable(short_token(token, 14))


def _draw_curves(axes: Axes, result: AttackEffect) -> None:
    plain(axes, grid="y", size=7.5)
    number = len(result.after)
    for position in np.flatnonzero(result.after.changed).tolist():
        axes.axvspan(position - 0.5, position + 0.5, color=MARK, alpha=0.13, linewidth=0)
    for between in _deletions(result):
        axes.axvline(between, color=MARK, linewidth=1, linestyle=(0, (1, 1.5)))
    depth = ramp(BLUES[2:], max(len(result.layers), 2))[-len(result.layers) :]
    kept = evenly_apart(len(result.layers), MAX_LEGEND_LAYERS)
    positions = result.pairs[:, 1]
    shared: dict[str, Any] = dict(marker="." if number <= MAX_TOKEN_LABELS else "", markersize=4)
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
    if number > MAX_TOKEN_LABELS:
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.set_xlabel("position after the change", fontsize=7.5, color=SOFT, labelpad=1)
        return
    axes.set_xticks(range(number), [_name(token) for token in result.after.text.tokens], rotation=90)
    for text, changed in zip(axes.get_xticklabels(), result.after.changed):
        text.set(fontsize=7, family=families(), color=MARK if changed else INK, parse_math=False)


def _deletions(result: AttackEffect) -> list[float]:
    """Return where tokens are removed without replacement, between the positions after the change."""
    ends = np.array([[len(result.before), len(result.after)]])
    pairs = np.concatenate([[[-1, -1]], result.pairs, ends])
    gone, new = np.diff(pairs, axis=0).T - 1
    return [float(at) + 0.5 for at in pairs[:-1, 1][(gone > 0) & (new == 0)]]
