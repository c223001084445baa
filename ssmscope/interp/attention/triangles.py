"""Figure of whole attention maps: triangles of queries and keys, each on its own scale around zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ssmscope.interp.attention.maps import causal, limit, title
from ssmscope.render.blocks import TokenText
from ssmscope.render.drawing import MARGIN, MARK, drawable, families, letters, write
from ssmscope.render.figure import INK, SOFT, Sheet
from ssmscope.render.numbers import number
from ssmscope.render.signed import SIGNED
from ssmscope.render.token_figure import BOX_HEIGHT, Panel, draw_boxes, wrap
from ssmscope.render.tokens import ramp, short_token, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.interp.attention.result import AttendedText, AttentionMap

MAX_LABELLED_TOKENS = 60
"""Largest number of tokens that are written along the axes of a map, if there are up to `MAX_LARGE_MAPS` maps."""
MAX_LARGE_MAPS = 4
"""Largest number of maps of a text that are drawn large, each with a colour bar."""
MAX_LEGEND_TOKENS = 240
"""Largest number of tokens of a text that is written above maps too small for labels."""
LABEL_CHARACTERS = 14
"""Characters of a token that fit along an axis."""
DOTS_PER_INCH = 150
"""Cells per inch of a map; in longer texts several weights share one."""
GAP_INCHES = 0.2
"""Inches between maps."""

_COLOURS = ListedColormap(ramp(SIGNED, 257)).with_extremes(bad="#ffffff")


class Triangles(Panel):
    """Maps of a text next to each other, under its tokens."""

    def __init__(self, number: int, shown: TokenText, text: AttendedText, maps: Sequence[AttentionMap]) -> None:
        super().__init__(number, shown)
        self.attended, self.maps = text, maps
        count, cells = len(maps), len(text.queries)
        self.large = count <= MAX_LARGE_MAPS
        limited = MAX_LABELLED_TOKENS if self.large else 12
        self.labelled = text.edges is None and cells <= limited and count <= 12
        self.across = next(n for most, n in ((1, 1), (4, 2), (6, 3), (12, 4), (24, 6), (48, 8)) if count <= most)
        if self.labelled:
            self.side = float(np.clip(cells * 0.115, 2.0, 7.0))
        else:
            self.side = 5.2 if count == 1 else 3.6 if self.large else {3: 2.4, 4: 2.1, 6: 1.5, 8: 1.2}[self.across]
        if count == 3 and self.side < 2.6:
            self.across = 3
        self.fold = 1 if text.edges is not None else max(1, math.ceil(cells / (self.side * DOTS_PER_INCH)))
        self.size = min(7.0, self.side / max(cells, 1) * 72 * 0.9) if self.labelled else 6.0
        self.names = [drawable(short_token(t, LABEL_CHARACTERS)) for t in text.tokens if self.labelled]
        label = max([5, *map(letters, self.names)]) * self.size / 72 * 0.62 + 0.1
        # Where the axes begin and end, in positions: a token lies around its position, a cell between its edges.
        edges = text.edges
        self.first, self.last = (-0.5, len(text) - 0.5) if edges is None else (float(edges[0]), float(edges[-1]))
        long = self.last - self.first
        sink = any(map_.sink is not None for map_ in maps)
        self.unit = max(1.0, 0.03 * long)  # The state's column, in positions.
        self.extra = 1.5 * self.unit if sink else 0.0
        self.wide = self.side * (long + self.extra) / long
        self.above, named = 0.36 + 0.14 * sink, 0.2 * self.large
        self.before = label + named
        self.step = self.before + self.wide + (0.95 if self.large else GAP_INCHES)
        written = not self.labelled and edges is None and len(text) <= MAX_LEGEND_TOKENS
        self.lines = wrap(text.tokens, text.words) if written else []
        self.head = len(self.lines) * (BOX_HEIGHT + 0.05) + 0.15 * written
        self.each = self.above + self.side + (label if self.labelled else 0.2) + named + GAP_INCHES
        self.height = 0.3 + self.head + math.ceil(count / self.across) * self.each + 0.2
        text_wide = max((boxes[-1].left + boxes[-1].width for boxes in self.lines), default=0.0)
        self.width = max(self.step * self.across, text_wide + 0.4)

    def draw_inner(self, sheet: Sheet, top: float, line: float) -> None:
        for index, boxes in enumerate(self.lines):
            y = top + index * (BOX_HEIGHT + 0.05)
            write(
                sheet.paper, MARGIN + 0.3, y + BOX_HEIGHT * 0.68, str(boxes[0].position), size=6, color=SOFT, ha="right"
            )
            draw_boxes(sheet.paper, boxes, MARGIN + 0.35, y, self.text)
        for index, map_ in enumerate(self.maps):
            row, column = divmod(index, self.across)
            self._map(sheet, map_, MARGIN + column * self.step + self.before, top + self.head + row * self.each)

    def _map(self, sheet: Sheet, map_: AttentionMap, left: float, top: float) -> None:
        text, first, last = self.attended, self.first, self.last
        end, largest = limit(map_, text)
        shown, clipped = number(end), largest > end
        caption = f"±{shown}" + f", largest {number(largest)}" * clipped if largest else "all weights are 0"
        room = self.step - 0.08  # The next map begins there.
        write(sheet.paper, left, top, shorten(title(map_), int(room / 0.065)), size=7.5, va="top")
        write(sheet.paper, left, top + 0.16, shorten(caption, int(room / 0.052)), size=6.5, color=SOFT, va="top")
        axes = sheet.panel(left, top + self.above, self.wide, self.side, grid=None)
        axes.set(xlim=(first - self.extra, last), ylim=(last, first), facecolor="white")
        self._cells(axes, np.where(causal(text), map_.values, np.nan), end or 1.0)
        if map_.sink is not None:
            begin = first - self.extra
            self._cells(axes, map_.sink[:, None], end or 1.0, (begin, begin + self.unit))
            frame: dict[str, Any] = dict(fill=False, edgecolor=SOFT, linewidth=0.4)
            axes.add_patch(Rectangle((begin, first), self.unit, last - first, **frame))
            write(axes, begin, first - 0.05 / self.side * (last - first), "state", size=6.5, color=SOFT, va="bottom")
        self._frame(axes)
        if self.large:
            bar = sheet.panel(left + self.wide + 0.12, top + self.above, 0.11, min(self.side, 2.2), grid=None)
            less, more = ("≤ ", "≥ ") if clipped else ("", "")
            _bar(bar, end or 1.0, [f"{less}−{number(end or 1.0)}", "0", f"{more}{number(end or 1.0)}"])

    def _cells(self, axes: Axes, values: np.ndarray, end: float, column: tuple[float, float] | None = None) -> None:
        """Draw the weights (queries, keys) as coloured cells, keys along the axis or all in one column."""
        edges = self.attended.edges
        style: dict[str, Any] = dict(cmap=_COLOURS, vmin=-end, vmax=end)
        if edges is not None:
            across = edges if column is None else np.array(column)
            axes.pcolormesh(across, edges, np.ma.masked_invalid(values), rasterized=True, **style)
            return
        shown = strongest_of_blocks(values, self.fold, 1 if column else self.fold)
        left, right = column or (self.first, self.first + shown.shape[1] * self.fold)
        extent = (left, right, self.first + shown.shape[0] * self.fold, self.first)
        axes.imshow(np.ma.masked_invalid(shown), extent=extent, aspect="auto", interpolation="nearest", **style)

    def _frame(self, axes: Axes) -> None:
        """Draw ticks, the names of the axes where there is room, and the marked span along both."""
        text, first, last = self.attended, self.first, self.last
        span = range(*text.span) if text.span is not None else range(0)
        style: dict[str, Any] = dict(fontsize=self.size, family=families(), parse_math=False, usetex=False)
        axes.tick_params(length=2, width=0.4, pad=1.5, color=SOFT, labelsize=self.size, labelcolor=SOFT)
        if self.labelled:
            places = range(len(self.names))
            axes.set_xticks(places, self.names, rotation=90, **style)
            axes.set_yticks(places, self.names, **style)
            for place, *labels in zip(places, axes.get_xticklabels(), axes.get_yticklabels()):
                special = text.words[place] is None
                for label in labels:
                    label.set(color=MARK if place in span else SOFT if special else INK)
                    label.set_fontstyle("italic" if special else "normal")
        else:
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(10 if self.large else 3, integer=True))
                axis.set_ticks([t for t in axis.get_majorticklocs() if max(first, 0) <= t <= last])
        axes.spines[["left", "bottom"]].set_linewidth(0.4)
        axes.spines["bottom"].set_bounds(first, last)
        if self.large:
            unit = "" if self.labelled else ", position"
            axes.set_ylabel(f"query{unit}", fontsize=7, color=SOFT, labelpad=2)
            axes.set_xlabel(f"key{unit}", fontsize=7, color=SOFT, labelpad=2)
        if span:
            begin, long = span.start - (0.5 if text.edges is None else 0.0), len(span)
            thick = 0.03 / self.side * (last - first)
            for corner, size in (((begin, last), (long, thick)), ((first - self.extra - thick, begin), (thick, long))):
                axes.add_patch(Rectangle(corner, *size, facecolor=MARK, linewidth=0, clip_on=False, zorder=3))


def _bar(axes: Axes, end: float, names: list[str]) -> None:
    """Draw the colour bar of one map."""
    scale = axes.figure.colorbar(
        ScalarMappable(norm=Normalize(-end, end), cmap=_COLOURS), cax=axes, orientation="vertical", ticks=[-end, 0, end]
    )
    scale.outline.set_linewidth(0.4)
    axes.yaxis.set_ticklabels(names, fontsize=7, color=SOFT)
    axes.tick_params(length=2, width=0.4, pad=1.5)


def strongest_of_blocks(values: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """Return the weight of the largest absolute value in every block of `tall` × `wide` weights; NaN where all are NaN.

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
