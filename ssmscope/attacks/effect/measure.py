"""Effect of a change of a text, from the trace of both texts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from ssmscope.api.options import chosen_layers
from ssmscope.api.provenance import call_options, record_provenance
from ssmscope.attacks.effect.result import AttackEffect, Side
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.trace import Trace
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.attention.result import ImplicitAttention
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.interp.heatmap.text_result import SelectionHeatmap
from ssmscope.interp.methods.gradients import head_input
from ssmscope.ops import by_memory

SAME = 1e-5
"""Relative distance up to which float32 vectors count as the same, because of rounding; 16 ε for coarser dtypes."""


def effect_of(
    model: Model, batch: Batch, *, layers: Literal["mean", "all"] | Sequence[int] = "mean", top: int = 5
) -> AttackEffect:
    """Compute the effect of the change from a batch's first row to its second, with options as in `attack_effect`."""
    trace = model.trace(batch)
    # Retention is defined as 0 for models without a recurrent state, and they have no final states.
    of_all = replace(trace, has_recurrent_state=True)
    heatmap = selection_heatmap(model, of_all, score="retention", layers=layers, top=top)
    assert isinstance(heatmap, SelectionHeatmap)
    chosen = heatmap.layers
    pairs = aligned(*(batch.input_ids[row, :length].tolist() for row, length in enumerate(batch.lengths)))
    maps = implicit_attention(None, trace, layers=list(chosen), rows="last", heads="abs")
    assert isinstance(maps, ImplicitAttention)
    sides = []
    for row in (0, 1):
        shares, states = zip(*(_shares(each.values, each.sink) for each in maps[row].maps))
        changed = np.ones(batch.lengths[row], dtype=bool)
        changed[pairs[:, row]] = False
        sides.append(Side(heatmap[row], changed, np.stack(shares), np.array(states, dtype=np.float32)))
    places = chosen_layers(chosen, trace.layer_numbers)
    distance, hidden, state = _moved(model, batch, trace, places, pairs)
    probabilities = model.probabilities(trace.logits.double())
    return AttackEffect(
        provenance=record_provenance(trace.source, options=call_options()),
        clean=sides[0],
        corrupted=sides[1],
        pairs=pairs,
        layers=chosen,
        by_layer=heatmap.by_layer,
        size=heatmap.size,
        distance=distance,
        hidden_cosine=hidden,
        state_cosine=state,
        kept=float(probabilities[1, int(probabilities[0].argmax())]),
    )


def aligned(before: Sequence[int], after: Sequence[int]) -> np.ndarray:
    """Return the positions of the tokens that both texts have, (tokens, 2) int64, increasing in both columns."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    pairs = [(block.a + at, block.b + at) for block in blocks for at in range(block.size)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _shares(weights: np.ndarray, sink: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Compute the shares (tokens,) of |α| in the last row (1, tokens), and the share of the state before them."""
    mass = np.abs(weights[0].astype(np.float64))
    state = 0.0 if sink is None else abs(float(sink[0]))
    total = mass.sum() + state
    if total == 0:
        return np.zeros(len(mass), dtype=np.float32), 0.0
    return (mass / total).astype(np.float32), state / total


def _moved(
    model: Model, batch: Batch, trace: Trace, chosen: Sequence[int], pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute distances (layers + 1, pairs), cosines of the last position and of final states; the head is last."""
    states = np.full(len(chosen), math.nan)
    if trace.has_recurrent_state:
        for row, index in enumerate(chosen):
            layer = trace.layers[index]
            memories = by_memory(layer.recurrences, [scan.state.flatten(1) for scan in layer.scan()])
            flat = torch.cat([torch.stack(each).sum(0) for each in memories], dim=1)
            states[row] = cosine(*flat.double().cpu().numpy())
    with torch.no_grad(), model.running(mask=batch.mask):
        read = head_input(model, model.embed(batch), batch.mask)
    distances, cosines = [], []
    for vectors in (*(trace.layers[index].u for index in chosen), read):
        before, after = vectors.detach().double().cpu().numpy()
        same = max(SAME, 16 * torch.finfo(vectors.dtype).eps)
        distances.append(relative(before[pairs[:, 0]], after[pairs[:, 1]], same))
        cosines.append(cosine(before[batch.lengths[0] - 1], after[batch.lengths[1] - 1]))
    return np.stack(distances).astype(np.float32), np.array(cosines), states


def relative(before: np.ndarray, after: np.ndarray, same: float) -> np.ndarray:
    """Compute ‖after − before‖ / ‖before‖ for each row; 0 where it is at most `same`."""
    apart, size = np.linalg.norm(after - before, axis=1), np.linalg.norm(before, axis=1)
    with np.errstate(divide="ignore"):
        return np.divide(apart, size, out=np.zeros_like(apart), where=apart > same * size)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Compute the cosine of two vectors: 1 if they are equal, NaN if just one is zero."""
    if np.array_equal(first, second):
        return 1.0
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / size if size else math.nan
