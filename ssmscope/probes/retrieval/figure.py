"""Figure of retrieval: grids of tasks and context lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_hex

from ssmscope.core.bootstrap import Estimate
from ssmscope.render.figure import INK, SOFT, Sheet
from ssmscope.render.numbers import brackets, number
from ssmscope.render.tokens import BLUES, ink, ramp, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.probes.retrieval.result import Ratio, Retrieval

RATIO_COLOURS = ("#8c3b00", "#d1540a", "#f0b284", "#f7f7f7", "#8fc0e0", "#2065a8", "#08306b")
"""Colours from the other model, orange, to the first, blue; distinct in every kind of colour vision."""
UNDEFINED_COLOUR = "#e3e6ea"
MIN_COLOUR_RATIO, MAX_COLOUR_RATIO = 4.0, 16.0
"""Bounds of the ratio at which the colour scale ends."""
CELL_WIDTH, CELL_HEIGHT = 0.66, 0.44
"""Size of a cell in inches."""
LEFT, RIGHT, TOP, TITLE, BOTTOM = 0.62, 0.85, 0.72, 0.42, 0.5
"""Margins in inches: minimum width of the task names, colour bar, the figure's heading, the panel's, and the axis."""
LETTER_WIDTH = 0.08
"""Width of a letter of a task's name, in inches."""
PANELS_PER_ROW = 3


def draw(result: Retrieval) -> Figure:
    """Draw a panel of every model's accuracies with their intervals, and one of every ratio, with colours centred at 1
    on a logarithmic scale and * where the interval excludes 1."""
    tasks, lengths = len(result.tasks), len(result.lengths)
    panels = len(result.models) + len(result.ratios)
    across = min(panels, PANELS_PER_ROW)
    down = math.ceil(panels / across)
    left = max(LEFT, 0.2 + LETTER_WIDTH * max(map(len, result.tasks)))
    wide = left + max(CELL_WIDTH * lengths, 2.6) + RIGHT
    high = TITLE + max(CELL_HEIGHT * tasks, 0.9) + BOTTOM
    width, height = max(across * wide, 5.2), TOP + down * high
    what = "Retrieval by context length" + (" and ratios" if result.ratios else "")
    sheet = Sheet(width, height, (what, "", ""), _below(result))

    def panel(at: int, title: str) -> Axes:
        row, column = divmod(at, across)
        place = column * wide + left, TOP + row * high + TITLE
        axes = sheet.panel(*place, wide - left - RIGHT, high - TITLE - BOTTOM, frame_on=False)
        axes.grid(visible=False)
        letters = round((wide - left) * 12)
        axes.set_title(shorten(title, letters), loc="left", size=9.5, color=INK, pad=7, parse_math=False)
        axes.set_xticks(range(lengths), [_thousands(n) for n in result.lengths])
        axes.set_yticks(range(tasks), result.tasks)
        axes.set_xlim(-0.5, lengths - 0.5)
        axes.set_ylim(tasks - 0.5, -0.5)
        axes.tick_params(length=0)
        axes.set_xlabel("tokens of the context", color=SOFT, size=9)
        return axes

    share = ScalarMappable(Normalize(0, 1), ListedColormap(ramp(BLUES, 256)))
    for at, name in enumerate(result.models):
        axes = panel(at, f"accuracy of {visible(name)}")
        for row, found in enumerate(result.cells[at]):
            for column, cell in enumerate(found):
                colour = _shade(share, cell.accuracy.value)
                _cell(axes, row, column, colour, cell.accuracy, number(cell.accuracy.value, 2))
        _bar(sheet, axes, share)
    reach = _reach(result.ratios)
    steps = ScalarMappable(Normalize(-math.log(reach), math.log(reach)), ListedColormap(ramp(RATIO_COLOURS, 255)))
    for at, name in enumerate(result.models[1:]):
        title = f"{visible(result.models[0])} / {visible(name)}"
        axes = panel(len(result.models) + at, title)
        for row, ratios in enumerate(result.ratios[at]):
            for column, one in enumerate(ratios):
                value = one.value.value
                factor = min(max(value, 1 / reach), reach)
                colour = UNDEFINED_COLOUR if math.isnan(value) else _shade(steps, math.log(factor))
                _cell(axes, row, column, colour, one.value, one.written, bold=one.differs)
        ticks = [1 / reach, 1 / math.sqrt(reach), 1, math.sqrt(reach), reach]
        _bar(sheet, axes, steps, [math.log(tick) for tick in ticks], [f"{tick:.2g}" for tick in ticks])
    return sheet.figure


def _shade(colours: ScalarMappable, value: float) -> str:
    red, green, blue, _ = np.asarray(colours.to_rgba(np.array(value))).tolist()
    return to_hex((red, green, blue))


def _cell(axes: Axes, row: int, column: int, colour: str, found: Estimate, written: str, *, bold: bool = False) -> None:
    axes.fill_between([column - 0.48, column + 0.48], row - 0.46, row + 0.46, color=colour, linewidth=0)
    if math.isnan(found.value):
        axes.text(column, row, "not\ndefined", ha="center", va="center", size=6, color=SOFT)
        return
    style: dict[str, Any] = dict(ha="center", va="center", color=ink(colour))
    axes.text(column, row - 0.13, written, size=9, weight="bold" if bold else "normal", **style)
    axes.text(column, row + 0.24, brackets(found, 2).strip(), size=5.4, **style)


def _bar(
    sheet: Sheet,
    beside: Axes,
    colours: ScalarMappable,
    ticks: Sequence[float] | None = None,
    names: Sequence[str] | None = None,
) -> None:
    box, width = beside.get_position(), sheet.width
    place = (box.x1 + 0.12 / width, box.y0, 0.1 / width, box.height)
    bar = sheet.figure.colorbar(colours, cax=sheet.figure.add_axes(place))
    bar.outline.set_visible(False)
    if ticks is None:
        bar.set_ticks([0, 0.5, 1])
    else:
        bar.set_ticks(ticks, labels=names)
    bar.ax.tick_params(colors=SOFT, labelsize=8, length=2)


def _reach(ratios: Sequence[Sequence[Sequence[Ratio]]]) -> float:
    """Return the largest factor between a ratio and 1, within the bounds of the colour scale."""
    values = [one.value.value for grid in ratios for row in grid for one in row]
    farthest = max((math.exp(abs(math.log(value))) for value in values if value > 0), default=MIN_COLOUR_RATIO)
    return min(max(farthest, MIN_COLOUR_RATIO), MAX_COLOUR_RATIO)


def _thousands(length: int) -> str:
    return f"{length // 1000}k" if length >= 1000 and length % 1000 == 0 else f"{length:,}"


def _below(result: Retrieval) -> str:
    intervals = "95 %: Wilson" + (", ratios paired bootstrap, * differs from 1" if result.ratios else "")
    chances = [f"{each:.3g}" for each in result.chance]
    chance = chances[0] if len(set(chances)) == 1 else ", ".join(chances)
    return f"{result.counted}; chance {chance}; {intervals}"
