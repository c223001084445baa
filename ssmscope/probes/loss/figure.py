"""Figure of the loss by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ssmscope.render.figure import COLOURS, SOFT, Sheet, handle, interval
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from ssmscope.probes.loss.result import TokenLoss

STYLES = ("-", (0, (6, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
"""Dashes of the lines, which also differ in lightness."""
WIDTH, LEFT, CURVES_HEIGHT, GAP, DIFFERENCES_HEIGHT, FOOTER = 8.0, 0.85, 2.9, 0.25, 1.7, 0.55
"""Sizes in inches: figure, left margin, heights of the panels and the gap between them, bottom margin."""


def draw(result: TokenLoss) -> Figure:
    """Draw the smoothed loss of every model with its interval against the number of tokens read; with several models,
    the paired difference in each bin in a panel below."""
    several = bool(result.differences)
    panels = CURVES_HEIGHT + (GAP + DIFFERENCES_HEIGHT if several else 0)
    smooth = "not smoothed" if result.smooth == 1 else f"moving average over {result.smooth:,} positions"
    intervals = "; bands: 95 %, bootstrap over windows" if np.isfinite(result.curves[..., 1]).any() else ""
    legend = [
        (_handle(at), shorten(f"{visible(name)}: {one.mean.value:.3f} {result.unit} a token", 100))
        for at, (name, one) in enumerate(zip(result.models, result.summaries))
    ]
    what, below = (
        ("Loss of the next token by its position", "", ""),
        "; ".join(filter(None, [f"{result.counted}; {smooth}{intervals}", result.outside])),
    )
    sheet = Sheet(WIDTH, Sheet.TOP + panels + FOOTER, what, below, legend, left=LEFT)
    wide = WIDTH - LEFT - 0.25
    upper = sheet.panel(LEFT, sheet.top, wide, CURVES_HEIGHT)
    _curves(upper, result)
    if several:
        lower = sheet.panel(LEFT, sheet.top + CURVES_HEIGHT + GAP, wide, DIFFERENCES_HEIGHT, sharex=upper)
        _differences(lower, result)
        upper.tick_params(labelbottom=False)
    sheet.figure.axes[-1].set_xlabel("tokens read", color=SOFT, size=9)
    return sheet.figure


def _handle(number: int) -> Line2D:
    return handle(number, linestyle=STYLES[number % len(STYLES)], marker="")


def _curves(axes: Axes, result: TokenLoss) -> None:
    _scale(axes, result.length)
    positions = np.array(result.positions)
    for number, curve in enumerate(result.curves):
        value, low, high = curve.T
        colour = COLOURS[number % len(COLOURS)]
        axes.fill_between(positions, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(positions, value, color=colour, linewidth=1.6, linestyle=STYLES[number % len(STYLES)])
    axes.set_ylim(*result.shown)
    axes.set_ylabel(f"loss, {result.unit}", color=SOFT, size=9)


def _differences(axes: Axes, result: TokenLoss) -> None:
    _scale(axes, result.length)
    axes.axhline(0, color=SOFT, linewidth=0.9)
    edges = [max(low, 1) for low, _ in result.bins]
    number = len(result.differences)
    for other, one in enumerate(result.differences):
        colour = COLOURS[(other + 1) % len(COLOURS)]
        for (_, high), low, found in zip(result.bins, edges, one.bins):
            middle = low ** (1 - (other + 1) / (number + 1)) * high ** ((other + 1) / (number + 1))
            axes.plot([low, high], [found.value] * 2, color=colour, linewidth=1.8, solid_capstyle="butt")
            interval(axes, middle, found, colour)
    name = shorten(visible(result.models[0]), 40).replace("$", r"\$")
    axes.set_ylabel("difference", color=SOFT, size=9)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_title(f"{name} minus another, by bin: below 0 it is better", loc="left", size=8.5, color=SOFT, pad=3)


def _scale(axes: Axes, length: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, max(length, 2))
    ticks = [2**k for k in range(0, 40) if 2**k <= length]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if len(ticks) <= 12 or tick >= 8 or tick == 1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
