"""Figure of the position-bias attack: accuracy by region, and the drop along the sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.render.figure import COLOURS, DASHED, INK, SOFT, Sheet, data_line, interval, line
from ssmscope.render.table import in_percent
from ssmscope.render.tokens import BLUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.attacks.position.result import PositionBias

BAR, TARGET = BLUES[3], COLOURS[1]
WIDTH, LEFT, HEADER, ROW, CURVE, FOOTER = 8.0, 1.35, 0.95, 0.34, 2.5, 0.65
"""In inches: the sheet, the margin left of its panels, the margin above a panel, a row of the upper panel, the lower
panel, and the margin below a panel."""


def draw(result: PositionBias) -> Figure:
    """Draw a bar with its interval for each region and, if there are windows, the drop against their position."""
    bars = ROW * (len(result.regions) + 1)
    height = HEADER + bars + FOOTER + (HEADER * 0.65 + CURVE + FOOTER if result.windows else 0)
    title = (
        "Position bias of ",
        result.model_name,
        f": {result.unit} replaced by {result.replaced_by}",
    )
    sheet = Sheet(WIDTH, height, title, data_line(result))
    _bars(sheet.panel(LEFT, HEADER, WIDTH - LEFT - 1.55, bars, grid="x"), result)
    if result.windows:
        _curve(sheet.panel(LEFT, height - FOOTER - CURVE, WIDTH - LEFT - 0.35, CURVE), result)
    return sheet.figure


def _bars(axes: Axes, result: PositionBias) -> None:
    places = range(len(result.regions) + 1)
    shown = [result.clean, *(one.accuracy for one in result.regions)]
    axes.barh(places, [e.value for e in shown], 0.62, color=[SOFT, *[BAR] * len(result.regions)])
    lift = 0.12 if any(one.success is not None for one in result.regions) else 0.0  # Success is drawn below.
    for place, found in enumerate(shown):
        interval(axes, place - lift, found, upright=False)
    axes.axvline(result.clean.value, color=INK, linewidth=1, linestyle=DASHED)
    targeted = [(place, one.success) for place, one in enumerate(result.regions, 1) if one.success is not None]
    if targeted:
        values = [success.value for _, success in targeted]
        label = "success: answered with the inserted class"
        below = [place + lift for place, _ in targeted]
        axes.plot(values, below, "D", color=TARGET, markersize=4, label=label, linestyle="none", clip_on=False)
        for place, success in targeted:
            interval(axes, place + lift, success, TARGET, upright=False)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, borderaxespad=0.1)
    axes.set_yticks(places, ["clean", *(one.region for one in result.regions)])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy", color=SOFT, size=9)
    for place, one in enumerate(result.regions, 1):
        undefined = math.isnan(one.drop.value)
        text = "no drop defined" if undefined else f"drop {in_percent(one.drop, interval=False)}"
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", size=8.5, color=INK)


def _curve(axes: Axes, result: PositionBias) -> None:
    share = result.windows[0].percent
    middles = [(one.start + one.stop) / 2 for one in result.windows]
    drops = [one.drop.times(100) for one in result.windows]
    axes.axhline(0, color=SOFT, linewidth=0.8)
    line(axes, middles, drops, 0, marker=".")
    axes.set_xlim(0, 100 if share else result.length)
    unit = "% of each example's tokens" if share else result.unit
    size = result.windows[0].stop - result.windows[0].start
    width = f"{size:g} %" if share else f"{size:g} {result.unit}"
    axes.set_xlabel(f"middle of the window, {unit}", color=SOFT, size=9)
    axes.set_ylabel("drop in accuracy, %", color=SOFT, size=9)
    title = f"one window of {width} at a time"
    if result.width is not None and not share:
        pixels = result.width
        to_rows, to_pixels = (lambda x: np.asarray(x) / pixels), (lambda x: np.asarray(x) * pixels)
        rows = axes.secondary_xaxis("top", functions=(to_rows, to_pixels))
        rows.tick_params(colors=SOFT, labelsize=8)
        rows.spines["top"].set_color(SOFT)
        title += "; above, the row of the image"
    axes.set_title(title, loc="left", size=9, color=INK)
