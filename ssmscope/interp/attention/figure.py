"""Attention maps as a figure: triangles of queries and keys, or chosen queries over the text or beside the image.

Everything is placed in inches, so that nothing overlaps at any number of tokens or maps. Positive weights are blue and
negative ones orange, each map on its own scale, which is symmetric around zero and written beside or above it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ssmscope.errors import InputError
from ssmscope.interp.attention.maps import CLIPPED, causal, heads_name, limit, span_name, title
from ssmscope.interp.heatmap.figure import BOX, FONT_SIZE, LINE, PADDING, _Box, _wrap
from ssmscope.show.figure import INK, SOFT
from ssmscope.show.signed import SIGNED, STEPS, brief, levels, shades
from ssmscope.show.token_figure import MARGIN, MARK, drawable, families, fill, letters, write
from ssmscope.show.tokens import ink, ramp, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention

TEXTS = 4
"""How many texts one figure holds."""
MAPS = 48
"""How many maps one figure holds; of chosen queries, how many rows of maps."""
LABELLED_TOKENS = 60
"""Up to how many tokens the axes of a map have the tokens themselves, of up to `LARGE` maps."""
LARGE = 4
"""Up to how many maps of a text are drawn large, each with a colour bar."""
LEGEND_TOKENS = 240
"""Up to how many tokens a text is written above maps too small for labels."""
BOX_TOKENS = 400
"""Up to how many tokens a chosen query is drawn as coloured tokens, if there are not more than `BOX_ROWS`."""
BOX_ROWS = 12
LABEL = 14
"""As many characters of a token as an axis has room for."""

DOTS = 150
"""How many cells an inch of a map shows; of longer texts several weights share one."""

# All in inches.
HEADER, HEADING, FOOTER, GAP = 0.95, 0.3, 0.3, 0.2
PICTURE, ACROSS = 1.5, 6
BLANK = "#ffffff"

_COLOURS = ListedColormap(ramp(SIGNED, 257)).with_extremes(bad=BLANK)
_SHADES = shades()


def draw(result: ImplicitAttention, *, start: int = 0) -> Figure:
    """A figure of up to 4 texts, from text number `start` on, and of up to 48 maps.

    Raises:
        InputError: when there is no such text.
    """
    if not 0 <= start < max(len(result), 1):
        raise InputError(f"there is no text {start!r} to start the figure at; allowed are 0 to {len(result) - 1}")
    texts = result.texts[start : start + TEXTS]
    room = MAPS // max(len(texts), 1)
    panels = [_panel(text, room) for text in texts]
    line = max([7.4, *(panel.width for panel in panels)])
    rest = len(result) - len(texts)
    width = line + 2 * MARGIN
    height = HEADER + sum(HEADING + panel.height + FOOTER for panel in panels) + (0.2 if rest else 0)
    figure = Figure(figsize=(width, height), facecolor="white")
    sheet = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    sheet.set_axis_off()
    folded = any(isinstance(panel, _Triangles) and panel.fold > 1 for panel in panels)
    _header(sheet, result, width, folded)
    top = HEADER
    for number, (text, panel) in enumerate(zip(texts, panels), start=start):
        answer = shorten(visible(text.answer), 30)
        heading = f"{number}   answer “{answer}”, p = {text.probability:.3f}"
        write(sheet, MARGIN, top, heading, size=8.5, weight="bold", va="top")
        marked = span_name(text)
        if marked:
            write(sheet, width - MARGIN, top, marked, size=7.5, color=MARK, va="top", ha="right")
        panel.draw(sheet, top + HEADING)
        top += HEADING + panel.height
        if panel.left_out:
            write(sheet, MARGIN, top + 0.08, panel.left_out, size=7.5, color=SOFT, va="top")
        top += FOOTER
    if rest:
        shown = f"texts {start}–{start + len(texts) - 1} of {len(result)}; figure(start=…) draws the others"
        write(sheet, MARGIN, top, shown, size=7.5, color=SOFT, va="top")
    return figure


def _header(sheet: Axes, result: ImplicitAttention, width: float, folded: bool) -> None:
    figure = cast(Figure, sheet.get_figure())
    height = figure.get_size_inches()[1]
    bar = 1.5
    left = width - MARGIN - bar - 0.25
    room = left - MARGIN - 0.3
    model = str(result.provenance.get("model", ""))
    write(sheet, MARGIN, 0.2, f"Implicit attention, {result.level_name}", size=10.5, weight="bold", va="top")
    second = f"{shorten(visible(model), max(int(room / 0.066) - 31, 12))} · {heads_name(result)}"
    write(sheet, MARGIN, 0.42, second, size=8, color=SOFT, va="top")
    third = f"rows are queries, columns keys; limit: the {CLIPPED:g}th percentile of |weight| of each map"
    write(sheet, MARGIN, 0.6, shorten(third, int(room / 0.052)), size=7, color=SOFT, va="top")
    if folded:
        fourth = "several weights share a dot, which shows the strongest of them"
        write(sheet, MARGIN, 0.75, fourth, size=7, color=SOFT, va="top")
    axes = figure.add_axes((left / width, 1 - 0.32 / height, bar / width, 0.11 / height))
    _bar(axes, 1.0, ["−limit", "0", "limit"], "horizontal")
    axes.set_xlabel("weight", fontsize=7, color=SOFT, labelpad=1)


def _bar(axes: Axes, end: float, names: list[str], orientation: str) -> None:
    figure = cast(Figure, axes.get_figure())
    mappable = ScalarMappable(norm=Normalize(-end, end), cmap=_COLOURS)
    scale = figure.colorbar(mappable, cax=axes, orientation=orientation, ticks=[-end, 0, end])
    cast(Any, scale.outline).set_linewidth(0.4)
    axis = axes.xaxis if orientation == "horizontal" else axes.yaxis
    axis.set_ticklabels(names, fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)


def _ends(map_: AttentionMap, text: AttendedText) -> tuple[float, str, bool]:
    """Where the colours of a map end, that as a caption, and whether some weights lie beyond."""
    end, largest = limit(map_, text)
    if largest == 0:
        return 1.0, "all weights are 0", False
    clipped = largest > end
    return end, f"±{brief(end)}" + (f", largest {brief(largest)}" if clipped else ""), clipped


def _panel(text: AttendedText, room: int) -> _Triangles | _Rows:
    cells = len(text) if text.edges is None else len(text.edges) - 1
    if len(text.queries) == cells and text.maps:
        return _Triangles(text, room)
    if text.pixels is not None and text.edges is None:
        return _Pictures(text, room)
    shown = min(len(text.maps) * len(text.queries), room)
    if text.edges is None and len(text) <= BOX_TOKENS and shown <= BOX_ROWS:
        return _Boxes(text, room)
    return _Bars(text, room)


class _Triangles:
    """The whole maps of a text, each a triangle. Lays itself out when made, so that the figure knows its size."""

    def __init__(self, text: AttendedText, room: int) -> None:
        self.text, self.maps = text, text.maps[:room]
        count, cells = len(self.maps), len(text.queries)
        more = len(text.maps) - count
        self.left_out = f"{more} more map{'s' if more > 1 else ''}; summary() has them all" if more else ""
        self.large = count <= LARGE
        limited = LABELLED_TOKENS if self.large else 12
        self.labelled = text.edges is None and cells <= limited and count <= 12
        self.across = next(n for most, n in ((1, 1), (4, 2), (6, 3), (12, 4), (24, 6), (48, 8)) if count <= most)
        if self.labelled:
            self.side = float(np.clip(cells * 0.115, 2.0, 7.0))
        else:
            self.side = 5.2 if count == 1 else 3.6 if self.large else {3: 2.4, 4: 2.1, 6: 1.5, 8: 1.2}[self.across]
        self.fold = 1 if text.edges is not None else max(1, math.ceil(cells / (self.side * DOTS)))
        if count == 3 and self.side < 2.6:
            self.across = 3
        self.size = min(7.0, self.side / max(cells, 1) * 72 * 0.9) if self.labelled else 6.0
        self.names = [drawable(shorten(visible(t).removeprefix(" "), LABEL)) for t in text.tokens if self.labelled]
        longest = max([5, *map(letters, self.names)]) if self.labelled else 5
        self.label = longest * self.size / 72 * 0.62 + 0.1
        self.sink = any(map_.sink is not None for map_ in self.maps)
        first, last = self._ends()
        self.unit = max(1.0, 0.03 * (last - first))  # how wide the column of the state is, in positions
        self.extra = 1.5 * self.unit if self.sink else 0.0
        self.wide = self.side * (last - first + self.extra) / (last - first)
        self.above = 0.36 + (0.14 if self.sink else 0)
        self.below = (self.label if self.labelled else 0.2) + (0.2 if self.large else 0)
        self.before = self.label + (0.2 if self.large else 0)
        self.step = self.before + self.wide + (0.95 if self.large else GAP)
        self.legend = _wrap(cast(Any, text), LEGEND_TOKENS) if self._needs_legend() else []
        self.head = len(self.legend) * (BOX + 0.03) + (0.15 if self.legend else 0)
        lines = math.ceil(count / self.across)
        self.each = self.above + self.side + self.below + GAP
        self.height = self.head + lines * self.each - GAP
        self.width = max(self.step * self.across, LINE + 0.35 if self.legend else 0)

    def _needs_legend(self) -> bool:
        return not self.labelled and self.text.edges is None and len(self.text) <= LEGEND_TOKENS

    def _ends(self) -> tuple[float, float]:
        """Where the axes begin and end, in positions: a token lies around its position, a cell between its edges."""
        if self.text.edges is None:
            return -0.5, len(self.text) - 0.5
        return float(self.text.edges[0]), float(self.text.edges[-1])

    def draw(self, sheet: Axes, top: float) -> None:
        for index, boxes in enumerate(self.legend):
            y = top + index * (BOX + 0.03)
            write(sheet, MARGIN + 0.3, y + BOX * 0.68, str(boxes[0].position), size=6, color=SOFT, ha="right")
            _boxes(sheet, boxes, MARGIN + 0.35, y, {}, self.text)
        top += self.head
        for index, map_ in enumerate(self.maps):
            row, column = divmod(index, self.across)
            self._map(sheet, map_, MARGIN + column * self.step + self.before, top + row * self.each)

    def _map(self, sheet: Axes, map_: AttentionMap, left: float, top: float) -> None:
        first, last = self._ends()
        end, caption, clipped = _ends(map_, self.text)
        room = self.step - 0.08  # up to the next map's
        write(sheet, left, top, shorten(title(map_), int(room / 0.065)), size=7.5, va="top")
        write(sheet, left, top + 0.16, shorten(caption, int(room / 0.052)), size=6.5, color=SOFT, va="top")
        axes = _axes(sheet, left, top + self.above, self.wide, self.side)
        axes.set(xlim=(first - self.extra, last), ylim=(last, first), facecolor=BLANK)
        self._cells(axes, np.where(causal(self.text), map_.values, np.nan), end, first)
        if map_.sink is not None:
            begin = first - self.extra
            column = (begin, begin + self.unit)
            self._cells(axes, map_.sink[:, None], end, first, column)
            axes.add_patch(
                Rectangle((begin, first), self.unit, last - first, fill=False, edgecolor=SOFT, linewidth=0.4)
            )
            write(axes, begin, first - 0.05 / self.side * (last - first), "state", size=6.5, color=SOFT, va="bottom")
        self._frame(axes, first, last)
        if self.large:
            bar = _axes(sheet, left + self.wide + 0.12, top + self.above, 0.11, min(self.side, 2.2))
            less, more = ("≤ ", "≥ ") if clipped else ("", "")
            _bar(bar, end, [f"{less}−{brief(end)}", "0", f"{more}{brief(end)}"], "vertical")

    def _cells(
        self, axes: Axes, values: np.ndarray, end: float, first: float, column: tuple[float, float] | None = None
    ) -> None:
        """The weights (queries, keys) as coloured cells, keys along the axis or all in one column."""
        edges = self.text.edges
        if edges is None:
            shown = strongest_of_blocks(values, self.fold, 1 if column else self.fold)
            left, right = column or (first, first + shown.shape[1] * self.fold)
            extent = (left, right, first + shown.shape[0] * self.fold, first)
            style: dict[str, Any] = dict(extent=extent, aspect="auto", interpolation="nearest")
            axes.imshow(np.ma.masked_invalid(shown), cmap=_COLOURS, vmin=-end, vmax=end, **style)
        else:
            across = edges if column is None else np.array(column)
            style = dict(vmin=-end, vmax=end, rasterized=True)
            axes.pcolormesh(across, edges, np.ma.masked_invalid(values), cmap=_COLOURS, **style)

    def _frame(self, axes: Axes, first: float, last: float) -> None:
        """Ticks, the names of the axes where there is room, and the marked span along both."""
        style: dict[str, Any] = dict(fontsize=self.size, family=families(), parse_math=False, usetex=False)
        axes.tick_params(length=2, width=0.4, pad=1.5, color=SOFT, labelsize=self.size, labelcolor=SOFT)
        if self.labelled:
            places = range(len(self.names))
            axes.set_xticks(places, self.names, rotation=90, **style)
            axes.set_yticks(places, self.names, **style)
            for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
                for place, label in enumerate(labels):
                    special = self.text.words[place] is None
                    label.set(color=MARK if self._marked(place) else SOFT if special else INK)
                    label.set_fontstyle("italic" if special else "normal")
        else:
            bins = 10 if self.large else 3
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(bins, integer=True))
                axis.set_ticks([t for t in axis.get_majorticklocs() if max(first, 0) <= t <= last])
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color=SOFT, linewidth=0.4)
        axes.spines["bottom"].set_bounds(first, last)
        if self.large:
            unit = "" if self.labelled else ", position"
            axes.set_ylabel(f"query{unit}", fontsize=7, color=SOFT, labelpad=2)
            axes.set_xlabel(f"key{unit}", fontsize=7, color=SOFT, labelpad=2)
        if self.text.span is not None:
            half = 0.5 if self.text.edges is None else 0.0
            begin, stop = (place - half for place in self.text.span)
            thick = 0.03 / self.side * (last - first)
            for corner, size in (
                ((begin, last), (stop - begin, thick)),
                ((first - self.extra - thick, begin), (thick, stop - begin)),
            ):
                axes.add_patch(Rectangle(corner, *size, facecolor=MARK, linewidth=0, clip_on=False, zorder=3))

    def _marked(self, place: int) -> bool:
        return self.text.span is not None and self.text.span[0] <= place < self.text.span[1]


def strongest_of_blocks(values: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """Of every block of `tall` × `wide` weights the one of the largest absolute value; NaN where all are NaN.

    A mean would let a thin diagonal fade, and weights of both signs cancel.
    """
    if tall == wide == 1:
        return values
    rows, columns = values.shape
    padding = ((0, -rows % tall), (0, -columns % wide))
    padded = np.pad(values.astype(np.float32), padding, constant_values=np.nan)
    down, across = padded.shape[0] // tall, padded.shape[1] // wide
    blocks = padded.reshape(down, tall, across, wide).swapaxes(1, 2).reshape(down, across, tall * wide)
    strength = np.where(np.isnan(blocks), -1.0, np.abs(blocks))
    return np.take_along_axis(blocks, strength.argmax(axis=-1)[..., None], axis=-1)[..., 0]


class _Rows(ABC):
    """What the views of chosen queries share: which rows of which maps are shown, and their names."""

    width = LINE + 0.35
    height = 0.0

    def __init__(self, text: AttendedText, room: int) -> None:
        self.text = text
        rows = [(map_, row) for map_ in text.maps for row in range(len(text.queries))]
        self.rows = rows[:room]
        more = len(rows) - len(self.rows)
        self.left_out = f"{more} more row{'s' if more > 1 else ''} of maps; the saved files have them" if more else ""
        if not rows:
            self.left_out = "no maps"

    @abstractmethod
    def draw(self, sheet: Axes, top: float) -> None:
        """The rows from `top` inches below the sheet's upper edge."""

    def name(self, map_: AttentionMap, row: int) -> str:
        query = int(self.text.queries[row])
        token = shorten(visible(self.text.tokens[query]).strip(" "), 20)
        return f"{title(map_)} · query {query} “{token}”"


class _Boxes(_Rows):
    """Each row as the text up to its query, every token in the colour of its weight."""

    def __init__(self, text: AttendedText, room: int) -> None:
        super().__init__(text, room)
        lines = _wrap(cast(Any, text), BOX_TOKENS)
        self.lines = [
            [kept for boxes in lines if (kept := [box for box in boxes if box.position <= text.queries[row]])]
            for _, row in self.rows
        ]
        self.heights = [0.25 + (BOX + 0.06) * len(lines) for lines in self.lines]
        self.height = sum(self.heights) + 0.1 * max(len(self.rows) - 1, 0)

    def draw(self, sheet: Axes, top: float) -> None:
        for (map_, row), lines, height in zip(self.rows, self.lines, self.heights):
            end, caption, _ = _ends(map_, self.text)
            write(sheet, MARGIN + 0.35, top, f"{self.name(map_, row)}   {caption}", size=7.5, color=SOFT, va="top")
            if map_.sink is not None:
                self._state(sheet, float(map_.sink[row]), end, top)
            found = levels(map_.values[row], end)
            fills = {position: _SHADES[level + STEPS] for position, level in enumerate(found.tolist())}
            for index, boxes in enumerate(lines):
                y = top + 0.22 + index * (BOX + 0.06)
                _boxes(sheet, boxes, MARGIN + 0.35, y, fills, self.text, query=int(self.text.queries[row]))
            top += height + 0.1

    def _state(self, sheet: Axes, weight: float, end: float, top: float) -> None:
        """What comes from the state, set apart at the right of the row's name."""
        fill = _SHADES[int(levels(np.array([weight]), end)[0]) + STEPS]
        text = f"state {brief(weight)}"
        width = len(text) * 6.5 / 72 * 0.602 + 2 * PADDING
        left = MARGIN + self.width - width
        sheet.add_patch(Rectangle((left, top - 0.01), width, 0.17, facecolor=fill, edgecolor=SOFT, linewidth=0.4))
        place = dict(size=6.5, ha="center", va="center", family=families())
        write(sheet, left + width / 2, top + 0.075, text, color=ink(fill), **place)


class _Bars(_Rows):
    """Each row as bars over positions."""

    def __init__(self, text: AttendedText, room: int) -> None:
        super().__init__(text, room)
        self.height = 1.08 * len(self.rows)

    def draw(self, sheet: Axes, top: float) -> None:
        edges = np.arange(len(self.text) + 1) - 0.5 if self.text.edges is None else self.text.edges.astype(float)
        last = float(edges[-1])
        unit = max(1.0, 0.012 * (last - edges[0]))
        sink = any(map_.sink is not None for map_, _ in self.rows)
        for index, (map_, row) in enumerate(self.rows):
            y = top + 1.08 * index
            write(sheet, MARGIN + 0.55, y, self.name(map_, row), size=7.5, color=SOFT, va="top")
            axes = _axes(sheet, MARGIN + 0.55, y + 0.2, LINE - 0.3, 0.6)
            weights = np.where(causal(self.text)[row], map_.values[row], 0.0)
            everything = weights if map_.sink is None else np.append(weights, map_.sink[row])
            most = float(np.abs(everything).max()) or 1.0
            for sign, level in ((1, 0.75), (-1, -0.75)):
                fill = _SHADES[int(level * STEPS) + STEPS]
                shown = np.maximum(weights * sign, 0) * sign
                axes.stairs(shown, edges, fill=True, color=fill, linewidth=0)
            if map_.sink is not None:
                weight = float(map_.sink[row])
                fill = _SHADES[(12 if weight > 0 else -12) + STEPS]
                axes.bar([edges[0] - 2.5 * unit], [weight], width=unit, color=fill)
            axes.axhline(0, color=SOFT, linewidth=0.4)
            axes.set(xlim=(edges[0] - (3.5 * unit if sink else 0), last), ylim=(-1.05 * most, 1.05 * most))
            axes.set_yticks([-most, 0, most], [f"−{brief(most)}", "0", brief(most)], fontsize=6, color=SOFT)
            axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
            ticks = [t for t in axes.get_xticks() if max(edges[0], 0) <= t <= last]
            names = [f"{t:.0f}" for t in ticks]
            if map_.sink is not None:
                ticks, names = [edges[0] - 2.5 * unit, *ticks], ["state", *names]
            axes.set_xticks(ticks, names, fontsize=6, color=SOFT)
            axes.tick_params(length=2, width=0.4, pad=1.5, color=SOFT)
            axes.spines[:].set_visible(False)
            query = float(self.text.queries[row])
            axes.plot([query], [1.05 * most], "v", color=INK, ms=4, clip_on=False)
            if self.text.span is not None:
                half = 0.5 if self.text.edges is None else 0.0
                begin, stop = (place - half for place in self.text.span)
                axes.add_patch(
                    Rectangle((begin, -1.05 * most), stop - begin, 0.08 * most, facecolor=MARK, clip_on=False)
                )


class _Pictures(_Rows):
    """The image, and beside it each row as a picture of the pixels that are its keys."""

    def __init__(self, text: AttendedText, room: int) -> None:
        super().__init__(text, room)
        assert text.pixels is not None
        self.pixels = text.pixels
        tall, wide = text.pixels.shape[:2]
        scale = PICTURE / max(tall, wide)
        self.tall, self.wide = max(tall * scale, 0.2), max(wide * scale, 0.2)
        self.each = self.tall + 0.72
        self.height = self.each * math.ceil((1 + len(self.rows)) / ACROSS)
        self.width = ACROSS * (PICTURE + GAP)

    def draw(self, sheet: Axes, top: float) -> None:
        grey = self.pixels.shape[2] != 3
        shown = self.pixels.mean(-1) if grey else self.pixels
        axes = self._axes(sheet, 0, top)
        axes.imshow(shown.clip(0, 1), cmap="gray" if grey else None, vmin=0, vmax=1, interpolation="nearest")
        axes.set_xlabel("image", fontsize=6.5, color=SOFT, labelpad=3)
        places = np.flatnonzero([word is not None for word in self.text.words])
        for index, (map_, row) in enumerate(self.rows, start=1):
            query = int(self.text.queries[row])
            end, caption, _ = _ends(map_, self.text)
            weights = np.where(places <= query, map_.values[row][places], np.nan).reshape(shown.shape[:2])
            axes = self._axes(sheet, index, top)
            picture = np.ma.masked_invalid(weights)
            axes.imshow(picture, cmap=_COLOURS, vmin=-end, vmax=end, interpolation="nearest")
            at = np.flatnonzero(places == query)
            if at.size:
                corner = (int(at[0]) % shown.shape[1] - 0.5, int(at[0]) // shown.shape[1] - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=INK, linewidth=1))
            state = "" if map_.sink is None else f"state {brief(float(map_.sink[row]))}"
            asked = f"query {query} “{shorten(visible(self.text.tokens[query]), 12)}”"
            end_only = caption.partition(",")[0]
            lines = [shorten(line, 26) for line in (title(map_), asked, end_only, state)]
            style: dict[str, Any] = dict(parse_math=False, usetex=False, family=families("DejaVu Sans"))
            caption = "\n".join(drawable(line) for line in lines if line)
            axes.set_xlabel(caption, fontsize=6.5, color=SOFT, labelpad=3, **style)

    def _axes(self, sheet: Axes, index: int, top: float) -> Axes:
        row, column = divmod(index, ACROSS)
        left = MARGIN + column * (PICTURE + GAP) + (PICTURE - self.wide) / 2
        axes = _axes(sheet, left, top + row * self.each, self.wide, self.tall)
        axes.set(xticks=[], yticks=[], facecolor=BLANK)
        axes.spines[:].set(color=SOFT, linewidth=0.4)
        return axes


def _axes(sheet: Axes, left: float, top: float, wide: float, tall: float) -> Axes:
    figure = cast(Figure, sheet.get_figure())
    width, height = figure.get_size_inches()
    return figure.add_axes((left / width, 1 - (top + tall) / height, wide / width, tall / height))


def _boxes(
    sheet: Axes,
    boxes: list[_Box],
    left: float,
    y: float,
    fills: dict[int, str],
    text: AttendedText,
    query: int | None = None,
) -> None:
    """One line of tokens in boxes of the given colours (white without one), the query framed, the marked underlined."""
    span = range(*text.span) if text.span is not None else ()
    places = [(Rectangle((left + b.left, y), b.width, BOX), fills.get(b.position, BLANK)) for b in boxes]
    places += [(Rectangle((left + b.left, y + BOX), b.width, 0.03), MARK) for b in boxes if b.position in span]
    fill(sheet, places, edge="none")
    for box in boxes:
        shade = fills.get(box.position, BLANK)
        special = text.words[box.position] is None
        if box.position == query:
            frame = Rectangle((left + box.left, y), box.width, BOX, fill=False, edgecolor=INK, linewidth=0.9)
            sheet.add_patch(frame)
        middle = left + box.left + box.width / 2
        style = dict(size=FONT_SIZE, ha="center", family=families(), style="italic" if special else "normal")
        write(sheet, middle, y + BOX * 0.68, box.token, color=ink(shade), **style)
