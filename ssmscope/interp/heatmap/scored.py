"""Heatmaps of texts and of data sets from the measurements of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ssmscope.api.options import chosen_layers
from ssmscope.api.results import record_provenance
from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.model import Model, TextsLike, as_batch
from ssmscope.core.trace import Trace, check_recurrent_state
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.interp.heatmap.measure import LayerScores, Score, TokenAverages, through_layers, visit_trace
from ssmscope.interp.heatmap.over_data import extremes, measure, summarise
from ssmscope.interp.heatmap.result import DataHeatmap, Head, ScoredText, SelectionHeatmap
from ssmscope.interp.heatmap.words import (
    Kind,
    is_selective,
    standing_out,
    word_groups,
    word_scores,
    word_text,
    words_of,
)

TOP_HEADS = 8
"""Number of heads that "top" shows."""
MAX_HEADS = 256
"""Largest number of heads that "all" shows."""
MAX_CORPUS_TEXTS = 2000
"""Largest number of texts, drawn by seed 0, that averages are taken over."""


def scored(model: Model | None, texts: TextsLike, options: Mapping[str, Any]) -> SelectionHeatmap:
    """Compute the heatmap of single texts, with the options of `selection_heatmap`."""
    score, layers, at, contrast = (options[name] for name in ("score", "layers", "at", "contrast"))
    through, heads, top = (options[name] for name in ("through", "heads", "top"))
    kind: Kind = "z" if contrast is not None else "share" if score == "survival" else "mean"
    wanted = {"heads": heads is not None, "half_lives": options["half_lives"]}
    trace, found = _measured(model, texts, score, at, layers, through, **wanted)
    check_recurrent_state(trace.has_recurrent_state, trace.source["model"], "a heatmap")
    places = list(chosen_layers(layers, trace.layer_numbers))
    chosen = tuple(trace.layer_numbers[place] for place in places)
    values = found.of(trace)
    # The test for noise reads what is left or, for retention, what is overwritten.
    written = 1.0 - values if score == "retention" else values
    if through and list(trace.layer_numbers) != list(range(len(trace.layer_numbers))):
        raise InputError("through follows state-space layers only, and this model has other layers between them")
    if through:
        written = values = through_layers(trace, np.nan_to_num(values))
    if contrast is not None:
        values = _averages(model, contrast, score).contrast(values, as_batch(model, texts))
    values, written = values[places], written[places]
    shown = _heads(found, places, heads)

    made = []
    for row, real in enumerate(trace.mask.cpu().numpy()):
        tokens, word_of = list(trace.tokens[row]), list(trace.words[row])
        ordinary = np.array([word is not None for word in word_of])
        scores, quantity = values[:, row, real], written[:, row, real]
        if not (finite := np.isfinite(scores[:, ordinary]).all(axis=1)).all():
            damaged = chosen[int(finite.argmin())]
            raise InputError(f"the scores of text {row} are not finite at layer {damaged}; the model is damaged")
        scores = np.where(np.isnan(scores), 0, scores)  # Special tokens have no z-scores.
        scores = np.concatenate([scores.mean(axis=0, keepdims=True), scores])
        judged = ordinary if at is None else ordinary & (np.arange(len(ordinary)) <= at)
        flat = [not is_selective(each[judged]) for each in (quantity.mean(axis=0), *quantity)]
        by_head = np.array([found.by_head[head.layer][row, real, head.head] for head in shown], dtype=np.float32)
        lives = None if found.half_lives is None else found.half_lives[places][:, row, real]
        if options["merge"]:
            groups, summed = word_groups(word_of), kind == "share"
            tokens, word_of = [word_text(tokens, group) for group in groups], [word_of[group[0]] for group in groups]
            scores = word_scores(scores, groups, summed=summed)
            by_head = word_scores(by_head, groups, summed=summed) if shown else by_head
            lives = None if lives is None else word_scores(lives, groups, summed=False)
        pixels = None if trace.pixels is None else trace.pixels[row].float().cpu().numpy()
        words = words_of(tokens, word_of, punctuation=options["punctuation"] or pixels is not None)
        standing = [
            () if noise else tuple(chain(*standing_out(words, each, kind, top))) for each, noise in zip(scores, flat)
        ]
        made.append(
            ScoredText(
                tokens=tuple(tokens),
                words=tuple(word_of),
                scores=scores[1:].astype(np.float32),
                mean=scores[0].astype(np.float32),
                rationale=standing[0],
                answer=trace.answers[row][0],
                probability=float(trace.answers[row][1]),
                pixels=pixels,
                half_lives=None if lives is None else lives.astype(np.float32),
                flat=tuple(flat),
                standing=tuple(standing[1:]),
                heads=by_head if shown else None,
            )
        )
    return SelectionHeatmap(
        provenance=record_provenance(trace.source, options={**options, "layers": _recorded(layers, chosen)}),
        texts=tuple(made),
        score=score,
        layers=chosen,
        size=top,
        by_layer=layers != "mean",
        at=at,
        contrast=contrast,
        through=through,
        reach=found.reach,
        shared=options["scale"] == "shared" or (options["scale"] is None and trace.pixels is None),
        heads=tuple(replace(head, layer=trace.layer_numbers[head.layer]) for head in shown),
        attends=model is not None and bool(attention_modules(model.module)),
    )


def _recorded(layers: Any, chosen: Sequence[int]) -> Any:
    return layers if isinstance(layers, str) else list(chosen)


def scored_data(
    model: Model | None, data: TextData, options: Mapping[str, Any], *, limit: int | None, seed: int
) -> DataHeatmap:
    """Compute the heatmap of a data set, with the options of `selection_heatmap`."""
    if model is None or model.tokenizer is None:
        raise InputError("labelled texts need a model with a tokenizer; give one, or name one with tokenizer")
    model.check_recurrent_state("a heatmap")
    score, layers, punctuation = (options[name] for name in ("score", "layers", "punctuation"))
    places = chosen_layers(layers, model.layer_numbers)
    data = data if limit is None else data.sample(limit, seed=seed)
    numbers = tuple(model.layer_numbers[place] for place in places)
    recorded = {"score": score, "layers": _recorded(layers, numbers), "top": options["top"]}
    recorded |= {"punctuation": punctuation, "limit": limit}
    provenance = record_provenance(model.source, options=recorded, seed=seed, data=data)
    found, words, lives, timed = measure(model, data, score, places, seed=seed, provenance=provenance)
    summary = summarise(model, data, found, words, lives, places, numbers, punctuation=punctuation, seed=seed)
    picked = extremes(found)
    shown = [data.texts[found["rows"][at]] for at, _ in picked]
    return DataHeatmap(
        provenance=provenance,
        score=score,
        layers=numbers,
        texts=len(found["rows"]),
        timed=timed,
        examples=(scored(model, shown, {**options, "half_lives": False}),) if shown else (),
        picked=tuple(what for _, what in picked),
        **summary,
    )


def _measured(
    model: Model | None, texts: TextsLike, score: Score, at: int | None, layers: Any, through: bool, **wanted: bool
) -> tuple[Trace, LayerScores]:
    """Return the trace of the texts and the measurements of its layers, recomputed for an existing trace."""
    batch = texts if isinstance(texts, Trace) else as_batch(model, texts)
    shortest = int(batch.mask.sum(1).min())
    if at is not None and at >= shortest:
        raise InputError(f"there is no token {at} in every text; the shortest has the tokens 0 to {shortest - 1}")
    if isinstance(batch, Trace):
        found = LayerScores(len(batch.retention), batch.mask, score, at, **wanted)
        if score == "survival" or any(wanted.values()):
            every = range(len(batch.retention))
            visit_trace(batch, found, every if through else chosen_layers(layers, batch.layer_numbers))
        return batch, found
    assert model is not None
    found = LayerScores(model.num_layers, batch.mask, score, at, **wanted)
    return model.trace(batch, visit=found.visit, keep_inputs=through, retention=score != "survival"), found


def _heads(found: LayerScores, places: Sequence[int], heads: str | None) -> tuple[Head, ...]:
    """Return the heads that are shown, the most selective first."""
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
