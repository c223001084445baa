"""Figure of plausibility: each measure of agreement by method, with its interval."""

from __future__ import annotations

from matplotlib.figure import Figure
from ssmscope.interp.plausibility.measures import MEASURES
from ssmscope.interp.plausibility.result import Plausibility
from ssmscope.render.figure import ROW_INCHES, Frame, Sheet, points
from ssmscope.render.numbers import counted


def draw(result: Plausibility, frame: Frame) -> Figure:
    """Draw a panel of points with intervals for each measure of agreement with people."""
    below = f"agreement with what people marked in {counted(len(result.texts), 'text')}, 95 % bootstrap intervals"
    sheet = Sheet(frame, result.headline, below)
    panels = sheet.panels(ROW_INCHES * len(result.methods), across=len(MEASURES), sharey=True)
    for place, (axes, name) in enumerate(zip(panels, MEASURES.values())):
        points(axes, result.methods, result.estimates[place :: len(MEASURES)], notes=())
        axes.set(xlim=(-0.03, 1.03), xlabel=name)
    return sheet.figure
