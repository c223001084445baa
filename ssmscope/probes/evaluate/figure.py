"""Figure of benchmark scores: a point with its interval for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmscope.render.figure import COLOURS, SOFT, Sheet, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.probes.evaluate.result import Benchmarks

WIDTH, LEFT, PANEL_WIDTH, ROW_HEIGHT, AXIS_HEIGHT = 8.6, 2.6, 3.9, 0.3, 0.55
"""Sizes in inches: the figure, the margin and width of the panel, a row of points, and an axis."""


def draw(result: Benchmarks) -> Figure:
    """Draw the scores between 0 and 1; others, such as perplexities, only if there is nothing else."""
    shown = [one for one in result.scores if 0 <= one.estimate.value <= 1] or list(result.scores)
    high = ROW_HEIGHT * len(shown)
    described = "lm-evaluation-harness; 95 % intervals over examples"
    if len(shown) < len(result.scores):
        described += "; scores outside 0 to 1 are only in the table"
    sheet = Sheet(WIDTH, Sheet.TOP + high + AXIS_HEIGHT, ("Benchmarks of ", result.model_name, ""), described)
    axes = sheet.panel(LEFT, sheet.top, PANEL_WIDTH, high)
    names = [f"{one.task}, {one.measure}" for one in shown]
    points(axes, names, [one.estimate for one in shown], [COLOURS[0]] * len(shown), letters=30)
    axes.set_xlabel("score", color=SOFT, size=8.5)
    return sheet.figure
