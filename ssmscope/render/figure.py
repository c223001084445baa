"""Figures in matplotlib's constrained layout: one style, a sheet with title and legend, and the marks all share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import ListedColormap, Normalize, to_hex
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.scale import LogScale
from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, MaxNLocator
from ssmscope.core.bootstrap import INTERVALS, Estimate
from ssmscope.errors import InputError
from ssmscope.render.colours import ink, ramp
from ssmscope.render.layout import FittedLayout, in_place_of, inches
from ssmscope.render.letters import MAX_NAME_LETTERS, drawable, families, short_name
from ssmscope.render.numbers import counted
from ssmscope.render.table import with_interval
from ssmscope.render.tokens import NO_BREAK, shorten, unbroken, visible

INK, SOFT, GRID, EDGE = "#1b1f24", "#57606a", "#e6e9ed", "#f3f4f6"
COLOURS = ("#2065a8", "#d1540a", "#0f8a6c", "#b01e8a", "#7a6a00", "#57606a")
EMPTY, MARK = GRID, COLOURS[1]
MARKERS = "osD^vP"
DASHED, DOTTED = (0, (4, 3)), (0, (1, 2))
LOG_SCALE_FROM = 300.0
FONT_SIZE, NARROW_FONT_SIZE, NARROW_INCHES = 9.0, 8.0, 5.0
MIN_SIDE_INCHES, MAX_SIDE_INCHES = 0.5, 100
ROW_INCHES, AXIS_INCHES, MIN_PANEL_INCHES = 0.28, 0.6, 1.9
MAX_NAMED, TITLE = 60, 320

HEIGHT_SHARE_IN_AXES = 0.75
"""Share of a body's least height that is enough in a user's axes."""


@dataclass(frozen=True)
class Frame:
    """User's wishes for a figure: axes or a part to draw into, a title, and a width, or width and height, in inches."""

    ax: Axes | SubFigure | None = None
    title: str | None = None
    size: float | tuple[float, float] | None = None

    @property
    def sides(self) -> tuple[float | None, float | None]:
        """Width and height in inches; None for what is not asked for."""
        return self.size if isinstance(self.size, tuple) and len(self.size) == 2 else (self.size, None)


@contextmanager
def framed(frame: Frame) -> Iterator[Frame]:
    """Draw in the package's style, whatever the user's settings.

    Raises:
        InputError: the size is not one or two numbers from 0.5 to 100, or given together with axes.
    """
    sides = [side for side in frame.sides if side is not None]
    good = all(isinstance(side, int | float) and MIN_SIDE_INCHES <= side <= MAX_SIDE_INCHES for side in sides)
    if not good or (isinstance(frame.size, tuple) and len(frame.size) != 2):
        said = f"size is {frame.size!r}; allowed are a width, or a width and a height,"
        raise InputError(f"{said} from {MIN_SIDE_INCHES} to {MAX_SIDE_INCHES} inches")
    if frame.ax is not None and frame.size is not None:
        raise InputError("give ax or size, not both: axes have the size of their own figure")
    narrow = bool(sides) and sides[0] < NARROW_INCHES
    with matplotlib.rc_context(_style(NARROW_FONT_SIZE if narrow else FONT_SIZE)):
        yield frame


def _style(font_size: float) -> dict[Any, Any]:
    ticks = {f"{axis}tick.{key}": value for axis in "xy" for key, value in (("color", SOFT), ("labelsize", "medium"))}
    return {
        **{"font.size": font_size, "font.family": families("DejaVu Sans"), "text.color": INK, **ticks},
        **{"text.parse_math": False, "text.usetex": False},  # A $ in a user's name must not start a formula.
        **{"axes.labelcolor": SOFT, "axes.labelsize": "medium", "axes.titlesize": "medium", "axes.edgecolor": SOFT},
        **{"axes.titlelocation": "left", "axes.titlecolor": INK, "axes.spines.top": False, "axes.spines.right": False},
        **{"axes.axisbelow": True, "grid.color": GRID, "figure.titlesize": "large", "figure.facecolor": "white"},
        **{"legend.frameon": False, "legend.fontsize": "medium", "lines.solid_capstyle": "butt"},
        **{"axes.formatter.use_mathtext": False, "axes.autolimit_mode": "data", "axes.xmargin": 0.03},
    }


def data_line(result: Any, *more: str) -> str:
    """Describe the data of a result: "300 examples of sst2 (test)", and its intervals."""
    data = result.provenance["data"]
    name = shorten(visible(f"{data['name']} ({data['split']})"), 60)
    told = f"{counted(data['examples'], 'example')} of {name}; {INTERVALS}"
    return "; ".join(filter(None, [told, *more]))


# ---- Sheets


class Sheet:
    """Figure `width` inches wide with title, smaller line and legend above its `body`; or what a user gives."""

    def __init__(
        self, frame: Frame, title: str, below: str = "", legend: Sequence[tuple[Line2D, str]] = (), *, width: float = 8
    ) -> None:
        """Make the sheet, `width` inches wide unless the frame says otherwise; titles and names are cut to fit."""
        self.frame, self.legend, self._told = frame, legend, (title, below, legend)
        wide, self._height = frame.sides
        self.width, self._head = wide or width, 0.0
        own = title if frame.title is None else frame.title
        self.figure: Figure
        self.body: Any
        if isinstance(frame.ax, SubFigure):
            self.figure, self.body = frame.ax.get_figure(root=True), frame.ax
            self.width, self._height = inches(frame.ax)
        elif frame.ax is not None:
            self.title = own
            self.figure = frame.ax.get_figure(root=True)  # type: ignore[assignment]
            return
        else:
            layout = FittedLayout(w_pad=0.06, h_pad=0.05, wspace=0.02, hspace=0.02)
            self.figure = self.body = Figure(figsize=(self.width, self._height or 1.0), layout=layout)
        lines = ((own, "large", INK, TITLE), (below if frame.title != "" else "", "medium", SOFT, 420))
        for line, size, colour, most in lines:
            if line:
                text, height = self._line(line, size, most)
                style: dict[str, Any] = dict(x=0.12 / self.width, ha="left", fontsize=size, color=colour)
                self.body.suptitle(text, **style)
                self.body = self.body.subfigures()
                self._head += height
        if legend:
            most = min(100, int(120 * (self.width - 0.5) / matplotlib.rcParams["font.size"]))
            names = [short_name(name, max(most, MAX_NAME_LETTERS)) for _, name in legend]
            columns = legend_columns(names, self.width)
            self.body.legend([each for each, _ in legend], names, loc="outside upper left", ncols=columns)
            self.body = self.body.subfigures()
            self._head += 0.1 + 0.19 * math.ceil(len(legend) / columns)

    def _line(self, text: str, size: str, most: int) -> tuple[str, float]:
        """Return a line above the body as it is wrapped, in at most so many letters, and its height in inches."""
        per_line = self._per_line(size)
        text = _wrapped(text, per_line, most // per_line + 1)
        points = font_manager.FontProperties(size=size).get_size_in_points()
        return text, 0.07 + 0.017 * points * (1 + text.count("\n"))

    def _per_line(self, size: str) -> int:
        """Return the number of letters of this size in a line."""
        return max(int(122 * (self.width - 0.3) / font_manager.FontProperties(size=size).get_size_in_points()), 12)

    def _replace(self, ax: Axes, least: float) -> None:
        """Go on in a part of the figure in place of a user's axes; low ones have one line of title, and no other."""
        title, below, legend = self._told
        frame = replace(self.frame, ax=in_place_of(ax))
        self.width, height = inches(frame.ax)  # type: ignore[arg-type]
        head = sum(self._line(*line)[1] for line in ((self.title, "large", TITLE), (below, "medium", 420)) if line[0])
        if low := head + 0.3 * bool(legend) + least > height:
            frame = replace(frame, title=shorten(visible(self.title), self._per_line("large")))
        Sheet.__init__(self, frame, title, "" if low else below, legend)

    def take(self, height: float, least: float) -> Any:
        """Make the sheet high enough for a body and return it; several panels take the place of a user's axes. Raise
        InputError for axes without a place among a figure's, or a height that leaves less than `least` inches."""
        ax = self.frame.ax
        if ax is not None and not isinstance(ax, SubFigure):
            self._replace(ax, least)
            least *= HEIGHT_SHARE_IN_AXES
        part = isinstance(self.frame.ax, SubFigure)
        if self._height is not None and self._height < self._head + least:
            more = f"a height of {math.ceil(10 * (self._head + least)) / 10:g} inches or more"
            if part:
                raise InputError(f"ax is {self._height:.1f} inches high, too low for this figure; give {more}")
            raise InputError(f"size is {self.frame.size!r}, too low for this figure; give {more}, or the width alone")
        if part:
            return self.body
        self.figure.set_size_inches(self.width, self._height or self._head + height)
        return self.body

    def panels(
        self,
        *heights: float,
        across: int = 1,
        count: int | None = None,
        widths: Sequence[float] | None = None,
        least: float = MIN_PANEL_INCHES,
        **options: Any,
    ) -> list[Axes]:
        """Return `count` panels row by row, in fewer columns if they would be narrower than `least` inches. `heights`
        are inches of each row, without the labels of its axes; `options` are matplotlib's."""
        count = len(heights) * across if count is None else count
        ax = self.frame.ax
        if count == 1 and ax is not None and not isinstance(ax, SubFigure):
            ax.set_title(_wrapped(self.title, 60))
            if self.legend:
                ax.legend([each for each, _ in self.legend], [name for _, name in self.legend])
            return [ax]
        fitting = max(1, int(self.width / least))
        if across > fitting:
            fitting = fitting if len(set(heights)) == 1 else 1
            heights = tuple(np.repeat(heights, across)[: math.ceil(count / fitting)])
            across, widths = fitting, None
        axes = AXIS_INCHES * len(heights)
        body = self.take(sum(heights) + axes, sum(heights) / 4 + axes)
        ratios: dict[str, Any] = dict(height_ratios=heights, width_ratios=widths)
        return list(map(styled, grid(body, count, across, **ratios, **options)))

    def parts(self, *heights: float, across: int = 1, least: float = 0.6) -> list[Any]:
        """Return parts with layouts of their own, of at least this share of their heights; stacked if narrow."""
        if self.width / across < 1.5 * MIN_PANEL_INCHES:
            heights, across = tuple(np.repeat(heights, across)), 1
        body = self.take(sum(heights), least * sum(heights))
        made = body.subfigures(len(heights), across, squeeze=False, height_ratios=heights)
        return made.ravel().tolist()


def legend_columns(names: Sequence[str], width: float) -> int:
    """Return the columns of a legend with these names that fit into this width, in inches."""
    return max(1, int(width / (0.75 + 0.075 * max(map(len, names)))))


def legend_below(part: SubFigure) -> None:
    """Draw the legend of a part's panels below them, in as many columns as it is wide for."""
    names = [name for axes in part.axes for name in axes.get_legend_handles_labels()[1]]
    part.legend(loc="outside lower left", ncols=legend_columns(names, inches(part)[0]), columnspacing=1.2)


def grid(part: Any, count: int, across: int, **options: Any) -> list[Axes]:
    """Return so many panels of a figure, row by row."""
    made = part.subplots(math.ceil(count / across), across, squeeze=False, **options).ravel().tolist()
    for axes in made[count:]:
        axes.remove()
    return made[:count]


def styled(axes: Axes, grid: str | None = "both") -> Axes:
    """Draw grid lines behind the content, and all ticks in the letters of the style."""
    size = font_manager.FontProperties(size="medium").get_size_in_points() - 0.5
    axes.tick_params(which="both", colors=SOFT, labelsize=size)  # matplotlib makes ticks later, outside of the style.
    if grid is not None:
        axes.grid(axis=grid)  # type: ignore[arg-type]
    return axes


def _wrapped(text: str, most: int, lines: int = 3) -> str:
    shown = unbroken(shorten(visible(text), lines * most - most // 2))
    return drawable("\n".join(textwrap.wrap(shown, most)).replace(NO_BREAK, " "))


# ---- Axes


def scale_log(axes: Axes, which: str, base: float = 10) -> None:
    """Make the axis "x" or "y" logarithmic, with plain numbers at its ticks."""
    axes.set(**{f"{which}scale": LogScale(None, base=base)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=base, numticks=9))
    axis.set_major_formatter(FuncFormatter(_plain_number))
    axis.set_minor_formatter(_MinorLabels(labelOnlyBase=False, minor_thresholds=(1.2, 0.5)))


def _plain_number(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:g}"


class _MinorLabels(LogFormatter):
    """Labels for ticks between powers of ten on an axis with few of these."""

    def __call__(self, value: float, place: int | None = None) -> str:
        return _plain_number(value) if super().__call__(value, place) else ""


def scale_steep(axes: Axes, curves: np.ndarray) -> None:
    """Make the axis logarithmic if a curve exceeds `LOG_SCALE_FROM`, so that it does not flatten the others."""
    finite = curves[np.isfinite(curves)]
    if finite.size and finite.max() > LOG_SCALE_FROM and finite.min() > 0:
        scale_log(axes, "y")


def integers(axis: Axis, most: int = 12) -> None:
    axis.set_major_locator(MaxNLocator(most, integer=True))


def limits(found: Sequence[Estimate]) -> tuple[float, float]:
    """Return the limits of an axis of shares: the intervals with a little room, hardly beyond 0 and 1."""
    ends = [end for e in found for end in (e.value, e.low, e.high) if not math.isnan(end)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    room = max(0.06 * (high - low), 0.02)
    return max(low - room, -0.02), min(high + room, 1.02)


def beside(axes: Axes, place: float, text: str, **style: Any) -> None:
    """Write a text at the right of the axes, at this value of the vertical axis."""
    axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), **{"va": "center", **style})


# ---- Marks


def look(number: int, **style: Any) -> dict[str, Any]:
    """Return colour, marker and dashes of the curve of this number; dashed once the colours are used up."""
    count = len(COLOURS)
    dashes = ("-", (0, (5, 2)), (0, (1, 1.5)))[min(number // count, 2)]
    own = {"color": COLOURS[number % count], "marker": MARKERS[number % len(MARKERS)], "linestyle": dashes}
    return {"linewidth": 1.6, "markersize": 4, **own, **style}


def handle(number: int, **style: Any) -> Line2D:
    return Line2D([], [], **look(number, **style))


def rule(colour: str = INK, style: Any = DASHED) -> Line2D:
    """Return the legend handle of a straight line without marks."""
    return Line2D([], [], color=colour, linewidth=1.1, linestyle=style)


def as_array(found: Any) -> np.ndarray:
    """Return value, low and high of estimates: (n, 3)."""
    return np.array([(e.value, e.low, e.high) if isinstance(e, Estimate) else e for e in found], float).reshape(-1, 3)


def line(axes: Axes, at: Any, found: Any, number: int, **style: Any) -> None:
    """Draw a curve with the band of its intervals, or a bar for one point; `found` are estimates or (places, 3)."""
    value, low, high = as_array(found).T
    how = look(number, **style)
    if len(at) == 1:
        axes.plot([at[0]] * 2, [low[0], high[0]], color=how["color"], linewidth=1.4, alpha=0.6)
    elif not np.isnan(low).all():
        axes.fill_between(at, low, high, color=how["color"], alpha=0.2, linewidth=0)
    axes.plot(at, np.where(np.isfinite(value), value, np.nan), **how)


def interval(axes: Axes, at: float, found: Estimate, colour: str = INK, *, upright: bool = True) -> None:
    ends, place = [found.low, found.high], [at, at]
    axes.plot(*((place, ends) if upright else (ends, place)), color=colour, linewidth=1.4)


def points(
    axes: Axes,
    names: Sequence[str],
    *series: Sequence[Estimate | None],
    colours: Sequence[Any] = COLOURS,
    markers: str = MARKERS,
    notes: Sequence[str] | None = None,
    letters: int = MAX_NAME_LETTERS,
    zero: bool = True,
    bars: Sequence[str] = (),
    hollow: Sequence[int] = (),
) -> None:
    """Draw a row per name, the first at the top: a point with its interval for each series, next to each other.

    Args:
        colours: a colour per series, or a list of colours with one per row.
        notes: texts at the right of the rows; None for the numbers of the first series.
        letters: maximum letters of a name.
        bars: colours of bars from zero to the first series' values, in place of its points.
        hollow: numbers of the series with hollow points.
    """
    axes.grid(False, axis="y")
    if zero:
        axes.axvline(0, color=SOFT, linewidth=0.8)
    step = 0.5 / max(len(series), 2)
    if bars:
        axes.barh(range(len(names)), [one.value if one else 0 for one in series[0]], 0.62, color=bars)
    for at, (found, colour, marker) in enumerate(zip(series, colours, markers)):
        shift = step * (at - (len(series) - 1) / 2)
        for row, one in enumerate(found):
            if one is None:
                continue
            own = colour if isinstance(colour, str) else colour[row]
            interval(axes, row + shift, one, own, upright=False)
            if not (bars and at == 0):
                face = "white" if at in hollow else own
                style: dict[str, Any] = dict(markersize=4.5, markerfacecolor=face, clip_on=False, zorder=3)
                axes.plot(one.value, row + shift, marker, color=own, **style)
    for row, note in enumerate(map(with_interval, filter(None, series[0])) if notes is None else notes):
        beside(axes, row, note)
    axes.set_yticks(range(len(names)), [short_name(name, letters) for name in names])
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5 if matplotlib.rcParams["font.size"] >= FONT_SIZE else 4))


def colours_of(stops: Sequence[str], low: float, high: float, count: int = 257) -> ScalarMappable:
    """Return a colour scale that passes through these colours from `low` to `high`."""
    return ScalarMappable(Normalize(low, high), ListedColormap(ramp(stops, count)).with_extremes(bad=EMPTY))


def colour_bar(axes: Any, colours: ScalarMappable, name: str, *, below: bool = False, **options: Any) -> Colorbar:
    """Draw a colour bar with its numbers at the right of axes, or in a small one below them."""
    figure = np.ravel(axes)[0].figure
    place: dict[str, Any] = {"ax": axes, "aspect": 22, "pad": 0.01, "fraction": 0.06}
    if below:
        place |= {"location": "bottom", "shrink": 0.35, "anchor": (0.0, 0.5), "pad": 0.03}
    bar = figure.colorbar(colours, **place, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=SOFT, labelsize=font_manager.FontProperties(size="small").get_size_in_points(), length=2)
    bar.set_label(name, loc="left" if below else None)
    return bar


def cells(
    axes: Axes,
    values: np.ndarray,
    colours: ScalarMappable,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    texts: Sequence[Sequence[str]] = (),
    labels: tuple[str, str] = ("", ""),
    bar: str | None,
    bold: np.ndarray | None = None,
    **options: Any,
) -> None:
    """Draw values (rows, columns) as coloured cells, the first row at the bottom, with a colour bar named `bar`.

    Args:
        rows, columns: names along the axes; None for numbers.
        texts: texts in the cells, bold where `bold` is True.
        labels: names of the vertical and of the horizontal axis.
        options: of matplotlib's `colorbar`.
    """
    axes.grid(False)
    how: dict[str, Any] = dict(aspect="auto", origin="lower", interpolation="nearest", cmap=colours.cmap)
    axes.imshow(np.ma.masked_invalid(values), clim=colours.get_clim(), **how)
    for axis, names in ((axes.yaxis, rows), (axes.xaxis, columns)):
        if names is None or len(names) > MAX_NAMED:
            integers(axis, 16)
            if names is not None:
                shown = tuple(names)
                axis.set_major_formatter(FuncFormatter(lambda at, _, s=shown: s[int(at)] if 0 <= at < len(s) else ""))
        else:
            axis.set_ticks(range(len(names)), names)
    if columns is not None and len(columns) <= MAX_NAMED and max(map(len, columns), default=0) > 4 and not texts:
        axes.tick_params(axis="x", rotation=90)
    for row, column in np.ndindex(values.shape) if texts else ():
        value = values[row, column]
        colour = EMPTY if np.isnan(value) else to_hex(tuple(colours.to_rgba(value)))
        style: dict[str, Any] = dict(weight="bold" if bold is not None and bold[row, column] else "normal")
        axes.text(column, row, texts[row][column], color=ink(colour), size="x-small", ha="center", va="center", **style)
    axes.set(ylabel=labels[0], xlabel=labels[1])
    axes.tick_params(length=2)
    if bar is not None:
        colour_bar(axes, colours, bar, **options)
