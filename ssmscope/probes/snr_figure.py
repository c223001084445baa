"""The needle's probability by layer as a picture, as in Figure 6 of Differential Mamba."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.probes.snr_measures import SNRCurve
    from ssmscope.probes.snr_result import NeedleSNR

INK, SOFT, GRID = "#1b1f24", "#57606a", "#e6e9ed"
COLOURS = ("#2065a8", "#d1540a", "#0f8a6c", "#b01e8a", "#7a6a00", "#57606a")
"""Models in this order; they differ in lightness too."""
MARKERS = "osD^vP"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
"""Of the first six models, of the next six, and of all others."""
LENGTHS = 4
"""How many lengths are drawn."""
ROW = 5
"""How many tasks stand beside one another."""
WIDTH, LEFT, RIGHT = 9.0, 0.75, 0.3
TOP, LEGEND, HEAD, PANEL, FOOT, GAP = 0.72, 0.2, 0.5, 2.5, 0.62, 0.72
SMALL, SMALL_HEAD, SMALL_GAP = 1.25, 0.3, 0.14
"""In inches: above everything, a line of the legend, above a block, its panels, what is below a row of panels, and
between two panels; the same of the tasks' small ones."""
TITLE, LINE = 100, 125
"""As many characters as fit in the title, and in a smaller line."""


def draw(result: NeedleSNR) -> Figure:
    """A block for each length: over all tasks the needle's probability and its log ratio to the best distractor; below
    them the tasks' probabilities, in panels that share their axes."""
    lengths = result.lengths[:LENGTHS]
    tasks = result.tasks[1:] if len(result.tasks) > 1 else ()
    rows = math.ceil(len(tasks) / ROW)
    block = HEAD + PANEL + FOOT + rows * (SMALL_HEAD + SMALL) + (FOOT if rows else 0)
    top = TOP + LEGEND * len(result.models)
    height = top + block * len(lengths)
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    _heading(figure, result, height)
    for number, length in enumerate(lengths):
        y = height - top - number * block - HEAD
        curves = [result.curve(model.name, result.tasks[0], length) for model in result.models]
        if length is not None:
            text = f"contexts of {length:,} {result.unit}, {curves[0].tokens:,.0f} tokens a prompt"
            figure.text(0.2 / WIDTH, (y + HEAD - 0.22) / height, text, size=9.5, color=INK, va="center")
        ratios = any(not math.isnan(curve.chance) for curve in curves)
        wide = (WIDTH - LEFT - RIGHT - GAP) / 2 if ratios else WIDTH - LEFT - RIGHT
        _panel(figure, (LEFT, y - PANEL, wide, PANEL), curves, "needle", "needle probability")
        if ratios:
            place = (LEFT + wide + GAP, y - PANEL, wide, PANEL)
            axes = _panel(figure, place, curves, "log_ratio", "ln(needle / best distractor)")
            axes.axhline(0, color=SOFT, linewidth=0.9)
        _tasks(figure, result, tasks, length, y - PANEL - FOOT)
    return figure


def _heading(figure: Figure, result: NeedleSNR, height: float) -> None:
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    title = "Needle probability by layer"
    if len(result.models) == 1:
        title = f"{title} of {shorten(visible(result.models[0].name), TITLE - len(title) - 4)}"
    figure.text(0.2 / WIDTH, 1 - 0.28 / height, title, size=11, color=INK, **style)
    examples, tasks = result.curves[0].examples, result.tasks
    listed = ", ".join(tasks[1:] if len(tasks) > 1 else tasks)
    listed = shorten(visible(listed), LINE - 60)
    text = f"{examples:,} questions ({listed}), mean and 95 % bootstrap interval over questions"
    figure.text(0.2 / WIDTH, 1 - 0.53 / height, text, size=8.5, color=SOFT, **style)
    for number, model in enumerate(result.models):
        y = 1 - (TOP + LEGEND * (number + 0.35)) / height
        at = np.array([0.22, 0.56]) / WIDTH
        line = _line(number)
        figure.add_artist(_handle(at, y, figure, line))
        name, lens = shorten(visible(model.name), LINE // 2), shorten(visible(model.lens), LINE // 2 - 5)
        figure.text(0.68 / WIDTH, y, f"{name}: {lens}", size=8.5, color=INK, **style)


def _handle(at: np.ndarray, y: float, figure: Figure, line: dict[str, Any]) -> Any:
    from matplotlib.lines import Line2D

    return Line2D(at, [y, y], transform=figure.transFigure, **line)


def _line(number: int) -> dict[str, Any]:
    place = number % len(COLOURS)
    dashes = DASHES[min(number // len(COLOURS), len(DASHES) - 1)]
    return {
        **{"color": COLOURS[place], "marker": MARKERS[place], "linestyle": dashes},
        **{"linewidth": 1.6, "markersize": 3.5},
    }


def _panel(
    figure: Figure, place: tuple[float, float, float, float], curves: list[SNRCurve], metric: str, name: str
) -> Axes:
    x, y, wide, high = place
    width, height = figure.get_size_inches()
    axes = figure.add_axes((x / width, y / height, wide / width, high / height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=8)
    axes.set_axisbelow(True)
    axes.grid(color=GRID)
    depths = {len(curve.layers) for curve in curves}
    for number, curve in enumerate(curves):
        at = [one.layer if len(depths) == 1 else one.depth for one in curve.layers]
        found = [getattr(one, metric) for one in curve.layers]
        colour = COLOURS[number % len(COLOURS)]
        axes.fill_between(at, [e.low for e in found], [e.high for e in found], color=colour, alpha=0.2, linewidth=0)
        axes.plot(at, [e.value for e in found], **_line(number))
    if metric == "needle":
        axes.set_ylim(0, None)
    if len(depths) == 1:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_xlabel("layer (0: embeddings; the last: the model itself)", color=SOFT, size=8.5)
    else:
        axes.set_xlabel("depth, layer / layers (1: the model itself)", color=SOFT, size=8.5)
    axes.set_ylabel(name, color=SOFT, size=8.5)
    return axes


def _tasks(figure: Figure, result: NeedleSNR, tasks: tuple[str, ...], length: int | None, y: float) -> None:
    columns = min(len(tasks), ROW)
    wide = (WIDTH - LEFT - RIGHT - SMALL_GAP * (columns - 1)) / max(columns, 1)
    first: Axes | None = None
    for number, task in enumerate(tasks):
        row, column = divmod(number, ROW)
        place = (LEFT + column * (wide + SMALL_GAP), y - (row + 1) * (SMALL_HEAD + SMALL), wide, SMALL)
        curves = [result.curve(model.name, task, length) for model in result.models]
        axes = _panel(figure, place, curves, "needle", "needle probability" if column == 0 else "")
        for line in axes.lines:
            line.set(markersize=0, linewidth=1.3)
        axes.set_title(shorten(visible(task), 24), size=8.5, color=INK, loc="left", pad=3, parse_math=False)
        if first is None:
            first = axes
        else:
            axes.sharey(first)
            axes.sharex(first)
        last_row = number + ROW >= len(tasks)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=len({len(c.layers) for c in curves}) == 1))
        axes.tick_params(labelleft=column == 0, labelbottom=last_row, labelsize=7.5)
        axes.set_xlabel("layer" if last_row and "depth" not in axes.get_xlabel() else "depth" if last_row else "")
        axes.xaxis.label.set(color=SOFT, size=8)
    if first is not None:
        highest = max(
            one.needle.high
            for task in tasks
            for m in result.models
            for one in result.curve(m.name, task, length).layers
        )
        first.set_ylim(0, 1.05 * highest)
