"""Views of the heatmap over a data set: words, groups of texts, layers, and texts at the extremes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.interp.heatmap.views import rows
from ssmscope.interp.heatmap.words import SHOWN_HIGHEST, SHOWN_LOWEST, format_half_life
from ssmscope.render import figure as plot
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.figure import line
from ssmscope.render.numbers import counted, evenly_spaced
from ssmscope.render.table import Cell, Line, Table, table, value_cell
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.core.bootstrap import Estimate
    from ssmscope.interp.heatmap.kept import KeptGroup
    from ssmscope.interp.heatmap.result import DataHeatmap

BRIEF_LAYERS = 6
"""Number of layers in a terminal."""
NAMED_WORDS = 3
"""Number of words that a table names for a group of texts, or for a layer."""
MAX_LAYER_CURVES = 5
"""Number of layers with a curve in the picture, in addition to the average."""


def blocks(result: DataHeatmap) -> Iterator[Block]:
    """Yield the verdict and the picture, words, groups, layers, and examples."""
    yield from result.opening(f"{result.verdict()[0].upper()}{result.verdict()[1:]}.")
    yield words(result)
    yield groups(result)
    yield replace(layers(result), brief=BRIEF_LAYERS)
    for shown in result.examples:
        yield Prose("Texts at the extremes", "heading")
        made = rows(shown)
        of_texts = zip(made.texts, result.picked, strict=True)
        texts = tuple(replace(text, about=f"{picked}; {text.about}") for text, picked in of_texts)
        yield replace(made, texts=texts, first=1)
    yield from (Prose(line, "note") for line in notes(result))


def words(result: DataHeatmap) -> Table:
    """Return a row per word from both ends of the ranking."""
    lines = [
        Line(
            (visible(each.word),),
            {"score": Cell(each.kept), "texts": Cell(text=f"{each.texts:,}"), "times": Cell(text=f"{each.count:,}")},
        )
        for each in result.shown_words
    ]
    from_both = f"The {SHOWN_HIGHEST} highest and {SHOWN_LOWEST} lowest of" if len(lines) < len(result.words) else "Of"
    note = (
        f"{from_both} {result.named:,} words in at least {result.least} texts, ranked by the inner end of their "
        f"interval and ordered by their means over occurrences, in {result.unit}."
    )
    return table(("word",), lines, note=note)


def group_cells(group: KeptGroup) -> dict[str, Cell]:
    """Return the cells of a group of texts."""
    cells = {"number": Cell(text=f"{group.texts:,}"), "highest word": Cell(group.strongest, digits=2)}
    cells |= {"punctuation": Cell(group.punctuation, digits=2), "last quarter": Cell(group.end, digits=2)}
    cells["spread"] = value_cell(group.spread, 2)
    return {**cells, "its highest words": Cell(text=" · ".join(map(visible, group.words[:NAMED_WORDS])) or "–")}


def groups(result: DataHeatmap) -> Table:
    """Return a row per group of texts."""
    what = (
        "Shares of the state held by a text's highest word, all its punctuation, the last quarter of its words"
        if result.survives
        else "Means over words: a text's highest, its punctuation, the last quarter"
    )
    note = f"{what}; spread: coefficient of variation over its words."
    return table(("texts",), [Line((each.name,), group_cells(each)) for each in result.groups], note=note)


def layers(result: DataHeatmap) -> Table:
    """Return a row per layer."""
    lines = []
    for each in result.by_layer:
        cells = {}
        if result.timed:
            shown = np.quantile(each.heads, [0.05, 0.5, 0.95], method="nearest") if each.heads.size else np.empty(0)
            cells["half-life"] = Cell(text=format_half_life(each.half_life))
            cells["heads 5, 50, 95 %"] = Cell(text=", ".join(map(format_half_life, shown.tolist())))
        cells |= {"first tenth": Cell(each.tenths[0], digits=2), "last tenth": Cell(each.tenths[-1], digits=2)}
        cells["highest words"] = Cell(text=" · ".join(map(visible, each.words[:NAMED_WORDS])))
        lines.append(Line((str(each.number),), cells))
    return table(
        ("layer",),
        lines,
        note=f"Half-lives in tokens. First and last tenth of a text: mean over words, in {result.unit}.",
    )


def notes(result: DataHeatmap) -> list[str]:
    """Return the notes on the numbers."""
    found = []
    if result.timed:
        found.append(
            "Half-lives of what a layer, or a head, writes at a token, over the tokens of "
            f"{counted(result.timed, 'text')}: the Kaplan–Meier median, since what is written often outlives its text."
        )
    return [*found, *result.notes]


def draw(result: DataHeatmap, frame: plot.Frame) -> Figure:
    """Draw words on the left, parts of a text and half-lives on the right."""
    curves = [("mean", result.tenths)]
    chosen = result.by_layer if len(result.by_layer) > 1 else ()
    step = evenly_spaced(len(chosen), MAX_LAYER_CURVES) if chosen else []
    curves += [(f"layer {chosen[at].number}", chosen[at].tenths) for at in step]
    legend = [(plot.handle(number), name) for number, (name, _) in enumerate(curves)]
    shown = result.shown_words
    sheet = plot.Sheet(frame, result.headline, plot.data_line(result), legend, width=10.2)
    panels = words_and_parts(sheet, len(shown), bool(result.timed))
    colours = [[plot.COLOURS[0] if at < SHOWN_HIGHEST else plot.COLOURS[1] for at in range(len(shown))]]
    plot.points(panels["words"], [each.word for each in shown], [each.kept for each in shown], colours=colours)
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
    """Draw a dot per head and layer, and a line for the layer as a whole; half-lives above the horizon lie at the
    top."""
    longest = 2.0 * max([value for each in result.by_layer for value in _finite([each.half_life, *each.heads])] or [8])
    random = np.random.default_rng(0)
    for at, each in enumerate(result.by_layer):
        heads = np.where(np.isfinite(each.heads), each.heads, longest)
        place = at + random.uniform(-0.22, 0.22, len(heads))
        size = 3 if len(heads) > 40 else 5
        axes.plot(place, heads, "o", color=plot.SOFT, markersize=size, alpha=0.5, markeredgewidth=0, rasterized=True)
        whole = each.half_life if np.isfinite(each.half_life) else longest
        axes.plot([at - 0.32, at + 0.32], [whole, whole], color=plot.COLOURS[1], linewidth=2)
    axes.set_yscale("log", base=2)
    ticks = [2.0**k for k in range(int(np.log2(longest)))]
    axes.set_yticks([*ticks, longest], [*(f"{tick:.0f}" for tick in ticks), "longer"])
    axes.minorticks_off()
    shown = range(0, len(result.by_layer), max(1, len(result.by_layer) // 12))
    axes.set_xticks(list(shown), [str(result.by_layer[at].number) for at in shown])
    axes.set(xlim=(-0.6, len(result.by_layer) - 0.4), ylim=(0.8, 1.25 * longest))
    axes.set(xlabel="layer (line) and its heads", ylabel="half-life in tokens")


def _finite(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values if np.isfinite(value)]
