"""Scored tokens as a figure: the text in coloured boxes, wrapped as text is, and the layers beneath it.

Everything is placed in inches, so that nothing overlaps at any length. A box is as wide as its token in a
monospaced font; where a text is short, each layer is a row of cells under the boxes, and where it is long,
the layers are one heatmap over positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ssmscope.errors import InputError
from ssmscope.show.figure import SOFT
from ssmscope.show.token_figure import EMPTY, MARGIN, MARK, drawable, families, fill, letters, write
from ssmscope.show.tokens import BLUES, SHADES, bounds, ink, ramp, shades, shorten, visible, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.interp.heatmap.result import ScoredText, SelectionHeatmap

TEXTS = 8
"""How many texts one figure holds."""
CELL_TOKENS = 60
"""Up to how many tokens a text has a row of cells per layer under its tokens."""
BOX_TOKENS = 1000
"""How many tokens of a longer text are written out; the heatmap over positions shows all."""

# All in inches; a monospaced character is 0.602 of the font size wide.
FONT_SIZE = 8.5
CHARACTER = FONT_SIZE / 72 * 0.602
PADDING, GAP = 0.035, 0.075
LINE = 9.0
LEFT, RIGHT = 0.75, 1.15
BOX, HEADING, HEADER = 0.21, 0.3, 0.85


@dataclass(frozen=True)
class _Box:
    position: int
    left: float
    width: float
    token: str


def draw(heatmap: SelectionHeatmap, *, start: int = 0) -> Figure:
    """A figure of up to 8 texts, from text number `start` on. Raises InputError if there is no such text."""
    if not 0 <= start < max(len(heatmap), 1):
        raise InputError(f"there is no text {start!r} to start the figure at; allowed are 0 to {len(heatmap) - 1}")
    texts = heatmap.texts[start : start + TEXTS]
    panels = [_Panel(number, text, heatmap) for number, text in enumerate(texts, start=start + 1)]
    line = max([5.2, *(panel.width for panel in panels)])
    rest = len(heatmap) - len(texts)
    height = HEADER + sum(panel.height for panel in panels) + (0.3 if rest else 0.1)
    width = LEFT + line + RIGHT
    figure = Figure(figsize=(width, height), facecolor="white")
    sheet = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    colours = ListedColormap(ramp(BLUES, 256)).with_extremes(bad=EMPTY)
    _header(sheet, heatmap, colours, width, line)
    top = HEADER
    for panel in panels:
        panel.draw(sheet, top, line, colours)
        top += panel.height
    if rest:
        shown = f"texts {start + 1}–{start + len(texts)} of {len(heatmap)}; figure(start=…) draws the others"
        write(sheet, MARGIN, top + 0.05, shown, size=7.5, color=SOFT, va="top")
    return figure


def _header(sheet: Axes, heatmap: SelectionHeatmap, colours: Colormap, width: float, line: float) -> None:
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    height = figure.get_size_inches()[1]
    bar = 1.5
    left = LEFT + line - bar
    room = int((left - 0.5 - MARGIN) / 0.075)
    write(
        sheet,
        MARGIN,
        0.2,
        f"Selection: {heatmap.score_name} (Baleen, Eq. 10)",
        size=10.5,
        weight="bold",
        va="top",
    )
    model = shorten(str(heatmap.provenance.get("model", "")), max(room - len(heatmap.layers_name) - 3, 12))
    write(sheet, MARGIN, 0.42, f"{model} · {heatmap.layers_name}", size=8, color=SOFT, va="top")
    write(sheet, MARGIN, 0.59, f"underlined: the top {heatmap.size}", size=7, color=SOFT, va="top")
    axes = figure.add_axes((left / width, 1 - 0.32 / height, bar / width, 0.11 / height))
    scale = figure.colorbar(ScalarMappable(cmap=colours), cax=axes, orientation="horizontal", ticks=[0, 1])
    scale.outline.set_linewidth(0.4)
    axes.set_xticklabels(["lowest", "highest"], fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)
    axes.set_xlabel(f"{heatmap.score} in each row", fontsize=7, color=SOFT, labelpad=1)


class _Panel:
    """One text: its heading, its boxes, its layers. Lays itself out when made, so that the figure knows its
    size."""

    def __init__(self, number: int, text: ScoredText, heatmap: SelectionHeatmap) -> None:
        self.number, self.text, self.heatmap = number, text, heatmap
        self.cells = len(text) <= CELL_TOKENS
        self.lines = _wrap(text, CELL_TOKENS if self.cells else BOX_TOKENS)
        self.width = max((boxes[-1].left + boxes[-1].width for boxes in self.lines), default=0.0)
        layers = len(heatmap.layers) if len(heatmap.layers) > 1 else 0
        if self.cells:
            self.row = min(0.13, 2.6 / max(layers, 1))
            self.step = BOX + (0.05 + self.row * layers if layers else 0) + (0.16 if layers else 0.06)
            self.below = 0.15
        else:
            self.row = min(0.13, max(1.2, 0.06 * layers) / (layers + 2))
            self.step = BOX + 0.06
            self.below = (0.3 if len(text) > BOX_TOKENS else 0.15) + self.row * (layers + 2) + 0.55
        self.layers = layers
        self.height = HEADING + self.step * len(self.lines) + self.below

    def draw(self, sheet: Axes, top: float, line: float, colours: Colormap) -> None:
        text = self.text
        answer = f"answer “{shorten(visible(text.answer), 40)}”, p = {text.probability:.3f}"
        write(sheet, MARGIN, top + 0.05, f"{self.number}", size=8.5, weight="bold", va="top")
        write(sheet, LEFT, top + 0.05, answer, size=8.5, weight="bold", va="top")
        write(sheet, LEFT + line + 0.08, top + 0.08, "range", size=6.5, color=SOFT, va="top")
        top += HEADING
        mean = shades(text.mean[None], text.special)[0]
        layers = shades(text.scores, text.special)
        for index, boxes in enumerate(self.lines):
            y = top + index * self.step
            _boxes(sheet, boxes, mean, text.rationale, y)
            if index == 0:
                self._label(
                    sheet,
                    y + BOX / 2,
                    line,
                    "mean" if self.layers else "score",
                    bounds(text.mean, text.special),
                )
            if self.cells and self.layers:
                self._cells(sheet, boxes, layers, y + BOX + 0.05, line, named=index == 0)
        if not self.cells:
            self._overview(sheet, np.vstack([mean[None], layers]), top + len(self.lines) * self.step, line, colours)

    def _cells(
        self, sheet: Axes, boxes: Sequence[_Box], levels: np.ndarray, y: float, line: float, *, named: bool
    ) -> None:
        """A row of cells per layer, each under its token."""
        places = [
            (
                Rectangle((box.left + LEFT, y + row * self.row), box.width, self.row),
                _shade(levels[row, box.position]),
            )
            for row in range(self.layers)
            for box in boxes
        ]
        fill(sheet, places, edge="white")
        if named:
            every = max(1, int(np.ceil(0.12 / self.row)))
            for row in range(0, self.layers, every):
                limits = bounds(self.text.scores[row], self.text.special)
                self._label(sheet, y + (row + 0.5) * self.row, line, f"layer {self.heatmap.layers[row]}", limits)

    def _overview(self, sheet: Axes, levels: np.ndarray, top: float, line: float, colours: Colormap) -> None:
        """The average and, set apart beneath it, the layers over positions."""
        figure = sheet.get_figure()
        assert isinstance(figure, Figure)
        width, height = figure.get_size_inches()
        if len(self.text) > BOX_TOKENS:
            note = f"the first {BOX_TOKENS} of {len(self.text)} tokens; below, all of them"
            write(sheet, LEFT, top, note, size=7, color=SOFT, va="top")
            top += 0.15
        image = np.where(levels < 0, np.nan, levels / (SHADES - 1))
        tall = self.row * (self.layers + 2)
        axes = figure.add_axes((LEFT / width, 1 - (top + 0.1 + tall) / height, line / width, tall / height))
        right = len(self.text) - 0.5
        shared: dict[str, Any] = {"cmap": colours, "vmin": 0, "vmax": 1, "aspect": "auto"}
        axes.imshow(image[:1], extent=(-0.5, right, 1.5, 0), **shared)
        if self.layers:
            axes.imshow(image[1:], extent=(-0.5, right, 2 + self.layers, 2), **shared)
        axes.set(xlim=(-0.5, right), ylim=(2 + self.layers, 0), facecolor="white")
        axes.plot(self.text.rationale, [0] * len(self.text.rationale), "v", color=MARK, ms=4, clip_on=False)
        every = max(1, int(np.ceil(0.13 / self.row)))
        rows = range(0, self.layers, every)
        limits = [bounds(self.text.scores[row], self.text.special) for row in rows]
        names = ["mean" if self.layers else "score", *(f"layer {self.heatmap.layers[row]}" for row in rows)]
        axes.set_yticks([0.75, *(row + 2.5 for row in rows)], names, fontsize=6.5, color=SOFT)
        axes.tick_params(length=2, width=0.4, pad=2, labelsize=6.5, labelcolor=SOFT)
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.set_xlabel("position", fontsize=7, color=SOFT, labelpad=1)
        axes.spines[:].set_visible(False)
        for row, limit in zip(rows, limits, strict=True):
            y = top + 0.1 + (row + 2.5) * self.row
            write(sheet, LEFT + line + 0.08, y, limit, size=6.5, color=SOFT, va="center")

    def _label(self, sheet: Axes, y: float, line: float, name: str, limits: str) -> None:
        """A row's name at its left and its range at its right."""
        write(sheet, LEFT - 0.06, y, name, size=6.5, color=SOFT, va="center", ha="right")
        write(sheet, LEFT + line + 0.08, y, limits, size=6.5, color=SOFT, va="center")


def _wrap(text: ScoredText, limit: int) -> list[list[_Box]]:
    """The first `limit` tokens as boxes, in lines of at most LINE inches."""
    lines: list[list[_Box]] = []
    end = LINE
    for position, (gap, token) in enumerate(written(text.tokens, text.words)[:limit]):
        token = drawable(shorten(token, 48))
        width = max(letters(token), 1) * CHARACTER + 2 * PADDING
        left = end + (GAP if gap else 0.012)
        if not lines or left + width > LINE:
            lines.append([])
            left = 0.0
        lines[-1].append(_Box(position, left, width, token))
        end = left + width
    return lines


def _boxes(sheet: Axes, boxes: Sequence[_Box], levels: np.ndarray, rationale: Sequence[int], y: float) -> None:
    """One line of tokens in their boxes, the rationale in bold and underlined."""
    places = [(Rectangle((LEFT + box.left, y), box.width, BOX), _shade(levels[box.position])) for box in boxes]
    kept = [box for box in boxes if box.position in rationale]
    places += [(Rectangle((LEFT + box.left, y + BOX - 0.028), box.width, 0.028), MARK) for box in kept]
    fill(sheet, places, edge="none")
    for box in boxes:
        special = levels[box.position] < 0
        write(
            sheet,
            LEFT + box.left + box.width / 2,
            y + BOX * 0.68,
            box.token,
            size=FONT_SIZE,
            color=SOFT if special else ink(_shade(levels[box.position])),
            weight="bold" if box.position in rationale else "normal",
            style="italic" if special else "normal",
            family=families(),
            ha="center",
        )


def _shade(level: int) -> str:
    return EMPTY if level < 0 else _SHADES[level]


_SHADES = ramp(BLUES)
