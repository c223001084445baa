"""Draw texts whose tokens are coloured: rows of tokens, strips over positions for long texts, maps for images.

Everything is placed in inches, so that nothing overlaps at any number of tokens or rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ssmscope.errors import InputError
from ssmscope.render.drawing import BAR_WIDTH, EMPTY, MARGIN, MARK, colour_bar, drawable, families, fill, letters, write
from ssmscope.render.figure import INK, SOFT, SUBTITLE_LETTERS_PER_INCH, TITLE_LETTERS_PER_INCH, Sheet
from ssmscope.render.numbers import number
from ssmscope.render.signed import SIGNED, STEPS
from ssmscope.render.token_rows import ends_of, kinds
from ssmscope.render.tokens import BLUES, SHADES, chance, ink, ramp, shorten, visible, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.render.blocks import TokenRow, TokenRows, TokenText

# All widths and heights are in inches; a monospaced character is 0.602 of the font size wide.
FONT_SIZE = 8.5
CHARACTER_WIDTH = FONT_SIZE / 72 * 0.602
PADDING, WORD_GAP, LINE_WIDTH, BOX_HEIGHT = 0.035, 0.075, 9.0, 0.21
MIN_LABEL_WIDTH, RIGHT_WIDTH, HEADING_HEIGHT, FOOTER_HEIGHT, ROW_GAP = 1.3, 1.55, 0.32, 0.14, 0.06
MAX_LABEL_WIDTH, LABEL_CHARACTER_WIDTH = 3.2, 0.05
"""Maximum width of row names, and the width of one of their characters."""
STRIP_HEIGHT, PICTURE_SIDE, PICTURE_GAP, CAPTION_HEIGHT = 0.18, 1.5, 0.18, 0.62
PICTURES_PER_ROW = 5
"""Number of pictures next to each other."""
MAX_WRITTEN_ROWS, MAX_WRITTEN_TOKENS = 12, 800
"""Maximum rows, and tokens in all of them, for which every row is written out; other texts become strips."""
MAX_BOXES = 1000
"""Maximum tokens of a long text that are written out; the strips show all."""
PIXEL_SHADES = 257
"""Number of colours in a map of pixels."""
FRAME = "#b01e8a"
"""Colour of the frame of marked pixels: neither orange nor blue, which mean against and for."""


@dataclass(frozen=True)
class Box:
    """A token and its place within a line of text, in inches."""

    position: int
    left: float
    width: float
    token: str


def wrap(tokens: Sequence[str], words: Sequence[int | None], most: int = MAX_BOXES) -> list[list[Box]]:
    """Return the first `most` tokens as boxes, in lines of at most LINE_WIDTH inches."""
    lines: list[list[Box]] = []
    end = LINE_WIDTH
    for position, (gap, token) in enumerate(written(tokens, words)[:most]):
        token = drawable(shorten(token, 48))
        width = max(letters(token), 1) * CHARACTER_WIDTH + 2 * PADDING
        left = end + (WORD_GAP if gap else 0.012)
        if not lines or left + width > LINE_WIDTH:
            lines.append([])
            left = 0.0
        lines[-1].append(Box(position, left, width, token))
        end = left + width
    return lines


def draw_boxes(
    sheet: Axes,
    boxes: Sequence[Box],
    left: float,
    y: float,
    text: TokenText,
    row: TokenRow | None = None,
) -> None:
    """Draw one line of tokens in the colours of a row, or without colour.

    Marked tokens are underlined and bold, the query is framed, and the text's span is underlined in colour.
    """
    fills = _colours(row) if row is not None else ["#ffffff"] * len(text.tokens)
    kept, against = (set(row.marked), set(row.against)) if row is not None else (set(), set())
    span = range(*text.span) if text.span is not None else ()
    places = [(Rectangle((left + box.left, y), box.width, BOX_HEIGHT), fills[box.position]) for box in boxes]
    for box in boxes:
        lower = Rectangle((left + box.left, y + BOX_HEIGHT + 0.007), box.width, 0.028)
        if box.position in kept or box.position in against or box.position in span:
            places.append((lower, INK if box.position in kept else MARK))
    fill(sheet, places, edge="none")
    for box in boxes:
        if row is not None and box.position == row.query:
            frame = Rectangle((left + box.left, y), box.width, BOX_HEIGHT, fill=False, edgecolor=INK, linewidth=0.9)
            sheet.add_patch(frame)
        style: dict[str, Any] = dict(
            size=FONT_SIZE,
            color=SOFT if row is not None and fills[box.position] == EMPTY else ink(fills[box.position]),
            weight="bold" if box.position in kept or box.position in against else "normal",
            style="italic" if text.words[box.position] is None else "normal",
            family=families(),
            ha="center",
        )
        write(sheet, left + box.left + box.width / 2, y + BOX_HEIGHT * 0.68, box.token, **style)


def _colours(row: TokenRow, count: int | None = None) -> list[str]:
    """Return the colour of every token, from a palette of `count` or, by default, of as many as in other views."""
    palette = ramp(SIGNED if row.signed else BLUES, count or (2 * STEPS + 1 if row.signed else SHADES))
    return [palette[shade] if shade >= 0 else EMPTY for shade in row.shades(count=count).tolist()]


class Panel(ABC):
    """A text of a figure, under its heading. It is laid out when it is made, so that the figure knows its size.

    Attributes:
        width: width of its content in inches.
        height: height in inches, with its heading.
        left: inches from the left at which its tokens begin, after the names of rows; 0 without such names.
    """

    width: float
    height: float
    left: float = 0.0

    def __init__(self, number: int, text: TokenText) -> None:
        self.number, self.text = number, text

    def wrap(self, label_lines: int) -> None:
        """Break the text into lines of tokens after row names of so many lines."""
        self.lines = wrap(self.text.tokens, self.text.words)
        self.left = _left(self.text.rows, label_lines)
        tokens = max((boxes[-1].left + boxes[-1].width for boxes in self.lines), default=0)
        self.width = self.left + tokens + RIGHT_WIDTH

    def indent(self, left: float) -> None:
        """Align the left end of its tokens with those of other panels."""
        if self.left:
            self.width += left - self.left
            self.left = left

    def draw(self, sheet: Sheet, top: float, line: float) -> None:
        """Draw it `top` inches below the sheet's upper end; `line` is the width of the widest panel."""
        text, paper = self.text, sheet.paper
        answer = f"{self.number}   answer “{shorten(visible(text.answer), 24)}”"
        answer += f", {said}" if (said := chance(text.probability)) else ""
        write(paper, MARGIN, top + 0.05, answer, size=8.5, weight="bold", va="top")
        side = MARGIN + max(3.4, 0.105 * letters(drawable(answer)))
        room = max(int((sheet.width - side - MARGIN) / 0.072), 8)
        write(paper, side, top + 0.06, shorten(visible(text.about), room), size=8, color=SOFT, va="top")
        self.draw_inner(sheet, top + HEADING_HEIGHT, line)

    @abstractmethod
    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        """Draw the content below the heading."""


def panel(number: int, text: TokenText) -> Panel:
    """Return a panel of a text: rows of tokens, strips if it is long, or pictures if its tokens are pixels."""
    if text.pixels is not None:
        return _Pictures(number, text)
    short = len(text.rows) <= MAX_WRITTEN_ROWS and len(text.rows) * len(text.tokens) <= MAX_WRITTEN_TOKENS
    return (_Rows if short else _Strips)(number, text)


def _names(row: TokenRow, lines: int) -> list[str]:
    """Return the name of a row in one line or in its own lines."""
    parts = [visible(part) for part in row.name.splitlines()]
    return [" · ".join(parts)] if lines == 1 else parts


def _left(rows: Sequence[TokenRow], lines: int) -> float:
    """Return the width that the names of rows need at the left."""
    longest = max((letters(drawable(part)) for row in rows for part in _names(row, lines)), default=0)
    return min(max(MIN_LABEL_WIDTH, 0.12 + LABEL_CHARACTER_WIDTH * longest), MAX_LABEL_WIDTH)


def _name(paper: Axes, left: float, y: float, row: TokenRow, *, lines: int = 2) -> None:
    """Write the name of a row at its left."""
    parts, room = _names(row, lines), round((left - 0.1) / LABEL_CHARACTER_WIDTH)
    for at, part in enumerate(parts):
        style: dict[str, Any] = dict(size=7 if len(parts) == 1 and lines > 1 else 6, va="center", ha="right")
        write(paper, left - 0.07, y + 0.1 * (at - (len(parts) - 1) / 2), shorten(part, room), **style)


def _extent(paper: Axes, right: float, y: float, row: TokenRow) -> None:
    """Write a row's range, the score of the state and the remark at the right end of its tokens."""
    write(paper, right + 0.08, y, row.extent, size=6.5, color=SOFT, va="center")
    if row.remark:
        write(
            paper, right + max(0.82, 0.15 + 0.055 * len(row.extent)), y, row.remark, size=6.5, color=MARK, va="center"
        )
    if row.state is not None:
        colour = _state_colour(row)
        place = Rectangle((right + 0.8, y - 0.08), 0.72, 0.16, facecolor=colour, edgecolor=SOFT, linewidth=0.4)
        paper.add_patch(place)
        style: dict[str, Any] = dict(size=6, color=ink(colour), ha="center", va="center")
        write(paper, right + 1.16, y, f"state {number(row.state)}", **style)


def _state_colour(row: TokenRow) -> str:
    palette = ramp(SIGNED, 2 * STEPS + 1) if row.signed else ramp(BLUES)
    return palette[int(row.shades(np.array([row.state]))[0])]


class _Rows(Panel):
    """Panel in which every line of the text has a line of tokens for each row."""

    def __init__(self, number: int, text: TokenText) -> None:
        super().__init__(number, text)
        self.wrap(2)
        self.step = (BOX_HEIGHT + ROW_GAP) * len(text.rows) + (0.12 if len(text.rows) > 1 else 0.04)
        self.height = HEADING_HEIGHT + self.step * len(self.lines) + FOOTER_HEIGHT

    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        for at, boxes in enumerate(self.lines):
            for index, row in enumerate(self.text.rows):
                y = top + at * self.step + index * (BOX_HEIGHT + ROW_GAP)
                seen = [box for box in boxes if row.query is None or box.position <= row.query]
                if seen:
                    draw_boxes(sheet.paper, seen, self.left, y, self.text, row)
                    _name(sheet.paper, self.left, y + BOX_HEIGHT / 2, row)
                if at == 0:
                    _extent(sheet.paper, line - RIGHT_WIDTH, y + BOX_HEIGHT / 2, row)


class _Strips(Panel):
    """Panel of the text in the colours of its first row, and a strip over positions for each row."""

    def __init__(self, number: int, text: TokenText) -> None:
        super().__init__(number, text)
        self.wrap(1)
        self.cut = 0.16 if len(text.tokens) > MAX_BOXES else 0.0
        self.tall = STRIP_HEIGHT * len(text.rows)
        self.height = (
            HEADING_HEIGHT + (BOX_HEIGHT + ROW_GAP) * len(self.lines) + self.cut + FOOTER_HEIGHT + self.tall + 0.5
        )

    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        text, wide = self.text, line - self.left - RIGHT_WIDTH
        _name(sheet.paper, self.left, top + BOX_HEIGHT / 2, text.rows[0])
        for boxes in self.lines:
            draw_boxes(sheet.paper, boxes, self.left, top, text, text.rows[0])
            top += BOX_HEIGHT + ROW_GAP
        if self.cut:
            note = f"the first {MAX_BOXES:,} of {len(text.tokens):,} tokens; below, all of them"
            write(sheet.paper, self.left, top, note, size=7, color=SOFT, va="top")
        top += self.cut + 0.1
        axes = sheet.panel(self.left, top, wide, self.tall, grid=None)
        right, thick = len(text.tokens) - 0.5, max(1.0, 0.03 * len(text.tokens) / wide)
        for index, row in enumerate(text.rows):
            image = np.array([[to_rgb(colour) for colour in _colours(row)]])
            axes.imshow(image, extent=(-0.5, right, index + 0.76, index), aspect="auto", interpolation="nearest")
            for places, colour in ((row.against, MARK), (row.marked, INK)):
                for at in places:
                    axes.add_patch(Rectangle((at - thick / 2, index + 0.79), thick, 0.13, color=colour, linewidth=0))
            if row.query is not None:
                axes.plot([row.query], [index + 0.86], "^", color=INK, markersize=2.5, clip_on=False)
            _name(sheet.paper, self.left, top + (index + 0.4) * STRIP_HEIGHT, row, lines=1)
            _extent(sheet.paper, line - RIGHT_WIDTH, top + (index + 0.4) * STRIP_HEIGHT, row)
        axes.set(xlim=(-0.5, right), ylim=(len(text.rows), 0), yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.tick_params(length=2, width=0.4, pad=2, labelsize=6.5)
        axes.set_xlabel("position", fontsize=7, color=SOFT, labelpad=1)
        axes.spines[:].set_visible(False)


class _Pictures(Panel):
    """Panel of the image, with a map for each row next to it."""

    def __init__(self, number: int, text: TokenText) -> None:
        super().__init__(number, text)
        self.width = PICTURES_PER_ROW * PICTURE_SIDE + (PICTURES_PER_ROW - 1) * PICTURE_GAP
        self.height = HEADING_HEIGHT + math.ceil((1 + len(text.rows)) / PICTURES_PER_ROW) * (
            PICTURE_SIDE + CAPTION_HEIGHT
        )

    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        pixels = self.text.pixels
        assert pixels is not None
        high, wide, channels = pixels.shape
        shown = (pixels if channels == 3 else pixels.mean(-1)).clip(0, 1)
        sharp: dict[str, Any] = dict(interpolation="nearest")
        axes = self._axes(sheet, top, 0)
        axes.imshow(shown, cmap="gray" if channels != 3 else None, vmin=0, vmax=1, **sharp)
        axes.set_xlabel("image", fontsize=7, color=SOFT, labelpad=3)
        places = np.flatnonzero(~self.text.special)
        for index, row in enumerate(self.text.rows, start=1):
            axes, colours = self._axes(sheet, top, index), _colours(row, PIXEL_SHADES)
            axes.imshow(np.array([to_rgb(colours[at]) for at in places]).reshape(high, wide, 3), **sharp)
            framed = [(at, FRAME, 1.2) for at in row.marked] + [(row.query, INK, 1.0)] * (row.query is not None)
            for token, colour, thick in framed:
                for at in np.flatnonzero(places == token).tolist():
                    corner = (at % wide - 0.5, at // wide - 0.5)
                    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=thick))
            state = "" if row.state is None else f"state {number(row.state)}"
            first, *more = row.name.splitlines()
            said = [" · ".join(filter(None, each)) for each in ((first, row.remark), *zip(more), (row.extent, state))]
            caption = "\n".join(drawable(shorten(visible(part), 30)) for part in said)
            axes.set_xlabel(
                caption, fontsize=6.5, color=SOFT, labelpad=3, parse_math=False, family=families("DejaVu Sans")
            )

    def _axes(self, sheet: Sheet, top: float, index: int) -> Axes:
        row, column = divmod(index, PICTURES_PER_ROW)
        left = MARGIN + column * (PICTURE_SIDE + PICTURE_GAP)
        axes = sheet.panel(left, top + row * (PICTURE_SIDE + CAPTION_HEIGHT), PICTURE_SIDE, PICTURE_SIDE, grid=None)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=SOFT, linewidth=0.4, visible=True)
        return axes


Bar = tuple[Sequence[str], tuple[str, str], str]
"""Colours, the names of their ends, and the name of the scale."""

MAX_HEADING_WIDTH = 12.2
"""Width in inches up to which headings widen a sheet."""


def stack(
    title: tuple[str, str, str], below: tuple[str, str], panels: Sequence[Panel], bars: Sequence[Bar], rest: str = ""
) -> Figure:
    """Draw panels one below the other on a sheet, with their colour scales at the upper right.

    Args:
        below: two smaller lines under the title; headings widen the sheet up to MAX_HEADING_WIDTH.
        rest: a note under the panels about texts that are not drawn.
    """
    left = max((one.left for one in panels), default=0.0)
    for one in panels:
        one.indent(left)
    aside = (BAR_WIDTH + 0.35) * len(bars)
    beside = max(len("".join(title)) / TITLE_LETTERS_PER_INCH, len(below[0]) / SUBTITLE_LETTERS_PER_INCH) + aside
    said = min(max(beside, len(below[1]) / SUBTITLE_LETTERS_PER_INCH), MAX_HEADING_WIDTH)
    width = max([7.4, said, *(one.width for one in panels)]) + 2 * MARGIN
    height = Sheet.TOP + 0.1 + sum(one.height for one in panels) + (0.3 if rest else 0)
    sheet = Sheet(width, height, title, below[0], aside=aside)
    write(
        sheet.paper,
        MARGIN,
        0.72,
        shorten(below[1], int(width * SUBTITLE_LETTERS_PER_INCH)),
        size=8.5,
        color=SOFT,
        va="center",
    )
    for at, (stops, ends, name) in enumerate(bars):
        colour_bar(sheet.paper, width - aside + at * (BAR_WIDTH + 0.35), stops, ends, name)
    top = Sheet.TOP + 0.1
    for one in panels:
        one.draw(sheet, top, width - 2 * MARGIN)
        top += one.height
    if rest:
        write(sheet.paper, MARGIN, top + 0.05, rest, size=7.5, color=SOFT, va="top")
    return sheet.figure


MAX_TEXTS = 8


def draw_rows(block: TokenRows, title: tuple[str, str, str], *, start: int = 0) -> Figure:
    """Draw a figure of up to MAX_TEXTS texts, from number `start` on.

    Raises:
        InputError: there is no such text.
    """
    chosen = chosen_texts(block.texts, start, MAX_TEXTS)
    bars = [(SIGNED if signed else BLUES, ends_of(block, signed), block.score) for signed in kinds(block)]
    below = (block.name, f"underlined or framed: {block.marked}")
    panels = [panel(number, text) for number, text in enumerate(chosen, start=start)]
    return stack(title, below, panels, bars, rest_of(len(block.texts), start, len(chosen)))


def chosen_texts(texts: Sequence[Any], start: int, most: int) -> Sequence[Any]:
    """Return the texts of a figure.

    Raises:
        InputError: there is no text `start`.
    """
    if not 0 <= start < max(len(texts), 1):
        raise InputError(f"there is no text {start!r} to start the figure at; allowed are 0 to {len(texts) - 1}")
    return texts[start : start + most]


def rest_of(every: int, start: int, shown: int) -> str:
    """Return a note on the texts that a figure shows; empty if it shows all."""
    return f"texts {start}–{start + shown - 1} of {every}; figure(start=…) draws the others" if shown < every else ""
