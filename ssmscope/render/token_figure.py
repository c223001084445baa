"""Drawing tokens on a sheet measured in inches: many boxes at once, and text in fonts that have its glyphs.

`draw_rows` draws texts whose tokens are coloured: in rows of tokens, of long texts in strips over positions, of images
in maps. Everything is placed in inches, so that nothing overlaps at any number of tokens or rows.
"""

from __future__ import annotations

import math
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import font_manager
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ssmscope.errors import InputError
from ssmscope.render.figure import COLOURS, GRID, INK, LETTERS, SMALL_LETTERS, SOFT, Sheet
from ssmscope.render.numbers import number
from ssmscope.render.signed import SIGNED, STEPS
from ssmscope.render.token_rows import ends_of, kinds
from ssmscope.render.tokens import BLUES, SHADES, chance, ink, ramp, shorten, visible, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.render.blocks import TokenRow, TokenRows, TokenText

MARGIN, BAR = 0.2, 1.5
"""In inches: what is left of everything, and the width of a colour bar."""
EMPTY, MARK = GRID, COLOURS[1]
"""A box without a value, and what sets a box apart from the others."""
FALLBACK_FONTS = (
    *("DejaVu Sans Mono", "DejaVu Sans", "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP"),
    *("Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "IPAGothic", "PingFang SC"),
    *("Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
    *("Noto Emoji", "Symbola", "Segoe UI Symbol"),
)


def sheet_of(width: float, height: float) -> Axes:
    """A white figure's only axes, in inches from its upper left."""
    sheet = Figure(figsize=(width, height), facecolor="white").add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    return sheet


def colour_bar(sheet: Axes, left: float, stops: Sequence[str], ends: tuple[str, str], name: str) -> None:
    """A scale from the first to the last colour at the top of the sheet: what its ends are, and of what it is."""
    figure = sheet.get_figure()
    assert isinstance(figure, Figure)
    width, height = figure.get_size_inches()
    axes = figure.add_axes((left / width, 1 - 0.32 / height, BAR / width, 0.11 / height))
    mappable = ScalarMappable(cmap=ListedColormap(ramp(stops, 256)))
    labels: dict[float, str] = {0: ends[0], 0.5: "0", 1: ends[1]} if stops is SIGNED else {0: ends[0], 1: ends[1]}
    scale = figure.colorbar(mappable, cax=axes, orientation="horizontal", ticks=list(labels))
    scale.outline.set_linewidth(0.4)
    axes.set_xticklabels(list(labels.values()), fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)
    axes.set_xlabel(name, fontsize=7, color=SOFT, labelpad=1)


def fill(sheet: Axes, places: Sequence[tuple[Rectangle, str]], edge: str) -> None:
    """Draw every rectangle in its colour, all of them as one collection."""
    patches, colours = [patch for patch, _ in places], [colour for _, colour in places]
    sheet.add_collection(PatchCollection(patches, facecolors=colours, edgecolors=edge, linewidths=0.4), autolim=False)


def write(sheet: Axes, x: float, y: float, text: str, *, color: str = INK, **style: Any) -> None:
    """Text as it is: no mathematics between dollar signs, whatever the user's settings."""
    style.setdefault("family", families("DejaVu Sans"))
    sheet.text(x, y, drawable(text), color=color, parse_math=False, usetex=False, **style)


@lru_cache
def families(first: str = "DejaVu Sans Mono") -> list[str]:
    """The fonts to take glyphs from, in order: the first, then the fallbacks that this machine has."""
    present = {entry.name for entry in font_manager.fontManager.ttflist}
    return [first, *(name for name in FALLBACK_FONTS if name in present and name != first)]


@lru_cache(maxsize=4096)
def _has_glyph(character: str) -> bool:
    paths = (font_manager.findfont(family) for family in families())
    return any(font_manager.get_font(path).get_char_index(ord(character)) for path in paths)


def drawable(text: str) -> str:
    """The text without marks of no width that no font draws, and a box for every glyph that no font here
    has."""
    return "".join(character if _has_glyph(character) else "" if _width(character) == 0 else "□" for character in text)


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def letters(text: str) -> int:
    """How many characters of a monospaced font the text is wide: 2 for a wide glyph, 0 for a mark of no width."""
    return sum(map(_width, text))


# ---- texts whose tokens are coloured, row by row

# All in inches; a monospaced character is 0.602 of the font size wide.
FONT_SIZE = 8.5
CHARACTER = FONT_SIZE / 72 * 0.602
PADDING, GAP, LINE, BOX = 0.035, 0.075, 9.0, 0.21
LEFT, RIGHT, HEADING, FOOTER, BETWEEN = 1.3, 1.55, 0.32, 0.14, 0.06
WIDEST_LEFT, LABEL = 3.2, 0.05
"""How far names of rows may reach to the right of the paper's edge, and the width of a character of theirs."""
STRIP, SIDE, ASIDE, CAPTION = 0.18, 1.5, 0.18, 0.62
ACROSS = 5
"""How many pictures stand beside each other."""
ROWS, ROW_TOKENS = 12, 800
"""Up to how many rows, and tokens in all of them, each row is written out; others are strips over positions."""
BOX_TOKENS = 1000
"""How many tokens of a longer text are written out; the strips show all."""
FINE = 257
"""How many colours a map of pixels has."""
FRAME = "#b01e8a"
"""Of pixels that are marked: neither orange nor blue, which are for and against."""


@dataclass(frozen=True)
class Box:
    """A token in its place within a line of text."""

    position: int
    left: float
    width: float
    token: str


def wrap(tokens: Sequence[str], words: Sequence[int | None], most: int = BOX_TOKENS) -> list[list[Box]]:
    """The first `most` tokens as boxes, in lines of at most LINE inches."""
    lines: list[list[Box]] = []
    end = LINE
    for position, (gap, token) in enumerate(written(tokens, words)[:most]):
        token = drawable(shorten(token, 48))
        width = max(letters(token), 1) * CHARACTER + 2 * PADDING
        left = end + (GAP if gap else 0.012)
        if not lines or left + width > LINE:
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
    """One line of tokens in the colours of a row, or in none: its marked tokens underlined and bold, its query framed,
    the text's span underlined in colour."""
    fills = _colours(row) if row is not None else ["#ffffff"] * len(text.tokens)
    kept, against = (set(row.marked), set(row.against)) if row is not None else (set(), set())
    span = range(*text.span) if text.span is not None else ()
    places = [(Rectangle((left + box.left, y), box.width, BOX), fills[box.position]) for box in boxes]
    for box in boxes:
        lower = Rectangle((left + box.left, y + BOX + 0.007), box.width, 0.028)
        if box.position in kept or box.position in against or box.position in span:
            places.append((lower, INK if box.position in kept else MARK))
    fill(sheet, places, edge="none")
    for box in boxes:
        if row is not None and box.position == row.query:
            frame = Rectangle((left + box.left, y), box.width, BOX, fill=False, edgecolor=INK, linewidth=0.9)
            sheet.add_patch(frame)
        style: dict[str, Any] = dict(
            size=FONT_SIZE,
            color=SOFT if row is not None and fills[box.position] == EMPTY else ink(fills[box.position]),
            weight="bold" if box.position in kept or box.position in against else "normal",
            style="italic" if text.words[box.position] is None else "normal",
            family=families(),
            ha="center",
        )
        write(sheet, left + box.left + box.width / 2, y + BOX * 0.68, box.token, **style)


def _colours(row: TokenRow, count: int | None = None) -> list[str]:
    """The colour of every token, of so many or as many as the other views have."""
    palette = ramp(SIGNED if row.signed else BLUES, count or (2 * STEPS + 1 if row.signed else SHADES))
    return [palette[shade] if shade >= 0 else EMPTY for shade in row.shades(count=count).tolist()]


class Panel(ABC):
    """A piece of a figure under its heading. It lays itself out when it is made, so that the figure knows its size.

    Attributes:
        width: of what it draws, in inches.
        height: the same, with its heading.
        left: where its tokens begin, behind the names of rows; 0 of one that has no such names.
    """

    width: float
    height: float
    left: float = 0.0

    def __init__(self, number: int, text: TokenText) -> None:
        self.number, self.text = number, text

    def indent(self, left: float) -> None:
        """Begin where the other panels of a figure do."""
        if self.left:
            self.width += left - self.left
            self.left = left

    def draw(self, sheet: Sheet, top: float, line: float) -> None:
        """It at so many inches below the sheet's upper end, `line` being the widest panel's width."""
        text, paper = self.text, sheet.paper
        answer = f"{self.number}   answer “{shorten(visible(text.answer), 24)}”"
        answer += f", {said}" if (said := chance(text.probability)) else ""
        write(paper, MARGIN, top + 0.05, answer, size=8.5, weight="bold", va="top")
        side = MARGIN + max(3.4, 0.105 * letters(drawable(answer)))
        room = max(int((sheet.width - side - MARGIN) / 0.072), 8)
        write(paper, side, top + 0.06, shorten(visible(text.about), room), size=8, color=SOFT, va="top")
        self.draw_inner(sheet, top + HEADING, line)

    @abstractmethod
    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        """What stands below the heading."""


def panel(number: int, text: TokenText) -> Panel:
    """A text in rows of tokens, as strips where it is long, or as pictures where its tokens are pixels."""
    if text.pixels is not None:
        return _Pictures(number, text)
    short = len(text.rows) <= ROWS and len(text.rows) * len(text.tokens) <= ROW_TOKENS
    return (_Rows if short else _Strips)(number, text)


def _names(row: TokenRow, lines: int) -> list[str]:
    """What a row is of, in so many lines."""
    parts = [visible(part) for part in row.name.splitlines()]
    return [" · ".join(parts)] if lines == 1 else parts


def _left(rows: Sequence[TokenRow], lines: int) -> float:
    """The room at the left that the names of rows need."""
    longest = max((letters(drawable(part)) for row in rows for part in _names(row, lines)), default=0)
    return min(max(LEFT, 0.12 + LABEL * longest), WIDEST_LEFT)


def _name(paper: Axes, left: float, y: float, row: TokenRow, *, lines: int = 2) -> None:
    """What a row is of, at its left."""
    parts, room = _names(row, lines), round((left - 0.1) / LABEL)
    for at, part in enumerate(parts):
        style: dict[str, Any] = dict(size=7 if len(parts) == 1 and lines > 1 else 6, va="center", ha="right")
        write(paper, left - 0.07, y + 0.1 * (at - (len(parts) - 1) / 2), shorten(part, room), **style)


def _extent(paper: Axes, right: float, y: float, row: TokenRow) -> None:
    """A row's range at the right end of its tokens, what comes from the state, and what is to be said of it."""
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
    """Of every line of the text a row of tokens each."""

    def __init__(self, number: int, text: TokenText) -> None:
        super().__init__(number, text)
        self.lines = wrap(text.tokens, text.words)
        self.step = (BOX + BETWEEN) * len(text.rows) + (0.12 if len(text.rows) > 1 else 0.04)
        self.left = _left(text.rows, 2)
        self.width = self.left + max((boxes[-1].left + boxes[-1].width for boxes in self.lines), default=0) + RIGHT
        self.height = HEADING + self.step * len(self.lines) + FOOTER

    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        for at, boxes in enumerate(self.lines):
            for index, row in enumerate(self.text.rows):
                y = top + at * self.step + index * (BOX + BETWEEN)
                seen = [box for box in boxes if row.query is None or box.position <= row.query]
                if seen:
                    draw_boxes(sheet.paper, seen, self.left, y, self.text, row)
                    _name(sheet.paper, self.left, y + BOX / 2, row)
                if at == 0:
                    _extent(sheet.paper, line - RIGHT, y + BOX / 2, row)


class _Strips(Panel):
    """The text in the colours of its first row, and a strip over positions for each."""

    def __init__(self, number: int, text: TokenText) -> None:
        super().__init__(number, text)
        self.lines = wrap(text.tokens, text.words)
        self.cut = 0.16 if len(text.tokens) > BOX_TOKENS else 0.0
        self.tall = STRIP * len(text.rows)
        self.left = _left(text.rows, 1)
        self.width = self.left + max((boxes[-1].left + boxes[-1].width for boxes in self.lines), default=0) + RIGHT
        self.height = HEADING + (BOX + BETWEEN) * len(self.lines) + self.cut + FOOTER + self.tall + 0.5

    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        text, wide = self.text, line - self.left - RIGHT
        _name(sheet.paper, self.left, top + BOX / 2, text.rows[0])
        for boxes in self.lines:
            draw_boxes(sheet.paper, boxes, self.left, top, text, text.rows[0])
            top += BOX + BETWEEN
        if self.cut:
            note = f"the first {BOX_TOKENS:,} of {len(text.tokens):,} tokens; below, all of them"
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
            _name(sheet.paper, self.left, top + (index + 0.4) * STRIP, row, lines=1)
            _extent(sheet.paper, line - RIGHT, top + (index + 0.4) * STRIP, row)
        axes.set(xlim=(-0.5, right), ylim=(len(text.rows), 0), yticks=[])
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        axes.tick_params(length=2, width=0.4, pad=2, labelsize=6.5)
        axes.set_xlabel("position", fontsize=7, color=SOFT, labelpad=1)
        axes.spines[:].set_visible(False)


class _Pictures(Panel):
    """The image, and beside it a map for each row."""

    def __init__(self, number: int, text: TokenText) -> None:
        super().__init__(number, text)
        self.width = ACROSS * SIDE + (ACROSS - 1) * ASIDE
        self.height = HEADING + math.ceil((1 + len(text.rows)) / ACROSS) * (SIDE + CAPTION)

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
            axes, colours = self._axes(sheet, top, index), _colours(row, FINE)
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
        row, column = divmod(index, ACROSS)
        left = MARGIN + column * (SIDE + ASIDE)
        axes = sheet.panel(left, top + row * (SIDE + CAPTION), SIDE, SIDE, grid=None)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=SOFT, linewidth=0.4, visible=True)
        return axes


Bar = tuple[Sequence[str], tuple[str, str], str]
"""Colours, what their ends are, and of what they are."""


WIDEST = 12.2
"""Inches, up to which a sheet is widened for its headings."""


def stack(
    title: tuple[str, str, str], below: tuple[str, str], panels: Sequence[Panel], bars: Sequence[Bar], rest: str = ""
) -> Figure:
    """A sheet of panels one below the other, with the scales of their colours at its upper right.

    Args:
        below: two smaller lines under the title; the sheet is as wide as all three are, up to WIDEST.
        rest: what is said under the panels of what is not drawn.
    """
    left = max((one.left for one in panels), default=0.0)
    for one in panels:
        one.indent(left)
    aside = (BAR + 0.35) * len(bars)
    beside = max(len("".join(title)) / LETTERS, len(below[0]) / SMALL_LETTERS) + aside
    said = min(max(beside, len(below[1]) / SMALL_LETTERS), WIDEST)
    width = max([7.4, said, *(one.width for one in panels)]) + 2 * MARGIN
    height = Sheet.TOP + 0.1 + sum(one.height for one in panels) + (0.3 if rest else 0)
    sheet = Sheet(width, height, title, below[0], aside=aside)
    write(sheet.paper, MARGIN, 0.72, shorten(below[1], int(width * SMALL_LETTERS)), size=8.5, color=SOFT, va="center")
    for at, (stops, ends, name) in enumerate(bars):
        colour_bar(sheet.paper, width - aside + at * (BAR + 0.35), stops, ends, name)
    top = Sheet.TOP + 0.1
    for one in panels:
        one.draw(sheet, top, width - 2 * MARGIN)
        top += one.height
    if rest:
        write(sheet.paper, MARGIN, top + 0.05, rest, size=7.5, color=SOFT, va="top")
    return sheet.figure


TEXTS = 8


def draw_rows(block: TokenRows, title: tuple[str, str, str], *, start: int = 0) -> Figure:
    """A figure of up to TEXTS texts, from number `start` on.

    Raises:
        InputError: there is no such text.
    """
    chosen = chosen_texts(block.texts, start, TEXTS)
    bars = [(SIGNED if signed else BLUES, ends_of(block, signed), block.score) for signed in kinds(block)]
    below = (block.name, f"underlined or framed: {block.marked}")
    panels = [panel(number, text) for number, text in enumerate(chosen, start=start)]
    return stack(title, below, panels, bars, rest_of(len(block.texts), start, len(chosen)))


def chosen_texts(texts: Sequence[Any], start: int, most: int) -> Sequence[Any]:
    """The texts of a figure.

    Raises:
        InputError: there is no text `start`.
    """
    if not 0 <= start < max(len(texts), 1):
        raise InputError(f"there is no text {start!r} to start the figure at; allowed are 0 to {len(texts) - 1}")
    return texts[start : start + most]


def rest_of(every: int, start: int, shown: int) -> str:
    """Which texts a figure has, where it does not have all."""
    return f"texts {start}–{start + shown - 1} of {every}; figure(start=…) draws the others" if shown < every else ""
