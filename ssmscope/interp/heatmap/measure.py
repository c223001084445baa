"""Heatmaps of texts from the scores of every token in each layer: survival, retention and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from ssmscope import ops
from ssmscope.api.options import chosen_layers
from ssmscope.api.provenance import record_provenance
from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.take_trace import TextsLike, as_batch
from ssmscope.core.ties import descending
from ssmscope.core.trace import LayerTrace, Trace, check_recurrent_state
from ssmscope.errors import InputError
from ssmscope.interp.attention.measure import absolute_map, normalise_rows
from ssmscope.interp.gates import MIN_SELECTING_SHARE, GateVariation
from ssmscope.interp.heatmap.scored_text import SHARES, ScoredText, lifts
from ssmscope.interp.heatmap.text_result import Head, SelectionHeatmap
from ssmscope.interp.heatmap.words import (
    Kind,
    is_selective,
    standing_out,
    word_groups,
    word_scores,
    word_text,
    words_of,
)

Score = Literal["survival", "readable", "retention", "write", "lift"]
MAX_THROUGH_TOKENS = 8192
"""Largest number of tokens of a text whose memory is followed through the layers below, which needs whole maps."""
PRIOR_OCCURRENCES = 5
"""Pseudo-occurrences of the average token that shrink the average of each token."""
MIN_SHARE = 1e-6
"""Smallest share, in units of an even spread, whose logarithm is taken."""


class LayerScores:
    """Measurements of every layer as the model runs: survival and half-lives (layers, batch, length), NaN for layers
    that were not visited; by_head, (batch, length, heads) per layer; selectivity, (batch, heads) per layer, the
    coefficient of variation over the text of what is overwritten; gates, with survival; reach, the positions that
    contribute to a write."""

    def __init__(
        self,
        layers: int,
        mask: Tensor,
        score: Score,
        at: int | None = None,
        *,
        heads: bool = False,
        half_lives: bool = False,
    ) -> None:
        self.score, self.at, self.heads, self.mask = score, at, heads, mask
        shape = (layers, *mask.shape)
        self.survival = np.full(shape, np.nan) if score in (*SHARES, "lift") else None
        self.half_lives = np.full(shape, np.nan) if half_lives else None
        self.by_head: dict[int, np.ndarray] = {}
        self.selectivity: dict[int, np.ndarray] = {}
        self.gates = GateVariation(mask)
        self.reach = 1

    def visit(self, index: int, rows: Sequence[int], layer: LayerTrace) -> None:
        """Measure a layer on some rows."""
        chosen = np.ix_(np.asarray(rows), np.arange(layer.u.shape[1]))
        self.reach = max(self.reach, layer.reach)
        if self.survival is not None:
            self.survival[index][chosen] = _numpy(layer.survival(self.at, readable=self.score == "readable"))
            self.gates.visit(index, rows, layer)
        if self.half_lives is not None:
            self.half_lives[index][chosen] = _numpy(layer.half_lives())
        if self.heads:
            self._take_heads(index, chosen, layer)

    def of(self, trace: Trace) -> np.ndarray:
        """Return the scores of a trace's run, whose layers were visited, (layers, batch, length); NaN at padding."""
        if self.survival is not None:
            return np.where(self.mask.cpu().numpy(), self.survival, np.nan)
        retention = _numpy(trace.retention)
        return retention if self.score == "retention" else 1 - retention

    def _take_heads(self, index: int, chosen: tuple[np.ndarray, ...], layer: LayerTrace) -> None:
        replaced = torch.cat([ops.write(r, per_head=True) for r in layer.recurrences if not r.joins], dim=2)
        if self.survival is not None:
            found = layer.survival(self.at, readable=self.score == "readable", per_head=True)
        else:
            found = replaced if self.score == "write" else 1 - replaced
        count = found.shape[2]
        shape = (*self.mask.shape, count)
        self.by_head.setdefault(index, np.full(shape, np.nan, dtype=np.float32))[chosen] = _numpy(found)
        self.selectivity.setdefault(index, np.full((len(self.mask), count), np.nan))
        for row, write in zip(chosen[0][:, 0], _numpy(replaced)):
            real = write[: int(self.mask[row].sum())]
            mean = real.mean(0)
            self.selectivity[index][row] = np.divide(real.std(0), mean, out=np.zeros_like(mean), where=mean > 0)


def scored_batch(model: Model, batch: Batch, score: Score) -> tuple[Trace, np.ndarray]:
    """Run a batch and return its trace, without inputs, and its scores, (layers, batch, length); NaN at padding."""
    found = LayerScores(model.num_layers, batch.mask, score)
    trace = model.trace(batch, keep_inputs=False, visit=found.visit)
    return trace, found.of(trace)


def visit_trace(trace: Trace, wanted: LayerScores, chosen: Sequence[int]) -> None:
    """Measure the layers of a trace."""
    try:
        for index in chosen:
            wanted.visit(index, range(len(trace)), trace.layers[index])
    except InputError:  # It is a ValueError too.
        raise
    except (ValueError, IndexError):
        raise InputError("this trace was taken without its inputs: survival needs one with keep_inputs") from None


def through_layers(trace: Trace, shares: np.ndarray) -> np.ndarray:
    """Follow every layer's memory to the tokens of the input: a layer's shares (layers, batch, length) composed with
    the maps of the layers below it, as in attention rollout (Abnar & Zuidema 2020). From the layer below to the first,
    p ← ½ p + ½ p |A|, A the mean of absolute values of the layer's block map, its rows divided by
    their sums. Mass on a state before the first token is dropped, and the shares are divided by their sum."""
    found = np.array(shares)
    for row in range(len(trace)):
        length = int(trace.mask[row].sum())
        if length > MAX_THROUGH_TOKENS:
            raise InputError(
                f"text {row} has {length:,} tokens; through follows memory in texts of up to {MAX_THROUGH_TOKENS:,}"
            )
        # Each layer's shares enter at its own height; all pass through the maps below together.
        carried = np.empty((0, length))
        for index in range(len(shares) - 1, -1, -1):
            carried = np.concatenate([carried, shares[index, row, None, :length]])
            if index == 0:
                break
            linearized = trace.linearized[index - 1].of_text(row, length)
            weights, column, _ = absolute_map(linearized, "block")
            normalised, _ = normalise_rows(weights, column)
            carried = 0.5 * carried + 0.5 * (carried @ normalised.double().numpy())
        total = carried.sum(1, keepdims=True)
        found[:, row, :length] = np.divide(carried, total, out=np.zeros_like(carried), where=total > 0)[::-1]
    return found


class TokenAverages:
    """Average score of every token over a corpus, and the spread of tokens around theirs, layer by layer.

    A rare token's average is shrunk towards that of all tokens, as by 5 occurrences of the latter. Survival is compared
    as the logarithm of its share in units of an even spread over the text.
    """

    def __init__(self, model: Model, texts: Sequence[str], score: Score) -> None:
        vocabulary, layers = model.vocabulary, model.num_layers
        self.score = score
        self.count = np.zeros(vocabulary)
        sums, squares = np.zeros((layers, vocabulary)), np.zeros((layers, vocabulary))
        encoded = model.encode(list(texts))
        for rows in by_length(encoded.lengths, tokens_at_once(model.device)):
            batch = encoded.rows(rows)
            values = self.compared(scored_batch(model, batch, score)[1], batch)
            ids, known = batch.input_ids.cpu().numpy(), ~np.isnan(values[0])
            self.count += np.bincount(ids[known], minlength=vocabulary)
            for layer in range(layers):
                sums[layer] += np.bincount(ids[known], values[layer][known], minlength=vocabulary)
                squares[layer] += np.bincount(ids[known], values[layer][known] ** 2, minlength=vocabulary)
        whole = sums.sum(1, keepdims=True) / max(self.count.sum(), 1)
        self.mean = (sums + PRIOR_OCCURRENCES * whole) / (self.count + PRIOR_OCCURRENCES)
        within = squares - np.divide(sums**2, self.count, out=np.zeros_like(sums), where=self.count > 0)
        self.spread = np.sqrt(within.sum(1) / max(self.count.sum(), 1))

    def compared(self, scores: np.ndarray, batch: Batch) -> np.ndarray:
        """Return the averaged quantity for scores (layers, batch, length); NaN at special tokens and padding."""
        ordinary = np.zeros(scores.shape[1:], dtype=bool)
        for row, words in enumerate(batch.words):
            ordinary[row, : len(words)] = [word is not None for word in words]
        values = scores
        if self.score in SHARES:
            values = np.log(np.maximum(scores * ordinary.sum(1)[None, :, None], MIN_SHARE))
        return np.where(ordinary, values, np.nan)

    def contrast(self, scores: np.ndarray, batch: Batch) -> np.ndarray:
        """Return z-scores: each token's deviation from its own average, in spreads of tokens around theirs."""
        ids = batch.input_ids.cpu().numpy()
        spread = np.where(self.spread > 0, self.spread, 1)[:, None, None]
        return (self.compared(scores, batch) - self.mean[:, ids]) / spread


def _numpy(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy().astype(np.float64)


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
    kind: Kind = "z" if contrast is not None else "share" if score in SHARES else "mean"
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
        contrast = contrast if isinstance(contrast, str) else "the given texts"
        options = {**options, "contrast": contrast}
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
        scores = lifted(scores, at) if score == "lift" else scores
        scores = np.concatenate([scores.mean(axis=0, keepdims=True), scores])
        judged = ordinary if at is None else ordinary & (np.arange(len(ordinary)) <= at)
        flat = [not is_selective(each[judged]) for each in (quantity.mean(axis=0), *quantity)]
        by_head = np.array([found.by_head[head.layer][row, real, head.head] for head in shown], dtype=np.float32)
        by_head = lifted(by_head, at) if score == "lift" and shown else by_head
        lives = None if found.half_lives is None else found.half_lives[places][:, row, real]
        if lives is not None:
            lives[:, -1] = np.nan  # Nothing follows the last token.
        unknown = trace.spelled[row].unknown if trace.spelled else ()
        if options["merge"]:
            groups, summed = word_groups(word_of), kind == "share"
            tokens, word_of = [word_text(tokens, group) for group in groups], [word_of[group[0]] for group in groups]
            unknown = tuple(at for at, group in enumerate(groups) if {*group} <= {*unknown})
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
                series=None if trace.series is None else trace.series[row][real].float().cpu().numpy(),
                half_lives=None if lives is None else lives.astype(np.float32),
                flat=tuple(flat),
                standing=tuple(standing[1:]),
                heads=by_head if shown else None,
                unknown=unknown,
            )
        )
    return SelectionHeatmap(
        provenance=record_provenance(trace.source, options={**options, "layers": layers_record(layers, chosen)}),
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
        selects=(share := found.gates.share()) is None or share >= MIN_SELECTING_SHARE,
    )


def lifted(shares: np.ndarray, at: int | None) -> np.ndarray:
    """Return shares (rows, tokens) over those of their neighbours, of the tokens up to `at`, 0 beyond it."""
    last = shares.shape[1] if at is None else at + 1
    over = np.nan_to_num(lifts(shares[:, :last], least=MIN_SHARE / last), nan=1.0)
    return np.concatenate([over, np.zeros_like(shares[:, last:])], axis=1)


def layers_record(layers: Any, chosen: Sequence[int]) -> Any:
    return layers if isinstance(layers, str) else list(chosen)


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
        if found.survival is not None or any(wanted.values()):
            every = range(len(batch.retention))
            visit_trace(batch, found, every if through else chosen_layers(layers, batch.layer_numbers))
        return batch, found
    assert model is not None
    found = LayerScores(model.num_layers, batch.mask, score, at, **wanted)
    return model.trace(batch, visit=found.visit, keep_inputs=through, retention=found.survival is None), found


def _heads(found: LayerScores, places: Sequence[int], heads: str | None) -> tuple[Head, ...]:
    """Return the heads that are shown, the most selective first."""
    if heads is None:
        return ()
    means = {layer: found.selectivity[layer].mean(0) for layer in places}
    every = [Head(layer, head, float(value)) for layer, of in means.items() for head, value in enumerate(of)]
    if heads == "all" and len(every) > MAX_HEADS:
        raise InputError(f"there are {len(every):,} heads; give heads='top', or layers with up to {MAX_HEADS} heads")
    order = descending(np.array([head.selectivity for head in every]))
    return tuple(every[at] for at in (order if heads == "all" else order[:TOP_HEADS]))


def _averages(model: Model | None, data: Any, score: Score) -> TokenAverages:
    from ssmscope.data.text import load_text

    if model is None:
        raise InputError("contrast needs the model, to average over texts; give the model first")
    texts = load_text(data, None).texts
    drawn = np.random.default_rng(0).permutation(len(texts))[:MAX_CORPUS_TEXTS]
    return TokenAverages(model, [texts[at] for at in sorted(drawn.tolist())], score)
