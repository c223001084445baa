"""Figure of grids of words by layer and token, placed in inches, so that nothing overlaps at any number of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ssmscope.render.drawing import BAR_WIDTH, EMPTY, MARGIN, MARK, colour_bar, fill, sheet_of, write
from ssmscope.render.figure import SOFT
from ssmscope.render.tokens import BLUES, evenly_apart, ink, ramp, short_token, shorten, visible
from ssmscope.render.word_grid import WordGrid, WordGrids, shade

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

MAX_TEXTS, MAX_TOKENS, MAX_LAYERS = 4, 24, 24
"""Maximum numbers of texts, tokens of each, and layers (without the model) in one figure."""

CELL_WIDTH, CELL_HEIGHT, LEFT, RIGHT = 0.64, 0.2, 0.75, 0.25
HEADER, HEADING, FOOTER = 0.95, 0.22, 0.15
MIN_WIDTH = 7.2
"""Sizes in inches: a cell and margins, heights of the header, of a panel's heading and footer, and the figure."""
TITLE_LETTER, LINE_LETTER = 0.105, 0.075
"""Maximum width in inches of a letter of the title, and of the line below it."""
LETTERS_PER_CELL = 10


def draw(result: WordGrids, title: str, model: str, *, start: int = 0) -> Figure:
    """Draw a panel per text, from column `start` on, layer 0 at the bottom and the model at the top.

    Args:
        title, model: the title, and the name at its end, which is shortened if necessary.
    """
    most = max(len(grid.tokens) for grid in result.grids)
    panels = [grid.part(slice(start, start + MAX_TOKENS)) for grid in result.grids if len(grid.tokens) > start]
    shown = replace(result, grids=panels[:MAX_TEXTS])
    layers = [*evenly_apart(result.layers, MAX_LAYERS), result.layers]
    notes = []
    if start or most > MAX_TOKENS:
        last = min(start + MAX_TOKENS, most) - 1
        notes.append(f"{result.column}s {start} to {last} of {most}; figure(start=…) draws others")
    if len(shown.grids) < len(result.grids):
        notes.append(f"{len(shown.grids)} of {len(result.grids)} texts")
    if len(layers) <= result.layers:
        notes.append(f"{len(layers)} of {result.layers + 1} layers, evenly apart")

    tall = HEADING + CELL_HEIGHT * (len(layers) + 1) + FOOTER
    height = HEADER + tall * len(shown.grids) + (0.25 if notes else 0.05)
    sheet = sheet_of(max(LEFT + CELL_WIDTH * max(len(grid.tokens) for grid in shown.grids) + RIGHT, MIN_WIDTH), height)
    high = shown.highest
    bar = sheet.get_xlim()[1] - RIGHT - BAR_WIDTH - 0.15
    room = bar - 0.35 - MARGIN
    model = shorten(visible(model), int(room / TITLE_LETTER) - len(title))
    write(sheet, MARGIN, 0.2, title + model, size=10.5, weight="bold", va="top")
    write(sheet, MARGIN, 0.42, shorten(visible(result.source), int(room / LINE_LETTER)), size=8, color=SOFT, va="top")
    marked = "outlined: the layer from which on the final answer leads"
    write(sheet, MARGIN, 0.59, marked, size=7, color=SOFT, va="top")
    colour_bar(sheet, bar, BLUES, ("0", f"{high:.3g}"), result.names[result.score])
    for number, grid in enumerate(shown.grids):
        top = HEADER + number * tall
        if len(result.grids) > 1:
            write(sheet, MARGIN, top - 0.06, grid.label, size=8, weight="bold")
        _cells(sheet, grid, layers, grid.scores[result.score], high, top)
        _tokens(sheet, grid, top + CELL_HEIGHT * len(layers) + 0.05, numbered=result.column == "text")
    write(sheet, MARGIN, height - 0.1, ";  ".join(notes), size=7.5, color=SOFT)
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    return figure


def _cells(sheet: Axes, grid: WordGrid, layers: Sequence[int], scores: np.ndarray, high: float, top: float) -> None:
    """Draw the cells below `top`, from the model down."""
    places: list[tuple[Rectangle, str]] = []
    shades = ramp(BLUES)
    for row, layer in enumerate(reversed(layers)):
        y = top + row * CELL_HEIGHT
        name = "model" if layer == layers[-1] else "0 (input)" if layer == 0 else str(layer)
        write(sheet, LEFT - 0.06, y + CELL_HEIGHT / 2, name, size=6.5, color=SOFT, va="center", ha="right")
        for at, settled in enumerate(grid.settled):
            x, level = LEFT + at * CELL_WIDTH, shade(float(scores[layer, at]), high)
            colour = EMPTY if level is None else shades[level]
            places.append((Rectangle((x, y), CELL_WIDTH, CELL_HEIGHT), colour))
            bold = "bold" if grid.same[layer, at] else "normal"
            style: dict[str, Any] = {"color": ink(colour), "weight": bold, "size": 6}
            word, middle = (
                short_token(grid.words[layer][at], LETTERS_PER_CELL),
                (x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2),
            )
            write(sheet, *middle, word, ha="center", va="center_baseline", **style)
            if layer == next(each for each in layers if each >= settled):
                box = Rectangle((x + 0.012, y + 0.012), CELL_WIDTH - 0.024, CELL_HEIGHT - 0.024, fill=False, zorder=2)
                box.set(edgecolor=MARK, linewidth=1.1)
                sheet.add_patch(box)
    fill(sheet, places, edge="white")


def _tokens(sheet: Axes, grid: WordGrid, y: float, *, numbered: bool) -> None:
    """Write the tokens below the grid, and the numbers of texts if columns are texts."""
    rows: list[tuple[str, list[str], dict[str, Any]]]
    rows = [("token", [short_token(token, LETTERS_PER_CELL) for token in grid.tokens], {"style": "italic"})]
    rows += [("text", list(map(str, grid.numbers)), {"color": SOFT})] if numbered else []
    for row, (name, words, style) in enumerate(rows):
        write(sheet, LEFT - 0.06, y + 0.14 * row, name, size=6.5, color=SOFT, ha="right", va="top")
        for at, word in enumerate(words):
            write(sheet, LEFT + (at + 0.5) * CELL_WIDTH, y + 0.14 * row, word, size=6.5, ha="center", va="top", **style)
