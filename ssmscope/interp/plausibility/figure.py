"""Figure of plausibility: each measure of agreement by method, with its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmscope.interp.plausibility.measures import MEASURES
from ssmscope.render.figure import COLOURS, SOFT, Sheet, points
from ssmscope.render.numbers import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.plausibility.result import Plausibility

WIDTH, NAMES, GAP, ROW, AXIS = 8.6, 1.55, 0.3, 0.3, 0.55
"""Width of the figure, room left of the panels and between them, height of a row of points, and room for an axis, in
inches."""


def draw(result: Plausibility) -> Figure:
    """Draw a panel of points with intervals for each measure of agreement with people."""
    high = ROW * len(result.methods)
    described = f"agreement with what people marked in {counted(len(result.texts), 'text')}, 95 % bootstrap intervals"
    model = result.model_name
    sheet = Sheet(WIDTH, Sheet.TOP + high + AXIS, ("Plausibility on ", model, ""), described)
    wide = (WIDTH - NAMES - GAP * len(MEASURES)) / len(MEASURES)
    for place, name in enumerate(MEASURES.values()):
        axes = sheet.panel(NAMES + place * (wide + GAP), sheet.top, wide, high)
        found = list(result.estimates[place :: len(MEASURES)])
        points(axes, result.methods, found, [COLOURS[0]] * len(found), numbers=False)
        axes.set_xlim(-0.03, 1.03)
        axes.set_xlabel(name, color=SOFT, size=8.5)
        axes.tick_params(labelleft=not place)
    return sheet.figure
