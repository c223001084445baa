"""Figure of grids of words by layer and token: layer 0 at the bottom, the model at the top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES, SHADES
from ssmscope.render.letters import drawable
from ssmscope.render.numbers import evenly_spaced
from ssmscope.render.tokens import short_token
from ssmscope.render.word_grid import WordGrid, WordGrids

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

BAR_INCHES = 0.35
MAX_TEXTS, MAX_TOKENS, MAX_LAYERS = 4, 24, 24
CELL_WIDTH, MIN_CELL_WIDTH, CELL_HEIGHT, SIDES, MIN_WIDTH = 0.64, 0.36, 0.2, 1.6, 7.2
LETTERS_PER_INCH = 16


def draw(result: WordGrids, title: str, frame: plot.Frame, *, start: int = 0) -> Figure:
    """Draw a panel per text, from column `start` on."""
    most, wide = max(len(grid.tokens) for grid in result.grids), frame.sides[0]
    fitting = MAX_TOKENS if wide is None else int(np.clip((wide - SIDES) / MIN_CELL_WIDTH, 1, MAX_TOKENS))
    panels = [grid.part(slice(start, start + fitting)) for grid in result.grids if len(grid.tokens) > start]
    shown = replace(result, grids=panels[:MAX_TEXTS])
    layers = [*evenly_spaced(result.layers, MAX_LAYERS), result.layers]
    notes = ["outlined: the layer from which on the final answer leads"]
    if start or most > fitting:
        last = min(start + fitting, most) - 1
        notes.append(f"{result.column}s {start} to {last} of {most}; figure(start=…) draws others")
    if len(shown.grids) < len(result.grids):
        notes.append(f"{len(shown.grids)} of {len(result.grids)} texts")
    if len(layers) <= result.layers:
        notes.append(f"{len(layers)} of {result.layers + 1} layers, evenly apart")
    columns, high = max(len(grid.tokens) for grid in shown.grids), shown.highest
    width = max(CELL_WIDTH * columns + SIDES, MIN_WIDTH)
    sheet = plot.Sheet(frame, title, "; ".join(notes), width=width)
    made = sheet.panels(*[CELL_HEIGHT * len(layers) + BAR_INCHES / len(shown.grids)] * len(shown.grids))
    colours = plot.colours_of(BLUES, 0, high, SHADES)
    room = max(int(LETTERS_PER_INCH * (sheet.width - SIDES) / columns), 3)
    for axes, grid in zip(made, shown.grids):
        _panel(axes, grid, layers, result, colours, room)
        axes.set_xlim(-0.5, columns - 0.5)
        if len(result.grids) > 1:
            axes.set_title(grid.label, weight="bold")
    bar = plot.colour_bar(made, colours, result.names[result.score], below=True)
    bar.set_ticks([0, high], labels=["0", f"{high:.3g}"])
    return sheet.figure


def _panel(
    axes: Axes, grid: WordGrid, layers: Sequence[int], result: WordGrids, colours: ScalarMappable, room: int
) -> None:
    """Draw the words of a text, its tokens below, and an outline where the final answer begins to lead."""
    numbers = [f"\ntext {number}" * (result.column == "text") for number in grid.numbers]
    plot.cells(
        axes,
        grid.scores[result.score][layers],
        colours,
        rows=["0 (input)", *map(str, layers[1:-1]), "model"],
        columns=[drawable(short_token(token, room)) + number for token, number in zip(grid.tokens, numbers)],
        texts=[[drawable(short_token(word, room)) for word in grid.words[layer]] for layer in layers],
        bar=None,
        bold=grid.same[layers],
    )
    axes.tick_params(length=0)
    for at, settled in enumerate(grid.settled):
        row = next(index for index, layer in enumerate(layers) if layer >= settled)
        outline = Rectangle((at - 0.48, row - 0.46), 0.96, 0.92, fill=False, edgecolor=plot.MARK, linewidth=1.2)
        axes.add_patch(outline)
