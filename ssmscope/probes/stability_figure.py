"""The stability of a model as a picture: half-lives by layer, and the states' norms over time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogFormatter

from ssmscope.interp.views.tokens import BLUES, ramp
from ssmscope.probes.bound_figure import GRID, INK, SOFT, heading, plain
from ssmscope.probes.stability_terminal import share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.probes.stability import Stability

COLOURS = {"stable": "#4f97cb", "marginal": "#e69f00", "unstable": "#a50026"}
WIDTH, ROW, LEAST, MOST, HEADER, FOOTER = 10.0, 0.27, 2.6, 9.0, 0.95, 0.6
"""In inches: a layer's row, the smallest and largest height of the panels, and what stands above and below them."""
NAMED = 34
"""Up to how many layers each is named on the axis."""


def draw(result: Stability) -> Figure:
    """Left a line per layer: 5 % to 95 % of its states' half-lives (thick from 25 % to 75 %, the median a dot) beside
    the text's length; right the norm of each layer's states at the positions."""
    panels = min(max(ROW * len(result.layers) + 0.3, LEAST), MOST)
    height = panels + HEADER + FOOTER
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    counts = ", ".join(f"{number} {name}" for name, number in result.counts().items() if number)
    model = str(result.provenance.get("model", "a model"))
    heading(figure, result.headline, model, f"on {result.inputs}; {result.unit}: {counts}")
    bottom, tall = FOOTER / height, panels / height
    left = figure.add_axes((0.065, bottom, 0.385, tall))
    right = figure.add_axes((0.6, bottom, 0.38, tall))
    _half_lives(left, result)
    _norms(right, result)
    return figure


def _half_lives(axes: Axes, result: Stability) -> None:
    plain(axes)
    spread = np.array([layer.quantiles for layer in result.layers])
    finite = spread[np.isfinite(spread) & (spread > 0)]
    low = min(finite.min(initial=result.longest), result.longest) / 2
    high = max(finite.max(initial=result.longest), result.longest) * 2
    shown = np.clip(spread, low, high)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.grid(axis="x", color=GRID)
    axes.axvline(result.longest, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    for row, (layer, (q5, q25, q50, q75, q95)) in enumerate(zip(result.layers, shown)):
        colour = COLOURS[layer.verdict]
        axes.plot([q5, q95], [row, row], color=colour, linewidth=1.2, solid_capstyle="butt")
        axes.plot([q25, q75], [row, row], color=colour, linewidth=5, solid_capstyle="butt")
        axes.plot([q50], [row], "o", color="white", markeredgecolor=INK, markersize=4.5, zorder=3)
        if math.isinf(layer.quantiles[-1]):  # half-lives without end run out of the axis
            axes.plot([high], [row], ">", color=colour, markersize=6, clip_on=False, zorder=3)
        if len(result.layers) <= NAMED:
            text = share(layer)
            place = axes.get_yaxis_transform()
            axes.text(1.03, row, text, transform=place, va="center", size=8, color=INK if layer.never else SOFT)
    if len(result.layers) <= NAMED:
        axes.set_yticks(range(len(result.layers)), [layer.name for layer in result.layers])
        axes.text(1.03, 1.02, "never", transform=axes.transAxes, size=8, color=SOFT)
    axes.set_ylim(len(result.layers) - 0.4, -0.6)
    axes.set_ylabel("layer", color=SOFT, size=9)
    axes.set_xlabel("half-life in tokens; dashed, the longest text", color=SOFT, size=9)
    axes.xaxis.set_major_formatter(FuncFormatter(_plainly))
    bars = [Line2D([], [], color=COLOURS[name], linewidth=5, label=name) for name, n in result.counts().items() if n]
    style: dict[str, Any] = dict(ncols=3, fontsize=8, frameon=False, borderaxespad=0.1, handlelength=1.2)
    axes.legend(handles=bars, loc="lower left", bbox_to_anchor=(0, 1.0), **style)


def _norms(axes: Axes, result: Stability) -> None:
    plain(axes)
    axes.grid(color=GRID)
    colours = ramp(BLUES[2:], max(result.number, 2))
    listed = {0, result.number - 1} if result.number > 6 else set(range(result.number))
    for layer, norms in enumerate(result.norms):
        drawn = np.where(np.isfinite(norms) & (norms > 0), norms, np.nan)
        label = f"layer {layer}" if layer in listed else None
        if result.number <= 6:
            axes.fill_between(result.positions, drawn[:, 1], drawn[:, 2], color=colours[layer], alpha=0.2, linewidth=0)
        marker = "." if len(result.positions) == 1 else None
        axes.plot(result.positions, drawn[:, 0], color=colours[layer], linewidth=1.4, label=label, marker=marker)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_plainly))
    axes.yaxis.set_minor_formatter(_Between(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))
    axes.set_xlabel("position in the text", color=SOFT, size=9)
    axes.set_ylabel("norm of the layer's states", color=SOFT, size=9)
    if result.number > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, fontsize=8, frameon=False, borderaxespad=0.1)


def _plainly(value: float, _: object) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:g}"


class _Between(LogFormatter):
    """Names the ticks between powers of ten where the axis has few of these."""

    def __call__(self, value: float, place: int | None = None) -> str:
        return _plainly(value, place) if super().__call__(value, place) else ""
