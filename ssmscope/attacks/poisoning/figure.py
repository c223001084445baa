"""Figure of survival, accuracy and detectors under each trigger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmscope.attacks.poisoning.result import NAMES
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.figure import COLOURS, DASHED, INK, MARKERS, SOFT, Sheet, dashed, data_line, handle, interval
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.attacks.poisoning.result import StatePoisoning


def draw(result: StatePoisoning) -> Figure:
    """Draw three panels for each model: survival of the span, accuracy or answers with the planted class, and AUROC."""
    first = result.victims[0]
    rows, step = len(first.attacks), 0.34 * len(first.attacks) + 0.75
    detectors = [(handle(number), f"detector: {name}") for number, name in enumerate(result.detectors)]
    legend = [(dashed(INK), "clean texts; for detectors chance"), *detectors]
    title = ("Hidden-state poisoning of ", result.model_name, f": {result.objective}")
    sheet = Sheet(
        10,
        Sheet.TOP + 0.1 + step * len(result.victims),
        title,
        data_line(result, f"{result.texts[2]:,} held out"),
        legend,
        across=2,
    )
    for number, one in enumerate(result.victims):
        top, tall = sheet.top + 0.3 + step * number, 0.34 * rows
        survival, answers, seen = (sheet.panel(1.55 + 2.85 * at, top, 2.5, tall) for at in range(3))
        name = shorten(visible(one.model), 60)
        survival.set_title(f"{name}: survival", loc="left", size=9, color=INK, parse_math=False)
        planted = one.planted is not None
        answers.set_title("planted class answered" if planted else "accuracy", loc="left", size=9, color=INK)
        seen.set_title("AUROC", loc="left", size=9, color=INK)
        _rows(survival, [each.survival for each in one.attacks], one.survival)
        clean = one.planted if one.planted is not None else one.accuracy
        found = [each.planted if each.planted is not None else each.accuracy for each in one.attacks]
        _rows(answers, found, clean)
        for at in range(len(result.detectors)):
            aside = 0.22 * (at - (len(result.detectors) - 1) / 2)
            _points(seen, [each.alarms[at].auroc for each in one.attacks], COLOURS[at], aside, MARKERS[at])
        seen.axvline(0.5, color=INK, linewidth=1, linestyle=DASHED)
        for axes in (survival, answers, seen):
            axes.set(ylim=(rows - 0.5, -0.5), xlim=(-0.02, 1.02), yticks=range(rows))
            axes.grid(False, axis="y")
            axes.set_yticklabels([NAMES[each.name] for each in one.attacks] if axes is survival else [])
    return sheet.figure


def _rows(axes: Axes, found: list[Estimate], clean: Estimate) -> None:
    axes.axvspan(clean.low, clean.high, color=SOFT, alpha=0.15, linewidth=0)
    axes.axvline(clean.value, color=INK, linewidth=1, linestyle=DASHED)
    _points(axes, found, INK, 0.0)


def _points(axes: Axes, found: list[Estimate], colour: str, aside: float, marker: str = "o") -> None:
    for place, one in enumerate(found):
        interval(axes, place + aside, one, colour, upright=False)
        axes.plot(one.value, place + aside, marker, color=colour, markersize=4)
