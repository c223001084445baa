"""Heatmaps of texts and of data sets: scored tokens, the words that stand out, and their views."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from markupsafe import Markup

from ssmscope.api.results import OverTexts, Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.interp.heatmap import views
from ssmscope.interp.heatmap.scored_text import ScoredText as ScoredText
from ssmscope.interp.heatmap.words import (
    BEYOND,
    MAX_HALF_LIFE,
    UNKNOWN,
    format_half_life,
    median_half_life,
    shown_words,
)
from ssmscope.outline import Outlined
from ssmscope.render.numbers import counted, number_runs
from ssmscope.render.table import MAX_COMPARED_ROWS, Cell, Line, Table, table, with_interval
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.paired import Paired
    from ssmscope.render.blocks import Block, TokenRows
    from ssmscope.render.figure import Frame

SCORES = {
    "survival": "survival: the share of the state that was written at each token",
    "retention": "retention E[A_t]: the share of its old state that a layer keeps when it reads the token",
    "write": "write 1 − E[A_t]: the share of its old state that a layer overwrites when it reads the token",
}
"""Scores by name, with their names in the views."""
MAX_NAMED_WORDS = 8
"""Largest number of words that a table names."""
MEASURES = ("strongest", "punctuation", "end", "spread")
"""Measures of a text, which groups average."""


def even_score(score: str, tenths: Sequence[Estimate]) -> float:
    """Return the score of a word that is kept like others: 1, an even share; with other scores the mean of tenths."""
    return 1.0 if score == "survival" else float(np.nanmean([each.value for each in tenths]))


def layers_name(layers: Sequence[int]) -> str:
    """Name averaged layers."""
    return f"layer {layers[0]}" if len(layers) == 1 else f"mean of layers {number_runs(layers)}"


@dataclass(frozen=True)
class Head:
    """Head that is shown, and the coefficient of variation over tokens of what it overwrites, averaged over texts."""

    layer: int
    head: int
    selectivity: float


@dataclass(frozen=True)
class SelectionHeatmap(Result, OverTexts[ScoredText], kind="heatmap"):
    """Heatmap of one or several texts. `len`, iteration and `[i]` are over the texts."""

    vector: ClassVar[bool] = False

    texts: tuple[ScoredText, ...]
    score: str
    """"survival", "retention" or "write"."""
    layers: tuple[int, ...]
    """Numbers of the layers in the rows of every text's `scores`, which its `mean` averages."""
    size: int
    """Largest number of words in a rationale."""
    by_layer: bool
    """True if table and terminal show every layer, not only the average."""
    at: int | None = None
    """Position whose states are examined, with survival; None for the end."""
    contrast: str | None = None
    """Data over which every token's own average was taken: scores are z-scores then."""
    through: bool = False
    """True if survival is followed through the layers below to the tokens of the input."""
    reach: int = 1
    """Number of positions that contribute to a write, by convolutions."""
    shared: bool = True
    """True if all rows of all texts are coloured on one scale."""
    heads: tuple[Head, ...] = ()
    """Heads that are shown, the most selective first."""
    attends: bool = False
    """True if the model also has layers of attention, which keep no state."""
    selects: bool = True
    """False for survival in a model whose gates hardly vary over these tokens, see `ssmscope.interp.gates`."""

    @property
    def of_images(self) -> bool:
        """True if the tokens are pixels of images whose size is known, and the views are maps."""
        return any(text.pixels is not None for text in self)

    def token_rows(self) -> TokenRows:
        return views.rows(self)

    def draw(self, frame: Frame, *, start: int = 0) -> Figure:  # type: ignore[override]
        """Draw every text in the colours of its average, its layers and its heads; long texts as strips over positions,
        images as maps. One figure holds 8 texts, from number `start` on."""
        from ssmscope.render.token_figure import draw_rows

        return draw_rows(views.rows(self), self.headline, frame, start=start)

    @property
    def summed(self) -> bool:
        """True if the scores of a word's tokens add up."""
        return self.score == "survival" and self.contrast is None

    @property
    def score_name(self) -> str:
        """Score with its formula, as the views call it."""
        name = SCORES[self.score]
        if self.score == "survival" and self.at is not None:
            name = name.replace("the state", f"the state after token {self.at}")
        above = f", in standard deviations above the token's own average over {self.contrast}"
        return name + above if self.contrast else name

    @property
    def layers_name(self) -> str:
        return layers_name(self.layers)

    def written(self, score: float) -> str:
        """Format a score: shares in percent."""
        if self.summed:
            return f"{100 * score:.0f} %" if score >= 0.1 else f"{100 * score:.1f} %"
        return f"{score:+.1f}".replace("-", "−") if self.contrast else f"{score:.3f}"

    def list_words(self, text: ScoredText, scores: np.ndarray, places: Sequence[int]) -> str:
        """List words of a text with their scores, for a table."""
        words = text.named(scores, places, summed=self.summed)[:MAX_NAMED_WORDS]
        return " · ".join(f"{word} {self.written(score)}" for word, score in words)

    def said(self, text: ScoredText, most: int = 3) -> str:
        """List the words of a text that stand out, with their scores."""
        words = text.named(text.mean, text.rationale, summed=self.summed, quoted=True)[:most]
        return ", ".join(f"{word} {self.written(score)}" for word, score in words) or "no word stands out"

    def of_marks(self, text: ScoredText, scores: np.ndarray, most: int = 3) -> str:
        """List shares of punctuation and special tokens, which are not among the words that may stand out."""
        found = text.marks(scores)[:most] if self.summed and not self.of_images else []
        return ", ".join(f"{name} {self.written(score)}" for name, score in found)

    def beside(self, text: ScoredText) -> list[str]:
        """Say what holds the state besides words, and most of it in which layer, and how many tokens are unknown."""
        said = []
        if marks := self.of_marks(text, text.mean):
            ends = [text.marks(row)[0] for row in text.scores]
            at = max(range(len(ends)), key=lambda layer: ends[layer][1])
            layer = f"; in layer {self.layers[at]} {ends[at][0]} holds {self.written(ends[at][1])}" * (len(ends) > 1)
            said.append(marks + layer)
        if text.unknown:
            said.append(f"{len(text.unknown)} of {counted(len(text), 'token')} {UNKNOWN}")
        return said

    def verdict(self, at: int = 0) -> str:
        if not len(self) or self.of_images:
            hardly = ", which hardly selects" * any(text.flat[:1] == (True,) for text in self)
            return f"{self.score} of {counted(len(self), 'image')}, {self.layers_name}{hardly}"
        where = {"survival": "of the states", "retention": "kept at", "write": "overwritten at"}[self.score]
        where = f"{where} {'at the end' if self.at is None else f'after token {self.at}'}" * (self.score == "survival")
        if len(self) == 1:
            text = self[0]
            rest = "".join(f"; {each}" for each in self.beside(text))
            if not text.rationale:
                noise = text.flat[:1] == (True,)
                why = "nothing stands out: the spread over tokens is noise" if noise else "no word stands out"
                return f"{why}{rest} ({self.score}, {self.layers_name})"
            if self.score == "survival" and not self.contrast:
                return f"{self.said(text)} {where}{rest}{self._half_life(text)} ({self.layers_name})"
            of = f"most above their own average over {self.contrast}" if self.contrast else f"highest {self.score}"
            return f"{of}: {self.said(text)}{rest} ({self.layers_name})"
        shown = "; ".join(f"text {number}: {self.said(text, 2)}" for number, text in enumerate(self.texts[:3]))
        rest = f"; {counted(len(self) - 3, 'more text')}" if len(self) > 3 else ""
        return f"{self.score}, {self.layers_name}: {shown}{rest}"

    def _half_life(self, text: ScoredText) -> str:
        if text.half_lives is None:
            return ""
        found = [median_half_life(row[~text.special]) for row in text.half_lives]
        found = found[:1] if len(set(found)) == 1 else found
        if BEYOND in found:
            return f"; half-life in tokens: {', '.join(found)}" * (len(found) <= 3)
        each = " and ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
        return f"; half of what is written is left after {each} tokens" * (len(found) <= 3)

    @classmethod
    def compare(cls, results: Sequence[SelectionHeatmap], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            for number, text in enumerate(result):
                tokens = result.list_words(text, text.mean, text.rationale)
                cells = {"answer": Cell(text=text.answer), "p": Cell(Estimate(text.probability, math.nan, math.nan))}
                cells |= {"score": Cell(text=result.score), "stands out": Cell(text=tokens or "nothing")}
                lines.append(Line((label, str(number)), cells))
        return table(("model", "text"), lines, most=MAX_COMPARED_ROWS)

    @property
    def headline(self) -> str:
        return f"Memory of {self.model_name}: {self.verdict()}"

    def top(self, k: int) -> pd.DataFrame:
        """Return the k highest tokens of every text: columns text, rank, position, token, score."""
        rows = [
            (number, rank, *entry)
            for number, text in enumerate(self.texts)
            for rank, entry in enumerate(text.top(k), start=1)
        ]
        return pd.DataFrame(rows, columns=["text", "rank", "position", "token", "score"])

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import strips_of

        return strips_of("tokens of the first texts by score", self.token_rows())

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, layer and token: columns model, text, position, token, word, layer, head, score,
        half_life (with survival, infinite where the text is too short for it), in_rationale.

        `layer` is "mean" for the average; the layers follow if they were asked for, and the heads. `text` and
        `position` count from 0. `word` is missing for special tokens, `head` and `half_life` where not defined.
        """
        parts = []
        for number, text in enumerate(self.texts):
            unknown = np.full((len(self.layers), len(text)), np.nan)
            lives = unknown if text.half_lives is None else text.half_lives
            rows: list[tuple[str, int | None, np.ndarray, np.ndarray]] = [("mean", None, text.mean, unknown[0])]
            of_layers = zip(self.layers, text.scores, lives) if self.by_layer else ()
            rows += [(str(layer), None, row, life) for layer, row, life in of_layers]
            of_heads = () if text.heads is None else zip(self.heads, text.heads)
            rows += [(str(head.layer), head.head, row, unknown[0]) for head, row in of_heads]
            tokens, words = pd.array(text.tokens, dtype="string"), pd.array(text.words, dtype="Int64")
            first = {"text": number, "position": range(len(text)), "token": tokens, "word": words}
            kept = np.isin(range(len(text)), text.rationale)
            for layer, head, scores, half_lives in rows:
                columns = {**first, "layer": layer, "head": pd.array([head] * len(text), dtype="Int64")}
                columns |= {"score": scores, "half_life": half_lives, "in_rationale": kept}
                parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def blocks(self) -> Iterable[Block]:
        return views.blocks(self)


@dataclass(frozen=True)
class KeptWord:
    """Word of a data set, lower case, and its mean score over its occurrences."""

    word: str
    texts: int
    """Number of texts in which it occurs."""
    count: int
    kept: Estimate
    """Score; with survival in units of an even share, a word's share times the number of words in its text."""


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
    """"survival", "retention" or "write"."""
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
        return self.score == "survival"

    @property
    def even(self) -> float:
        return even_score(self.score, self.tenths)

    @property
    def unit(self) -> str:
        """Unit of the scores of words and parts."""
        return "times an even share" if self.survives else self.score

    @property
    def headline(self) -> str:
        data, layers = self.provenance["data"], layers_name(self.layers)
        return f"Memory of {self.model_name} over {data['name']} ({data['split']}): {self.score}, {layers}"

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
        return f"{said} ({self.score}, {counted(self.texts, 'text')})"

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
            Line((label, group.name), {"score": Cell(text=result.score), **views.group_cells(group)})
            for result, (label,) in zip(results, labels)
            for group in result.groups
        ]
        return table(("model", "texts"), lines, most=MAX_COMPARED_ROWS)

    @classmethod
    def draw_pair(cls, pair: Paired, frame: Frame) -> Figure:
        """Draw two models in one picture: words, parts of a text, half-lives of layers."""
        from ssmscope.interp.heatmap.data_figure import draw_pair

        return draw_pair(pair, frame)

    @classmethod
    def differences(cls, results: Sequence[DataHeatmap], names: Sequence[str]) -> Table:
        return views.differences(results, names)

    def blocks(self) -> Iterable[Block]:
        return views.data_blocks(self)
