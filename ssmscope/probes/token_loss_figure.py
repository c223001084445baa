"""The loss by position as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ssmscope.interp.views.tokens import shorten, visible
from ssmscope.probes.bound_figure import GRID, INK, SOFT, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.probes.token_loss import TokenLoss

COLOURS = ("#2065a8", "#d1540a", "#0f8a6c", "#b01e8a", "#7a6a00", "#57606a")
STYLES = ("-", (0, (6, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
"""Lines differ in lightness and in their dashes."""
WIDTH = 8.0
LEFT, TOP, CURVES, BELOW, LINE = 0.85, 0.8, 2.9, 1.7, 0.2
"""In inches: the axis beside the panels, what stands above them, the panels, and a line of the legend."""


def draw(result: TokenLoss) -> Figure:
    """The smoothed loss of every model against how many tokens were read, with its interval; with several models, in a
    panel below, the paired difference in each bin."""
    several = bool(result.differences)
    height = TOP + LINE * len(result.models) + CURVES + 0.6 + (BELOW + 0.25 if several else 0)
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    figure.text(
        0.15 / WIDTH, 1 - 0.25 / height, "Loss of the next token by its position", size=11, color=INK, va="center"
    )
    smooth = "not smoothed" if result.smooth == 1 else f"moving average over {result.smooth:,} positions"
    intervals = "; bands: 95 %, bootstrap over windows" if np.isfinite(result.curves[..., 1]).any() else ""
    text = shorten(f"{result.counted}; {smooth}{intervals}", 115)
    figure.text(0.15 / WIDTH, 1 - 0.5 / height, text, size=8.5, color=SOFT, va="center", parse_math=False)
    bottom = 0.55 + (BELOW + 0.25 if several else 0)
    upper = figure.add_axes((LEFT / WIDTH, bottom / height, 1 - (LEFT + 0.25) / WIDTH, CURVES / height))
    _curves(upper, result)
    upper.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), fontsize=8.5, frameon=False, borderaxespad=0.2, labelspacing=0.25
    )
    if several:
        lower = figure.add_axes((LEFT / WIDTH, 0.55 / height, 1 - (LEFT + 0.25) / WIDTH, BELOW / height), sharex=upper)
        _differences(lower, result)
        upper.tick_params(labelbottom=False)
    figure.axes[-1].set_xlabel("tokens read", color=SOFT, size=9)
    return figure


def _curves(axes: Axes, result: TokenLoss) -> None:
    _plain(axes, result.length)
    positions = np.array(result.positions)
    for number, name in enumerate(result.models):
        value, low, high = result.curves[number].T
        colour = COLOURS[number % len(COLOURS)]
        mean = result.summaries[number].mean.value
        label = shorten(f"{visible(name)}: {mean:.3f} {result.unit} a token", 100).replace("$", r"\$")
        axes.fill_between(positions, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(positions, value, color=colour, linewidth=1.6, linestyle=STYLES[number % len(STYLES)], label=label)
    settled = result.curves[:, positions >= min(16, result.length)]
    bounds = settled[np.isfinite(settled)]
    spread = max(float(bounds.max() - bounds.min()), 1e-3)
    axes.set_ylim(float(bounds.min()) - 0.06 * spread, float(bounds.max()) + 0.1 * spread)
    axes.set_ylabel(f"loss, {result.unit}", color=SOFT, size=9)


def _differences(axes: Axes, result: TokenLoss) -> None:
    _plain(axes, result.length)
    axes.axhline(0, color=SOFT, linewidth=0.9)
    edges = [max(low, 1) for low, _ in result.bins]
    number = len(result.differences)
    for other, one in enumerate(result.differences):
        colour = COLOURS[(other + 1) % len(COLOURS)]
        for (_, high), low, found in zip(result.bins, edges, one.bins):
            middle = low ** (1 - (other + 1) / (number + 1)) * high ** ((other + 1) / (number + 1))
            axes.plot([low, high], [found.value] * 2, color=colour, linewidth=1.8, solid_capstyle="butt")
            axes.plot([middle] * 2, [found.low, found.high], color=colour, linewidth=1.3, solid_capstyle="butt")
    name = shorten(visible(result.models[0]), 40).replace("$", r"\$")
    axes.set_ylabel("difference", color=SOFT, size=9)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_title(f"{name} less another, by bin: below 0 it is better", loc="left", size=8.5, color=SOFT, pad=3)


def _plain(axes: Axes, length: int) -> None:
    plain(axes)
    axes.grid(color=GRID)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, max(length, 2))
    ticks = [2**k for k in range(0, 40) if 2**k <= length]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if len(ticks) <= 12 or tick >= 8 or tick == 1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
