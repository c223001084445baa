"""Explanations as a figure: a row of coloured tokens per method, strips of a long text, maps of an image.

Everything is placed in inches, so that nothing overlaps at any number of tokens or methods.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ssmscope.errors import InputError
from ssmscope.interp.explain import shades as explained
from ssmscope.interp.heatmap.figure import BOX, FONT_SIZE, _wrap
from ssmscope.show import signed
from ssmscope.show.figure import INK, SOFT
from ssmscope.show.token_figure import MARGIN, MARK, families, fill, write
from ssmscope.show.tokens import BLUES, ink, ramp, shorten, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from ssmscope.interp.explain.result import Attribution, ExplainedText, Explanation
    from ssmscope.interp.heatmap.figure import _Box

TEXTS = 8
"""How many texts or images one figure holds."""
ROW_TOKENS = 60
"""Up to how many tokens a text has a row of its tokens per method; longer ones have strips over positions."""
BOX_TOKENS = 1000
"""How many tokens of a longer text are written out; the strips show all."""
ACROSS = 5
"""How many pictures stand beside each other."""

LEFT, RIGHT, HEADER, HEADING = 1.3, 1.55, 0.92, 0.32
STRIP, BETWEEN = 0.18, 0.06
SIDE, GAP, CAPTION = 1.5, 0.18, 0.42

FRAME = "#b01e8a"
"""Of the top pixels: neither orange nor blue, which are for and against."""

_SIGNED = signed.shades()
_BLUES = ramp(BLUES)


def draw(result: Explanation, *, start: int = 0) -> Figure:
    """A figure of up to 8 texts or images, from number `start` on. Raises InputError if there is no such text."""
    if not 0 <= start < max(len(result), 1):
        raise InputError(f"there is no text {start!r} to start the figure at; allowed are 0 to {len(result) - 1}")
    chosen = result.texts[start : start + TEXTS]
    panels = [_panel(number, text, result.top) for number, text in enumerate(chosen, start=start)]
    line = max([5.2, *(panel.width for panel in panels)])
    rest = len(result) - len(chosen)
    width, height = LEFT + line + RIGHT, HEADER + sum(panel.height for panel in panels) + (0.3 if rest else 0.1)
    figure = Figure(figsize=(width, height), facecolor="white")
    sheet = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    _header(sheet, result, width)
    top = HEADER
    for panel in panels:
        panel.draw(sheet, top, line)
        top += panel.height
    if rest:
        shown = f"texts {start}–{start + len(chosen) - 1} of {len(result)}; figure(start=…) draws the others"
        write(sheet, MARGIN, top + 0.05, shown, size=7.5, color=SOFT, va="top")
    return figure


def _header(sheet: Axes, result: Explanation, width: float) -> None:
    kinds = [each.signed for text in result.texts[:1] for each in text.attributions]
    bars: list[tuple[tuple[str, ...], str, str]] = [(signed.SIGNED, "against", "for")] if any(kinds) else []
    bars += [] if all(kinds) else [(BLUES, "lowest", "highest")]
    left = width - MARGIN - 1.75 * len(bars)
    model = str(result.provenance.get("model", ""))
    write(sheet, MARGIN, 0.2, f"Explanation of {shorten(visible(model), 48)}", size=10.5, weight="bold", va="top")
    write(
        sheet,
        MARGIN,
        0.42,
        "each row in its own range, special tokens in it or at its end",
        size=7,
        color=SOFT,
        va="top",
    )
    write(sheet, MARGIN, 0.57, f"underlined or framed: the top {result.top}", size=7, color=SOFT, va="top")
    for place, (stops, low, high) in enumerate(bars):
        axes = _axes(sheet, left + place * 1.75 + 0.2, 0.5, 1.35, 0.11)
        colours = ScalarMappable(cmap=ListedColormap(ramp(stops, 257)))
        scale = axes.get_figure().colorbar(colours, cax=axes, orientation="horizontal", ticks=[0, 1])  # type: ignore[union-attr]
        scale.outline.set_linewidth(0.4)
        axes.set_xticklabels([low, high], fontsize=7, color=SOFT)
        axes.tick_params(length=2, width=0.4, pad=1.5)


def _panel(number: int, text: ExplainedText, top: int) -> _Panel:
    if text.pixels is not None:
        return _Pictures(number, text, top)
    return (_Rows if len(text) <= ROW_TOKENS else _Strips)(number, text, top)


class _Panel:
    """One text: its heading and what stands below it. Lays itself out when made, so that the figure knows its size."""

    width: float
    height: float

    def __init__(self, number: int, text: ExplainedText, top: int) -> None:
        self.number, self.text, self.top = number, text, top
        self.colours = [_colours(each, text) for each in text.attributions]
        self.kept = [frozenset(text.top(each, top)) for each in text.attributions]
        self.lay_out()

    def lay_out(self) -> None:
        """Set `width`, of what stands right of the names, and `height`."""

    def draw(self, sheet: Axes, top: float, line: float) -> None:
        answer = f"answer “{shorten(visible(self.text.answer), 24)}”, p = {self.text.probability:.3f}"
        write(sheet, MARGIN, top + 0.05, f"{self.number}", size=8.5, weight="bold", va="top")
        write(sheet, LEFT, top + 0.05, answer, size=8.5, weight="bold", va="top")
        side = LEFT + max(3.2, 0.11 * len(answer))
        room = int((LEFT + line + RIGHT - side - MARGIN) / 0.07)
        write(sheet, side, top + 0.06, explained.about(self.text, room), size=8, color=SOFT, va="top")

    def name(self, sheet: Axes, y: float, index: int) -> None:
        """A method at the left of its row."""
        name = shorten(visible(self.text.attributions[index].method), 24)
        write(sheet, LEFT - 0.07, y, name, size=7, color=INK, va="center", ha="right")

    def limits(self, sheet: Axes, y: float, line: float, index: int) -> None:
        """A row's range at its right, and whether its scores add up."""
        each = self.text.attributions[index]
        write(sheet, LEFT + line + 0.08, y, explained.limits(each, self.text), size=6.5, color=SOFT, va="center")
        if doubt := explained.doubt(each):
            write(sheet, LEFT + line + 0.82, y, doubt, size=6.5, color=MARK, va="center")


class _Rows(_Panel):
    """Of every line of the text a row per method."""

    def lay_out(self) -> None:
        self.lines = _wrap(self.text, ROW_TOKENS)  # type: ignore[arg-type]
        self.width = max(boxes[-1].left + boxes[-1].width for boxes in self.lines)
        self.row = BOX + BETWEEN
        self.step = self.row * len(self.text.attributions) + (0.12 if len(self.text.attributions) > 1 else 0.04)
        self.height = HEADING + self.step * len(self.lines) + 0.14

    def draw(self, sheet: Axes, top: float, line: float) -> None:
        super().draw(sheet, top, line)
        for number, boxes in enumerate(self.lines):
            for index in range(len(self.text.attributions)):
                y = top + HEADING + number * self.step + index * self.row
                _boxes(sheet, boxes, self.colours[index], self.text.special, self.kept[index], y)
                self.name(sheet, y + BOX / 2, index)
                if number == 0:
                    self.limits(sheet, y + BOX / 2, line, index)


class _Strips(_Panel):
    """The text in the colours of the first method, and a strip over positions per method."""

    def lay_out(self) -> None:
        self.lines = _wrap(self.text, BOX_TOKENS)  # type: ignore[arg-type]
        self.width = max(boxes[-1].left + boxes[-1].width for boxes in self.lines)
        self.step = BOX + BETWEEN
        self.cut = 0.16 if len(self.text) > BOX_TOKENS else 0.0
        self.tall = STRIP * len(self.text.attributions)
        self.height = HEADING + self.step * len(self.lines) + self.cut + 0.14 + self.tall + 0.5

    def draw(self, sheet: Axes, top: float, line: float) -> None:
        super().draw(sheet, top, line)
        y = top + HEADING
        self.name(sheet, y + BOX / 2, 0)
        for boxes in self.lines:
            _boxes(sheet, boxes, self.colours[0], self.text.special, self.kept[0], y)
            y += self.step
        if self.cut:
            note = f"the first {BOX_TOKENS} of {len(self.text)} tokens; below, all of them"
            write(sheet, LEFT, y, note, size=7, color=SOFT, va="top")
        y += self.cut + 0.1
        axes = _axes(sheet, LEFT, y, line, self.tall)
        count, right = len(self.colours), len(self.text) - 0.5
        wide = max(1.0, 0.03 * len(self.text) / line)
        for index, (colours, kept) in enumerate(zip(self.colours, self.kept, strict=True)):
            image = np.array([[to_rgb(colour) for colour in colours]])
            axes.imshow(image, extent=(-0.5, right, index + 0.76, index), aspect="auto", interpolation="nearest")
            for position in kept:
                axes.add_patch(Rectangle((position - wide / 2, index + 0.79), wide, 0.13, color=INK, linewidth=0))
            self.name(sheet, y + (index + 0.4) * STRIP, index)
            self.limits(sheet, y + (index + 0.4) * STRIP, line, index)
        axes.set(xlim=(-0.5, right), ylim=(count, 0), yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.tick_params(length=2, width=0.4, pad=2, labelsize=6.5, labelcolor=SOFT)
        axes.set_xlabel("position", fontsize=7, color=SOFT, labelpad=1)
        axes.spines[:].set_visible(False)


class _Pictures(_Panel):
    """The image and a map per method."""

    def lay_out(self) -> None:
        self.width = ACROSS * SIDE + (ACROSS - 1) * GAP - LEFT + MARGIN
        self.rows = math.ceil((1 + len(self.text.attributions)) / ACROSS)
        self.height = HEADING + self.rows * (SIDE + CAPTION)

    def draw(self, sheet: Axes, top: float, line: float) -> None:
        super().draw(sheet, top, line)
        pixels = self.text.pixels
        assert pixels is not None
        high, wide, channels = pixels.shape
        grey = channels != 3
        for place in range(1 + len(self.text.attributions)):
            left = MARGIN + (place % ACROSS) * (SIDE + GAP)
            axes = _axes(sheet, left, top + HEADING + (place // ACROSS) * (SIDE + CAPTION), SIDE, SIDE)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(color=SOFT, linewidth=0.4)
            if not place:
                shown = (pixels.mean(-1) if grey else pixels).clip(0, 1)
                axes.imshow(shown, cmap="gray" if grey else None, vmin=0, vmax=1, interpolation="nearest")
                axes.set_xlabel("image", fontsize=7, color=SOFT, labelpad=3)
                continue
            each = self.text.attributions[place - 1]
            rgb = [to_rgb(colour) for colour, own in zip(self.colours[place - 1], self.text.special) if not own]
            axes.imshow(np.array(rgb).reshape(high, wide, 3), interpolation="nearest")
            for position in self.kept[place - 1]:
                corner = (position % wide - 0.5, position // wide - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=FRAME, linewidth=1.2))
            below = " · ".join(filter(None, (explained.limits(each, self.text), explained.doubt(each))))
            axes.set_xlabel(f"{visible(each.method)}\n{below}", fontsize=7, color=SOFT, labelpad=3)


def _colours(each: Attribution, text: ExplainedText) -> list[str]:
    shades = explained.levels(each, text)
    return [_SIGNED[level + signed.STEPS] if each.signed else _BLUES[level] for level in shades]


def _boxes(
    sheet: Axes, boxes: Sequence[_Box], colours: Sequence[str], special: np.ndarray, kept: frozenset[int], y: float
) -> None:
    """One line of tokens in the colours of a method, its top tokens underlined and in bold."""
    places = [(Rectangle((LEFT + box.left, y), box.width, BOX), colours[box.position]) for box in boxes]
    places += [
        (Rectangle((LEFT + box.left, y + BOX + 0.007), box.width, 0.028), INK) for box in boxes if box.position in kept
    ]
    fill(sheet, places, edge="none")
    for box in boxes:
        write(
            sheet,
            LEFT + box.left + box.width / 2,
            y + BOX * 0.68,
            box.token,
            size=FONT_SIZE,
            color=ink(colours[box.position]),
            weight="bold" if box.position in kept else "normal",
            style="italic" if special[box.position] else "normal",
            family=families(),
            ha="center",
        )


def _axes(sheet: Axes, left: float, top: float, wide: float, tall: float) -> Axes:
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, 1 - (top + tall) / height, wide / width, tall / height))
