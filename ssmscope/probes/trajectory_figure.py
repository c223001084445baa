"""Answers by layer as a picture: layers × tokens, coloured by a statistic, with every layer's own answer.

Everything is placed in inches, so that nothing overlaps at any number of tokens and layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.views.figure import EMPTY, INK, MARGIN, MARK, SOFT, _fill, _write
from ssmscope.interp.views.tokens import BLUES, SHADES, ink, ramp, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.probes.trajectory import LensedText, Trajectory

TEXTS, TOKENS, LAYERS = 4, 24, 24
"""How many texts, tokens of each and layers (beside the model) one figure holds."""

# All in inches.
CELL, ROW, LEFT, RIGHT = 0.64, 0.2, 0.75, 0.25
HEADER, HEADING, FOOTER = 0.95, 0.22, 0.15
LEAST = 7.2
BOLD, PLAIN = 0.105, 0.075
"""How wide a character of the title is at most, and one of the line below it."""
LETTERS = 10
"""As many characters as fit in a cell."""

PROBABILITIES = ("answer_probability", "top_probability")


def draw(result: Trajectory, statistic: str, *, start: int = 0) -> Figure:
    """A panel per text; of answers at the last position only, one panel with a column per text."""
    from ssmscope.probes.trajectory import STATISTICS

    if statistic not in STATISTICS or (statistic == "cross_entropy" and result.classes):
        allowed = [name for name in STATISTICS if not (name == "cross_entropy" and result.classes)]
        raise InputError(
            f"unknown statistic {statistic!r}; allowed are {', '.join(allowed)}{did_you_mean(str(statistic), allowed)}"
        )
    panels = _panels(result, start)
    layers = _shown(result.layers)
    high = 1.0 if statistic in PROBABILITIES else _highest(panels, statistic)
    columns = max(len(panel) for panel in panels)
    width = max(LEFT + CELL * columns + RIGHT, LEAST)
    tall = HEADING + ROW * (len(layers) + 1) + FOOTER
    notes = _notes(result, panels, start, len(layers))
    height = HEADER + tall * len(panels) + (0.25 if notes else 0.05)
    figure = Figure(figsize=(width, height), facecolor="white")
    sheet = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    _header(figure, sheet, result, STATISTICS[statistic], high)
    for number, panel in enumerate(panels):
        top = HEADER + number * tall
        if result.positions == "last":
            _panel(sheet, panel, layers, statistic, high, top, heading="", numbered=start + 1)
        else:
            which = next(i for i, text in enumerate(result.texts, start=1) if text is panel[0][0])
            heading = f"text {which}" if len(result.texts) > 1 else ""
            _panel(sheet, panel, layers, statistic, high, top, heading=heading, numbered=None)
    if notes:
        _write(sheet, MARGIN, height - 0.1, notes, size=7.5, color=SOFT)
    return figure


Column = tuple["LensedText", int]
"""A text, and a column of its arrays."""


def _panels(result: Trajectory, start: int) -> list[list[Column]]:
    most = max(len(text.positions) for text in result.texts) if result.positions == "every" else len(result.texts)
    if not 0 <= start < most:
        what = "token" if result.positions == "every" else "text"
        raise InputError(f"there is no {what} {start!r} to start the figure at; allowed are 0 to {most - 1}")
    if result.positions == "last":
        return [[(text, 0) for text in result.texts[start : start + TOKENS]]]
    every = ([(text, at) for at in range(start, min(start + TOKENS, len(text.positions)))] for text in result.texts)
    return [panel for panel in every if panel][:TEXTS]


def _shown(layers: int) -> list[int]:
    """The layers that are drawn, from the embeddings to the model."""
    from ssmscope.probes.trajectory_terminal import spread

    return [*spread(layers, LAYERS), layers]


def _highest(panels: list[list[Column]], statistic: str) -> float:
    values = np.concatenate([getattr(text, statistic)[:, at] for panel in panels for text, at in panel])
    return max(float(np.nanmax(values)), 1e-9) if not np.isnan(values).all() else 1.0


def _notes(result: Trajectory, panels: list[list[Column]], start: int, layers: int) -> str:
    notes = []
    what = "token" if result.positions == "every" else "text"
    most = max(len(text.positions) for text in result.texts) if what == "token" else len(result.texts)
    if start or most > TOKENS:
        last = min(start + TOKENS, most) - 1
        notes.append(f"{what}s {start} to {last} of {most}; figure(start=…) draws others")
    if what == "token" and len(panels) < len(result.texts):
        notes.append(f"{len(panels)} of {len(result.texts)} texts")
    if layers <= result.layers:
        notes.append(f"{layers} of {result.layers + 1} layers, evenly apart")
    return ";  ".join(notes)


def _header(figure: Figure, sheet: Axes, result: Trajectory, name: str, high: float) -> None:
    width, height = figure.get_size_inches()
    bar = 1.5
    left = width - RIGHT - bar - 0.15
    room = left - 0.35 - MARGIN
    title = "Answers by layer of "
    model = shorten(visible(str(result.provenance.get("model", "a model"))), int(room / BOLD) - len(title))
    _write(sheet, MARGIN, 0.2, title + model, size=10.5, weight="bold", va="top")
    _write(sheet, MARGIN, 0.42, shorten(visible(result.lens), int(room / PLAIN)), size=8, color=SOFT, va="top")
    marked = "outlined: the layer from which on the final answer leads"
    _write(sheet, MARGIN, 0.59, marked, size=7, color=SOFT, va="top")
    axes = figure.add_axes((left / width, 1 - 0.32 / height, bar / width, 0.11 / height))
    colours = ListedColormap(ramp(BLUES, 256))
    mappable = ScalarMappable(norm=Normalize(0, high), cmap=colours)
    scale = figure.colorbar(mappable, cax=axes, orientation="horizontal", ticks=[0, high])
    scale.outline.set_linewidth(0.4)
    axes.set_xticklabels(["0", f"{high:.3g}"], fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)
    axes.set_xlabel(name, fontsize=7, color=SOFT, labelpad=1)


def _panel(
    sheet: Axes,
    panel: list[Column],
    layers: list[int],
    statistic: str,
    high: float,
    top: float,
    *,
    heading: str,
    numbered: int | None,
) -> None:
    """The grid from `top` on, its rows from the model down; where columns are texts, the first one's number."""
    shades = ramp(BLUES)
    places: list[tuple[Rectangle, str]] = []
    words: list[tuple[float, float, str, str, bool]] = []
    outlined: list[tuple[Rectangle, str]] = []
    if heading:
        _write(sheet, MARGIN, top - 0.06, heading, size=8, weight="bold")
    for row, layer in enumerate(reversed(layers)):
        y = top + row * ROW
        name = "model" if layer == layers[-1] else "0 (input)" if layer == 0 else str(layer)
        _write(sheet, LEFT - 0.06, y + ROW / 2, name, size=6.5, color=SOFT, va="center", ha="right")
        for column, (text, at) in enumerate(panel):
            value = float(getattr(text, statistic)[layer, at])
            x = LEFT + column * CELL
            shade = EMPTY if np.isnan(value) else shades[round(min(max(value / high, 0.0), 1.0) * (SHADES - 1))]
            places.append((Rectangle((x, y), CELL, ROW), shade))
            words.append((x + CELL / 2, y + ROW / 2, text.answers[layer][at], ink(shade), bool(text.agrees[layer, at])))
            if layer == next(each for each in layers if each >= text.settled[at]):
                outlined.append((Rectangle((x + 0.012, y + 0.012), CELL - 0.024, ROW - 0.024), "none"))
    _fill(sheet, places, edge="white")
    for box, _ in outlined:
        box.set(fill=False, edgecolor=MARK, linewidth=1.1)
        sheet.add_patch(box)
    for x, y, word, colour, agrees in words:
        shown = shorten(visible(word).strip(" ") or "␣", LETTERS)
        weight = "bold" if agrees else "normal"
        _write(sheet, x, y, shown, size=6, color=colour, weight=weight, ha="center", va="center_baseline")
    below = top + ROW * len(layers) + 0.05
    for column, (text, at) in enumerate(panel):
        token = shorten(visible(text.tokens[text.positions[at]]).strip(" ") or "␣", LETTERS)
        x = LEFT + (column + 0.5) * CELL
        _write(sheet, x, below, token, size=6.5, color=INK, ha="center", va="top", style="italic")
        if numbered is not None:
            _write(sheet, x, below + 0.14, str(numbered + column), size=6.5, color=SOFT, ha="center", va="top")
    _write(sheet, LEFT - 0.06, below, "token", size=6.5, color=SOFT, ha="right", va="top")
    if numbered is not None:
        _write(sheet, LEFT - 0.06, below + 0.14, "text", size=6.5, color=SOFT, ha="right", va="top")
