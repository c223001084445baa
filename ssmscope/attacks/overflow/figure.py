"""Figure of accuracy with filler of growing length."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from ssmscope.attacks.overflow.result import StateOverflow
from ssmscope.render import figure as plot

COLOUR_NUMBERS = {"after": 1, "before": 0}
NAMES = {"accuracy": "accuracy", "log_odds": "log-odds of the true class", "majority": "share of largest class"}


def draw(result: StateOverflow, frame: plot.Frame) -> Figure:
    """Draw accuracy, log-odds and the largest class's share of the answers over the length, and half-lengths."""
    legend = [(plot.handle(COLOUR_NUMBERS[curve.where]), f"filler {curve.where} the text") for curve in result.curves]
    legend.append((plot.rule(), "without filler"))
    legend.append((plot.rule(plot.SOFT, plot.DOTTED), "chance: the data's most frequent class"))
    if any(curve.half_length is not None for curve in result.curves):
        legend.append((plot.rule(plot.SOFT, (0, (2, 2))), "vertical: half of the accuracy above chance is lost"))
    sheet = plot.Sheet(frame, result.headline, plot.data_line(result), legend)
    panels = sheet.panels(2.1, 2.1, 2.1, sharex=True)
    lengths = [point.tokens for point in result.curves[0].points]
    for curve in result.curves:
        number = COLOUR_NUMBERS[curve.where]
        for axes, name in zip(panels, NAMES):
            plot.line(axes, lengths, [getattr(point, name) for point in curve.points], number)
        if curve.half_length is not None:
            dashes = (4 * number, (4, 4))  # The dashes of two lines at one place alternate.
            panels[0].axvline(curve.half_length.value, color=plot.COLOURS[number], linewidth=1.3, linestyle=dashes)
    panels[0].axhline(result.clean.value, color=plot.INK, linewidth=1, linestyle=plot.DASHED)
    panels[1].axhline(0, color=plot.SOFT, linewidth=0.8)
    points = [point for curve in result.curves for point in curve.points]
    shares = ([result.clean, *(point.accuracy for point in points)], [point.majority for point in points])
    for axes, found in zip((panels[0], panels[2]), shares):
        axes.axhline(result.chance, color=plot.SOFT, linewidth=1.1, linestyle=plot.DOTTED)
        low, high = plot.limits(found)
        axes.set_ylim(min(low, result.chance - 0.02), high)
    for axes, name in zip(panels, NAMES.values()):
        axes.set_ylabel(name)
    bottom = panels[-1]
    bottom.set_xscale("symlog", base=2, linthresh=lengths[1], linscale=1)
    bottom.set_xlim(-0.12 * lengths[1], lengths[-1] * 1.08)
    bottom.set_xticks(_apart(lengths), [f"{n:,}" for n in _apart(lengths)])
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.set_xlabel("tokens of filler")
    return sheet.figure


def _apart(lengths: list[int]) -> list[int]:
    """Return the lengths whose labels fit below the axis without touching; the last is always among them."""
    places = [0.0 if n == 0 else 1 + float(np.log2(n / lengths[1])) for n in lengths]
    kept = [len(lengths) - 1]
    for at in range(len(lengths) - 2, -1, -1):
        if places[kept[-1]] - places[at] >= 0.07 * places[-1]:
            kept.append(at)
    return [lengths[at] for at in reversed(kept)]
