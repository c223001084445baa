"""Figure of accuracy along the places of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssmscope.core.bootstrap import Estimate
from ssmscope.render.figure import (
    COLOURS,
    DASHED,
    DOTTED,
    EDGE,
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
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.attacks.insertion.result import InsertionCurve, InsertionSweep

OUTSIDE_DISTANCE = 0.09
"""Distance from the content's ends at which the places outside it are drawn."""


def draw(result: InsertionSweep) -> Figure:
    """Draw accuracy over the places, with the clean one and the worst of each example, and the change of log-odds."""
    odds, curves = result.clean_log_odds is not None, result.shown
    legend = [(handle(number), f"“{shorten(visible(curve.phrase), 80)}”") for number, curve in enumerate(curves)]
    legend += [(dashed(INK), "clean"), (dotted(SOFT), "right at every place")]
    number = len(result.curves)
    what = "the same phrase" if curves == result.curves else f"the worst {len(curves)} of {number} phrases"
    title = ("Insertion sweep of ", result.model_name, f": {what} at every place")
    figure, axes = stacked(title, data_line(result), legend, 2 if odds else 1)
    places = curves[0].places
    ends = {place.name: -OUTSIDE_DISTANCE for place in places[:1] if place.share is None}
    ends |= {place.name: 1 + OUTSIDE_DISTANCE for place in places[1:] if place.share is None}
    sides = [at + side for at in ends.values() for side in (-OUTSIDE_DISTANCE / 2, OUTSIDE_DISTANCE / 2)]
    for panel in axes:
        for at in ends.values():
            panel.axvspan(at - OUTSIDE_DISTANCE / 2, at + OUTSIDE_DISTANCE / 2, color=EDGE, zorder=0)
        panel.set_xlim(min([-0.03, *sides]), max([1.03, *sides]))
    upper = axes[0]
    upper.axhline(result.clean.value, color=INK, linewidth=1, linestyle=DASHED)
    for number, curve in enumerate(curves):
        _along(upper, curve, ends, [place.accuracy for place in curve.places], number)
        upper.axhline(curve.worst.value, color=COLOURS[number], linewidth=1.1, linestyle=DOTTED)
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
    outside = [(at, name.replace(" the ", "\n")) for name, at in ends.items()]
    ticks = sorted([*((at, f"{100 * at:g}") for at in shown), *outside])
    axes[-1].set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    what = "text" if result.provenance["options"]["template"] is None else "content"
    axes[-1].set_xlabel(f"words of the {what} before the phrase, %", color=SOFT, size=9)
    return figure


def _along(axes: Axes, curve: InsertionCurve, ends: dict[str, float], found: Sequence[Estimate], number: int) -> None:
    """Draw a line over the content, and single points outside it."""
    inside = [(p.share, e) for p, e in zip(curve.places, found) if p.share is not None]
    line(axes, [at for at, _ in inside], [e for _, e in inside], number)
    for place, one in zip(curve.places, found):
        if place.share is None:
            line(axes, [ends[place.name]], [one], number)
