"""Comparison of two models' memory over the same data: words, parts of a text, half-lives of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.heatmap.data_views import draw_tenths, words_and_parts
from ssmscope.interp.heatmap.words import SHOWN_HIGHEST, SHOWN_LOWEST
from ssmscope.render import figure as plot
from ssmscope.render.table import Cell, Line, Table, table
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.heatmap.result import DataHeatmap
    from ssmscope.interp.paired import Paired

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


def draw(pair: Paired, frame: plot.Frame) -> Figure:
    """Draw both models' scores of each word on the left, with the difference, marked * where the intervals do not meet;
    parts of a text and the half-lives of layers on the right."""
    results: Sequence[DataHeatmap] = pair.results  # type: ignore[assignment]
    words, timed = shared_words(results), all(result.timed for result in results)
    legend = [(plot.handle(at), name) for at, name in enumerate(pair.names)]
    below = plot.data_line(
        results[0], "at the right of a word the difference, * where the two intervals do not overlap"
    )
    sheet = plot.Sheet(frame, pair.headline, below, legend, width=10.6)
    panels = words_and_parts(sheet, len(words), timed)
    scores = [[each.kept[at] for each in words] for at in range(2)]
    notes = [signed(each) + " *" * (each.gap > 0) for each in words]
    plot.points(
        panels["words"], [each.word for each in words], *scores, notes=notes, letters=NAME_CHARACTERS, zero=False
    )
    panels["words"].set_xlabel(results[0].unit if words else "no word is in both results")
    draw_tenths(panels, [result.tenths for result in results], results[0])
    if timed:
        axes = panels["lives"]
        for at, result in enumerate(results):
            numbers, found = zip(*((each.number, each.half_life) for each in result.by_layer))
            axes.plot(numbers, found, **plot.look(at))
        plot.scale_log(axes, "y", base=2)
        plot.integers(axes.xaxis, 8)
        longer = any(math.isinf(each.half_life) for result in results for each in result.by_layer)
        axes.set(xlabel="layer", ylabel="half-life in tokens" + ", longer ones omitted" * longer)
    return sheet.figure
