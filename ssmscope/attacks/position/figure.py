"""Figure of the position-bias attack: accuracy by region, and the drop along the sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.attacks.position.result import PositionBias
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES
from ssmscope.render.table import in_percent


def draw(result: PositionBias, frame: plot.Frame) -> Figure:
    """Draw a bar with its interval for each region and, if there are windows, the drop against their position."""
    below = plot.data_line(result, "diamonds: answered with the inserted class" if _targeted(result) else "")
    sheet = plot.Sheet(frame, result.headline, below)
    heights = [1.25 * plot.ROW_INCHES * (len(result.regions) + 1), 2.3]
    bars, *curve = sheet.panels(*heights[: 1 + bool(result.windows)])
    _bars(bars, result)
    for axes in curve:
        _curve(axes, result)
    return sheet.figure


def _targeted(result: PositionBias) -> bool:
    return any(one.success is not None for one in result.regions)


def _bars(axes: Axes, result: PositionBias) -> None:
    accuracies = [result.clean, *(one.accuracy for one in result.regions)]
    success = [[None, *(one.success for one in result.regions)]] if _targeted(result) else []
    drops = [one.drop for one in result.regions]
    notes = ["no drop defined" if math.isnan(d.value) else f"drop {in_percent(d, interval=False)}" for d in drops]
    names = ["clean", *(one.region for one in result.regions)]
    style: dict[str, Any] = dict(colours=(plot.INK, plot.COLOURS[1]), markers="oD", notes=["", *notes], zero=False)
    plot.points(axes, names, accuracies, *success, **style, bars=[plot.SOFT, *[BLUES[3]] * len(result.regions)])
    axes.axvline(result.clean.value, color=plot.INK, linewidth=1, linestyle=plot.DASHED)
    axes.set(xlim=(0, 1), xlabel="accuracy")


def _curve(axes: Axes, result: PositionBias) -> None:
    share = result.windows[0].percent
    middles = [(one.start + one.stop) / 2 for one in result.windows]
    axes.axhline(0, color=plot.SOFT, linewidth=0.8)
    plot.line(axes, middles, [one.drop.times(100) for one in result.windows], 0, marker=".")
    unit = "% of each example's tokens" if share else result.unit
    size = result.windows[0].stop - result.windows[0].start
    title = f"one window of {f'{size:g} %' if share else f'{size:g} {result.unit}'} at a time"
    if result.width is not None and not share:
        pixels = result.width
        functions = (lambda x: np.asarray(x) / pixels), (lambda x: np.asarray(x) * pixels)
        plot.styled(axes.secondary_xaxis("top", functions=functions), None)  # type: ignore[arg-type]
        title += "; above, the row of the image"
    axes.set(xlim=(0, 100 if share else result.length), xlabel=f"middle of the window, {unit}")
    axes.set(ylabel="drop in accuracy, %", title=title)
