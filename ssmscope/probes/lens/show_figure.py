"""Figure of answers by layer: layers × tokens, coloured by a statistic, with every layer's own answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ssmscope.errors import InputError, did_you_mean
from ssmscope.probes.lens.lensed_text import STATISTICS, Column, highest
from ssmscope.probes.lens.result import Trajectory
from ssmscope.render import figure as plot
from ssmscope.render.colours import BLUES, SHADES
from ssmscope.render.letters import drawable
from ssmscope.render.numbers import evenly_spaced
from ssmscope.render.tokens import short_token

MAX_TEXTS, MAX_TOKENS, MAX_LAYERS = 4, 24, 24
"""Maximum numbers of texts, tokens of each, and layers (without the model) in one figure."""
CELL_WIDTH, MIN_CELL_WIDTH, CELL_HEIGHT, SIDES, MIN_WIDTH = 0.64, 0.36, 0.2, 1.6, 7.2
"""Sizes in inches: a cell, the room for names and the colour bar at the sides, and the figure."""
LETTERS_PER_INCH = 16
"""Letters of an answer that fit in an inch."""


def draw(result: Trajectory, frame: plot.Frame, *, statistic: str | None = None, start: int = 0) -> Figure:
    """Draw a panel per text, the embeddings at the bottom and the model at the top: 24 tokens, from number `start` on,
    of 4 texts; for answers at the last position only, one panel with a column per text.

    Raises:
        InputError: an unknown statistic, or no text has a token number `start`.
    """
    statistic = statistic or result.statistic
    allowed = [name for name in STATISTICS if not (name == "cross_entropy" and result.classes)]
    if statistic not in allowed:
        raise InputError(
            f"unknown statistic {statistic!r}; allowed are {', '.join(allowed)}{did_you_mean(str(statistic), allowed)}"
        )
    what, most = ("token" if result.positions == "every" else "text"), max(map(len, result.panels))
    if not 0 <= start < most:
        raise InputError(f"there is no {what} {start!r} to start the figure at; allowed are 0 to {most - 1}")
    wide = frame.sides[0]
    fitting = MAX_TOKENS if wide is None else int(np.clip((wide - SIDES) / MIN_CELL_WIDTH, 1, MAX_TOKENS))
    panels = [each for panel in result.panels if (each := panel[start : start + fitting])][:MAX_TEXTS]
    layers = [*evenly_spaced(result.layers, MAX_LAYERS), result.layers]
    notes = [result.lens, "outlined: the layer from which on the final answer leads"]
    if start or most > fitting:
        last = min(start + fitting, most) - 1
        notes.append(f"{what}s {start} to {last} of {most}; figure(start=…) draws others")
    if len(panels) < len(result.panels):
        notes.append(f"{len(panels)} of {len(result.panels)} texts")
    if len(layers) <= result.layers:
        notes.append(f"{len(layers)} of {result.layers + 1} layers, evenly apart")

    columns, high = max(map(len, panels)), highest(chain(*panels), statistic)
    width = max(CELL_WIDTH * columns + SIDES, MIN_WIDTH)
    sheet = plot.Sheet(frame, f"Answers by layer of {result.model_name}", "; ".join(notes), width=width)
    made = sheet.panels(*[CELL_HEIGHT * len(layers)] * len(panels))
    colours = plot.colours_of(BLUES, 0, high, SHADES)
    room = max(int(LETTERS_PER_INCH * (sheet.width - SIDES) / columns), 3)
    for axes, panel in zip(made, panels):
        _panel(axes, panel, layers, statistic, colours, room, numbered=what == "text")
        axes.set_xlim(-0.5, columns - 0.5)
        if len(result.panels) > 1:
            axes.set_title(f"text {panel[0].number}", weight="bold")
    bar = plot.colour_bar(made, colours, STATISTICS[statistic], below=True)
    bar.set_ticks([0, high], labels=["0", f"{high:.3g}"])
    return sheet.figure


def _panel(
    axes: Axes,
    panel: Sequence[Column],
    layers: Sequence[int],
    statistic: str,
    colours: ScalarMappable,
    room: int,
    *,
    numbered: bool,
) -> None:
    """Draw the answers of a text, its tokens below, and an outline where the final answer begins to lead."""
    values = [[column.value(statistic, layer) for column in panel] for layer in layers]
    texts = [[drawable(short_token(column.answer(layer), room)) for column in panel] for layer in layers]
    tokens = [drawable(short_token(column.token, room)) + f"\ntext {column.number}" * numbered for column in panel]
    plot.cells(
        axes,
        np.array(values),
        colours,
        rows=["0 (input)", *map(str, layers[1:-1]), "model"],
        columns=tokens,
        texts=texts,
        bar=None,
        bold=np.array([[column.agrees(layer) for column in panel] for layer in layers]),
    )
    axes.tick_params(length=0)
    for at, column in enumerate(panel):
        row = next(index for index, layer in enumerate(layers) if layer >= column.settled)
        axes.add_patch(Rectangle((at - 0.48, row - 0.46), 0.96, 0.92, fill=False, edgecolor=plot.MARK, linewidth=1.2))
