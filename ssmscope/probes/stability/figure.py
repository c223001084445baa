"""Figure of a model's stability: half-lives by layer, and the states' norms over time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from ssmscope.probes.stability.result import Stability
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES, ramp

COLOURS = {"stable": "#4f97cb", "marginal": "#e69f00", "unstable": "#a50026"}
MIN_INCHES, MAX_INCHES, LEGEND_INCHES = 2.3, 9.0, 3.6
MAX_NAMED = 34
LEGEND: dict[str, Any] = dict(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, handlelength=1.4)
LEGEND |= dict(borderaxespad=0.1, columnspacing=1.2)


def draw(result: Stability, frame: plot.Frame) -> Figure:
    """Draw at the left a line per layer, 5 % to 95 % of its states' half-lives (thick from 25 % to 75 %, a dot at the
    median) with the text's length; at the right the norm of each layer's states at the positions."""
    counts = ", ".join(f"{number} {name}" for name, number in result.counts().items() if number)
    sheet = plot.Sheet(frame, result.headline, f"on {result.inputs}; {result.unit}: {counts}", width=10.0)
    high = float(np.clip(plot.ROW_INCHES * len(result.layers), MIN_INCHES, MAX_INCHES))
    left, right = sheet.panels(high, across=2, least=LEGEND_INCHES)
    _half_lives(left, result)
    _norms(right, result)
    return sheet.figure


def _half_lives(axes: Axes, result: Stability) -> None:
    spread = np.array([layer.quantiles for layer in result.layers])
    finite = spread[np.isfinite(spread) & (spread > 0)]
    low = min(finite.min(initial=result.longest), result.longest) / 2
    high = max(finite.max(initial=result.longest), result.longest) * 2
    plot.scale_log(axes, "x")
    axes.grid(visible=False, axis="y")
    axes.axvline(result.longest, color=plot.SOFT, linewidth=1, linestyle=plot.DASHED)
    named = len(result.layers) <= MAX_NAMED
    for row, (layer, (q5, q25, q50, q75, q95)) in enumerate(zip(result.layers, np.clip(spread, low, high))):
        colour = COLOURS[layer.behaviour]
        axes.plot([q5, q95], [row, row], color=colour, linewidth=1.2)
        axes.plot([q25, q75], [row, row], color=colour, linewidth=5)
        axes.plot([q50], [row], "o", color="white", markeredgecolor=plot.INK, markersize=4.5, zorder=3)
        if math.isinf(layer.quantiles[-1]):  # An arrow marks infinite half-lives.
            axes.plot([high], [row], ">", color=colour, markersize=6, clip_on=False, zorder=3)
        if named:
            plot.beside(axes, row, layer.outlasting, color=plot.INK if layer.never else plot.SOFT)
    if named:
        axes.set_yticks(range(len(result.layers)), [layer.name for layer in result.layers])
        axes.text(1.02, 1.01, "never", transform=axes.transAxes, color=plot.SOFT)
    axes.set(xlim=(low, high), ylim=(-0.6, len(result.layers) - 0.4))
    axes.set(xlabel="half-life in tokens; dashed, the longest text", ylabel="layer")
    bars = [Line2D([], [], color=COLOURS[name], linewidth=5, label=name) for name, n in result.counts().items() if n]
    axes.legend(handles=bars, **LEGEND)


def _norms(axes: Axes, result: Stability) -> None:
    plot.scale_log(axes, "y")
    number = len(result.norms)
    colours = ramp(BLUES[2:], max(number, 2))
    listed = {0, number - 1} if number > 6 else set(range(number))
    for layer, norms in enumerate(result.norms):
        shown = np.where(np.isfinite(norms) & (norms > 0), norms, np.nan)
        label = f"layer {result.numbers[layer]}" if layer in listed else None
        if number <= 6:
            axes.fill_between(result.positions, shown[:, 1], shown[:, 2], color=colours[layer], alpha=0.2, linewidth=0)
        marker = "." if len(result.positions) == 1 else None
        axes.plot(result.positions, shown[:, 0], color=colours[layer], linewidth=1.4, label=label, marker=marker)
    axes.set(xlabel="position in the text", ylabel="norm of the layer's states")
    if number > 1:
        axes.legend(**LEGEND)
