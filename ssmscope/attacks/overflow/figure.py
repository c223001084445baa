"""Figure of accuracy with filler of growing length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ssmscope.render.figure import (
    COLOURS,
    DASHED,
    DOTTED,
    INK,
    SOFT,
    dashed,
    data_line,
    dotted,
    handle,
    limits,
    line,
    stacked,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.attacks.overflow.result import StateOverflow

COLOUR_NUMBERS = {"after": 1, "before": 0}
"""Colour of each place, whichever are shown."""


def draw(result: StateOverflow) -> Figure:
    """Draw accuracy, mean log-odds of the true class, and the largest class's share of the answers over the length.

    Vertical lines are half-lengths.
    """
    legend = [(handle(COLOUR_NUMBERS[curve.where]), f"filler {curve.where} the text") for curve in result.curves]
    legend += [(dashed(INK), "without filler"), (dotted(SOFT), "chance: the data's most frequent class")]
    if any(curve.half_length is not None for curve in result.curves):
        half = Line2D([], [], color=SOFT, linewidth=1.3, linestyle=(0, (2, 2)))
        legend.append((half, "vertical: half of the accuracy above chance is lost"))
    title = ("State overflow of ", result.model_name, ": filler of growing length")
    figure, axes = stacked(title, data_line(result), legend, 3)
    lengths = [point.tokens for point in result.curves[0].points]
    for curve in result.curves:
        number = COLOUR_NUMBERS[curve.where]
        for panel, name in zip(axes, ("accuracy", "log_odds", "majority")):
            line(panel, lengths, [getattr(point, name) for point in curve.points], number)
        if curve.half_length is not None:
            # The dashes of two lines at one place alternate.
            axes[0].axvline(
                curve.half_length.value, color=COLOURS[number], linewidth=1.3, linestyle=(4 * number, (4, 4))
            )
    axes[0].axhline(result.clean.value, color=INK, linewidth=1, linestyle=DASHED)
    axes[1].axhline(0, color=SOFT, linewidth=0.8)
    points = [point for curve in result.curves for point in curve.points]
    shares = ([result.clean, *(point.accuracy for point in points)], [point.majority for point in points])
    for panel, found in zip((axes[0], axes[2]), shares):
        panel.axhline(result.chance, color=SOFT, linewidth=1.1, linestyle=DOTTED)
        low, high = limits(found)
        panel.set_ylim(min(low, result.chance - 0.02), high)
    for panel, name in zip(axes, ("accuracy", "log-odds of the true class", "share of largest class")):
        panel.set_ylabel(name, color=SOFT, size=9)
    bottom = axes[-1]
    bottom.set_xscale("symlog", base=2, linthresh=lengths[1], linscale=1)
    bottom.set_xlim(-0.12 * lengths[1], lengths[-1] * 1.08)
    bottom.set_xticks(_apart(lengths), [f"{n:,}" for n in _apart(lengths)])
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.set_xlabel("tokens of filler", color=SOFT, size=9)
    return figure


def _apart(lengths: list[int]) -> list[int]:
    """Return the lengths whose labels fit below the axis without touching; the last is always among them."""
    places = [0.0 if n == 0 else 1 + float(np.log2(n / lengths[1])) for n in lengths]
    kept = [len(lengths) - 1]
    for at in range(len(lengths) - 2, -1, -1):
        if places[kept[-1]] - places[at] >= 0.07 * places[-1]:
            kept.append(at)
    return [lengths[at] for at in reversed(kept)]
