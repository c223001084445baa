"""Figure of the needle's probability by layer, as in Figure 6 of Differential Mamba."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.probes.snr.measure import SNRCurve
from ssmscope.probes.snr.result import NeedleSNR
from ssmscope.render import figure as plot
from ssmscope.render.letters import short_name
from ssmscope.render.numbers import counted

MAX_LENGTHS, TASKS_PER_ROW, MAX_NAME_LETTERS = 4, 5, 60
PANEL, SMALL = 2.3, 1.4


def draw(result: NeedleSNR, frame: plot.Frame) -> Figure:
    """Draw a block per length: the needle's probability and its log ratio to the best distractor over all tasks, and
    below them each task's probabilities in panels that share their axes."""
    lengths = result.lengths[:MAX_LENGTHS]
    tasks = result.tasks[1:] if len(result.tasks) > 1 else ()
    listed = short_name(", ".join(tasks or result.tasks), MAX_NAME_LETTERS)
    questions = counted(result.curves[0].examples, "question")
    below = f"{questions} ({listed}), mean and 95 % bootstrap interval over questions"
    names = [f"{short_name(model.name, 44)}: {short_name(model.lens, 44)}" for model in result.models]
    legend = [(plot.handle(at), name) for at, name in enumerate(names)]
    sheet = plot.Sheet(frame, result.headline, below, legend, width=9.0)
    if len(lengths) == 1 and lengths[0] is None and not tasks:
        _upper(sheet.panels(PANEL, across=1 + _has_ratios(result.curves)), result.curves)
        return sheet.figure
    across = min(max(len(tasks), 1), TASKS_PER_ROW, max(1, int(sheet.width / 1.5)))
    stacked = sheet.width < plot.NARROW_INCHES
    upper = (PANEL + plot.AXIS_INCHES) * (2 if stacked else 1)
    lower = SMALL * math.ceil(len(tasks) / across) + 0.3 if tasks else 0.02
    for length, block in zip(lengths, sheet.parts(*[upper + lower + 0.2] * len(lengths))):
        curves = [result.curve(model.name, result.tasks[0], length) for model in result.models]
        if length is not None:
            said = f"contexts of {length:,} {result.unit}, {curves[0].tokens:,.0f} tokens a prompt"
            block.suptitle(said, x=0.12 / sheet.width, ha="left", fontsize="medium")
        above, below = block.subfigures(2, 1, height_ratios=(upper, lower))
        shape = (1, 1 + _has_ratios(curves))[:: -1 if stacked else 1]
        _upper([plot.styled(axes) for axes in above.subplots(*shape, squeeze=False).ravel()], curves)
        if tasks:
            own = [[result.curve(model.name, task, length) for model in result.models] for task in tasks]
            _tasks(below, own, across)
    return sheet.figure


def _upper(panels: Sequence[Axes], curves: Sequence[SNRCurve]) -> None:
    _panel(panels[0], curves, "needle", "needle probability")
    for axes in panels[1:]:
        _panel(axes, curves, "log_ratio", "ln(needle / best distractor)")
        axes.axhline(0, color=plot.SOFT, linewidth=0.9)


def _has_ratios(curves: Sequence[SNRCurve]) -> bool:
    return any(not math.isnan(curve.chance) for curve in curves)


def _panel(axes: Axes, curves: Sequence[SNRCurve], metric: str, name: str, **style: Any) -> None:
    """Draw a line for each model over layers, or over depth if the models differ in layers."""
    alike = len({len(curve.layers) for curve in curves}) == 1
    for number, curve in enumerate(curves):
        at = [one.layer if alike else one.depth for one in curve.layers]
        plot.line(axes, at, [getattr(one, metric) for one in curve.layers], number, **{"markersize": 3.5, **style})
    if metric == "needle":
        axes.set_ylim(0, None)
    if alike:
        plot.integers(axes.xaxis, 8)
    axes.set_ylabel(name)
    axes.set_xlabel("layer (0: embeddings; last: the model)" if alike else "depth, layer / layers (1: the model)")


def _tasks(part: Any, tasks: Sequence[Sequence[SNRCurve]], across: int) -> None:
    made = plot.grid(part, len(tasks), across, sharex=True, sharey=True)
    for number, (axes, curves) in enumerate(zip(made, tasks)):
        name = "needle probability" if number == 0 else ""
        _panel(plot.styled(axes), curves, "needle", name, marker="", linewidth=1.3)
        axes.set_title(short_name(curves[0].task, 24))
        axes.set_xlabel("")
        axes.tick_params(labelbottom=number + across >= len(tasks))
    alike = len({len(curve.layers) for curve in tasks[0]}) == 1
    part.supxlabel("layer" if alike else "depth", fontsize="medium", color=plot.SOFT)
    made[0].set_ylim(0, 1.05 * max(one.needle.high for curves in tasks for curve in curves for one in curve.layers))
