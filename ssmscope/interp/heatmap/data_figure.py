"""Figures of the heatmap over a data set, of one model and of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.heatmap.result import DataHeatmap, shared_words
from ssmscope.interp.heatmap.words import shown_words
from ssmscope.interp.paired import Paired
from ssmscope.render import figure as plot
from ssmscope.render.figure import line
from ssmscope.render.numbers import evenly_spaced

MAX_LAYER_CURVES = 5
NAME_CHARACTERS = 18


def draw(result: DataHeatmap, frame: plot.Frame) -> Figure:
    """Draw words on the left, parts of a text and half-lives on the right."""
    curves = [("mean", result.tenths)]
    chosen = result.by_layer if len(result.by_layer) > 1 else ()
    step = evenly_spaced(len(chosen), MAX_LAYER_CURVES) if chosen else []
    curves += [(f"layer {chosen[at].number}", chosen[at].tenths) for at in step]
    legend = [(plot.handle(number), name) for number, (name, _) in enumerate(curves)]
    shown = shown_words(result.words)
    sheet = plot.Sheet(frame, result.headline, plot.data_line(result), legend, width=10.2)
    panels = words_and_parts(sheet, len(shown), bool(result.timed))
    plot.points(panels["words"], [each.word for each in shown], [each.kept for each in shown])
    panels["words"].set_xlabel(f"{result.score}, {result.unit}" if result.survives else result.score)
    draw_tenths(panels, [tenths for _, tenths in curves], result)
    if result.timed:
        _half_lives(panels["lives"], result)
    return sheet.figure


def words_and_parts(sheet: plot.Sheet, words: int, timed: bool) -> dict[str, Axes]:
    """Return panels of words, of parts of a text and, with `timed`, of half-lives."""
    left, right = sheet.parts(max(0.26 * words, 4.2) + plot.AXIS_INCHES, across=2)
    panels = [left.subplots(), *np.ravel(right.subplots(1 + timed, 1))]
    return dict(zip(("words", "parts", "lives"), map(plot.styled, panels)))


def draw_tenths(panels: dict[str, Axes], curves: Sequence[Sequence[Estimate]], result: DataHeatmap) -> None:
    """Draw scores by tenth of the text, and lines at an even share here and in the panel of words."""
    axes = panels["parts"]
    for number, tenths in enumerate(curves):
        line(axes, range(1, len(tenths) + 1), tenths, number)
    if result.survives:
        for even in (panels["words"].axvline, axes.axhline):
            even(1, color=plot.INK, linewidth=0.8, linestyle=plot.DOTTED)
        axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, len(result.tenths) + 1))
    axes.set(xlabel="tenth of the text", ylabel=result.unit)


def _half_lives(axes: Axes, result: DataHeatmap) -> None:
    """Draw a dot per head, and a line for the layer as a whole; half-lives above the horizon lie at the top."""
    every = np.concatenate([[each.half_life, *each.heads] for each in result.by_layer])
    longest = 2.0 * float(np.max(every[np.isfinite(every)], initial=0) or 8)
    random = np.random.default_rng(0)
    for at, each in enumerate(result.by_layer):
        heads = np.where(np.isfinite(each.heads), each.heads, longest)
        place = at + random.uniform(-0.22, 0.22, len(heads))
        size = 3 if len(heads) > 40 else 5
        axes.plot(place, heads, "o", color=plot.SOFT, markersize=size, alpha=0.5, markeredgewidth=0, rasterized=True)
        whole = each.half_life if np.isfinite(each.half_life) else longest
        axes.plot([at - 0.32, at + 0.32], [whole, whole], color=plot.INK, linewidth=2)
    axes.set_yscale("log", base=2)
    ticks = [2.0**k for k in range(int(np.log2(longest)))]
    axes.set_yticks([*ticks, longest], [*(f"{tick:.0f}" for tick in ticks), "longer"])
    axes.minorticks_off()
    shown = range(0, len(result.by_layer), max(1, len(result.by_layer) // 12))
    axes.set_xticks(list(shown), [str(result.by_layer[at].number) for at in shown])
    limits: dict[str, Any] = dict(xlim=(-0.6, len(result.by_layer) - 0.4), ylim=(0.8, 1.25 * longest))
    axes.set(xlabel="layer (line) and its heads", ylabel="half-life in tokens", **limits)


def draw_pair(pair: Paired, frame: plot.Frame) -> Figure:
    """Draw both models' scores of each word with the difference, * where intervals are apart; parts and half-lives."""
    results: Sequence[DataHeatmap] = pair.results  # type: ignore[assignment]
    words, timed = shared_words(results), all(result.timed for result in results)
    legend = [(plot.handle(at), name) for at, name in enumerate(pair.names)]
    note = "at the right of a word the difference, * where the two intervals do not overlap"
    sheet = plot.Sheet(frame, pair.headline, plot.data_line(results[0], note), legend, width=10.6)
    panels = words_and_parts(sheet, len(words), timed)
    scores = [[each.kept[at] for each in words] for at in range(2)]
    notes = [each.signed + " *" * (each.gap > 0) for each in words]
    style: dict[str, Any] = dict(notes=notes, letters=NAME_CHARACTERS, zero=False)
    plot.points(panels["words"], [each.word for each in words], *scores, **style)
    panels["words"].set_xlabel(results[0].unit if words else "no word is in both results")
    draw_tenths(panels, [result.tenths for result in results], results[0])
    if timed:
        axes = panels["lives"]
        for at, result in enumerate(results):
            numbers, found = zip(*((each.number, each.half_life) for each in result.by_layer))
            axes.plot(numbers, found, **plot.look(at))
        plot.scale_log(axes, "y")
        plot.integers(axes.xaxis, 8)
        longer = any(math.isinf(each.half_life) for result in results for each in result.by_layer)
        axes.set(xlabel="layer", ylabel="half-life in tokens" + ", longer ones omitted" * longer)
    return sheet.figure
