"""Figure of answers by layer: layers × tokens, coloured by a statistic, with every layer's own answer.

Everything is placed in inches, so that nothing overlaps at any number of tokens and layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ssmscope.errors import InputError, did_you_mean
from ssmscope.probes.lens.lensed_text import STATISTICS, highest, shade
from ssmscope.render.drawing import BAR_WIDTH, EMPTY, MARGIN, MARK, colour_bar, fill, sheet_of, write
from ssmscope.render.figure import SOFT
from ssmscope.render.tokens import BLUES, evenly_apart, ink, ramp, short_token, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.probes.lens.lensed_text import Column
    from ssmscope.probes.lens.result import Trajectory

MAX_TEXTS, MAX_TOKENS, MAX_LAYERS = 4, 24, 24
"""Maximum numbers of texts, tokens of each, and layers (without the model) in one figure."""

CELL_WIDTH, CELL_HEIGHT, LEFT, RIGHT = 0.64, 0.2, 0.75, 0.25
HEADER, HEADING, FOOTER = 0.95, 0.22, 0.15
MIN_WIDTH = 7.2
"""Sizes in inches: a cell and margins, heights of the header, of a panel's heading and footer, and the figure."""
TITLE_LETTER, LINE_LETTER = 0.105, 0.075
"""Maximum width in inches of a letter of the title, and of the line below it."""
LETTERS_PER_CELL = 10
SHADES = ramp(BLUES)


def draw(result: Trajectory, statistic: str, *, start: int = 0) -> Figure:
    """Draw a panel per text; for answers at the last position only, one panel with a column per text."""
    allowed = [name for name in STATISTICS if not (name == "cross_entropy" and result.classes)]
    if statistic not in allowed:
        raise InputError(
            f"unknown statistic {statistic!r}; allowed are {', '.join(allowed)}{did_you_mean(str(statistic), allowed)}"
        )
    what, most = ("token" if result.positions == "every" else "text"), max(map(len, result.panels))
    if not 0 <= start < most:
        raise InputError(f"there is no {what} {start!r} to start the figure at; allowed are 0 to {most - 1}")
    cut = (panel[start : start + MAX_TOKENS] for panel in result.panels)
    panels = [panel for panel in cut if panel][:MAX_TEXTS]
    layers = [*evenly_apart(result.layers, MAX_LAYERS), result.layers]
    notes = []
    if start or most > MAX_TOKENS:
        last = min(start + MAX_TOKENS, most) - 1
        notes.append(f"{what}s {start} to {last} of {most}; figure(start=…) draws others")
    if len(panels) < len(result.panels):
        notes.append(f"{len(panels)} of {len(result.panels)} texts")
    if len(layers) <= result.layers:
        notes.append(f"{len(layers)} of {result.layers + 1} layers, evenly apart")

    tall = HEADING + CELL_HEIGHT * (len(layers) + 1) + FOOTER
    height = HEADER + tall * len(panels) + (0.25 if notes else 0.05)
    sheet = sheet_of(max(LEFT + CELL_WIDTH * max(map(len, panels)) + RIGHT, MIN_WIDTH), height)
    high = highest(chain(*panels), statistic)
    _header(sheet, result, STATISTICS[statistic], high)
    for number, panel in enumerate(panels):
        top = HEADER + number * tall
        if len(result.panels) > 1:
            write(sheet, MARGIN, top - 0.06, f"text {panel[0].number}", size=8, weight="bold")
        _panel(sheet, panel, layers, statistic, high, top)
        _tokens(sheet, panel, top + CELL_HEIGHT * len(layers) + 0.05, numbered=what == "text")
    write(sheet, MARGIN, height - 0.1, ";  ".join(notes), size=7.5, color=SOFT)
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    return figure


def _header(sheet: Axes, result: Trajectory, statistic: str, high: float) -> None:
    left = sheet.get_xlim()[1] - RIGHT - BAR_WIDTH - 0.15
    room = left - 0.35 - MARGIN
    title = "Answers by layer of "
    model = shorten(visible(result.model_name), int(room / TITLE_LETTER) - len(title))
    write(sheet, MARGIN, 0.2, title + model, size=10.5, weight="bold", va="top")
    write(sheet, MARGIN, 0.42, shorten(visible(result.lens), int(room / LINE_LETTER)), size=8, color=SOFT, va="top")
    marked = "outlined: the layer from which on the final answer leads"
    write(sheet, MARGIN, 0.59, marked, size=7, color=SOFT, va="top")
    colour_bar(sheet, left, BLUES, ("0", f"{high:.3g}"), statistic)


def _panel(
    sheet: Axes, panel: Sequence[Column], layers: Sequence[int], statistic: str, high: float, top: float
) -> None:
    """Draw the grid below `top`, its rows from the model down."""
    places: list[tuple[Rectangle, str]] = []
    for row, layer in enumerate(reversed(layers)):
        y = top + row * CELL_HEIGHT
        name = "model" if layer == layers[-1] else "0 (input)" if layer == 0 else str(layer)
        write(sheet, LEFT - 0.06, y + CELL_HEIGHT / 2, name, size=6.5, color=SOFT, va="center", ha="right")
        for at, column in enumerate(panel):
            x, level = LEFT + at * CELL_WIDTH, shade(column.value(statistic, layer), high)
            colour = EMPTY if level is None else SHADES[level]
            places.append((Rectangle((x, y), CELL_WIDTH, CELL_HEIGHT), colour))
            style = dict(color=ink(colour), weight="bold" if column.agrees(layer) else "normal")
            word = short_token(column.answer(layer), LETTERS_PER_CELL)
            write(
                sheet, x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2, word, size=6, ha="center", va="center_baseline", **style
            )
            if layer == next(each for each in layers if each >= column.settled):
                box = Rectangle((x + 0.012, y + 0.012), CELL_WIDTH - 0.024, CELL_HEIGHT - 0.024, fill=False, zorder=2)
                box.set(edgecolor=MARK, linewidth=1.1)
                sheet.add_patch(box)
    fill(sheet, places, edge="white")


def _tokens(sheet: Axes, panel: Sequence[Column], y: float, *, numbered: bool) -> None:
    """Write the tokens below the grid, and the numbers of texts if columns are texts."""
    write(sheet, LEFT - 0.06, y, "token", size=6.5, color=SOFT, ha="right", va="top")
    if numbered:
        write(sheet, LEFT - 0.06, y + 0.14, "text", size=6.5, color=SOFT, ha="right", va="top")
    for at, column in enumerate(panel):
        x = LEFT + (at + 0.5) * CELL_WIDTH
        write(sheet, x, y, short_token(column.token, LETTERS_PER_CELL), size=6.5, ha="center", va="top", style="italic")
        if numbered:
            write(sheet, x, y + 0.14, str(column.number), size=6.5, color=SOFT, ha="center", va="top")
