"""Heatmap over a data set: words, parts of texts and groups that are kept, and their views."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.interp.heatmap.scored_text import SHARES
from ssmscope.interp.heatmap.text_result import SelectionHeatmap, layers_name, rows
from ssmscope.interp.heatmap.words import (
    MAX_HALF_LIFE,
    SHOWN_HIGHEST,
    SHOWN_LOWEST,
    KeptWord,
    format_half_life,
    shown_words,
)
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.numbers import counted
from ssmscope.render.table import MAX_COMPARED_ROWS, Cell, Line, Table, table, value_cell, with_interval
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from ssmscope.interp.paired import Paired
    from ssmscope.render.blocks import Block
    from ssmscope.render.figure import Frame

MEASURES = ("strongest", "punctuation", "end", "spread")
"""Measures of a text, which groups average."""


def even_score(score: str, tenths: Sequence[Estimate]) -> float:
    """Return the score of a word that is kept like others: 1, an even share; with other scores the mean of tenths."""
    return 1.0 if score in SHARES else float(np.nanmean([each.value for each in tenths]))


@dataclass(frozen=True)
class KeptGroup:
    """Scores of a group of texts: shares of the states, summed over words; with other scores means over words."""

    name: str
    """"all", "class NAME", "answered right" or "answered wrong"."""
    texts: int
    strongest: Estimate
    """Score of the highest word of a text that is not punctuation."""
    punctuation: Estimate
    end: Estimate
    """Score of the last quarter of the words."""
    spread: Estimate
    """Coefficient of variation over the words of a text."""
    words: tuple[str, ...]
    """Highest words."""


@dataclass(frozen=True)
class KeptLayer(Outlined):
    """Scores and half-lives of a layer."""

    number: int
    half_life: float
    """Half-life in tokens, see `median_half_lives`; NaN where it was not measured, infinite beyond the horizon."""
    heads: np.ndarray
    """(heads,) float64: half-lives of each head, or channel."""
    words: tuple[str, ...]
    tenths: tuple[Estimate, ...]
    """Mean score of the words in each tenth of a text; with survival in units of an even share."""


@dataclass(frozen=True)
class DataHeatmap(Result, kind="heatmap-data"):
    """Contents of a model's memory over a data set: which words, positions, classes and answers are kept."""

    drawn_by: ClassVar[str] = "data_figure"

    score: str
    """"survival", "readable", "retention" or "write"."""
    layers: tuple[int, ...]
    """Layers that are averaged."""
    texts: int
    words: tuple[KeptWord, ...]
    """Words with the highest lower ends and with the lowest upper ends of their intervals, by falling mean."""
    least: int
    """Smallest number of texts in which one of these words occurs."""
    named: int
    """Number of words that occur in as many texts."""
    groups: tuple[KeptGroup, ...]
    tenths: tuple[Estimate, ...]
    """Mean score of the words in each tenth of a text, averaged over the layers."""
    by_layer: tuple[KeptLayer, ...]
    timed: int
    """Number of texts whose half-lives were measured."""
    examples: tuple[SelectionHeatmap, ...]
    """Texts at the extremes, as one heatmap; empty where no text is short enough to be shown."""
    picked: tuple[str, ...]
    """Description of each of them."""
    notes: tuple[str, ...]
    longest: int = MAX_HALF_LIFE
    """Largest half-life, in tokens, that can be seen in these texts."""

    def token_rows(self) -> None:
        """Return None: a data set has no rows of tokens."""

    @property
    def survives(self) -> bool:
        return self.score in SHARES

    @property
    def even(self) -> float:
        return even_score(self.score, self.tenths)

    @property
    def unit(self) -> str:
        """Unit of the scores of words and parts."""
        return "times an even share" if self.survives else self.score

    @property
    def headline(self) -> str:
        data = self.provenance["data"]
        return f"Memory of {self.model_name} over {data['name']} ({data['split']}): {self.verdict()}"

    def verdict(self, at: int = 0) -> str:
        if not self.words:
            return f"{self.score} over {counted(self.texts, 'text')}; no word occurs in enough of them"
        unit = f" {self.unit}" * self.survives
        shown, even = shown_words(self.words), self.even
        high, low = [each for each in shown if each.kept.low > even], [each for each in shown if each.kept.high < even]
        most = ", ".join(f"“{visible(each.word)}”" for each in high[1:3])
        said = f"highest: “{visible(high[0].word)}” {with_interval(high[0].kept)}{unit}" if high else ""
        said += f", then {most}" * bool(most)
        said += f"{'; ' * bool(high)}lowest: “{visible(low[-1].word)}” {with_interval(low[-1].kept)}" if low else ""
        said = said or f"no word's interval lies above or below {'an even share' if self.survives else 'the mean'}"
        known = [each.half_life for each in self.by_layer if not math.isnan(each.half_life)]
        if known and len(known) <= 4:
            lives = ", ".join(format_half_life(life, self.longest) for life in known)
            said += f"; half of what is written is left after {lives} tokens"
        return f"{said} ({self.score}, {layers_name(self.layers)}, {counted(self.texts, 'text')})"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per word, group, tenth of a text, layer and head.

        Columns: of ("word", "group", "part", "half-life"), name (the word, group or tenth, from 1), layer and head
        where it is of one, measure ("score", "strongest", "punctuation", "end", "spread" or "tokens"), texts, count
        (the occurrences of a word), value and its 95 % interval in low and high.
        """
        rows: list[dict[str, object]] = []

        def add(of: str, name: object, measure: str, found: Estimate, **more: object) -> None:
            rows.append({"of": of, "name": str(name), "measure": measure, **more, **vars(found)})

        for word in self.words:
            add("word", word.word, "score", word.kept, texts=word.texts, count=word.count)
        for group in self.groups:
            for measure in MEASURES:
                add("group", group.name, measure, getattr(group, measure), texts=group.texts)
        for layer, tenths in ((None, self.tenths), *((each.number, each.tenths) for each in self.by_layer)):
            for part, found in enumerate(tenths, start=1):
                add("part", part, "score", found, layer=layer)
        for each in self.by_layer if self.timed else ():
            for head, value in ((None, each.half_life), *enumerate(each.heads.tolist())):
                add("half-life", "", "tokens", Estimate(value, math.nan, math.nan), layer=each.number, head=head)
        columns = ["of", "name", "layer", "head", "measure", "texts", "count", "value", "low", "high"]
        whole = dict.fromkeys(["layer", "head", "texts", "count"], "Int64")
        return pd.DataFrame(rows, columns=columns).astype(whole)

    @classmethod
    def compare(cls, results: Sequence[DataHeatmap], labels: Sequence[Sequence[str]]) -> Table:
        lines = [
            Line((label, group.name), {"score": Cell(text=result.score), **group_cells(group)})
            for result, (label,) in zip(results, labels)
            for group in result.groups
        ]
        return table(("model", "texts"), lines, most=MAX_COMPARED_ROWS)

    @classmethod
    def draw_pair(cls, pair: Paired, frame: Frame) -> Figure:
        """Draw two models in one picture: words, parts of a text, half-lives of layers."""
        return importlib.import_module(f"{__package__}.{cls.drawn_by}").draw_pair(pair, frame)

    @staticmethod
    def differ(results: Sequence[DataHeatmap], names: Sequence[str]) -> str:
        """Say of which words one model keeps more than the other: those whose intervals do not overlap."""
        apart = [each for each in shared_words(results) if each.gap > 0]
        sides = [
            f"{name} keeps more of "
            + ", ".join(f"“{visible(each.word)}” ({each.signed})" for each in found[:NAMED_WORDS])
            for name, found in zip(
                names, ([e for e in apart if e.difference > 0], [e for e in apart if e.difference < 0][::-1])
            )
            if found
        ]
        return "; ".join(sides) or "no word that both name is kept differently"

    @classmethod
    def differences(cls, results: Sequence[DataHeatmap], names: Sequence[str]) -> Table:
        return differences(results, names)

    def blocks(self) -> Iterable[Block]:
        return data_blocks(self)


BRIEF_LAYERS = 6
"""Number of layers in a terminal."""
NAMED_WORDS = 3
"""Number of words that a table names for a group of texts, or for a layer."""


def data_blocks(result: DataHeatmap) -> Iterator[Block]:
    """Yield the verdict and the picture, words, groups, layers, and examples."""
    yield from result.opening()
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
        of_texts = zip(made.texts, result.picked)
        texts = tuple(replace(text, about=f"{picked}; {text.about}") for text, picked in of_texts)
        yield replace(made, texts=texts, first=1)
    if result.timed:
        yield Prose(
            "Half-lives of what a layer, or a head, writes at a token, over the tokens of "
            f"{counted(result.timed, 'text')}: the Kaplan–Meier median, since what is written often outlives its "
            "text.",
            "definition",
        )
    yield from (Prose(line, "note") for line in result.notes)


def words(result: DataHeatmap) -> Table:
    lines = []
    for each in shown_words(result.words):
        cells = {"score": Cell(each.kept), "texts": Cell(text=f"{each.texts:,}")}
        lines.append(Line((visible(each.word),), {**cells, "times": Cell(text=f"{each.count:,}")}))
    from_both = f"The {SHOWN_HIGHEST} highest and {SHOWN_LOWEST} lowest of" if len(lines) < len(result.words) else "Of"
    note = (
        f"{from_both} {result.named:,} words in at least {result.least} texts, ranked by the inner end of their "
        f"interval and ordered by their means over occurrences, in {result.unit}."
    )
    if any(each.kept.low <= result.even <= each.kept.high for each in shown_words(result.words)):
        note += f" An interval around {result.even:.3g} tells a word from no other."
    return table(("word",), lines, note=note)


def _layer_cells(result: DataHeatmap, layer: KeptLayer) -> dict[str, Cell]:
    cells = {}
    if result.timed:
        shown = np.quantile(layer.heads, [0.05, 0.5, 0.95], method="nearest") if layer.heads.size else np.empty(0)
        cells["half-life"] = Cell(text=format_half_life(layer.half_life, result.longest))
        said = ", ".join(format_half_life(each, result.longest) for each in shown.tolist())
        cells["heads 5, 50, 95 %"] = Cell(text=said)
    cells |= {"first tenth": Cell(layer.tenths[0], digits=2), "last tenth": Cell(layer.tenths[-1], digits=2)}
    return {**cells, "highest means": _named(layer.words, "")}


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
    """Return the words that both results name, by falling difference; of many, those furthest apart."""
    theirs = {each.word: each.kept for each in results[1].words}
    found = [SharedWord(each.word, (each.kept, theirs[each.word])) for each in results[0].words if each.word in theirs]
    apart = [found[at] for at in descending(np.array([each.gap for each in found]))[: SHOWN_HIGHEST + SHOWN_LOWEST]]
    return [apart[at] for at in descending(np.array([each.difference for each in apart]))]


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
