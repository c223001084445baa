"""Figure of a model's stability: half-lives by layer, and the states' norms over time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogFormatter

from ssmscope.render.figure import DASHED, INK, SOFT, Sheet, title
from ssmscope.render.tokens import BLUES, ramp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.probes.stability.result import Stability

COLOURS = {"stable": "#4f97cb", "marginal": "#e69f00", "unstable": "#a50026"}
WIDTH, ROW_HEIGHT, MIN_HEIGHT, MAX_HEIGHT, HEADER, FOOTER = 10.0, 0.27, 2.6, 9.0, 0.95, 0.6
"""Sizes in inches: the figure, a layer's row, bounds on the height of the panels, and the margins above and below."""
MAX_NAMED = 34
"""Maximum number of layers that are named on the axis."""
LEGEND: dict[str, Any] = dict(
    loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, frameon=False, borderaxespad=0.1
)


def draw(result: Stability) -> Figure:
    """Draw at the left a line per layer, 5 % to 95 % of its states' half-lives (thick from 25 % to 75 %, a dot at the
    median) with the text's length; at the right the norm of each layer's states at the positions."""
    tall = min(max(ROW_HEIGHT * len(result.layers) + 0.3, MIN_HEIGHT), MAX_HEIGHT)
    counts = ", ".join(f"{number} {name}" for name, number in result.counts().items() if number)
    below = f"on {result.inputs}; {result.unit}: {counts}"
    sheet = Sheet(WIDTH, HEADER + tall + FOOTER, title(result), below)
    _half_lives(sheet.panel(0.65, HEADER, 3.85, tall, xscale="log"), result)
    _norms(sheet.panel(6.0, HEADER, 3.8, tall, yscale="log"), result)
    return sheet.figure


def _half_lives(axes: Axes, result: Stability) -> None:
    spread = np.array([layer.quantiles for layer in result.layers])
    finite = spread[np.isfinite(spread) & (spread > 0)]
    low = min(finite.min(initial=result.longest), result.longest) / 2
    high = max(finite.max(initial=result.longest), result.longest) * 2
    shown = np.clip(spread, low, high)
    axes.set_xlim(low, high)
    axes.grid(visible=False, axis="y")
    axes.axvline(result.longest, color=SOFT, linewidth=1, linestyle=DASHED)
    for row, (layer, (q5, q25, q50, q75, q95)) in enumerate(zip(result.layers, shown)):
        colour = COLOURS[layer.behaviour]
        axes.plot([q5, q95], [row, row], color=colour, linewidth=1.2, solid_capstyle="butt")
        axes.plot([q25, q75], [row, row], color=colour, linewidth=5, solid_capstyle="butt")
        axes.plot([q50], [row], "o", color="white", markeredgecolor=INK, markersize=4.5, zorder=3)
        if math.isinf(layer.quantiles[-1]):  # An arrow marks infinite half-lives.
            axes.plot([high], [row], ">", color=colour, markersize=6, clip_on=False, zorder=3)
        if len(result.layers) <= MAX_NAMED:
            style: dict[str, Any] = dict(va="center", size=8, color=INK if layer.never else SOFT)
            axes.text(1.03, row, layer.outlasting, transform=axes.get_yaxis_transform(), **style)
    if len(result.layers) <= MAX_NAMED:
        axes.set_yticks(range(len(result.layers)), [layer.name for layer in result.layers])
        axes.text(1.03, 1.02, "never", transform=axes.transAxes, size=8, color=SOFT)
    axes.set_ylim(len(result.layers) - 0.4, -0.6)
    axes.set_ylabel("layer", color=SOFT, size=9)
    axes.set_xlabel("half-life in tokens; dashed, the longest text", color=SOFT, size=9)
    axes.xaxis.set_major_formatter(FuncFormatter(_plainly))
    bars = [Line2D([], [], color=COLOURS[name], linewidth=5, label=name) for name, n in result.counts().items() if n]
    axes.legend(handles=bars, handlelength=1.2, **LEGEND)


def _norms(axes: Axes, result: Stability) -> None:
    number = len(result.norms)
    colours = ramp(BLUES[2:], max(number, 2))
    listed = {0, number - 1} if number > 6 else set(range(number))
    for layer, norms in enumerate(result.norms):
        drawn = np.where(np.isfinite(norms) & (norms > 0), norms, np.nan)
        label = f"layer {result.numbers[layer]}" if layer in listed else None
        if number <= 6:
            axes.fill_between(result.positions, drawn[:, 1], drawn[:, 2], color=colours[layer], alpha=0.2, linewidth=0)
        marker = "." if len(result.positions) == 1 else None
        axes.plot(result.positions, drawn[:, 0], color=colours[layer], linewidth=1.4, label=label, marker=marker)
    axes.yaxis.set_major_formatter(FuncFormatter(_plainly))
    axes.yaxis.set_minor_formatter(_Between(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))
    axes.set_xlabel("position in the text", color=SOFT, size=9)
    axes.set_ylabel("norm of the layer's states", color=SOFT, size=9)
    if number > 1:
        axes.legend(**LEGEND)


def _plainly(value: float, _: object) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:g}"


class _Between(LogFormatter):
    """Labels for ticks between powers of ten on an axis with few of these."""

    def __call__(self, value: float, place: int | None = None) -> str:
        return _plainly(value, place) if super().__call__(value, place) else ""
