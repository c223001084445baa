"""Figure of a change: both texts in coloured rows, and the distance of the vectors along the text."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from ssmscope.attacks.effect.result import AttackEffect
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES, ramp
from ssmscope.render.letters import drawable
from ssmscope.render.numbers import evenly_spaced
from ssmscope.render.token_figure import Part, draw_rows
from ssmscope.render.tokens import short_token

MAX_LEGEND_LAYERS, CURVES_INCHES = 6, 3.0
DISTANCE = "relative distance of the vectors at the tokens of both texts"


def draw(result: AttackEffect, frame: plot.Frame, *, distances: bool = False) -> Figure:
    """Draw both texts with the distances below them, or the distances alone."""
    if distances:
        sheet = plot.Sheet(frame, DISTANCE, width=9.4)
        _curves(sheet.panels(2.2)[0], result)
        return sheet.figure

    def curves(part: SubFigure) -> None:
        axes = part.subplots()
        axes.set_title(DISTANCE, weight="bold")
        _curves(axes, result)

    return draw_rows(result.token_rows(), result.headline, frame, more=[Part(CURVES_INCHES, curves)])


def _curves(axes: Axes, result: AttackEffect) -> None:
    plot.styled(axes, "y")
    number = len(result.corrupted)
    for position in np.flatnonzero(result.corrupted.changed).tolist():
        axes.axvspan(position - 0.5, position + 0.5, color=plot.MARK, alpha=0.13, linewidth=0)
    for between in _deletions(result):
        axes.axvline(between, color=plot.MARK, linewidth=1, linestyle=(0, (1, 1.5)))
    depth = ramp(BLUES[2:], max(len(result.layers), 2))[-len(result.layers) :]
    kept = evenly_spaced(len(result.layers), MAX_LEGEND_LAYERS)
    positions = result.pairs[:, 1]
    shared: dict[str, Any] = dict(marker="." if number <= plot.MAX_NAMED else "", markersize=4)
    for row, (layer, colour) in enumerate(zip(result.layers, depth)):
        label = f"layer {layer}" if row in kept else None
        axes.plot(positions, result.distance[row], color=colour, linewidth=1.2, label=label, **shared)
    shared |= dict(color=plot.INK, linewidth=1.4, linestyle=plot.DASHED)
    axes.plot(positions, result.distance[-1], label="head", **shared)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), labelcolor=plot.SOFT, handlelength=1.6)
    axes.set(xlim=(-0.5, number - 0.5), ylim=(0, None), ylabel="‖u′ − u‖ / ‖u‖")
    if number > plot.MAX_NAMED:
        plot.integers(axes.xaxis)
        axes.set_xlabel("position in the corrupted text")
        return
    names = [drawable(short_token(token, 14)) for token in result.corrupted.text.tokens]
    axes.set_xticks(range(number), names, rotation=90)
    for text, changed in zip(axes.get_xticklabels(), result.corrupted.changed):
        text.set_color(plot.MARK if changed else plot.INK)


def _deletions(result: AttackEffect) -> list[float]:
    ends = np.array([[len(result.clean), len(result.corrupted)]])
    pairs = np.concatenate([[[-1, -1]], result.pairs, ends])
    gone, new = np.diff(pairs, axis=0).T - 1
    return [float(at) + 0.5 for at in pairs[:-1, 1][(gone > 0) & (new == 0)]]
