"""What the heatmap shows, from what a model's layers did: survival, retention and writing of every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ssmscope import ops
from ssmscope.errors import InputError
from ssmscope.interp.attention.measure import row_normalised

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.core.trace import LayerTrace, Trace

Score = Literal["survival", "retention", "write"]
MAPPED = 8192
"""Up to how many tokens a text has whose memory is followed through the layers below: their maps are whole."""
FEW = 5
"""So many occurrences of the average token stand beside those of each token, where its average is taken."""
LEAST = 1e-6
"""The share of an even spread from which on logarithms are taken."""


class AsyncCopy:
    """A tensor on its way to this process; a GPU goes on meanwhile."""

    def __init__(self, t: Tensor) -> None:
        self.copy, self.event = t.to("cpu", non_blocking=True), None
        if t.device.type == "cuda":
            self.event = torch.cuda.current_stream(t.device).record_event()

    def wait(self) -> np.ndarray:
        if self.event is not None:
            self.event.synchronize()
        return self.copy.numpy()


class Layers:
    """What is taken of every layer as the model runs.

    Attributes:
        half_lives: (layers, batch, length), where they are wanted.
        by_head: per layer (batch, length, heads), where heads are wanted.
        selectivity: per layer (batch, heads), the coefficient of variation over the text of what is replaced.
        seen: called with a layer's number, a row and its survival (length,) as soon as a GPU has it.
        reach: how many positions a write comes from.
        attends: whether the model has softmax attention, too, where that was asked for.
    """

    def __init__(
        self, layers: int, mask: Tensor, score: Score, at: int | None, *, heads: bool = False, half_lives: bool = False
    ) -> None:
        self.score, self.at, self.heads = score, at, heads
        self.mask = mask
        self.shape = (layers, *mask.shape)
        self.half_lives = np.full(self.shape, np.nan) if half_lives else None
        self.by_head: dict[int, np.ndarray] = {}
        self.selectivity: dict[int, np.ndarray] = {}
        self.reach, self.attends = 1, False
        self.seen: Callable[[int, int, np.ndarray], None] | None = None
        self._scores: np.ndarray | None = None
        self._taken: list[tuple[int, tuple[np.ndarray, ...], AsyncCopy]] = []

    def visit(self, index: int, rows: Sequence[int], layer: LayerTrace) -> None:
        """Take what is wanted of a layer on some rows."""
        width = layer.u.shape[1]
        chosen = np.ix_(np.asarray(rows), np.arange(width))
        self.reach = max(self.reach, layer.reach)
        if self.score == "survival":
            self._taken.append((index, chosen, AsyncCopy(layer.survival(self.at))))
        if self.half_lives is not None:
            self.half_lives[index][chosen] = _numpy(layer.half_lives())
        if self.heads:
            self._take_heads(index, chosen, layer)

    def of(self, trace: Trace) -> np.ndarray:
        """The scores, (layers, batch, length) float64, NaN at padding; the layers of `trace`'s run were visited."""
        if self.score == "survival":
            scores, padding = self._arrived(), ~self.mask.cpu().numpy()
            if padding.any():
                scores[:, padding] = np.nan
            return scores
        retention = _numpy(trace.retention)
        return retention if self.score == "retention" else 1 - retention

    def on_idle(self) -> None:
        """While a GPU runs: write down what it has already."""
        if self.score == "survival":
            self._arrived()

    def _arrived(self) -> np.ndarray:
        """Survival, (layers, batch, length) float64, NaN where a layer was not asked for; that of each is written down
        as soon as a GPU has it, which goes on with the next."""
        scores = self._scores = np.full(self.shape, np.nan) if self._scores is None else self._scores
        for index, chosen, values in self._taken:
            scores[index][chosen] = values.wait()
            if self.seen is not None:
                for row in chosen[0][:, 0].tolist():
                    self.seen(index, row, scores[index, row])
        self._taken.clear()
        return scores

    def _take_heads(self, index: int, chosen: tuple[np.ndarray, ...], layer: LayerTrace) -> None:
        replaced = torch.cat([ops.write(r, per_head=True) for r in layer.recurrences], dim=2)
        if self.score == "survival":
            found = layer.survival(self.at, per_head=True)
        else:
            found = replaced if self.score == "write" else 1 - replaced
        count = found.shape[2]
        if index not in self.by_head:
            self.by_head[index] = np.full((*self.mask.shape, count), np.nan, dtype=np.float32)
            self.selectivity[index] = np.full((len(self.mask), count), np.nan)
        self.by_head[index][chosen] = _numpy(found)
        for row, write in zip(chosen[0][:, 0], _numpy(replaced)):
            real = write[: int(self.mask[row].sum())]
            mean = real.mean(0)
            self.selectivity[index][row] = np.divide(real.std(0), mean, out=np.zeros_like(mean), where=mean > 0)


def of_trace(trace: Trace, wanted: Layers, chosen: Sequence[int]) -> None:
    """Take what is wanted of the layers of a trace.

    Raises:
        InputError: for a trace without its layers.
    """
    try:
        for index in chosen:
            wanted.visit(index, range(len(trace)), trace.layers[index])
    except InputError:  # a ValueError too
        raise
    except (ValueError, IndexError):
        raise InputError("this trace was taken without its inputs: survival needs one with keep_inputs") from None


def through_layers(trace: Trace, shares: np.ndarray, residual: float = 0.5) -> np.ndarray:
    """Every layer's memory by the tokens of the input: a layer's shares (layers, batch, length) composed with the maps
    of the layers below it, as attention rollout composes them (Abnar & Zuidema 2020): from the layer below to the
    first, p ← residual p + (1 − residual) p |A|, A the mean of absolute values of the layer's block map, its rows
    divided by their sums. What goes to a state before the first token is left out, and the shares divided by their sum.

    Raises:
        InputError: for a text of more than 8,192 tokens.
    """
    found = np.array(shares)
    for row in range(len(trace)):
        length = int(trace.mask[row].sum())
        if length > MAPPED:
            raise InputError(f"text {row} has {length:,} tokens; through follows memory in texts of up to {MAPPED:,}")
        # each layer's shares at its own height; all pass through the maps below together
        carried = np.empty((0, length))
        for index in range(len(shares) - 1, -1, -1):
            carried = np.concatenate([carried, shares[index, row, None, :length]])
            if index == 0:
                break
            linearized = trace.linearized[index - 1].of_text(row, length)
            weights = linearized.attention("block", absolute=True, skip=True)[0, 0].abs().float().cpu()
            sink = linearized.sink("block", absolute=True)
            column = torch.zeros_like(weights[0]) if sink is None else sink[0, 0].abs().float().cpu()
            normalised, _ = row_normalised(weights, column)
            carried = residual * carried + (1 - residual) * (carried @ normalised.double().numpy())
        total = carried.sum(1, keepdims=True)
        found[:, row, :length] = np.divide(carried, total, out=np.zeros_like(carried), where=total > 0)[::-1]
    return found


class Averages:
    """The average of every token over a corpus, and the spread of tokens about theirs, layer by layer.

    A token's average is drawn towards that of all tokens by 5 occurrences of it, so that rare tokens are not taken at
    their word. Survival is compared as the logarithm of its share in units of an even spread over the text, since a
    share depends on how many tokens there are.
    """

    def __init__(self, model: Model, texts: Sequence[str], score: Score, *, at_once: int = 32) -> None:
        vocabulary, layers = model.vocabulary, model.num_layers
        self.score = score
        self.count = np.zeros(vocabulary)
        sums, squares = np.zeros((layers, vocabulary)), np.zeros((layers, vocabulary))
        for start in range(0, len(texts), at_once):
            batch = model.encode(list(texts[start : start + at_once]))
            values = self.compared(of_batch(model, batch, score), batch)
            ids, known = batch.input_ids.cpu().numpy(), ~np.isnan(values[0])
            self.count += np.bincount(ids[known], minlength=vocabulary)
            for layer in range(layers):
                sums[layer] += np.bincount(ids[known], values[layer][known], minlength=vocabulary)
                squares[layer] += np.bincount(ids[known], values[layer][known] ** 2, minlength=vocabulary)
        whole = sums.sum(1, keepdims=True) / max(self.count.sum(), 1)
        self.mean = (sums + FEW * whole) / (self.count + FEW)
        within = squares - np.divide(sums**2, self.count, out=np.zeros_like(sums), where=self.count > 0)
        self.spread = np.sqrt(within.sum(1) / max(self.count.sum(), 1))

    def compared(self, scores: np.ndarray, batch: Batch) -> np.ndarray:
        """What is compared, of scores (layers, batch, length); NaN at special tokens and padding."""
        ordinary = np.zeros(scores.shape[1:], dtype=bool)
        for row, words in enumerate(batch.words):
            ordinary[row, : len(words)] = [word is not None for word in words]
        values = scores
        if self.score == "survival":
            values = np.log(np.maximum(scores * ordinary.sum(1)[None, :, None], LEAST))
        return np.where(ordinary, values, np.nan)

    def contrast(self, scores: np.ndarray, batch: Batch) -> np.ndarray:
        """z-scores: how far each token lies above its own average, in spreads of tokens about theirs."""
        ids = batch.input_ids.cpu().numpy()
        spread = np.where(self.spread > 0, self.spread, 1)[:, None, None]
        return (self.compared(scores, batch) - self.mean[:, ids]) / spread


def of_batch(model: Model, batch: Batch, score: Score) -> np.ndarray:
    """The scores of a batch, (layers, batch, length); NaN at padding."""
    found = Layers(model.num_layers, batch.mask, score, None)
    return found.of(model.trace(batch, keep_inputs=False, visit=found.visit, on_idle=found.on_idle))


def _numpy(t: Tensor) -> np.ndarray:
    return t.detach().cpu().numpy().astype(np.float64)
