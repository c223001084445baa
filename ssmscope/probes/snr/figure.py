"""Figure of the needle's probability by layer, as in Figure 6 of Differential Mamba."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from ssmscope.render.figure import COLOURS, INK, SOFT, Sheet, handle, line
from ssmscope.render.numbers import counted
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.probes.snr.measure import SNRCurve
    from ssmscope.probes.snr.result import NeedleSNR

DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Dashes of the first six models, the next six, and all others."""
MAX_LENGTHS = 4
TASKS_PER_ROW = 5
WIDTH, LEFT, RIGHT = 9.0, 0.75, 0.3
HEAD, PANEL, FOOT, GAP = 0.42, 2.5, 0.62, 0.72
SMALL, SMALL_HEAD, SMALL_GAP = 1.25, 0.3, 0.14
"""Sizes in inches: margin above a block, panels, margin below them and gap between them; the same for the tasks' small
panels."""
MAX_NAME_LETTERS = 60


def draw(result: NeedleSNR) -> Figure:
    """Draw a block per length: the needle's probability and its log ratio to the best distractor over all tasks, and
    below them each task's probabilities in panels that share their axes."""
    lengths, several = result.lengths[:MAX_LENGTHS], len(result.models) > 1
    tasks = result.tasks[1:] if len(result.tasks) > 1 else ()
    rows = math.ceil(len(tasks) / TASKS_PER_ROW)
    block = HEAD + PANEL + FOOT + rows * (SMALL_HEAD + SMALL) + (FOOT if rows else 0)
    title = (
        ("Needle probability by layer", "", "")
        if several
        else ("Needle probability by layer of ", result.models[0].name, "")
    )
    listed = shorten(visible(", ".join(tasks or result.tasks)), MAX_NAME_LETTERS)
    below = (
        f"{counted(result.curves[0].examples, 'question')} ({listed}), mean and 95 % bootstrap interval over questions"
    )
    legend = [
        (
            handle(at, **_look(at)),
            f"{shorten(visible(model.name), MAX_NAME_LETTERS)}: {shorten(visible(model.lens), MAX_NAME_LETTERS)}",
        )
        for at, model in enumerate(result.models)
    ]
    sheet = Sheet(WIDTH, Sheet.TOP + block * len(lengths), title, below, legend, left=0.22)
    for number, length in enumerate(lengths):
        top = sheet.top + number * block
        curves = [result.curve(model.name, result.tasks[0], length) for model in result.models]
        if length is not None:
            text = f"contexts of {length:,} {result.unit}, {curves[0].tokens:,.0f} tokens a prompt"
            y = 1 - (top + 0.14) / sheet.height
            sheet.figure.text(0.2 / WIDTH, y, text, size=9.5, color=INK, va="center")
        ratios = any(not math.isnan(curve.chance) for curve in curves)
        wide = (WIDTH - LEFT - RIGHT - GAP) / 2 if ratios else WIDTH - LEFT - RIGHT
        _panel(sheet.panel(LEFT, top + HEAD, wide, PANEL), curves, "needle", "needle probability")
        if ratios:
            axes = sheet.panel(LEFT + wide + GAP, top + HEAD, wide, PANEL)
            _panel(axes, curves, "log_ratio", "ln(needle / best distractor)")
            axes.axhline(0, color=SOFT, linewidth=0.9)
        of_tasks = [[result.curve(model.name, task, length) for model in result.models] for task in tasks]
        _tasks(sheet, of_tasks, top + HEAD + PANEL + FOOT)
    return sheet.figure


def _look(number: int) -> dict[str, Any]:
    return {"linestyle": DASHES[min(number // len(COLOURS), len(DASHES) - 1)], "markersize": 3.5}


def _panel(axes: Axes, curves: Sequence[SNRCurve], metric: str, name: str, **style: Any) -> None:
    """Draw a line for each model over layers, or over depth if the models differ in layers."""
    alike = len({len(curve.layers) for curve in curves}) == 1
    for number, curve in enumerate(curves):
        at = [one.layer if alike else one.depth for one in curve.layers]
        line(axes, at, [getattr(one, metric) for one in curve.layers], number, **{**_look(number), **style})
    if metric == "needle":
        axes.set_ylim(0, None)
    if alike:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    at_ends = (
        "layer (0: embeddings; the last: the model itself)" if alike else "depth, layer / layers (1: the model itself)"
    )
    axes.set_xlabel(at_ends, color=SOFT, size=8.5)
    axes.set_ylabel(name, color=SOFT, size=8.5)


def _tasks(sheet: Sheet, tasks: Sequence[Sequence[SNRCurve]], top: float) -> None:
    """Draw the tasks in rows of small panels with the same axes."""
    columns = min(len(tasks), TASKS_PER_ROW)
    wide = (WIDTH - LEFT - RIGHT - SMALL_GAP * (columns - 1)) / max(columns, 1)
    shared: dict[str, Any] = {}
    for number, curves in enumerate(tasks):
        row, column = divmod(number, TASKS_PER_ROW)
        y = top + row * (SMALL_HEAD + SMALL) + SMALL_HEAD
        axes = sheet.panel(LEFT + column * (wide + SMALL_GAP), y, wide, SMALL, **shared)
        shared = shared or {"sharex": axes, "sharey": axes}
        _panel(axes, curves, "needle", "needle probability" if column == 0 else "", markersize=0, linewidth=1.3)
        axes.set_title(shorten(visible(curves[0].task), 24), size=8.5, color=INK, loc="left", pad=3, parse_math=False)
        alike, last_row = len({len(curve.layers) for curve in curves}) == 1, number + TASKS_PER_ROW >= len(tasks)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=alike))
        axes.tick_params(labelleft=column == 0, labelbottom=last_row, labelsize=7.5)
        axes.set_xlabel(("layer" if alike else "depth") if last_row else "", size=8)
    if tasks:
        highest = max(one.needle.high for curves in tasks for curve in curves for one in curve.layers)
        shared["sharey"].set_ylim(0, 1.05 * highest)
