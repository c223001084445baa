"""Figure of whole attention maps: triangles of queries and keys, each on its own scale around zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from ssmscope.interp.attention.maps import AttendedText, AttentionMap, causal, limit, title
from ssmscope.render import figure as plot
from ssmscope.render.blocks import TokenText
from ssmscope.render.colours import SIGNED, ramp
from ssmscope.render.letters import drawable
from ssmscope.render.numbers import number
from ssmscope.render.token_figure import Columns, Part, name_tokens, rows_part
from ssmscope.render.tokens import short_token, shorten

MAX_LARGE_MAPS, MAX_NAMED_IN_SMALL = 4, 12
"""Largest number of maps of a text drawn large, with a colour bar each, and of tokens named along small ones."""
MAX_LEGEND_TOKENS = 240
"""Largest number of tokens of a text that is written above maps too small for labels."""
DOTS_PER_INCH = 150
"""Cells per inch of a map; in longer texts several weights share one."""
ACROSS = ((1, 1, 5.2), (2, 2, 3.6), (3, 3, 3.6), (4, 2, 3.6), (6, 3, 2.4), (12, 4, 2.1), (24, 6, 1.5), (48, 8, 1.3))
"""Maps next to each other and inches of each without its labels, for at most so many maps."""

_COLOURS = ListedColormap(ramp(SIGNED, 257)).with_extremes(bad="#ffffff")


@dataclass(frozen=True)
class Triangles:
    """Maps of a text next to each other, in a figure at most `width` inches wide, if that is given."""

    text: AttendedText
    maps: Sequence[AttentionMap]
    width: float | None = None

    @property
    def large(self) -> bool:
        return len(self.maps) <= MAX_LARGE_MAPS

    @property
    def named(self) -> bool:
        """True if the tokens are written along the axes."""
        most = plot.MAX_NAMED if self.large else MAX_NAMED_IN_SMALL
        return self.text.edges is None and len(self.text.queries) <= most and len(self.maps) <= 12

    @property
    def side(self) -> float:
        """Inches of a map without its labels."""
        return float(np.clip(len(self.text.queries) * 0.125, 2.0, 7.0)) if self.named else self._wanted[1]

    @property
    def _wanted(self) -> tuple[int, float]:
        return next((across, side) for most, across, side in ACROSS if len(self.maps) <= most)

    @property
    def _step(self) -> float:
        """Inches of a map with its labels."""
        label = 0.08 * max(len(short_token(token, 14)) for token in self.text.tokens) if self.named else 0.3
        return self.side + label + (0.9 if self.large else 0.1)

    @property
    def across(self) -> int:
        wanted, _ = self._wanted
        return wanted if self.width is None else max(1, min(wanted, int(self.width / self._step)))

    @property
    def inches(self) -> float:
        return self.across * self._step

    @property
    def fold(self) -> int:
        """Number of weights along each axis that share a dot."""
        dots = self.side * DOTS_PER_INCH
        return 1 if self.text.edges is not None else max(1, math.ceil(len(self.text.queries) / dots))

    def parts(self, shown: TokenText, columns: Columns) -> Iterator[Part]:
        """Yield the text, where the maps are too small to name its tokens, and the maps."""
        if not self.named and self.text.edges is None and len(self.text) <= MAX_LEGEND_TOKENS:
            yield rows_part(shown, [None], columns)
        rows = math.ceil(len(self.maps) / self.across)
        yield Part(rows * (self._step + (0.3 if not self.large else -0.2)), lambda part: self._draw(part, shown))

    def _draw(self, part: SubFigure, shown: TokenText) -> None:
        for axes, map_ in zip(plot.grid(part, len(self.maps), self.across), self.maps):
            self._map(plot.styled(axes, None), map_, shown)

    def _map(self, axes: Axes, map_: AttentionMap, shown: TokenText) -> None:
        text, edges = self.text, self.text.edges
        # A token lies around its position, a cell between its edges.
        first, last = (-0.5, len(text) - 0.5) if edges is None else (float(edges[0]), float(edges[-1]))
        long, (end, largest) = last - first, limit(map_, text)
        ends = end or 1.0
        unit = max(1.0, 0.03 * long)  # The state's column, in positions.
        begin = first if map_.sink is None else first - 1.5 * unit
        clipped = largest > end
        caption = f"±{number(end)}" + f", largest {number(largest)}" * clipped if largest else "all weights are 0"
        name = shorten(drawable(title(map_)), max(int(self._step / 0.075), 12))
        size = "medium" if self.large else "small"
        axes.set_title(f"{name}\n{caption}", size=size, pad=16 if map_.sink is not None else None)
        axes.set(xlim=(begin, last), ylim=(last, first), facecolor="white")
        axes.set_box_aspect(long / (last - begin))
        axes.set_anchor("W")
        self._cells(axes, np.where(causal(text), map_.values, np.nan), ends, first)
        if map_.sink is not None:
            self._cells(axes, map_.sink[:, None], ends, first, (begin, begin + unit))
            axes.add_patch(Rectangle((begin, first), unit, long, fill=False, edgecolor=plot.SOFT, linewidth=0.4))
            axes.text(begin, first - 0.015 * long, "state", size="small", color=plot.SOFT, va="bottom")
        self._label(axes, shown, first, last, begin)
        if self.large:
            less, more = ("≤ ", "≥ ") if clipped else ("", "")
            bar = plot.colour_bar(axes, plot.colours_of(SIGNED, -ends, ends), "weight", ticks=[-ends, 0, ends])
            bar.set_ticklabels([f"{less}−{number(ends)}", "0", f"{more}{number(ends)}"])

    def _cells(
        self, axes: Axes, values: np.ndarray, end: float, first: float, column: tuple[float, float] | None = None
    ) -> None:
        """Draw the weights (queries, keys) as coloured cells, keys along the axis or all in one column."""
        edges = self.text.edges
        style: dict[str, Any] = dict(cmap=_COLOURS, vmin=-end, vmax=end)
        if edges is not None:
            across = edges if column is None else np.array(column)
            axes.pcolormesh(across, edges, np.ma.masked_invalid(values), rasterized=True, **style)
            return
        shown = strongest_of_blocks(values, self.fold, 1 if column else self.fold)
        left, right = column or (first, first + shown.shape[1] * self.fold)
        extent = (left, right, first + shown.shape[0] * self.fold, first)
        axes.imshow(np.ma.masked_invalid(shown), extent=extent, aspect="auto", interpolation="nearest", **style)

    def _label(self, axes: Axes, shown: TokenText, first: float, last: float, begin: float) -> None:
        """Draw ticks, the names of the axes where there is room, and the marked span along both."""
        if self.named:
            name_tokens(axes, shown, both=True)
        else:
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(10 if self.large else 3, integer=True))
                axis.set_ticks([t for t in axis.get_majorticklocs() if max(first, 0) <= t <= last])
        axes.spines["bottom"].set_bounds(first, last)
        if self.large:
            unit = "" if self.named else ", position"
            axes.set(xlabel=f"key{unit}", ylabel=f"query{unit}")
        if self.text.span is not None:
            begun, ended = self.text.span
            start, long = begun - (0.5 if self.text.edges is None else 0.0), ended - begun
            thick = 0.012 * (last - first)
            for corner, size in (((start, last), (long, thick)), ((begin - thick, start), (thick, long))):
                axes.add_patch(Rectangle(corner, *size, facecolor=plot.MARK, linewidth=0, clip_on=False, zorder=3))


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
