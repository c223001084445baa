"""Common parts of pictures: the palette, a sheet with title and legend, plain axes, curves with bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ssmscope.core.bootstrap import Estimate
from ssmscope.render.numbers import counted
from ssmscope.render.table import written
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, GRID, EDGE = "#1b1f24", "#57606a", "#e6e9ed", "#f3f4f6"
COLOURS = ("#2065a8", "#d1540a", "#0f8a6c", "#b01e8a", "#7a6a00", "#57606a")
"""Colours of curves in order; they differ in lightness too."""
MARKERS = "osD^vP"
LOG_SCALE_FROM = 300.0
"""Value above which `scale_steep` makes an axis logarithmic."""
DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))

MAX_NAME_LETTERS = 20
"""Maximum letters of the name of a row of points."""

TITLE_LETTERS_PER_INCH, SUBTITLE_LETTERS_PER_INCH = 10.6, 14.0
"""Letters per inch of the title and of the line below it."""


def plain(axes: Axes, *, grid: str | None = "both", size: float = 8.5) -> Axes:
    """Leave axes only their left and lower lines, and draw a grid behind the content."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=size)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(axis=grid, color=GRID)  # type: ignore[arg-type]
    return axes


def heading(figure: Figure, before: str, model: str, after: str, below: str, aside: float = 0.0) -> None:
    """Write the title, with the model's name shortened if necessary, and a smaller line below it.

    Args:
        aside: inches at the right to leave free.
    """
    width, height = figure.get_size_inches()
    style: dict[str, Any] = dict(va="center", parse_math=False)  # A $ in a user's name must not start a formula.
    wide = width - aside
    room = max(round(TITLE_LETTERS_PER_INCH * wide) - len(before) - len(after), 8)
    title = shorten(f"{before}{shorten(visible(model), room)}{after}", round(TITLE_LETTERS_PER_INCH * wide))
    figure.text(0.2 / width, 1 - 0.28 / height, title, size=11, color=INK, **style)
    small = shorten(visible(below), round(SUBTITLE_LETTERS_PER_INCH * wide))
    figure.text(0.2 / width, 1 - 0.54 / height, small, size=8.5, color=SOFT, **style)


def title(result: Any) -> tuple[str, str, str]:
    """Split a result's headline into the part before its model's name, the name, and the part after it."""
    before, model, after = result.headline.partition(result.model_name)
    return before, model, after


def data_line(result: Any, *more: str) -> str:
    """Describe the data of a result: "300 examples of sst2 (test), 95 % bootstrap intervals"."""
    data = result.provenance["data"]
    name = shorten(visible(f"{data['name']} ({data['split']})"), 60)
    return "; ".join([f"{counted(data['examples'], 'example')} of {name}, 95 % bootstrap intervals", *more])


class Sheet:
    """A figure with a title, a legend below it, and panels placed in inches from the upper left.

    Attributes:
        top: inches from the upper end at which panels may begin.
    """

    TOP, LINE = 0.85, 0.2

    def __init__(
        self,
        width: float,
        height: float,
        title: tuple[str, str, str],
        below: str,
        legend: Sequence[tuple[Line2D, str]] = (),
        *,
        left: float = 0.85,
        across: int = 1,
        aside: float = 0.0,
    ) -> None:
        """Make the sheet.

        Args:
            width, height: inches without the legend.
            title: its parts before the model's name, the name, and after it.
            across: entries of the legend per line.
            aside: inches to leave free at the right of the title.
        """
        lines = self.LINE * math.ceil(len(legend) / across)
        self.top = self.TOP + lines
        self.width, self.height = width, height + lines
        self.figure = Figure(figsize=(self.width, self.height), facecolor="white")
        heading(self.figure, *title, below, aside)
        step = (width - left - 0.2) / across
        for number, (handle, name) in enumerate(legend):
            x, y = left + number % across * step, self.TOP - 0.1 + self.LINE * (number // across + 0.5)
            y = 1 - y / self.height
            handle.set(xdata=[x / self.width, (x + 0.32) / self.width], ydata=[y, y], transform=self.figure.transFigure)
            self.figure.add_artist(handle)
            place = (x + 0.42) / self.width
            self.figure.text(place, y, visible(name), size=8.5, color=INK, va="center", parse_math=False)

    @cached_property
    def paper(self) -> Axes:
        """Axes of the whole sheet, in inches from its upper left, for elements placed freely."""
        paper = self.figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        paper.set_axis_off()
        return paper

    def panel(
        self, left: float, top: float, width: float, height: float, *, grid: str | None = "both", **options: Any
    ) -> Axes:
        """Return axes at these inches from the sheet's left and upper ends, with grid lines "x", "y" or "both"."""
        bottom = self.height - top - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return plain(self.figure.add_axes(place, **options), grid=grid)


def scale_steep(axes: Axes, curves: np.ndarray) -> None:
    """Make the axis logarithmic if a curve exceeds `LOG_SCALE_FROM`, so that it does not flatten the others."""
    finite = curves[np.isfinite(curves)]
    if finite.size and finite.max() > LOG_SCALE_FROM and finite.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.12g}"))


def stacked(
    title: tuple[str, str, str], below: str, legend: Sequence[tuple[Line2D, str]], panels: int
) -> tuple[Figure, list[Axes]]:
    """Return a sheet's figure and its panels, one above the other with a common horizontal axis."""
    width, height, left, tall, step = 8.0, Sheet.TOP + 0.27, 0.85, 2.3, 2.65
    sheet = Sheet(width, height + step * panels, title, below, legend, left=left)
    axes: list[Axes] = []
    for number in range(panels):
        share = axes[0] if axes else None
        axes.append(sheet.panel(left, sheet.top + step * number, width - left - 0.3, tall, sharex=share))
        axes[-1].tick_params(labelbottom=number == panels - 1)
    return sheet.figure, axes


def line(axes: Axes, at: Sequence[float], found: Sequence[Estimate], number: int, **style: Any) -> None:
    """Draw a curve in the colour of its number with the band of its intervals, or a bar for a single point."""
    colour = COLOURS[number % len(COLOURS)]
    low, high = [e.low for e in found], [e.high for e in found]
    if len(at) == 1:
        axes.plot([at[0], at[0]], [low[0], high[0]], color=colour, linewidth=1.4, alpha=0.6, solid_capstyle="butt")
    else:
        axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    look = {"linewidth": 1.6, "marker": MARKERS[number % len(MARKERS)], "markersize": 4, **style}
    axes.plot(at, [e.value for e in found], color=colour, **look)


def interval(axes: Axes, at: float, found: Estimate, colour: str = INK, *, upright: bool = True) -> None:
    """Draw an interval as a thin line."""
    ends, place = [found.low, found.high], [at, at]
    x, y = (place, ends) if upright else (ends, place)
    axes.plot(x, y, color=colour, linewidth=1.4, solid_capstyle="butt")


def points(
    axes: Axes,
    names: Sequence[str],
    found: Sequence[Estimate],
    colours: Sequence[str],
    *,
    numbers: bool = True,
    letters: int = MAX_NAME_LETTERS,
) -> None:
    """Draw a row per name: a point with its interval on an axis with zero.

    Args:
        numbers: True to write the numbers at the right.
        letters: maximum letters of a name.
    """
    axes.grid(False, axis="y")
    axes.axvline(0, color=SOFT, linewidth=0.8)
    for place, (each, colour) in enumerate(zip(found, colours)):
        interval(axes, place, each, colour, upright=False)
        axes.plot(each.value, place, "o", color=colour, markersize=4.5)
        if numbers:
            style: dict[str, Any] = dict(transform=axes.get_yaxis_transform(), va="center", size=8.5, color=INK)
            axes.text(1.02, place, written(each), **style)
    axes.set_yticks(range(len(names)), [shorten(visible(name), letters) for name in names], parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def handle(number: int, **style: Any) -> Line2D:
    """Return the legend handle of a curve."""
    look = {"linewidth": 1.6, "marker": MARKERS[number % len(MARKERS)], "markersize": 4, **style}
    return Line2D([], [], color=COLOURS[number % len(COLOURS)], **look)


def dashed(colour: str) -> Line2D:
    return Line2D([], [], color=colour, linewidth=1, linestyle=DASHED)


def dotted(colour: str) -> Line2D:
    return Line2D([], [], color=colour, linewidth=1.1, linestyle=DOTTED)


def limits(found: Sequence[Estimate]) -> tuple[float, float]:
    """Return the limits of an axis of shares: the intervals with a little room, hardly beyond 0 and 1."""
    ends = [end for e in found for end in (e.low, e.high) if not math.isnan(end)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = max(0.06 * (high - low), 0.02)
    return max(low - room, -0.02), min(high + room, 1.02)
