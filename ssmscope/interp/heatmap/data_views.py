"""Views of the heatmap over a data set: words, groups of texts, layers, texts at the extremes, and two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.heatmap.views import rows
from ssmscope.interp.heatmap.words import SHOWN_HIGHEST, SHOWN_LOWEST, format_half_life
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, Table, table, value_cell
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from ssmscope.interp.heatmap.result import DataHeatmap, KeptGroup, KeptLayer

BRIEF_LAYERS = 6
"""Number of layers in a terminal."""
NAMED_WORDS = 3
"""Number of words that a table names for a group of texts, or for a layer."""


def blocks(result: DataHeatmap) -> Iterator[Block]:
    """Yield the verdict and the picture, words, groups, layers, and examples."""
    yield from result.opening(f"{result.verdict()[0].upper()}{result.verdict()[1:]}.")
    yield words(result)
    what = (
        "Shares of the state held by a text's highest word, all its punctuation, the last quarter of its words"
        if result.survives
        else "Means over words: a text's highest, its punctuation, the last quarter"
    )
    note = f"{what}; spread: coefficient of variation over its words."
    yield table(("texts",), [Line((each.name,), group_cells(each)) for each in result.groups], note=note)
    note = f"Half-lives in tokens. First and last tenth of a text: mean over words, in {result.unit}."
    lines = [Line((str(each.number),), _layer_cells(result, each)) for each in result.by_layer]
    yield replace(table(("layer",), lines, note=note), brief=BRIEF_LAYERS)
    for shown in result.examples:
        yield Prose("Texts at the extremes", "heading")
        made = rows(shown)
        of_texts = zip(made.texts, result.picked, strict=True)
        texts = tuple(replace(text, about=f"{picked}; {text.about}") for text, picked in of_texts)
        yield replace(made, texts=texts, first=1)
    if result.timed:
        yield Prose(
            "Half-lives of what a layer, or a head, writes at a token, over the tokens of "
            f"{counted(result.timed, 'text')}: the Kaplan–Meier median, since what is written often outlives its "
            "text.",
            "note",
        )
    yield from (Prose(line, "note") for line in result.notes)


def words(result: DataHeatmap) -> Table:
    lines = []
    for each in result.shown_words:
        cells = {"score": Cell(each.kept), "texts": Cell(text=f"{each.texts:,}")}
        lines.append(Line((visible(each.word),), {**cells, "times": Cell(text=f"{each.count:,}")}))
    from_both = f"The {SHOWN_HIGHEST} highest and {SHOWN_LOWEST} lowest of" if len(lines) < len(result.words) else "Of"
    note = (
        f"{from_both} {result.named:,} words in at least {result.least} texts, ranked by the inner end of their "
        f"interval and ordered by their means over occurrences, in {result.unit}."
    )
    return table(("word",), lines, note=note)


def _layer_cells(result: DataHeatmap, layer: KeptLayer) -> dict[str, Cell]:
    cells = {}
    if result.timed:
        shown = np.quantile(layer.heads, [0.05, 0.5, 0.95], method="nearest") if layer.heads.size else np.empty(0)
        cells["half-life"] = Cell(text=format_half_life(layer.half_life))
        cells["heads 5, 50, 95 %"] = Cell(text=", ".join(map(format_half_life, shown.tolist())))
    cells |= {"first tenth": Cell(layer.tenths[0], digits=2), "last tenth": Cell(layer.tenths[-1], digits=2)}
    return {**cells, "highest words": _named(layer.words, "")}


def group_cells(group: KeptGroup) -> dict[str, Cell]:
    """Return the cells of a group of texts."""
    cells = {"number": Cell(text=f"{group.texts:,}"), "highest word": Cell(group.strongest, digits=2)}
    cells |= {"punctuation": Cell(group.punctuation, digits=2), "last quarter": Cell(group.end, digits=2)}
    return {**cells, "spread": value_cell(group.spread, 2), "its highest words": _named(group.words)}


def _named(words: Sequence[str], none: str = "–") -> Cell:
    return Cell(text=" · ".join(map(visible, words[:NAMED_WORDS])) or none)


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
    def signed(self) -> str:
        return f"{self.difference:+.2f}".replace("-", "−")

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
    apart = sorted(found, key=lambda each: -each.gap)[: SHOWN_HIGHEST + SHOWN_LOWEST]
    return sorted(apart, key=lambda each: -each.difference)


def differences(results: Sequence[DataHeatmap], names: Sequence[str]) -> Table:
    """Return a row per word that both models' results name."""
    lines = []
    for each in shared_words(results):
        cells = {name: Cell(kept) for name, kept in zip(names, each.kept)}
        said = each.signed + " *" * (each.gap > 0)
        lines.append(Line((visible(each.word),), {**cells, "difference": Cell(text=said)}))
    note = (
        f"Mean scores over a word's occurrences, in {results[0].unit}, for words in both results; the difference "
        f"is {names[0]} minus {names[1]}, * where the two intervals do not overlap."
    )
    return table(("word",), lines, note=note)
