"""Figure of survival, accuracy and detectors under each trigger."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.attacks.poisoning.result import NAMES, StatePoisoning
from ssmscope.core.bootstrap import Estimate
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name


def draw(result: StatePoisoning, frame: plot.Frame) -> Figure:
    """Draw three panels for each model: survival of the span, accuracy or answers with the planted class, and AUROC."""
    names = [NAMES[each.name] for each in result.victims[0].attacks]
    detectors = [(plot.handle(at, linestyle=""), f"detector: {name}") for at, name in enumerate(result.detectors)]
    legend = [(plot.rule(), "clean texts; for detectors chance"), *detectors]
    told = plot.data_line(result, f"{result.texts[2]:,} held out")
    sheet = plot.Sheet(frame, result.headline, told, legend, width=10)
    panels = iter(sheet.panels(*[0.34 * len(names)] * len(result.victims), across=3))
    for one in result.victims:
        survival, answers, seen = next(panels), next(panels), next(panels)
        survival.set_title(f"survival in {short_name(one.model, 36)}")
        answers.set_title("accuracy" if one.planted is None else "planted class answered")
        seen.set_title("AUROC")
        clean = one.accuracy if one.planted is None else one.planted
        _rows(survival, names, [each.survival for each in one.attacks], one.survival)
        found = [each.accuracy if each.planted is None else each.planted for each in one.attacks]
        _rows(answers, names, found, clean)
        alarms = [[each.alarms[at].auroc for each in one.attacks] for at in range(len(result.detectors))]
        plot.points(seen, names, *alarms, notes=(), zero=False)
        seen.axvline(0.5, color=plot.INK, linewidth=1, linestyle=plot.DASHED)
        for axes in (survival, answers, seen):
            axes.set_xlim(-0.02, 1.02)
            axes.tick_params(labelleft=axes.get_subplotspec().is_first_col())  # type: ignore[union-attr]
    return sheet.figure


def _rows(axes: Axes, names: list[str], found: list[Estimate], clean: Estimate) -> None:
    axes.axvspan(clean.low, clean.high, color=plot.SOFT, alpha=0.15, linewidth=0)
    axes.axvline(clean.value, color=plot.INK, linewidth=1, linestyle=plot.DASHED)
    plot.points(axes, names, found, colours=(plot.INK,), notes=(), zero=False)
