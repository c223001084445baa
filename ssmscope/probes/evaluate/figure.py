"""Scores on benchmarks as a picture: a point with its interval for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmscope.render.figure import COLOURS, SOFT, Sheet, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.probes.evaluate.result import Benchmarks

WIDTH, NAMES, PANEL, ROW, AXIS = 8.6, 2.6, 3.9, 0.3, 0.55
"""In inches: the figure, what is left of the panel and its width, a row of points, and what an axis needs."""


def draw(result: Benchmarks) -> Figure:
    """The scores between 0 and 1; perplexities and the like are in the table alone, unless there is nothing else."""
    shown = [one for one in result.scores if 0 <= one.estimate.value <= 1] or list(result.scores)
    high = ROW * len(shown)
    described = "lm-evaluation-harness; 95 % intervals over examples"
    if len(shown) < len(result.scores):
        described += "; scores beyond 0 to 1 are in the table alone"
    sheet = Sheet(WIDTH, Sheet.TOP + high + AXIS, ("Benchmarks of ", result.model_name, ""), described)
    axes = sheet.panel(NAMES, sheet.top, PANEL, high)
    points(
        axes,
        [f"{one.task}, {one.measure}" for one in shown],
        [one.estimate for one in shown],
        [COLOURS[0]] * len(shown),
        letters=30,
    )
    axes.set_xlabel("score", color=SOFT, size=8.5)
    return sheet.figure
