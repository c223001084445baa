"""Figure of fidelity: ΔA with its interval, and the output as more and more tokens are hidden."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D

from ssmscope.interp.fidelity.measures import LERF, MORF
from ssmscope.render.figure import COLOURS, DASHED, DOTTED, INK, SOFT, Sheet, points
from ssmscope.render.numbers import counted
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.interp.fidelity.result import Fidelity

ORDERS: tuple[tuple[int, dict[str, Any], str], ...] = (
    (MORF, {"color": COLOURS[1]}, "most relevant first (MoRF)"),
    (LERF, {"color": COLOURS[0], "linestyle": DASHED}, "least relevant first (LeRF)"),
)
CHANCE: dict[str, Any] = {"color": SOFT, "linestyle": DOTTED}
"""Style of random rankings, whose two orders are alike."""

WIDTH, ROW, AXIS = 8.6, 0.3, 0.55
"""Width of the figure, height of a row of points, and room for an axis, in inches."""
NAMES, NUMBERS, LEFT = 1.55, 2.0, 0.75
"""Room left and right of the points, and left of the curves, in inches."""
ACROSS, CURVE, TITLE, GAP = 3, 1.65, 0.36, 0.25
"""Curves in a row, and in inches their height, the room for a title, and the gap between two."""


def draw(result: Fidelity) -> Figure:
    """Draw ΔA of every method and of the random rankings with intervals; below, the mean of f along each method's
    rankings, most relevant first and least relevant first, with those of the random rankings."""
    high = ROW * len(result.rows)
    lines = math.ceil(len(result.methods) / ACROSS)
    options, data = result.provenance["options"], result.provenance["data"]
    how = "deleted" if options["mode"] == "delete" else f"replaced ({visible(str(options['replacement']))})"
    described = (
        f"{counted(len(result.texts), 'text')} of {shorten(visible(data['name'] + ' (' + data['split'] + ')'), 40)}"
    )
    described += f", tokens {shorten(how, 30)}, 95 % bootstrap intervals"
    model = result.model_name
    legend = [*((Line2D([], [], **style), name) for _, style, name in ORDERS), (Line2D([], [], **CHANCE), "random")]
    height = Sheet.TOP + high + AXIS + lines * (TITLE + CURVE + AXIS)
    sheet = Sheet(WIDTH, height, ("Fidelity of ", model, ""), described, legend, left=LEFT, across=ACROSS)
    upper = sheet.panel(NAMES, sheet.top, WIDTH - NAMES - NUMBERS, high)
    colours = [INK] * len(result.methods) + [SOFT]
    points(upper, result.rows, [result.estimate(method) for method in result.rows], colours)
    spread, place = result.rankings[:, 0], len(result.rows) - 1
    wide: dict[str, Any] = dict(linewidth=6, alpha=0.3, solid_capstyle="butt")
    upper.plot([spread.min(), spread.max()], [place, place], color=SOFT, **wide)
    upper.set_xlabel("ΔA = A_LeRF − A_MoRF (the grey bar: the random rankings one by one)", color=SOFT, size=8.5)
    _curves(sheet, result, sheet.top + high + AXIS)
    return sheet.figure


def _curves(sheet: Sheet, result: Fidelity, top: float) -> None:
    """Draw a panel per method, all on the same scale."""
    low, high = result.curve[..., 1].min(), result.curve[..., 2].max()
    room = 0.04 * max(high - low, 1e-9)
    wide = (WIDTH - LEFT - GAP * ACROSS) / ACROSS
    for number, method in enumerate(result.methods):
        line, column = divmod(number, ACROSS)
        axes = sheet.panel(LEFT + column * (wide + GAP), top + line * (TITLE + CURVE + AXIS) + TITLE, wide, CURVE)
        _band(axes, result.shares, result.curve[-1].mean(0), CHANCE)
        for order, style, _ in ORDERS:
            _band(axes, result.shares, result.curve[number, order], style)
        axes.set(xlim=(0, 1), ylim=(low - room, high + room))
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
        axes.set_title(shorten(visible(method), 30), loc="left", size=9, color=INK, parse_math=False)
        last = number + ACROSS >= len(result.methods)
        axes.tick_params(labelleft=not column, labelbottom=last)
        if not column:
            axes.set_ylabel(f"{result.value} of the class", color=SOFT, size=8.5)
        if last:
            axes.set_xlabel("share q of the tokens hidden", color=SOFT, size=8.5)


def _band(axes: Axes, shares: np.ndarray, curve: np.ndarray, style: dict[str, Any]) -> None:
    mean, low, high = curve.T
    axes.fill_between(shares, low, high, color=style["color"], alpha=0.2, linewidth=0)
    axes.plot(shares, mean, linewidth=1.5, **style)
