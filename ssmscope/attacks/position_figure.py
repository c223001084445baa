"""The position-bias attack as a picture: accuracy by region, and the drop along the sequence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from ssmscope.bootstrap import Estimate
from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.attacks.position import PositionBias

INK, SOFT, BAR, TARGET, CLEAN, GRID = "#1b1f24", "#57606a", "#4f97cb", "#d1540a", "#1b1f24", "#e6e9ed"
WIDTH, HEADER, ROW, CURVE, FOOTER = 8.0, 0.95, 0.34, 2.5, 0.65
"""In inches: a row of the upper panel, the lower panel, and what stands above and below each panel."""
TITLE, LINE = 90, 115
"""As many characters as fit in the title, and in the smaller line below it."""


def draw(result: PositionBias) -> Figure:
    """A bar per region with its interval beside the clean accuracy; below it, where there are windows, the drop against
    their position with its band."""
    bars = ROW * (len(result.regions) + 1)
    height = HEADER + bars + FOOTER + (HEADER * 0.65 + CURVE + FOOTER if result.windows else 0)
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    left, right = 1.35 / WIDTH, 1 - 1.55 / WIDTH
    data = result.provenance["data"]
    described = shorten(visible(f"{data['name']} ({data['split']})"), LINE - 50)
    described = f"{data['examples']:,} examples of {described}, 95 % bootstrap intervals"
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    figure.text(0.2 / WIDTH, 1 - 0.3 / height, _title(result), size=11, color=INK, **style)
    figure.text(0.2 / WIDTH, 1 - 0.56 / height, described, size=8.5, color=SOFT, **style)
    upper = figure.add_axes((left, 1 - (HEADER + bars) / height, right - left, bars / height))
    _bars(upper, result)
    if result.windows:
        lower = figure.add_axes((left, FOOTER / height, 1 - 0.35 / WIDTH - left, CURVE / height))
        _curve(lower, result)
    return figure


def _title(result: PositionBias) -> str:
    from ssmscope.attacks.position import REPLACEMENTS

    before, after = "Position bias of ", f": {result.unit} replaced by {REPLACEMENTS[result.replacement]}"
    model = visible(str(result.provenance.get("model", "a model")))
    return before + shorten(model, TITLE - len(before) - len(after)) + after


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=8.5)
    axes.set_axisbelow(True)


def _bars(axes: Axes, result: PositionBias) -> None:
    _plain(axes)
    places = range(len(result.regions) + 1)
    shown = [result.clean, *(one.accuracy for one in result.regions)]
    axes.grid(axis="x", color=GRID)
    axes.barh(places, [e.value for e in shown], 0.62, color=[SOFT, *[BAR] * len(result.regions)])
    lift = 0.12 if any(one.success is not None for one in result.regions) else 0.0  # room for success below
    for place, found in enumerate(shown):
        _interval(axes, place - lift, found, CLEAN)
    axes.axvline(result.clean.value, color=CLEAN, linewidth=1, linestyle=(0, (4, 3)))
    targeted = [(place, one.success) for place, one in enumerate(result.regions, 1) if one.success is not None]
    if targeted:
        values = [success.value for _, success in targeted]
        label = "success: given the class put in"
        below = [place + lift for place, _ in targeted]
        axes.plot(values, below, "D", color=TARGET, markersize=4, label=label, linestyle="none", clip_on=False)
        for place, success in targeted:
            _interval(axes, place + lift, success, TARGET)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False, borderaxespad=0.1)
    axes.set_yticks(places, ["clean", *(one.region for one in result.regions)])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy", color=SOFT, size=9)
    for place, one in enumerate(result.regions, 1):
        text = (
            "no drop defined" if math.isnan(one.drop.value) else f"drop {100 * one.drop.value:.1f} %".replace("-", "−")
        )
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", size=8.5, color=INK)


def _interval(axes: Axes, place: float, found: Estimate, colour: str) -> None:
    axes.plot([found.low, found.high], [place, place], color=colour, linewidth=1.4, solid_capstyle="butt")


def _curve(axes: Axes, result: PositionBias) -> None:
    _plain(axes)
    share = result.windows[0].percent
    middles = [(one.start + one.stop) / 2 for one in result.windows]
    drops = [one.drop.times(100) for one in result.windows]
    axes.axhline(0, color=SOFT, linewidth=0.8)
    axes.fill_between(middles, [e.low for e in drops], [e.high for e in drops], color=BAR, alpha=0.28, linewidth=0)
    axes.plot(middles, [e.value for e in drops], color=BAR, linewidth=1.6, marker=".", markersize=4)
    axes.grid(color=GRID)
    axes.set_xlim(0, 100 if share else result.length)
    unit = "% of each example's tokens" if share else result.unit
    size = result.windows[0].stop - result.windows[0].start
    width = f"{size:g} %" if share else f"{size:g} {result.unit}"
    axes.set_xlabel(f"middle of the window, {unit}", color=SOFT, size=9)
    axes.set_ylabel("drop in accuracy, %", color=SOFT, size=9)
    axes.set_title(f"one window of {width} at a time", loc="left", size=9, color=INK)
    if result.width is not None and not share:
        pixels = result.width
        to_rows, to_pixels = (lambda x: np.asarray(x) / pixels), (lambda x: np.asarray(x) * pixels)
        rows = axes.secondary_xaxis("top", functions=(to_rows, to_pixels))
        rows.tick_params(colors=SOFT, labelsize=8)
        rows.spines["top"].set_color(SOFT)
        axes.set_title(f"one window of {width} at a time; above, the row of the image", loc="left", size=9, color=INK)
