"""Scores of every token from a model's layers: survival, retention and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ssmscope import ops
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace, Trace
from ssmscope.errors import InputError
from ssmscope.interp.attention.measure import absolute_map, normalise_rows

Score = Literal["survival", "retention", "write"]
MAX_THROUGH_TOKENS = 8192
"""Largest number of tokens of a text whose memory is followed through the layers below, which needs whole maps."""
PRIOR_OCCURRENCES = 5
"""Pseudo-occurrences of the average token that shrink the average of each token."""
MIN_SHARE = 1e-6
"""Smallest share, in units of an even spread, whose logarithm is taken."""

TEXTS_AT_ONCE = 32
"""Number of texts that run together where averages are taken."""


class LayerScores:
    """Measurements of every layer as the model runs: survival and half-lives (layers, batch, length), NaN for layers
    that were not visited; by_head, (batch, length, heads) per layer; selectivity, (batch, heads) per layer, the
    coefficient of variation over the text of what is overwritten; reach, the positions that contribute to a write."""

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
        self.survival = np.full(shape, np.nan) if score == "survival" else None
        self.half_lives = np.full(shape, np.nan) if half_lives else None
        self.by_head: dict[int, np.ndarray] = {}
        self.selectivity: dict[int, np.ndarray] = {}
        self.reach = 1

    def visit(self, index: int, rows: Sequence[int], layer: LayerTrace) -> None:
        """Measure a layer on some rows."""
        chosen = np.ix_(np.asarray(rows), np.arange(layer.u.shape[1]))
        self.reach = max(self.reach, layer.reach)
        if self.survival is not None:
            self.survival[index][chosen] = _numpy(layer.survival(self.at))
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
        replaced = torch.cat([ops.write(r, per_head=True) for r in layer.recurrences], dim=2)
        if self.score == "survival":
            found = layer.survival(self.at, per_head=True)
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
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            batch = model.encode(list(texts[start : start + TEXTS_AT_ONCE]))
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
        """Return what is averaged for scores (layers, batch, length); NaN at special tokens and padding."""
        ordinary = np.zeros(scores.shape[1:], dtype=bool)
        for row, words in enumerate(batch.words):
            ordinary[row, : len(words)] = [word is not None for word in words]
        values = scores
        if self.score == "survival":
            values = np.log(np.maximum(scores * ordinary.sum(1)[None, :, None], MIN_SHARE))
        return np.where(ordinary, values, np.nan)

    def contrast(self, scores: np.ndarray, batch: Batch) -> np.ndarray:
        """Return z-scores: each token's deviation from its own average, in spreads of tokens around theirs."""
        ids = batch.input_ids.cpu().numpy()
        spread = np.where(self.spread > 0, self.spread, 1)[:, None, None]
        return (self.compared(scores, batch) - self.mean[:, ids]) / spread


def _numpy(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy().astype(np.float64)
