"""Heatmaps of texts and of data sets from the measurements of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.api.options import chosen_layers
from ssmscope.api.results import record_provenance
from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.model import as_batch
from ssmscope.core.trace import LayerTrace, Trace, check_recurrent_state
from ssmscope.errors import InputError
from ssmscope.interp.heatmap.measure import LayerScores, Score, TokenAverages, through_layers, visit_trace
from ssmscope.interp.heatmap.over_data import extremes, measure, summarise
from ssmscope.interp.heatmap.result import DataHeatmap, Head, ScoredText, SelectionHeatmap
from ssmscope.interp.heatmap.words import (
    Kind,
    Words,
    is_selective,
    standing_out,
    word_groups,
    word_scores,
    word_text,
    words_of,
)

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model, TextsLike
    from ssmscope.data.text import TextData

TOP_HEADS = 8
"""Number of heads that "top" shows."""
MAX_HEADS = 256
"""Largest number of heads that "all" shows."""
MAX_CORPUS_TEXTS = 2000
"""Largest number of texts, drawn by seed 0, that averages are taken over."""


def scored(
    model: Model | None,
    texts: TextsLike,
    *,
    score: Score,
    layers: Any,
    top: int,
    punctuation: bool,
    at: int | None = None,
    heads: str | None = None,
    through: bool = False,
    half_lives: bool = False,
    contrast: str | None = None,
    scale: str | None = None,
    merge: bool = False,
) -> SelectionHeatmap:
    """Compute the heatmap of single texts, see `selection_heatmap`."""
    kind: Kind = "z" if contrast is not None else "share" if score == "survival" else "mean"
    rows = _Rows(kind, top, punctuation, at)
    early = rows if kind == "share" and not through and not merge else None
    wanted = {"heads": heads is not None, "half_lives": half_lives}
    trace, found = _taken(model, texts, score, at, layers, through, early, **wanted)
    check_recurrent_state(trace.has_recurrent_state, trace.source["model"], "a heatmap")
    places = chosen_layers(layers, trace.layer_numbers)
    chosen = tuple(trace.layer_numbers[place] for place in places)
    values = found.of(trace)
    # The test for noise reads what is left or, for retention, what is overwritten.
    written = values if score != "retention" else 1.0 - values
    if through and list(trace.layer_numbers) != list(range(len(trace.layer_numbers))):
        raise InputError("through follows state-space layers only, and this model has other layers between them")
    if through:
        values = through_layers(trace, np.nan_to_num(values))
        written = values
    if contrast is not None:
        values = _averages(model, contrast, score).contrast(values, as_batch(model, texts))
    if places != tuple(range(len(values))):
        values, written = values[list(places)], written[list(places)]
    shown = _heads(found, places, heads)

    made = []
    for row, real in enumerate(trace.mask.cpu().numpy()):
        words = np.array([word is not None for word in trace.words[row]])
        scores = _columns(values[:, row], real)
        quantity = scores if written is values else _columns(written[:, row], real)
        _check_finite(_columns(scores, words), row, chosen)
        scores = np.where(np.isnan(scores), 0, scores)  # Special tokens have no z-scores.
        mean = scores.mean(axis=0)
        looked = [rows.early.get((place, row)) for place in places]
        flat = [rows.flat(quantity.mean(axis=0), words)]
        flat += [rows.flat(each, words) if seen is None else seen[0] for each, seen in zip(quantity, looked)]
        tokens, word_of = list(trace.tokens[row]), list(trace.words[row])
        by_head = np.array([found.by_head[head.layer][row, real, head.head] for head in shown], dtype=np.float32)
        lives = None if found.half_lives is None else found.half_lives[list(places)][:, row, real]
        if merge:
            groups = word_groups(word_of)
            tokens, word_of = [word_text(tokens, group) for group in groups], [word_of[group[0]] for group in groups]
            scores, mean = (word_scores(each, groups, summed=kind == "share") for each in (scores, mean))
            by_head = word_scores(by_head, groups, summed=kind == "share") if shown else by_head
            lives = None if lives is None else word_scores(lives, groups, summed=False)
        pixels = None if trace.pixels is None else trace.pixels[row].float().cpu().numpy()

        named = words_of(tuple(tokens), tuple(word_of), punctuation=punctuation or pixels is not None)
        made.append(
            ScoredText(
                tokens=tuple(tokens),
                words=tuple(word_of),
                scores=scores.astype(np.float32),
                mean=mean.astype(np.float32),
                rationale=rows.standing(mean, flat[0], named),
                answer=trace.answers[row][0],
                probability=float(trace.answers[row][1]),
                pixels=pixels,
                half_lives=None if lives is None else lives.astype(np.float32),
                flat=tuple(flat),
                standing=tuple(
                    rows.standing(each, noise, named) if seen is None else seen[1]
                    for each, noise, seen in zip(scores, flat[1:], looked)
                ),
                heads=by_head if shown else None,
            )
        )
    options = {"score": score, "at": at, "layers": layers if isinstance(layers, str) else list(chosen), "heads": heads}
    options |= {"through": through, "half_lives": half_lives, "contrast": contrast, "scale": scale}
    options |= {"top": top, "punctuation": punctuation, "merge": merge}
    return SelectionHeatmap(
        provenance=record_provenance(trace.source, options=options),
        texts=tuple(made),
        score=score,
        layers=chosen,
        size=top,
        by_layer=layers != "mean",
        at=at,
        contrast=contrast,
        through=through,
        reach=found.reach,
        shared=scale == "shared" or (scale is None and trace.pixels is None),
        heads=tuple(replace(head, layer=trace.layer_numbers[head.layer]) for head in shown),
        attends=found.attends,
    )


class _Rows:
    """Judgements on rows of scores: noise or not, and the words that stand out; `early` has those, by layer and text,
    that were made while a GPU still ran."""

    def __init__(self, kind: Kind, top: int, punctuation: bool, at: int | None) -> None:
        self.kind, self.top, self.punctuation, self.at = kind, top, punctuation, at
        self.early: dict[tuple[int, int], tuple[bool, tuple[int, ...]]] = {}
        self._words: dict[int, tuple[np.ndarray, Words]] = {}

    def flat(self, quantity: np.ndarray, words: np.ndarray) -> bool:
        """Return True if a row is noise; `words` are True at tokens of words."""
        words = words if self.at is None else words & (np.arange(len(words)) <= self.at)
        return not is_selective(_columns(quantity, words))

    def standing(self, scores: np.ndarray, noise: bool, named: Words) -> tuple[int, ...]:
        """Return the positions of the words that stand out, none of noise."""
        return () if noise else sum(standing_out(named, scores, self.kind, self.top), ())

    def look(self, batch: Batch, index: int, row: int, scores: np.ndarray) -> None:
        """Judge a layer's shares of a text, (length,)."""
        if row not in self._words:
            named = words_of(tuple(batch.tokens[row]), tuple(batch.words[row]), punctuation=self.punctuation)
            self._words[row] = np.array([word is not None for word in batch.words[row]]), named
        words, named = self._words[row]
        noise = self.flat(scores[: len(words)], words)
        self.early[index, row] = noise, self.standing(scores[: len(words)], noise, named)


def scored_data(
    model: Model | None,
    data: TextData,
    *,
    score: Score,
    layers: Any,
    top: int,
    punctuation: bool,
    limit: int | None,
    seed: int,
) -> DataHeatmap:
    """Compute the heatmap of a data set, see `selection_heatmap`."""
    if model is None or model.tokenizer is None:
        raise InputError("labelled texts need a model with a tokenizer; give one, or name one with tokenizer")
    model.check_recurrent_state("a heatmap")
    places = chosen_layers(layers, model.layer_numbers)
    data = data if limit is None else data.sample(limit, seed=seed)
    numbers = tuple(model.layer_numbers[place] for place in places)
    options: dict[str, Any] = {"score": score, "layers": layers if isinstance(layers, str) else list(numbers)}
    options |= {"top": top, "punctuation": punctuation, "limit": limit}
    provenance = record_provenance(model.source, options=options, seed=seed, data=data)
    found, lives, timed = measure(
        model, data, score, places, half_lives=score == "survival", seed=seed, provenance=provenance
    )
    summary = summarise(model, data, found, lives, places, numbers, punctuation=punctuation, seed=seed)
    picked = extremes(found)
    shown = [data.texts[found.rows[at]] for at, _ in picked]
    alone: Any = {"score": score, "layers": layers, "top": top, "punctuation": punctuation}
    return DataHeatmap(
        provenance=provenance,
        score=score,
        layers=numbers,
        texts=len(found.rows),
        timed=timed,
        examples=(scored(model, shown, **alone),) if shown else (),
        picked=tuple(what for _, what in picked),
        **summary,
    )


def _taken(
    model: Model | None,
    texts: TextsLike,
    score: Score,
    at: int | None,
    layers: Any,
    through: bool,
    early: _Rows | None,
    **wanted: bool,
) -> tuple[Trace, LayerScores]:
    """Return the trace of the texts, and the measurements of its layers as they ran, which `early` sees; for an
    existing trace, layers are recomputed."""
    if isinstance(texts, Trace):
        _check_position(texts.mask.sum(1).tolist(), at)
        found = LayerScores(len(texts.retention), texts.mask, score, at, **wanted)
        found.attends = model is not None and bool(attention_modules(model.module))
        if score == "survival" or any(wanted.values()):
            every = range(len(texts.retention))
            visit_trace(texts, found, every if through else chosen_layers(layers, texts.layer_numbers))
        return texts, found
    batch = as_batch(model, texts)
    assert model is not None
    _check_position(batch.lengths, at)
    found = LayerScores(model.num_layers, batch.mask, score, at, **wanted)
    if early is not None and batch.values is None:
        found.seen = partial(early.look, batch)

    def visit(index: int, rows: Sequence[int], layer: LayerTrace) -> None:
        if index == 0:
            found.attends = bool(attention_modules(model.module))  # A GPU runs meanwhile.
        found.visit(index, rows, layer)

    asked: Any = {"keep_inputs": through, "retention": score != "survival"}
    return model.trace(batch, visit=visit, **asked), found


def _columns(scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Select entries of the last dimension; return the array itself where all are chosen."""
    return scores if chosen.all() else scores[..., chosen]


def _check_position(lengths: Sequence[int], at: int | None) -> None:
    if at is not None and at >= min(lengths):
        raise InputError(f"there is no token {at} in every text; the shortest has the tokens 0 to {min(lengths) - 1}")


def _check_finite(scores: np.ndarray, row: int, chosen: Sequence[int]) -> None:
    if not np.isfinite(scores).all():
        layer = chosen[int(np.flatnonzero(~np.isfinite(scores).all(axis=1))[0])]
        raise InputError(f"the scores of text {row} are not finite at layer {layer}; the model is damaged")


def _heads(found: LayerScores, places: Sequence[int], heads: str | None) -> tuple[Head, ...]:
    """Return the heads that are shown, the most selective first.

    Raises:
        InputError: for all heads of a model that has too many.
    """
    if heads is None:
        return ()
    means = {layer: found.selectivity[layer].mean(0) for layer in places}
    every = [Head(layer, head, float(value)) for layer, of in means.items() for head, value in enumerate(of)]
    if heads == "all" and len(every) > MAX_HEADS:
        raise InputError(f"there are {len(every):,} heads; give heads 'top', or layers with up to {MAX_HEADS} heads")
    every.sort(key=lambda head: (-head.selectivity, head.layer, head.head))
    return tuple(every if heads == "all" else every[:TOP_HEADS])


def _averages(model: Model | None, data: str, score: Score) -> TokenAverages:
    from ssmscope.data.text import load_text

    if model is None:
        raise InputError("contrast needs the model, to average over texts; give the model first")
    texts = load_text(data, None, label_names=model.labels).texts
    drawn = np.random.default_rng(0).permutation(len(texts))[:MAX_CORPUS_TEXTS]
    return TokenAverages(model, [texts[at] for at in sorted(drawn.tolist())], score)
