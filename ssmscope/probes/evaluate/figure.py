"""Figure of scores: a point with its interval for each."""

from __future__ import annotations

from matplotlib.figure import Figure

from ssmscope.probes.evaluate.result import Benchmarks
from ssmscope.render.figure import ROW_INCHES, Frame, Sheet, points


def draw(result: Benchmarks, frame: Frame) -> Figure:
    """Draw the scores between 0 and 1; others, such as perplexities, only if there is nothing else."""
    shown = [one for one in result.scores if 0 <= one.estimate.value <= 1] or list(result.scores)
    below = result.intervals.rstrip(".")
    if len(shown) < len(result.scores):
        below += "; scores outside 0 to 1 are only in the table"
    sheet = Sheet(frame, f"Evaluation of {result.model_name}", below)
    (axes,) = sheet.panels(ROW_INCHES * len(shown))
    points(axes, [f"{one.task}, {one.measure}" for one in shown], [one.estimate for one in shown], letters=30)
    axes.set_xlabel("score")
    return sheet.figure
