"""Accuracy along the places of a text as a picture, and what pictures of accuracy curves share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ssmscope.attacks.insertion import FIRST, LAST
from ssmscope.bootstrap import Estimate
from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.attacks.insertion import InsertionCurve, InsertionSweep

INK, SOFT, GRID, EDGE = "#1b1f24", "#57606a", "#e6e9ed", "#f3f4f6"
COLOURS = ("#2065a8", "#d1540a", "#0f8a6c", "#b01e8a", "#7a6a00", "#57606a")
"""Lines in this order; they differ in lightness too."""
MARKERS = "osD^vP"
WIDTH, TOP, PANEL, BETWEEN, BOTTOM = 8.0, 0.85, 2.3, 0.35, 0.62
"""In inches: the sheet, what stands above the panels, a panel, what is between two, and below the last."""
LEGEND = 0.2
"""A line of the legend."""
LEFT, RIGHT = 0.85, 0.3
TITLE, LINE = 90, 115
"""As many characters as fit in the title, and in the smaller line below it."""
OUTSIDE = 0.09
"""How far from the content's ends the places outside it are drawn."""


def draw(result: InsertionSweep) -> Figure:
    """Two panels over the places: accuracy, with the clean one and the worst of each example, and the mean change of
    the log-odds of the true class, where there are any."""
    odds, curves = result.clean_log_odds is not None, result.shown
    legend = [(handle(number), f"“{shorten(visible(curve.phrase), 80)}”") for number, curve in enumerate(curves)]
    legend += [(dashed(INK), "clean"), (dotted(SOFT), "right at every place")]
    number = len(result.curves)
    what = "the same phrase" if curves == result.curves else f"the worst {len(curves)} of {number} phrases"
    figure, axes = sheet(result, ("Insertion sweep of ", f": {what} at every place"), 2 if odds else 1, legend)
    places = curves[0].places
    ends = {place.name: -OUTSIDE for place in places[:1] if place.share is None}
    ends |= {place.name: 1 + OUTSIDE for place in places[1:] if place.share is None}
    sides = [at + side for at in ends.values() for side in (-OUTSIDE / 2, OUTSIDE / 2)]
    for panel in axes:
        for at in ends.values():
            panel.axvspan(at - OUTSIDE / 2, at + OUTSIDE / 2, color=EDGE, zorder=0)
        panel.set_xlim(min([-0.03, *sides]), max([1.03, *sides]))
    upper = axes[0]
    upper.axhline(result.clean.value, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    for number, curve in enumerate(curves):
        _along(upper, curve, ends, [place.accuracy for place in curve.places], number)
        upper.axhline(curve.worst.value, color=COLOURS[number], linewidth=1.1, linestyle=(0, (1, 2)))
        if odds:
            changes = [place.log_odds_change for place in curve.places if place.log_odds_change is not None]
            _along(axes[1], curve, ends, changes, number)
    upper.set_ylabel("accuracy", color=SOFT, size=9)
    accuracies = [e for curve in curves for e in (curve.worst, *(place.accuracy for place in curve.places))]
    upper.set_ylim(*limits([result.clean, *accuracies]))
    if odds:
        axes[1].axhline(0, color=SOFT, linewidth=0.8)
        axes[1].set_ylabel("change of the log-odds", color=SOFT, size=9)
    shown = [0, 0.2, 0.4, 0.6, 0.8, 1]
    words = {FIRST: "before\ntemplate", LAST: "after\ntemplate"}
    ticks = sorted([*((at, f"{100 * at:g}") for at in shown), *((at, words[name]) for name, at in ends.items())])
    axes[-1].set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    what = "text" if result.provenance["options"]["template"] is None else "content"
    axes[-1].set_xlabel(f"words of the {what} before the phrase, %", color=SOFT, size=9)
    return figure


def _along(axes: Axes, curve: InsertionCurve, ends: dict[str, float], found: Sequence[Estimate], number: int) -> None:
    """A line over the content, and single points outside it."""
    inside = [(p.share, e) for p, e in zip(curve.places, found) if p.share is not None]
    line(axes, [at for at, _ in inside], [e for _, e in inside], number)
    for place, one in zip(curve.places, found):
        if place.share is None:
            line(axes, [ends[place.name]], [one], number)


def sheet(
    result: Any, title: tuple[str, str], panels: int, legend: Sequence[tuple[Line2D, str]]
) -> tuple[Figure, list[Axes]]:
    """A figure with its title (what stands before and after the model's name), what it is of, the legend, and empty
    panels one above the other that share their horizontal axis."""
    top = TOP + LEGEND * len(legend)
    height = top + PANEL * panels + BETWEEN * (panels - 1) + BOTTOM
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    data = result.provenance["data"]
    described = shorten(visible(f"{data['name']} ({data['split']})"), LINE - 50)
    described = f"{data['examples']:,} examples of {described}, 95 % bootstrap intervals"
    model = visible(str(result.provenance.get("model", "a model")))
    named = title[0] + shorten(model, TITLE - sum(map(len, title))) + title[1]
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    figure.text(0.2 / WIDTH, 1 - 0.3 / height, named, size=11, color=INK, **style)
    figure.text(0.2 / WIDTH, 1 - 0.56 / height, described, size=8.5, color=SOFT, **style)
    for number, (drawn, name) in enumerate(legend):
        y = 1 - (TOP - 0.1 + LEGEND * (number + 0.5)) / height
        drawn.set(xdata=[LEFT / WIDTH, (LEFT + 0.32) / WIDTH], ydata=[y, y], transform=figure.transFigure)
        figure.add_artist(drawn)
        figure.text((LEFT + 0.42) / WIDTH, y, name, size=8.5, color=INK, **style)
    axes: list[Axes] = []
    for number in range(panels):
        bottom = height - top - PANEL * (number + 1) - BETWEEN * number
        place = (LEFT / WIDTH, bottom / height, 1 - (LEFT + RIGHT) / WIDTH, PANEL / height)
        panel = figure.add_axes(place, sharex=axes[0] if axes else None)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(SOFT)
        panel.tick_params(colors=SOFT, labelsize=8.5, labelbottom=number == panels - 1)
        panel.set_axisbelow(True)
        panel.grid(color=GRID)
        axes.append(panel)
    return figure, axes


def line(axes: Axes, at: Sequence[float], found: Sequence[Estimate], number: int) -> None:
    """A curve and the band of its intervals; a bar where it is one point."""
    colour = COLOURS[number]
    low, high = [e.low for e in found], [e.high for e in found]
    if len(at) == 1:
        axes.plot([at[0], at[0]], [low[0], high[0]], color=colour, linewidth=1.4, alpha=0.6, solid_capstyle="butt")
    else:
        axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.plot(at, [e.value for e in found], color=colour, linewidth=1.6, marker=MARKERS[number], markersize=4)


def handle(number: int) -> Line2D:
    """What stands for a curve in the legend."""
    return Line2D([], [], color=COLOURS[number], linewidth=1.6, marker=MARKERS[number], markersize=4)


def dashed(colour: str) -> Line2D:
    return Line2D([], [], color=colour, linewidth=1, linestyle=(0, (4, 3)))


def dotted(colour: str) -> Line2D:
    return Line2D([], [], color=colour, linewidth=1.1, linestyle=(0, (1, 2)))


def limits(found: Sequence[Estimate]) -> tuple[float, float]:
    """An axis of accuracies with a little room, within 0 and 1."""
    ends = [end for e in found for end in (e.low, e.high) if not math.isnan(end)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = max(0.06 * (high - low), 0.02)
    return max(low - room, -0.02), min(high + room, 1.02)
