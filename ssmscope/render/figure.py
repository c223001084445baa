"""What pictures share: one palette, a sheet with title and legend, axes without ornament, lines with their bands."""

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
"""Lines in this order; they differ in lightness too."""
MARKERS = "osD^vP"
STEEP = 300.0
"""From this value on the axis of `scale_steep` is logarithmic."""
DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))

NAME = 20
"""As many letters of a name as stand beside a row of points."""

LETTERS, SMALL_LETTERS = 10.6, 14.0
"""How many letters of the title, and of the line below it, stand in an inch."""


def plain(axes: Axes, *, grid: str | None = "both", size: float = 8.5) -> Axes:
    """Axes with a left and a lower line alone, and a grid behind what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(which="both", colors=SOFT, labelsize=size)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(axis=grid, color=GRID)  # type: ignore[arg-type]
    return axes


def heading(figure: Figure, before: str, model: str, after: str, below: str, aside: float = 0.0) -> None:
    """The title, in which the model's name gives way where it is long, and a smaller line below it; `aside` is how many
    inches at their right are not theirs."""
    width, height = figure.get_size_inches()
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    wide = width - aside
    room = max(round(LETTERS * wide) - len(before) - len(after), 8)
    title = shorten(f"{before}{shorten(visible(model), room)}{after}", round(LETTERS * wide))
    figure.text(0.2 / width, 1 - 0.28 / height, title, size=11, color=INK, **style)
    small = shorten(visible(below), round(SMALL_LETTERS * wide))
    figure.text(0.2 / width, 1 - 0.54 / height, small, size=8.5, color=SOFT, **style)


def title(result: Any) -> tuple[str, str, str]:
    """A result's headline as what is before its model's name, the name, and what is after it."""
    before, model, after = result.headline.partition(result.model_name)
    return before, model, after


def data_line(result: Any, *more: str) -> str:
    """What a result is measured on: "300 examples of sst2 (test), 95 % bootstrap intervals"."""
    data = result.provenance["data"]
    name = shorten(visible(f"{data['name']} ({data['split']})"), 60)
    return "; ".join([f"{counted(data['examples'], 'example')} of {name}, 95 % bootstrap intervals", *more])


class Sheet:
    """A figure with a title, a legend below it, and panels that are placed in inches from the upper left.

    Attributes:
        top: where the panels may begin.
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
        """Args: the sheet's size without the legend; the title before the model, the model, and after it; how many
        names of the legend stand side by side; how many inches at the right of the title are not its own."""
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
        """Axes of the whole sheet, in inches from its upper left, for what is placed freely."""
        paper = self.figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        paper.set_axis_off()
        return paper

    def panel(
        self, left: float, top: float, width: float, height: float, *, grid: str | None = "both", **options: Any
    ) -> Axes:
        """Axes at so many inches from the sheet's left and upper ends; a grid is of lines "x", "y" or "both"."""
        bottom = self.height - top - height
        place = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return plain(self.figure.add_axes(place, **options), grid=grid)


def scale_steep(axes: Axes, curves: np.ndarray) -> None:
    """A logarithmic axis where curves are steep, so that one that grows does not flatten the others; they hold
    logarithms themselves."""
    finite = curves[np.isfinite(curves)]
    if finite.size and finite.max() > STEEP and finite.min() > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.12g}"))


def stacked(
    title: tuple[str, str, str], below: str, legend: Sequence[tuple[Line2D, str]], panels: int
) -> tuple[Figure, list[Axes]]:
    """A sheet with panels one above the other, which share their horizontal axis."""
    width, height, left, tall, step = 8.0, Sheet.TOP + 0.27, 0.85, 2.3, 2.65
    sheet = Sheet(width, height + step * panels, title, below, legend, left=left)
    axes: list[Axes] = []
    for number in range(panels):
        share = axes[0] if axes else None
        axes.append(sheet.panel(left, sheet.top + step * number, width - left - 0.3, tall, sharex=share))
        axes[-1].tick_params(labelbottom=number == panels - 1)
    return sheet.figure, axes


def line(axes: Axes, at: Sequence[float], found: Sequence[Estimate], number: int, **style: Any) -> None:
    """A curve in the colour of its number and the band of its intervals; a bar where it is one point."""
    colour = COLOURS[number % len(COLOURS)]
    low, high = [e.low for e in found], [e.high for e in found]
    if len(at) == 1:
        axes.plot([at[0], at[0]], [low[0], high[0]], color=colour, linewidth=1.4, alpha=0.6, solid_capstyle="butt")
    else:
        axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    look = {"linewidth": 1.6, "marker": MARKERS[number % len(MARKERS)], "markersize": 4, **style}
    axes.plot(at, [e.value for e in found], color=colour, **look)


def interval(axes: Axes, at: float, found: Estimate, colour: str = INK, *, upright: bool = True) -> None:
    """An interval as a thin line."""
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
    letters: int = NAME,
) -> None:
    """A row per name, of which so many letters are shown: a point with its interval beside zero, and at the right,
    where there is room, its numbers."""
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
    """What stands for a curve in the legend."""
    look = {"linewidth": 1.6, "marker": MARKERS[number % len(MARKERS)], "markersize": 4, **style}
    return Line2D([], [], color=COLOURS[number % len(COLOURS)], **look)


def dashed(colour: str) -> Line2D:
    return Line2D([], [], color=colour, linewidth=1, linestyle=DASHED)


def dotted(colour: str) -> Line2D:
    return Line2D([], [], color=colour, linewidth=1.1, linestyle=DOTTED)


def limits(found: Sequence[Estimate]) -> tuple[float, float]:
    """An axis of shares with a little room, within 0 and 1."""
    ends = [end for e in found for end in (e.low, e.high) if not math.isnan(end)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = max(0.06 * (high - low), 0.02)
    return max(low - room, -0.02), min(high + room, 1.02)
