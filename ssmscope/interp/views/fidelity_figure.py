"""Fidelity, plausibility and sanity checks as pictures: points with intervals, and curves with bands.

Everything is placed in inches, so that nothing overlaps at any number of methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ssmscope.bootstrap import Estimate
from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ssmscope.interp.fidelity_result import Fidelity
    from ssmscope.interp.plausibility import Plausibility
    from ssmscope.interp.sanity import SanityCheck

INK, SOFT, GRID = "#1b1f24", "#57606a", "#e6e9ed"
FIRST, LAST, CHANCE = "#d1540a", "#2065a8", "#8b949e"
"""Most relevant first, least relevant first, and random rankings."""
SERIES = ("#2065a8", "#d1540a", "#1a7f5a", "#8250a8", "#9a6700", "#0b7f93", "#bf3f6f", "#57606a")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))

WIDTH, HEADER, ROW, AXIS = 8.6, 0.8, 0.3, 0.55
"""In inches: the figure, its title, a row of points, and what an axis needs below it."""
NAMES, NUMBERS = 1.55, 2.0
"""Left and right of a panel of points."""
CURVES, CURVE, TOP, LEGEND = 3, 1.65, 0.36, 0.42
"""Curves side by side, the height of one, and what stands above each and above all."""
LABEL, TITLE, LINE = 20, 96, 118
"""As many characters as fit beside a panel, in the title and in the line below it."""


def draw(result: Fidelity) -> Figure:
    """ΔA of every method and of the random rankings with intervals; below, the mean of f along each method's rankings,
    most relevant first and least relevant first, beside those of the random rankings."""
    points = ROW * len(result.rows)
    lines = math.ceil(len(result.methods) / CURVES)
    below = LEGEND + lines * (TOP + CURVE + AXIS)
    height = HEADER + points + AXIS + below
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    data = result.provenance["data"]
    asked = result.provenance["options"]
    how = "deleted" if asked["mode"] == "delete" else f"replaced ({visible(str(asked['replacement']))})"
    model = visible(str(result.provenance.get("model", "a model")))
    described = f"{len(result.texts):,} texts of {shorten(visible(data['name'] + ' (' + data['split'] + ')'), 40)}"
    described += f", tokens {shorten(how, 30)}, 95 % bootstrap intervals"
    _header(figure, "Fidelity of " + shorten(model, TITLE - 12), described)
    upper = figure.add_axes(_box(height, NAMES, HEADER, WIDTH - NAMES - NUMBERS, points))
    found = [result.estimate(method) for method in result.rows]
    colours = [LAST] * len(result.methods) + [CHANCE]
    _points(upper, result.rows, found, colours)
    spread = result.rankings[:, 0]
    place = len(result.rows) - 1
    upper.plot(
        [spread.min(), spread.max()], [place, place], color=CHANCE, linewidth=6, alpha=0.3, solid_capstyle="butt"
    )
    upper.set_xlabel("ΔA = A_LeRF − A_MoRF (the grey bar: the random rankings one by one)", color=SOFT, size=8.5)
    low, high = result.curve[..., 1].min(), result.curve[..., 2].max()
    room = 0.04 * max(high - low, 1e-9)
    wide = (WIDTH - 0.75 - 0.25 - 0.25 * (CURVES - 1)) / CURVES
    start = HEADER + points + AXIS + LEGEND
    for number, method in enumerate(result.methods):
        line, column = divmod(number, CURVES)
        left, top = 0.75 + column * (wide + 0.25), start + line * (TOP + CURVE + AXIS) + TOP
        axes = figure.add_axes(_box(height, left, top, wide, CURVE))
        _curves(axes, result, number)
        axes.set_ylim(low - room, high + room)
        axes.set_title(shorten(visible(method), 30), loc="left", size=9, color=INK, parse_math=False)
        if column:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel(f"{result.value} of the class", color=SOFT, size=8.5)
        if number + CURVES >= len(result.methods):
            axes.set_xlabel("share q of the tokens hidden", color=SOFT, size=8.5)
        else:
            axes.tick_params(labelbottom=False)
        if not number:
            figure.legend(
                *axes.get_legend_handles_labels(),
                loc="center left",
                bbox_to_anchor=(0.7 / WIDTH, 1 - (start - LEGEND / 2 + 0.08) / height),
                ncols=3,
                fontsize=8.5,
                frameon=False,
                borderaxespad=0,
                borderpad=0,
            )
    return figure


def draw_plausibility(result: Plausibility) -> Figure:
    """A panel of points with intervals for each measure of agreement with people."""
    from ssmscope.interp.plausibility import MEASURES

    points = ROW * len(result.methods)
    height = HEADER + points + AXIS
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    model = visible(str(result.provenance.get("model", "a model")))
    described = f"agreement with what people marked in {len(result.texts):,} texts, 95 % bootstrap intervals"
    _header(figure, "Plausibility on " + shorten(model, TITLE - 16), described)
    wide = (WIDTH - NAMES - 0.3 - 0.3 * (len(MEASURES) - 1)) / len(MEASURES)
    for place, name in enumerate(MEASURES.values()):
        axes = figure.add_axes(_box(height, NAMES + place * (wide + 0.3), HEADER, wide, points))
        found = list(result.estimates[place :: len(MEASURES)])
        _points(axes, result.methods, found, [LAST] * len(found), numbers=False)
        axes.set_xlim(-0.03, 1.03)
        axes.set_xlabel(name, color=SOFT, size=8.5)
        if place:
            axes.tick_params(labelleft=False)
    return figure


def draw_sanity(result: SanityCheck) -> Figure:
    """The correlation of each method's scores with those of the trained model, by how many parts are randomised."""
    from ssmscope.interp.sanity import MEASURES

    names = [shorten(visible(name), 24) for name in result.parts]
    below = 0.3 + 0.062 * max(map(len, names)) + 0.25
    columns = 4
    lines = math.ceil(len(result.methods) / columns)
    top = HEADER + 0.23 * lines + 0.4
    height = top + 2.4 + below
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    model = visible(str(result.provenance.get("model", "a model")))
    described = f"{result.texts:,} texts, 95 % bootstrap intervals; randomised from the head down to the named part"
    _header(figure, "Scores after randomising the weights of " + shorten(model, TITLE - 40), described)
    wide = (WIDTH - 0.75 - 0.25 - 0.3) / 2
    low = min(0.0, float(np.nanmin(result.estimates[..., 1]))) if np.isfinite(result.estimates).any() else 0.0
    for place, name in enumerate(MEASURES.values()):
        axes = figure.add_axes(_box(height, 0.75 + place * (wide + 0.3), top, wide, 2.4))
        _plain(axes)
        axes.axhline(0, color=SOFT, linewidth=0.8)
        at = np.arange(len(names))
        for number, method in enumerate(result.methods):
            mean, lower, upper = result.estimates[number, :, place].T
            style = dict(color=SERIES[number % len(SERIES)], linestyle=DASHES[number % len(DASHES)])
            axes.fill_between(at, lower, upper, color=style["color"], alpha=0.15, linewidth=0)
            axes.plot(at, mean, marker=".", linewidth=1.5, label=shorten(visible(method), 26), **style)
        axes.grid(color=GRID)
        axes.set_ylim(low - 0.05, 1.05)
        axes.set_xticks(at, names, rotation=90, parse_math=False)
        axes.set_title(name, loc="left", size=9, color=INK)
        if place:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel("Spearman's ρ to the trained model", color=SOFT, size=8.5)
            handles, labels = axes.get_legend_handles_labels()
            # a legend is filled column by column, and read line by line
            order = [at for first in range(columns) for at in range(first, len(labels), columns)]
            legend = figure.legend(
                [handles[at] for at in order],
                [labels[at] for at in order],
                loc="upper left",
                bbox_to_anchor=(0.7 / WIDTH, 1 - HEADER / height),
                ncols=columns,
                fontsize=8.5,
                frameon=False,
                borderaxespad=0,
                borderpad=0,
            )
            for text in legend.get_texts():
                text.set_parse_math(False)
    return figure


def _box(height: float, left: float, top: float, wide: float, high: float) -> tuple[float, float, float, float]:
    """An axes' place in the figure, from inches counted from its upper left corner."""
    return left / WIDTH, 1 - (top + high) / height, wide / WIDTH, high / height


def _header(figure: Figure, title: str, described: str) -> None:
    height = figure.get_size_inches()[1]
    style: dict[str, Any] = dict(va="center", parse_math=False)  # names are the user's: a $ in them starts no formula
    figure.text(0.2 / WIDTH, 1 - 0.28 / height, title, size=11, color=INK, **style)
    figure.text(0.2 / WIDTH, 1 - 0.54 / height, shorten(described, LINE), size=8.5, color=SOFT, **style)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=8)
    axes.set_axisbelow(True)


def _points(
    axes: Axes, names: Sequence[str], found: Sequence[Estimate], colours: Sequence[str], numbers: bool = True
) -> None:
    """A point with its interval a row, the number beside it."""
    _plain(axes)
    axes.grid(axis="x", color=GRID)
    axes.axvline(0, color=SOFT, linewidth=0.8)
    for place, (each, colour) in enumerate(zip(found, colours)):
        if math.isnan(each.value):
            continue
        axes.plot([each.low, each.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
        axes.plot(each.value, place, "o", color=colour, markersize=4.5)
    if numbers:
        for place, each in enumerate(found):
            text = str(each).replace("-", "−")
            axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", size=8.5, color=INK)
    axes.set_yticks(range(len(names)), [shorten(visible(name), LABEL) for name in names], parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _curves(axes: Axes, result: Fidelity, number: int) -> None:
    _plain(axes)
    axes.grid(color=GRID)
    shares = result.shares
    chance = result.curve[-1].mean(0)  # the two orders of random rankings are alike
    axes.fill_between(shares, chance[:, 1], chance[:, 2], color=CHANCE, alpha=0.2, linewidth=0)
    orders = ((0, FIRST, "-", "most relevant first (MoRF)"), (1, LAST, (0, (5, 2)), "least relevant first (LeRF)"))
    for order, colour, dashes, label in orders:
        mean, low, high = result.curve[number, order].T
        axes.fill_between(shares, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(shares, mean, color=colour, linestyle=dashes, linewidth=1.5, label=label)
    axes.plot(shares, chance[:, 0], color=CHANCE, linewidth=1.2, linestyle=(0, (1.5, 1.5)), label="random rankings")
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
