"""Figure of accuracy along the places of a text."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.attacks.insertion.result import InsertionCurve, InsertionSweep
from ssmscope.core.bootstrap import Estimate
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name

OUTSIDE_INCHES, MARGIN_INCHES = 0.5, 0.7


def draw(result: InsertionSweep, frame: plot.Frame) -> Figure:
    """Draw accuracy over the places, with the clean one and the worst of each example, and the change of log-odds."""
    odds, curves = result.clean_log_odds is not None, result.shown
    legend = [(plot.handle(number), f"“{short_name(curve.phrase, 80)}”") for number, curve in enumerate(curves)]
    legend += [(plot.rule(), "clean"), (plot.rule(plot.SOFT, plot.DOTTED), "right at every place")]
    few = f"the worst {len(curves)} of {len(result.curves)} phrases" * (curves != result.curves)
    sheet = plot.Sheet(frame, result.headline, plot.data_line(result, few), legend)
    panels = sheet.panels(*[2.2] * (1 + odds), sharex=True)
    places = curves[0].places
    outside = OUTSIDE_INCHES / max(sheet.width - MARGIN_INCHES - 3 * OUTSIDE_INCHES, plot.MIN_SIDE_INCHES)
    ends = {place.name: -outside for place in places[:1] if place.share is None}
    ends |= {place.name: 1 + outside for place in places[1:] if place.share is None}
    sides = [at + side for at in ends.values() for side in (-outside / 2, outside / 2)]
    for axes in panels:
        for at in ends.values():
            axes.axvspan(at - outside / 2, at + outside / 2, color=plot.EDGE, zorder=0)
        axes.set_xlim(min([-0.03, *sides]), max([1.03, *sides]))
    panels[0].axhline(result.clean.value, color=plot.INK, linewidth=1, linestyle=plot.DASHED)
    for number, curve in enumerate(curves):
        _along(panels[0], curve, ends, [place.accuracy for place in curve.places], number)
        panels[0].axhline(curve.worst.value, color=plot.COLOURS[number], linewidth=1.1, linestyle=plot.DOTTED)
        if odds:
            changes = [place.log_odds_change for place in curve.places if place.log_odds_change is not None]
            _along(panels[1], curve, ends, changes, number)
    accuracies = [e for curve in curves for e in (curve.worst, *(place.accuracy for place in curve.places))]
    panels[0].set(ylabel="accuracy", ylim=plot.limits([result.clean, *accuracies]))
    if odds:
        panels[1].axhline(0, color=plot.SOFT, linewidth=0.8)
        panels[1].set_ylabel("change of the log-odds")
    names = [(at, name.replace(" the ", "\n")) for name, at in ends.items()]
    ticks = sorted([*((at, f"{100 * at:g}") for at in (0, 0.2, 0.4, 0.6, 0.8, 1)), *names])
    panels[-1].set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    what = "text" if result.provenance["options"]["template"] is None else "content"
    panels[-1].set_xlabel(f"words of the {what} before the phrase, %")
    return sheet.figure


def _along(axes: Axes, curve: InsertionCurve, ends: dict[str, float], found: Sequence[Estimate], number: int) -> None:
    inside = [(p.share, e) for p, e in zip(curve.places, found) if p.share is not None]
    plot.line(axes, [at for at, _ in inside], [e for _, e in inside], number)
    for place, one in zip(curve.places, found):
        if place.share is None:
            plot.line(axes, [ends[place.name]], [one], number)
