"""Comparison of two models' memory over the same data: words, parts of a text, half-lives of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.heatmap.data_views import draw_tenths
from ssmscope.interp.heatmap.words import SHOWN_HIGHEST, SHOWN_LOWEST
from ssmscope.render.figure import COLOURS, INK, MARKERS, SOFT, Sheet, data_line, handle, interval
from ssmscope.render.table import Cell, Line, Table, table
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ssmscope.interp.heatmap.result import DataHeatmap

NAME_CHARACTERS = 18
"""Number of characters of a word that are drawn."""


@dataclass(frozen=True)
class SharedWord:
    """Word that both models' results name, with its mean score in each."""

    word: str
    kept: tuple[Estimate, Estimate]

    @property
    def difference(self) -> float:
        """Mean score of the first model minus that of the other."""
        return self.kept[0].value - self.kept[1].value

    @property
    def gap(self) -> float:
        """Distance between the two intervals; negative where they overlap."""
        first, other = self.kept
        return max(first.low - other.high, other.low - first.high)


def shared_words(results: Sequence[DataHeatmap]) -> list[SharedWord]:
    """Return the words that both results name, by falling difference; if there are many, those whose intervals lie
    furthest apart."""
    theirs = {each.word: each.kept for each in results[1].words}
    found = [SharedWord(each.word, (each.kept, theirs[each.word])) for each in results[0].words if each.word in theirs]
    return sorted(
        sorted(found, key=lambda each: -each.gap)[: SHOWN_HIGHEST + SHOWN_LOWEST], key=lambda each: -each.difference
    )


def differences(results: Sequence[DataHeatmap], names: Sequence[str]) -> Table:
    """Return a row per word that both models' results name."""
    lines = []
    for each in shared_words(results):
        cells = {name: Cell(kept) for name, kept in zip(names, each.kept)}
        said = signed(each) + " *" * (each.gap > 0)
        lines.append(Line((visible(each.word),), {**cells, "difference": Cell(text=said)}))
    note = (
        f"Mean scores over a word's occurrences, in {results[0].unit}, for words in both results; the difference is "
        f"{names[0]} minus {names[1]}, * where the two intervals do not overlap."
    )
    return table(("word",), lines, note=note)


def signed(word: SharedWord) -> str:
    return f"{word.difference:+.2f}".replace("-", "−")


def draw(results: Sequence[DataHeatmap], names: Sequence[str], title: tuple[str, str, str]) -> Figure:
    """Draw both models' scores of each word on the left; parts of a text and the half-lives of layers on the right."""
    words, timed = shared_words(results), all(result.timed for result in results)
    tall = max(0.26 * len(words), 4.6)
    below = data_line(results[0], "bold: the two intervals do not overlap")
    legend = [(handle(at), name) for at, name in enumerate(names)]
    sheet = Sheet(10.6, Sheet.TOP + tall + 0.6, title, below, legend, left=1.75, across=2)
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
        axes.text(1.02, row, signed(each), transform=axes.get_yaxis_transform(), **style)
    names = [shorten(visible(each.word), NAME_CHARACTERS) for each in words]
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    head = "difference" if words else "no word is in both results"
    axes.text(1.02, -0.7, head, transform=axes.get_yaxis_transform(), size=8.5, color=SOFT, va="bottom")
