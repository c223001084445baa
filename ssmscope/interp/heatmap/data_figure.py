"""Figures of the heatmap over a data set, of one model and of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from ssmscope.interp.heatmap.views import shared_words
from ssmscope.interp.heatmap.words import SHOWN_HIGHEST
from ssmscope.render.figure import (
    COLOURS,
    DOTTED,
    INK,
    MARKERS,
    SOFT,
    Sheet,
    data_line,
    handle,
    interval,
    line,
    points,
    title,
)
from ssmscope.render.tokens import evenly_apart, shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.core.bootstrap import Estimate
    from ssmscope.interp.heatmap.result import DataHeatmap
    from ssmscope.interp.heatmap.views import SharedWord

MAX_LAYER_CURVES = 5
"""Number of layers with a curve in the picture, in addition to the average."""
NAME_CHARACTERS = 18
"""Number of characters of a word that are drawn."""


def draw(result: DataHeatmap) -> Figure:
    """Draw words on the left, parts of a text and half-lives on the right."""
    shown, timed = result.shown_words, bool(result.timed)
    tall = max(0.26 * len(shown), 4.6)
    curves = [("mean", result.tenths)]
    chosen = result.by_layer if len(result.by_layer) > 1 else ()
    step = evenly_apart(len(chosen), MAX_LAYER_CURVES) if chosen else []
    curves += [(f"layer {chosen[at].number}", chosen[at].tenths) for at in step]
    legend = [(handle(number), name) for number, (name, _) in enumerate(curves)]
    below = data_line(result)
    sheet = Sheet(10.2, Sheet.TOP + tall + 0.6, title(result), below, legend, left=5.9, across=min(len(legend), 3))
    axes = sheet.panel(1.75, sheet.top, 2.1, tall)
    colours = [COLOURS[0] if at < SHOWN_HIGHEST else COLOURS[1] for at in range(len(shown))]
    if shown:
        points(axes, [each.word for each in shown], [each.kept for each in shown], colours)
    axes.set_xlabel(f"{result.score}, {result.unit}" if result.survives else result.score, color=SOFT, size=9)
    high = (tall - 0.75) / 2 if timed else tall
    parts = sheet.panel(6.1, sheet.top, 3.8, high)
    draw_tenths(axes, parts, [tenths for _, tenths in curves], result)
    if timed:
        _half_lives(sheet.panel(6.1, sheet.top + high + 0.75, 3.8, high), result)
    return sheet.figure


def draw_tenths(words: Axes, axes: Axes, curves: Sequence[Sequence[Estimate]], result: DataHeatmap) -> None:
    """Draw scores by tenth of the text, and lines at an even share here and in the panel of words."""
    for number, tenths in enumerate(curves):
        line(axes, range(1, len(tenths) + 1), tenths, number)
    if result.survives:
        for even in (words.axvline, axes.axhline):
            even(1, color=INK, linewidth=0.8, linestyle=DOTTED)
        axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, len(result.tenths) + 1))
    axes.set_xlabel("tenth of the text", color=SOFT, size=9)
    axes.set_ylabel(result.unit, color=SOFT, size=9)


def _half_lives(axes: Axes, result: DataHeatmap) -> None:
    """Draw a dot per head and layer, and a line for the layer as a whole; half-lives above the horizon lie at the
    top."""
    longest = 2.0 * max([value for each in result.by_layer for value in _finite([each.half_life, *each.heads])] or [8])
    random = np.random.default_rng(0)
    for at, each in enumerate(result.by_layer):
        heads = np.where(np.isfinite(each.heads), each.heads, longest)
        place = at + random.uniform(-0.22, 0.22, len(heads))
        size = 3 if len(heads) > 40 else 5
        axes.plot(place, heads, "o", color=SOFT, markersize=size, alpha=0.5, markeredgewidth=0, rasterized=True)
        whole = each.half_life if np.isfinite(each.half_life) else longest
        axes.plot([at - 0.32, at + 0.32], [whole, whole], color=COLOURS[1], linewidth=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.8, 1.25 * longest)
    ticks = [2.0**k for k in range(int(np.log2(longest)))]
    axes.set_yticks([*ticks, longest], [*(f"{tick:.0f}" for tick in ticks), "longer"])
    axes.minorticks_off()
    every = max(1, len(result.by_layer) // 12)
    shown = range(0, len(result.by_layer), every)
    axes.set_xticks(list(shown), [str(result.by_layer[at].number) for at in shown])
    axes.set_xlim(-0.6, len(result.by_layer) - 0.4)
    axes.set_xlabel("layer (line) and its heads", color=SOFT, size=9)
    axes.set_ylabel("half-life in tokens", color=SOFT, size=9)


def _finite(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values if np.isfinite(value)]


def draw_pair(results: Sequence[DataHeatmap], names: Sequence[str], heading: tuple[str, str, str]) -> Figure:
    """Draw both models' scores of each word on the left; parts of a text and the half-lives of layers on the right."""
    words, timed = shared_words(results), all(result.timed for result in results)
    tall = max(0.26 * len(words), 4.6)
    below = data_line(results[0], "bold: the two intervals do not overlap")
    legend = [(handle(at), name) for at, name in enumerate(names)]
    sheet = Sheet(10.6, Sheet.TOP + tall + 0.6, heading, below, legend, left=1.75, across=2)
    axes = sheet.panel(1.75, sheet.top, 3.2, tall)
    _draw_words(axes, words)
    axes.set_xlabel(results[0].unit, color=SOFT, size=9)
    high = (tall - 0.75) / 2 if timed else tall
    parts = sheet.panel(6.6, sheet.top, 3.7, high)
    draw_tenths(axes, parts, [result.tenths for result in results], results[0])
    if timed:
        lives = sheet.panel(6.6, sheet.top + high + 0.75, 3.7, high)
        for at, result in enumerate(results):
            numbers, found = zip(*((each.number, each.half_life) for each in result.by_layer))
            lives.plot(numbers, found, color=COLOURS[at], marker=MARKERS[at], markersize=4, linewidth=1.6)
        lives.set_yscale("log", base=2)
        lives.yaxis.set_major_formatter("{x:g}")
        lives.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        lives.set_xlabel("layer", color=SOFT, size=9)
        longer = any(math.isinf(each.half_life) for result in results for each in result.by_layer)
        lives.set_ylabel("half-life in tokens" + ", longer ones omitted" * longer, color=SOFT, size=9)
    return sheet.figure


def _draw_words(axes: Axes, words: Sequence[SharedWord]) -> None:
    """Draw both scores of every word with their intervals, and the difference on the right, bold where the intervals do
    not meet."""
    axes.grid(False, axis="y")
    for row, each in enumerate(words):
        for at, kept in enumerate(each.kept):
            place = row + 0.32 * at - 0.16
            interval(axes, place, kept, COLOURS[at], upright=False)
            axes.plot(kept.value, place, MARKERS[at], color=COLOURS[at], markersize=4)
        weight = "bold" if each.gap > 0 else "normal"
        style: dict[str, Any] = dict(va="center", size=8.5, color=INK, weight=weight)
        axes.text(1.02, row, each.signed, transform=axes.get_yaxis_transform(), **style)
    names = [shorten(visible(each.word), NAME_CHARACTERS) for each in words]
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    head = "difference" if words else "no word is in both results"
    axes.text(1.02, -0.7, head, transform=axes.get_yaxis_transform(), size=8.5, color=SOFT, va="bottom")
