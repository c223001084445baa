"""Draw texts whose tokens are coloured: rows of tokens, strips over positions for long texts, maps for images.

A figure is a stack of parts, each with a constrained layout of its own. Tokens are set like type: a line is so many
characters wide, and a narrower figure has shorter lines.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Rectangle
from ssmscope.errors import InputError
from ssmscope.render import figure as plot
from ssmscope.render.blocks import OF_DIFFERENCES, TokenRow, TokenRows, TokenText
from ssmscope.render.colours import BLUES, SHADES, SIGNED, STEPS, ink, ramp
from ssmscope.render.layout import inches
from ssmscope.render.letters import drawable, families, letters
from ssmscope.render.numbers import format_probability, number
from ssmscope.render.pictures import PHOTO
from ssmscope.render.series import draw_series
from ssmscope.render.token_rows import in_line, row_kinds, scale_ends, window_note, windows
from ssmscope.render.tokens import short_token, shorten, spell_tokens, visible

LINE_INCHES, STRIP_INCHES, PICTURE_INCHES, SERIES_INCHES = 0.24, 0.19, 1.5, 1.5
"""Heights in inches of a line of tokens, of a strip, of a picture without its caption, and of a series."""
MAX_LINE, MIN_LINE, MAX_NAME, MAX_TOKEN = 100, 16, 64, 48
MIN_INCHES = 7.4
PICTURES_PER_ROW = 5
MAX_WRITTEN_ROWS, MAX_WRITTEN_TOKENS = 12, 800
"""Maximum rows, and tokens in all of them, for which every row is written out; other texts become strips."""
MAX_BOXES = 1000
"""Maximum tokens of a long text that are written out; the strips show all."""
PIXEL_SHADES = 257
FRAME = "#b01e8a"
"""Colour of the frame of marked pixels: neither orange nor blue, which mean against and for."""
MAX_TEXTS = 8


@dataclass(frozen=True)
class Part:
    """A part of a figure: its height in inches, and what draws it into a subfigure."""

    height: float
    draw: Callable[[SubFigure], None]


@dataclass(frozen=True)
class Columns:
    """Characters of a line: those of row names at the left, of tokens, and of ranges and remarks at the right."""

    names: int
    text: int
    right: int

    @property
    def total(self) -> int:
        return self.names + self.text + self.right

    @property
    def inches(self) -> float:
        return self.total * _character_inches() + 0.16

    @classmethod
    def fitting(cls, frame: plot.Frame, texts: Sequence[TokenText]) -> Columns:
        """Return as many characters as the texts need, or as fit into the frame."""
        rows = [row for text in texts if text.pixels is None for row in text.rows]
        names = min(2 + max((letters(in_line(row.name)) for row in rows), default=0), MAX_NAME)
        right = 2 + max((len(_right(row)) for row in rows), default=0)
        longest = [x + w for text in texts for line in lay_out(text, MAX_LINE) for _, x, w, _ in line]
        if frame.sides[0] is None:
            least = int(MIN_INCHES / _character_inches()) - names - right
            return cls(names, max(math.ceil(max(longest, default=0)) + 1, least), right)
        total = int((frame.sides[0] - 0.16) / _character_inches())
        names, right = min(names, total // 4), min(right, total // 3)
        return cls(names, max(total - names - right, MIN_LINE), right)


def _character_inches() -> float:
    return 0.602 / 72 * _token_size()  # a monospaced character is 0.602 of the font size wide


def _token_size() -> float:
    return float(matplotlib.rcParams["font.size"]) - 0.5


Box = tuple[int, float, float, str]
"""A token in a line: its position, left end and width in characters, and spelling."""


def lay_out(text: TokenText, columns: float, most: int = MAX_BOXES) -> list[list[Box]]:
    """Return tokens as boxes, of a long text those in `windows`, in lines of at most so many characters."""
    lines: list[list[Box]] = []
    end, spelled, before = float(columns), spell_tokens(text.tokens, text.words), -1
    for position in windows(text, most):
        gap, token = spelled[position]
        token, before = f"{'⋯ ' * (position > before + 1)}{token}", position
        token = drawable(shorten(token, min(MAX_TOKEN, int(columns) - 1)))
        width, left = max(letters(token), 1) + 0.9, end + (0.9 if gap else 0.15)
        if not lines or left + width > columns:
            lines.append([])
            left = 0.0
        lines[-1].append((position, left, width, token))
        end = left + width
    return lines


def typewriter(part: SubFigure, lines: float) -> Axes:
    """Return axes that measure characters to the right, and lines down from the top."""
    columns = (inches(part)[0] - 0.16) / _character_inches()
    axes = part.subplots(subplot_kw={"xlim": (0, columns), "ylim": (lines, 0)})
    axes.set_axis_off()
    return axes


def draw_boxes(axes: Axes, boxes: Sequence[Box], left: float, y: float, text: TokenText, row: TokenRow | None) -> None:
    """Draw one line of tokens in the colours of a row, or without colour: marked ones underlined and bold, the query
    framed, the text's span underlined in colour."""
    fills = colours_of_row(row) if row is not None else ["#ffffff"] * len(text.tokens)
    kept, against = (set(row.marked), set(row.against)) if row is not None else (set(), set())
    span = range(*text.span) if text.span is not None else ()
    places = [Rectangle((left + x, y + 0.06), width, 0.76) for _, x, width, _ in boxes]
    colours = [fills[position] for position, *_ in boxes]
    for position, x, width, _ in boxes:
        if position in kept or position in against or position in span:
            places.append(Rectangle((left + x, y + 0.84), width, 0.1))
            colours.append(plot.INK if position in kept else plot.MARK)
    axes.add_collection(PatchCollection(places, facecolors=colours, edgecolors="none"), autolim=False)
    for position, x, width, token in boxes:
        if row is not None and position == row.query:
            axes.add_patch(Rectangle((left + x, y + 0.06), width, 0.76, fill=False, edgecolor=plot.INK, linewidth=0.9))
        style: dict[str, Any] = dict(
            color=plot.SOFT if row is not None and fills[position] == plot.EMPTY else ink(fills[position]),
            weight="bold" if position in kept or position in against else "normal",
            style="italic" if text.words[position] is None else "normal",
        )
        place = (left + x + width / 2, y + 0.46)
        axes.text(*place, token, size=_token_size(), family=families(), ha="center", va="center_baseline", **style)


def _palette(row: TokenRow, count: int | None = None) -> list[str]:
    return ramp(SIGNED if row.signed else BLUES, count or (2 * STEPS + 1 if row.signed else SHADES))


def colours_of_row(row: TokenRow, count: int | None = None) -> list[str]:
    """Return the colour of every token, from a palette of `count` or, by default, of as many as in other views."""
    palette = _palette(row, count)
    return [palette[shade] if shade >= 0 else plot.EMPTY for shade in row.shades(count=count).tolist()]


def _right(row: TokenRow) -> str:
    """Return what stands at the right of a row: its range, a remark, the score of the state."""
    return "  ".join(filter(None, (row.extent, row.remark, "" if row.state is None else f"state {number(row.state)}")))


# ---- Parts of a text


def text_parts(at: int, text: TokenText, columns: Columns) -> Iterator[Part]:
    """Yield the heading of a text, and rows of tokens, strips if it is long, or pictures if its tokens are pixels."""
    yield heading(at, text, columns)
    rows = len(text.rows)
    if text.pixels is not None:
        across = max(1, min(PICTURES_PER_ROW, int(columns.inches / PICTURE_INCHES)))
        high = (PICTURE_INCHES + 0.6) * math.ceil((1 + rows) / across)
        yield Part(high, lambda part: _pictures(part, text, across))
    elif text.series is not None:
        high = SERIES_INCHES + STRIP_INCHES * rows
        yield Part(high + plot.AXIS_INCHES, lambda part: _below_series(part, text, SERIES_INCHES / high))
    elif rows <= MAX_WRITTEN_ROWS and rows * len(text.tokens) <= MAX_WRITTEN_TOKENS:
        yield rows_part(text, text.rows, columns)
    else:
        named = len(text.tokens) <= min(plot.MAX_NAMED, _room_below(text, columns))
        if not named:
            yield rows_part(text, text.rows[:1], columns)
        below = 0.35 + 0.07 * max(len(short_token(token, 14)) for token in text.tokens) if named else plot.AXIS_INCHES
        yield Part(STRIP_INCHES * rows + below, lambda part: _strips(part.subplots(), text, named))


def heading(at: int, text: TokenText, columns: Columns) -> Part:
    """Return the line above a text: its number, the model's answer, and further text."""
    answer = f"{at}   answer “{shorten(visible(text.answer), 24)}”"
    answer += f", {said}" if (said := format_probability(text.probability)) else ""
    about = [drawable(line) for line in textwrap.wrap(visible(text.about), max(columns.total, 12), max_lines=3)]
    first = len(answer) + 4
    in_line = len(about) == 1 and first + len(about[0]) <= columns.total
    count = 1 if in_line or not about else 1 + len(about)

    def draw(part: SubFigure) -> None:
        axes = typewriter(part, count)
        axes.text(0, 0.5, drawable(answer), weight="bold", va="center")
        for line, said in enumerate(about):
            place = (first, 0.5) if in_line else (0, line + 1.5)
            axes.text(*place, said, color=plot.SOFT, va="center")

    return Part(LINE_INCHES * count + 0.06, draw)


def rows_part(text: TokenText, rows: Sequence[TokenRow | None], columns: Columns) -> Part:
    """Return a part in which every line of the text has a line of tokens for each row; None is a row without colour."""
    lines = lay_out(text, columns.text)
    step = len(rows) + (0.45 if len(rows) > 1 else 0.0)
    cut = len(text.tokens) > MAX_BOXES
    note = f"{window_note(text, MAX_BOXES)}; below, all of them" if cut else ""
    count = max(1.0, step * len(lines) + bool(note))  # a text without tokens has no lines

    def draw(part: SubFigure) -> None:
        axes = typewriter(part, count)
        for at, boxes in enumerate(lines):
            for index, row in enumerate(rows):
                y = at * step + index
                seen = [box for box in boxes if row is None or row.query is None or box[0] <= row.query]
                if seen:
                    draw_boxes(axes, seen, columns.names, y, text, row)
                if row is not None and seen and (at == 0 or len(rows) > 1):
                    name = drawable(shorten(in_line(row.name), max(columns.names - 1, 6)))
                    style: dict[str, Any] = dict(size=0.95 * _token_size(), va="center", ha="right")
                    axes.text(columns.names - 0.8, y + 0.45, name, **style)
                if row is not None and at == 0:
                    _at_right(axes, columns, y, row)
                if row is None:
                    place = (columns.names - 1, y + 0.5)
                    axes.text(*place, str(boxes[0][0]), size="small", color=plot.SOFT, va="center", ha="right")
        if note:
            axes.text(columns.names, count - 0.5, note, size="small", color=plot.SOFT, va="center")

    return Part(LINE_INCHES * count + 0.1, draw)


def _at_right(axes: Axes, columns: Columns, y: float, row: TokenRow) -> None:
    """Write a row's range, the remark and the score of the state at the right end of its tokens."""
    style: dict[str, Any] = dict(size=0.88 * _token_size(), va="center")
    left = columns.names + columns.text + 1
    if len(_right(row)) >= columns.right and row.state is None:  # too narrow: one below the other, in smaller letters
        said = "\n".join(filter(None, (row.extent, row.remark)))
        style["size"] = _token_size() * min(0.66, columns.right / max(map(len, said.split("\n"))))
        axes.text(left, y + 0.45, said, color=plot.MARK if row.remark else plot.SOFT, linespacing=0.95, **style)
        return
    axes.text(left, y + 0.45, row.extent, color=plot.SOFT, **style)
    left += len(row.extent) + 1
    axes.text(left, y + 0.45, row.remark, color=plot.MARK, **style)
    if row.state is not None:
        said, colour = f"state {number(row.state)}", _palette(row)[row.state_shade]
        axes.add_patch(
            Rectangle((left, y + 0.06), len(said), 0.76, facecolor=colour, edgecolor=plot.SOFT, linewidth=0.4)
        )
        axes.text(left + len(said) / 2, y + 0.45, said, color=ink(colour), ha="center", **style)


def _below_series(part: SubFigure, text: TokenText, share: float) -> None:
    """Draw a series over its steps, in this share of the height, and its strips below on the same axis."""
    parts = [share, 1 - share] if text.rows else [1]
    above, *below = part.subplots(len(parts), 1, sharex=True, height_ratios=parts, squeeze=False)[:, 0]
    for axes in below:
        _strips(axes, text, False)
    assert text.series is not None
    draw_series(above, text.series)
    (below or [above])[0].set_xlabel("step")


def _strips(axes: Axes, text: TokenText, named: bool) -> None:
    """Draw a strip over positions for each row, with the tokens below it if there are few."""
    plot.styled(axes, None)
    right, rows = len(text.tokens) - 0.5, text.rows
    thick = 0.8 if named else max(1.0, 0.004 * len(text.tokens))
    for index, row in enumerate(rows):
        image = np.array([[to_rgb(colour) for colour in colours_of_row(row)]])
        axes.imshow(image, extent=(-0.5, right, index + 0.76, index), aspect="auto", interpolation="nearest")
        for places, colour in ((row.against, plot.MARK), (row.marked, plot.INK)):
            for at in places:
                axes.add_patch(Rectangle((at - thick / 2, index + 0.79), thick, 0.13, color=colour, linewidth=0))
        if row.query is not None:
            axes.plot([row.query], [index + 0.86], "^", color=plot.INK, markersize=2.5, clip_on=False)
        plot.beside(axes, index + 0.4, _right(row), size="small", color=plot.MARK if row.remark else plot.SOFT)
    axes.set(xlim=(-0.5, right), ylim=(len(rows), 0))
    names = [drawable(shorten(in_line(row.name), MAX_NAME)) for row in rows]
    axes.set_yticks(np.arange(len(rows)) + 0.4, names)
    axes.tick_params(axis="y", length=0, labelsize=0.85 * _token_size(), labelcolor=plot.INK)
    axes.spines[:].set_visible(False)
    if named:
        name_tokens(axes, text)
    else:
        plot.integers(axes.xaxis)
        axes.set_xlabel("position")


def _room_below(text: TokenText, columns: Columns) -> int:
    """Return how many tokens can be named side by side below the strips of a text."""
    names = max(min(letters(in_line(row.name)), MAX_NAME) for row in text.rows)
    around = 0.85 * _character_inches() * (names + max(len(_right(row)) for row in text.rows))
    return int((columns.inches - around) / (1.1 * 0.85 * _token_size() / 72))


def name_tokens(axes: Axes, text: TokenText, *, both: bool = False) -> None:
    """Write the tokens along the horizontal axis, or both: special ones slanted, those of the text's span in colour."""
    names = [drawable(short_token(token, 14)) for token in text.tokens]
    span = range(*text.span) if text.span is not None else ()
    style: dict[str, Any] = dict(family=families(), size=0.85 * _token_size())
    axes.set_xticks(range(len(names)), names, rotation=90, **style)
    if both:
        axes.set_yticks(range(len(names)), names, **style)
    for axis in (axes.xaxis, axes.yaxis)[: 1 + both]:
        for at, label in enumerate(axis.get_ticklabels()):
            special = text.words[at] is None
            label.set(color=plot.MARK if at in span else plot.SOFT if special else plot.INK)
            label.set_fontstyle("italic" if special else "normal")
        axis.set_tick_params(length=2)


def _pictures(part: SubFigure, text: TokenText, across: int) -> None:
    pixels = text.pixels
    assert pixels is not None
    high, wide, channels = pixels.shape
    panels = plot.grid(part, 1 + len(text.rows), across)
    shown = (pixels if channels == 3 else pixels.mean(-1)).clip(0, 1)
    panels[0].imshow(shown, cmap="gray" if channels != 3 else None, vmin=0, vmax=1, interpolation="nearest")
    panels[0].set_gid(PHOTO)
    panels[0].set_xlabel("image")
    places = np.flatnonzero(~text.special)
    for axes, row in zip(panels[1:], text.rows):
        colours = colours_of_row(row, PIXEL_SHADES)
        map_ = np.array([to_rgb(colours[at]) for at in places]).reshape(high, wide, 3)
        axes.imshow(map_, interpolation="nearest")
        framed = [(at, FRAME, 1.2) for at in row.marked] + [(row.query, plot.INK, 1.0)] * (row.query is not None)
        for token, colour, thick in framed:
            for at in np.flatnonzero(places == token).tolist():
                corner = (at % wide - 0.5, at // wide - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=colour, linewidth=thick))
        state = "" if row.state is None else f"state {number(row.state)}"
        first, *more = row.name.splitlines()
        said = [" · ".join(filter(None, each)) for each in ((first, row.remark), *zip(more), (row.extent, state))]
        axes.set_xlabel("\n".join(drawable(shorten(visible(line), 30)) for line in said), size="small")
    for axes in panels:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color=plot.SOFT, linewidth=0.4, visible=True)


# ---- Figures

Bar = tuple[Sequence[str], tuple[float, float] | None, tuple[str, str], str]
"""Colours, their ends in numbers if all rows share them, the names of the ends, and the name of the scale."""


def stack(
    frame: plot.Frame,
    title: str,
    below: Sequence[str],
    parts: Sequence[Part],
    bars: Sequence[Bar],
    width: float,
    *,
    least: float = 0.9,
) -> Figure:
    """Draw parts one below the other, of at least this share of their heights, under the title, smaller lines, and the
    colour bars."""
    sheet = plot.Sheet(frame, title, "; ".join(filter(None, below)), width=width)
    high = 0.75 if any(ends and stops is SIGNED for stops, ends, _, _ in bars) else 0.55
    every = [Part(high, lambda part: _bars(part, bars, sheet.width)), *parts]
    for subfigure, part in zip(sheet.parts(*(part.height for part in every), least=least), every):
        part.draw(subfigure)
    return sheet.figure


def _bars(part: SubFigure, bars: Sequence[Bar], width: float) -> None:
    """Draw colour bars in a row, with numbers or, if every row has a scale of its own, the names of their ends."""
    first, *others = part.subplots(1, max(len(bars), int(width / 2.2)), squeeze=False)[0]
    for axes, (stops, ends, names, name) in zip((first, *others), bars):
        low, high = ends or ((-1.0, 1.0) if stops is SIGNED else (0.0, 1.0))
        scale = part.colorbar(plot.colours_of(stops, low, high), cax=axes, orientation="horizontal")
        said = [number(low), number(high)] if ends else list(names)
        if ends and stops is SIGNED:
            said = ["\n".join(each) for each in zip(said, names)]
        ticks, labels = ([low, 0, high], [said[0], "0", said[1]]) if stops is SIGNED else ([low, high], said)
        scale.set_ticks(ticks, labels=labels)
        scale.outline.set_visible(False)
        axes.tick_params(length=2, colors=plot.SOFT, labelsize=0.85 * _token_size())
        axes.set_title(name, color=plot.SOFT)
    for axes in others[len(bars) - 1 :]:
        axes.set_axis_off()


def bars_of(block: TokenRows) -> list[Bar]:
    """Return the colour bars of a block: with numbers where all rows of a kind share their ends."""
    made: list[Bar] = []
    for signed in row_kinds(block):
        ends = {row.ends for text in block.texts for row in text.rows if row.signed == signed}
        shared = ends.pop() if len(ends) == 1 else None
        name = f"difference of {block.score}" if signed and block.around == OF_DIFFERENCES else block.score
        made.append((SIGNED if signed else BLUES, shared, scale_ends(block, signed), name))
    return made


def draw_rows(block: TokenRows, title: str, frame: plot.Frame, *, start: int = 0, more: Sequence[Part] = ()) -> Figure:
    """Draw up to MAX_TEXTS texts, from number `start` on, and further parts. Raises InputError without such a text."""
    chosen = chosen_texts(block.texts, start, MAX_TEXTS)
    marked = "framed" if any(text.pixels is not None for text in chosen) else "underlined"
    below = [block.name, f"{marked}: {block.marked}", rest_of(len(block.texts), start, len(chosen))]
    columns = Columns.fitting(frame, chosen)
    parts = [part for at, text in enumerate(chosen, start=start) for part in text_parts(at, text, columns)]
    return stack(frame, title, below, [*parts, *more], bars_of(block), max(columns.inches, MIN_INCHES))


def chosen_texts(texts: Sequence[Any], start: int, most: int) -> Sequence[Any]:
    """Return the texts of a figure. Raises InputError if there is no text `start`."""
    if not 0 <= start < max(len(texts), 1):
        raise InputError(f"there is no text {start!r} to start the figure at; allowed are 0 to {len(texts) - 1}")
    return texts[start : start + most]


def rest_of(every: int, start: int, shown: int) -> str:
    """Return a note on the texts that a figure shows; empty if it shows all."""
    return f"texts {start}–{start + shown - 1} of {every}; figure(start=…) draws the others" if shown < every else ""
