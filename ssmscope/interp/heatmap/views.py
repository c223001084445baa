"""Views of heatmaps: of texts, tokens in the colours of the average, of layers and heads; of a data set, its words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.api.results import TABLE_ROWS
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.interp.heatmap.words import SHOWN_HIGHEST, SHOWN_LOWEST, format_half_life, median_half_life, shown_words
from ssmscope.render.blocks import Block, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import counted, score_range
from ssmscope.render.table import MAX_COMPARED_ROWS, Cell, Line, Table, table, value_cell
from ssmscope.render.tokens import short_token, visible

if TYPE_CHECKING:
    from ssmscope.interp.heatmap.result import DataHeatmap, KeptGroup, KeptLayer, ScoredText, SelectionHeatmap

FLAT_REMARK = "flat: noise"
IMAGE_REMARK = "hardly selects"
"""Remark on a flat row of an image; it is drawn all the same, since neighbouring pixels show what is not noise."""
CONVOLUTION_REMARK = "; in italics, or underlined in orange: the convolution is not yet full"


def blocks(result: SelectionHeatmap) -> Iterator[Block]:
    """Yield the verdict, the coloured texts with their picture, a table of what stands out, and notes."""
    yield Prose(result.headline, "title")
    yield rows(result)
    yield Picture(result.figure, result.headline, vector=False, folded=not result.of_images)
    if not result.of_images:
        yield replace(table(("text", "of"), list(strongest(result)), most=MAX_COMPARED_ROWS), brief=TABLE_ROWS)
    yield from (Prose(line, "note") for line in notes(result))


def rows(result: SelectionHeatmap, *, every: bool = True) -> TokenRows:
    """Return every text with a row for the average and, with `every`, for each layer and head."""
    shared = scale(result) if result.shared else None
    of_heads = _ends(result, [text.heads[:, ~text.special] for text in result if text.heads is not None])
    return TokenRows(
        texts=tuple(_text(text, result, shared, of_heads, every) for text in result),
        of="layer",
        score=result.score if result.contrast is None else f"{result.score}, z",
        name=result.score_name,
        around=("below its average", "above"),
        marked=f"up to {result.size} {'places' if result.of_images else 'words'} that stand out"
        + CONVOLUTION_REMARK * (result.reach > 1 and not result.of_images),
        first=None if result.by_layer else 1,
        summed=result.summed,
    )


def scale(result: SelectionHeatmap) -> tuple[float, float]:
    """Return the ends of the colours that averages and layers of all texts share."""
    return _ends(result, [np.vstack([text.mean[None], text.scores])[:, ~text.special] for text in result])


def _ends(result: SelectionHeatmap, scores: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the ends of a colour scale: 0 to the largest share, lowest to highest, symmetric for z-scores."""
    every = np.concatenate([each.ravel() for each in scores]) if scores else np.zeros(0)
    if not every.size:
        return 0.0, 0.0
    low, high = float(every.min()), float(every.max())
    if result.contrast is not None:
        return -max(-low, high), max(-low, high)
    return (0.0, high) if result.score == "survival" else (low, high)


def _text(
    text: ScoredText,
    result: SelectionHeatmap,
    shared: tuple[float, float] | None,
    of_heads: tuple[float, float],
    every: bool,
) -> TokenText:
    outside = text.special.copy()
    if result.at is not None:
        outside[result.at + 1 :] = True

    def row(
        name: str, scores: np.ndarray, flat: bool, marked: Sequence[int], ends: tuple[float, float] | None
    ) -> TokenRow:
        seen, hidden = scores[~outside], flat and not result.of_images
        middle = float(seen.mean()) if seen.size else 0.0
        used = (middle, middle) if hidden else ends or _ends(result, [seen])
        signed, remark = result.contrast is not None and not hidden, FLAT_REMARK * hidden or IMAGE_REMARK * flat
        own = (float(seen.min()), float(seen.max())) if seen.size and (ends or hidden) else None
        return TokenRow(name, scores, used, signed, outside, marked, remark=remark, own=own)

    single = len(result.layers) == 1
    flat = text.flat or (False,) * (1 + len(result.layers))
    standing = text.standing or ((),) * len(result.layers)
    made = [row(result.layers_name if single else "mean", text.mean, flat[0], text.rationale, shared)]
    if every and not single:
        each = zip(result.layers, text.scores, flat[1:], standing)
        made += [row(f"layer {number}", scores, noise, marked, shared) for number, scores, noise, marked in each]
    if every and text.heads is not None:
        for head, scores in zip(result.heads, text.heads):
            name = f"layer {head.layer} head {head.head}\nselectivity {head.selectivity:.2f}"
            made.append(row(name, scores, False, (), of_heads if result.shared else None))
    warm = min(result.reach - 1, len(text))
    span = (0, warm) if warm and not result.of_images else None
    about = f"stands out: {result.said(text)}" if text.rationale else "no word stands out"
    about = "" if result.of_images else "; ".join((about, *result.beside(text)))
    return TokenText(text.tokens, text.words, made, text.answer, text.probability, about, span, text.pixels)


def strongest(result: SelectionHeatmap) -> Iterator[Line]:
    """Yield a row per text and layer, the average first, then heads."""
    single = len(result.layers) == 1
    names = [result.layers_name] if single else ["mean", *(f"layer {layer}" for layer in result.layers)]
    of_heads = [f"layer {head.layer} head {head.head}" for head in result.heads]
    seen = slice(None if result.at is None else result.at + 1)
    for number, text in enumerate(result):
        scores, standing = (text.mean, *text.scores), (text.rationale, *text.standing)
        shown = len(names) if result.by_layer else 1
        for at, (name, row, places) in enumerate(zip(names[:shown], scores, standing)):
            said = result.list_words(text, row, places) or (FLAT_REMARK if any(text.flat[at : at + 1]) else "nothing")
            cells = {"stands out": Cell(text=said)}
            if marks := result.of_marks(text, row):
                cells["punctuation, special tokens"] = Cell(text=marks)
            if text.half_lives is not None and (at or single):
                life = text.half_lives[max(at - 1, 0)]
                cells["half-life in tokens"] = Cell(text=median_half_life(life[~text.special]))
            ends = {"tokens from – to": Cell(text=score_range(row[seen], text.special[seen]))}
            yield Line((str(number), name), cells | ends)
        for name, row in zip(of_heads, () if text.heads is None else text.heads):
            strongest = text.top(3, row)
            said = " · ".join(f"{short_token(token, 24)} {result.written(score)}" for _, token, score in strongest)
            ends = {"tokens from – to": Cell(text=score_range(row[seen], text.special[seen]))}
            yield Line((str(number), name), {"stands out": Cell(text=said), **ends})


def notes(result: SelectionHeatmap) -> list[str]:
    """Return the notes on the scores."""
    found = []
    if result.score == "survival":
        found.append(
            "Survival: what is left in the states of what was written at a token, as a share of all that is left, "
            "exact in every head, heads weighted by what they hold."
            + " Half-life: tokens after which half of what was written is left, the median over the text."
            * any(text.half_lives is not None for text in result)
        )
    if result.contrast is not None:
        of = "the logarithm of a token's share, in units of an even spread" if result.score == "survival" else "scores"
        found.append(
            f"z-scores of {of}: how far it lies above the token's own average over {result.contrast}, in standard "
            "deviations of tokens around theirs. Averages of rare tokens are shrunk towards the overall average."
        )
    if result.through:
        found.append("Followed through the layers below to the input tokens, half of each step by the residual stream.")
    elif len(result.layers) > 1 and result.score == "survival":
        found.append(
            "Earlier layers have mixed other tokens into what a deeper layer writes at a token; see the option through."
        )
    if any(any(text.flat) for text in result):
        by = "by less than a tenth of its mean (of what is overwritten, for retention)"
        of_image = f"“{IMAGE_REMARK.capitalize()}”: a map varies over the image {by}, and its colours exaggerate that."
        of_text = f"A flat row varies over the tokens {by}: that is noise, and is not coloured."
        found.append(of_image if result.of_images else of_text)
    if not result.selects:
        found.append(
            f"The gates hardly select: they vary over these tokens by a tenth or more in fewer than half of the heads. "
            f"What survives says where a {'pixel' if result.of_images else 'token'} stands rather than what it is."
        )
    if result.reach > 1 and not result.of_images:
        found.append(
            f"The first {result.reach - 1} tokens, in italics or underlined in orange: the convolution's window "
            "begins before the text, and what is written there comes from fewer tokens."
        )
    if result.attends:
        found.append("Layers of attention keep no state and have no row.")
    return found


BRIEF_LAYERS = 6
"""Number of layers in a terminal."""
NAMED_WORDS = 3
"""Number of words that a table names for a group of texts, or for a layer."""


def data_blocks(result: DataHeatmap) -> Iterator[Block]:
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
        of_texts = zip(made.texts, result.picked)
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
