"""Figure of the loss by position."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from ssmscope.probes.loss.result import TokenLoss
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name
from ssmscope.render.tokens import shorten, visible

STYLES = ("-", (0, (6, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))


def draw(result: TokenLoss, frame: plot.Frame) -> Figure:
    """Draw the smoothed loss of every model by the number of tokens read and, of several, the paired difference."""
    smooth = "not smoothed" if result.smooth == 1 else f"moving average over {result.smooth:,} positions"
    below = f"{result.counted}; {smooth}"
    below += "; bands: 95 %, bootstrap over windows" if np.isfinite(result.curves[..., 1]).any() else ""
    below += f"; {result.outside}" if result.outside else ""
    each = zip(result.models, result.summaries)
    names = [shorten(f"{visible(name)}: {one.mean.value:.3f} {result.unit} a token", 100) for name, one in each]
    styles = [{"linestyle": STYLES[at % len(STYLES)], "marker": ""} for at in range(len(names))]
    legend = [(plot.handle(at, **style), name) for at, (style, name) in enumerate(zip(styles, names))]
    sheet = plot.Sheet(frame, result.headline, below, legend)
    panels = sheet.panels(*(2.8, 1.6)[: 1 + bool(result.differences)], sharex=True)
    positions = np.array(result.positions)
    for at, curve in enumerate(result.curves):
        plot.line(panels[0], positions, curve, at, **styles[at])
    panels[0].set_ylim(*result.shown)
    panels[0].set_ylabel(f"loss, {result.unit}")
    if result.differences:
        _differences(panels[1], result)
    for axes in panels:
        plot.scale_log(axes, "x", base=2)
        ticks = [2**k for k in range(0, 40) if 2**k <= result.length]
        shown = [tick for tick in ticks if len(ticks) <= 12 or tick >= 8 or tick == 1]
        axes.xaxis.set_major_locator(FixedLocator(shown))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(1, max(result.length, 2))
    panels[-1].set_xlabel("tokens read")
    return sheet.figure


def _differences(axes: Axes, result: TokenLoss) -> None:
    axes.axhline(0, color=plot.SOFT, linewidth=0.9)
    edges = [max(low, 1) for low, _ in result.bins]
    number = len(result.differences)
    for other, one in enumerate(result.differences):
        colour = plot.COLOURS[(other + 1) % len(plot.COLOURS)]
        share = (other + 1) / (number + 1)
        for (_, high), low, found in zip(result.bins, edges, one.bins):
            axes.plot([low, high], [found.value] * 2, color=colour, linewidth=1.8)
            plot.interval(axes, low ** (1 - share) * high**share, found, colour)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylabel("difference")
    axes.set_title(f"{short_name(result.models[0], 40)} minus another, by bin: below 0 it is better", color=plot.SOFT)
