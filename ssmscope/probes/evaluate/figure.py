"""Figure of scores: a panel for each measure, a point with its interval for each task."""

from __future__ import annotations

from matplotlib.figure import Figure
from ssmscope.probes.evaluate.result import Benchmarks, TaskScore
from ssmscope.render.figure import ROW_INCHES, Frame, Sheet, points


def draw(result: Benchmarks, frame: Frame) -> Figure:
    """Draw every measure on an axis of its own."""
    by_measure: dict[str, list[TaskScore]] = {}
    for one in result.scores:
        by_measure.setdefault(one.measure, []).append(one)
    sheet = Sheet(frame, result.headline, result.intervals.rstrip("."))
    panels = sheet.panels(*(ROW_INCHES * len(scores) for scores in by_measure.values()))
    for axes, (measure, scores) in zip(panels, by_measure.items()):
        points(axes, [one.task for one in scores], [one.estimate for one in scores], letters=30)
        axes.set_xlabel(measure)
    return sheet.figure
