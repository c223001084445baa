"""Loss and hits of every token under rounded states, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from ssmscope.core.bootstrap import Estimate, estimates, ratio, resampled_sums
from ssmscope.core.edits import Edit, edited
from ssmscope.core.model import Model
from ssmscope.probes.loss.measure import window_scores
from ssmscope.probes.precision.result import Arm
from ssmscope.probes.precision.rounding import Rounding, state_rounded

DISTANCES = (16, 64, 256)
"""Ends of the bins of distances between the two places of a repeated pair of tokens; the last bin has all others."""

Windows = Int[np.ndarray, "windows length+1"]
Scores = Float[np.ndarray, "2 windows length"]


def token_scores(model: Model, windows: Windows, edit: Edit | None = None) -> Scores:
    """Return −ln p of every token of a window but the first, and 1 where it is the likeliest, else 0."""

    def score(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets], dim=1)

    with edited(model, edit) if edit is not None else nullcontext():
        return window_scores(model, windows, score, piece=windows.shape[1]).astype(float).transpose(2, 0, 1)


def repeated(windows: Windows) -> Int[np.ndarray, "windows length"]:
    """Return for every token but the first how many tokens before it the same pair, it and its predecessor, occurred
    last; 0 where it did not. Such a token can be retrieved."""
    found = np.zeros((windows.shape[0], windows.shape[1] - 1), dtype=np.int64)
    for row, ids in enumerate(windows.tolist()):
        seen: dict[tuple[int, int], int] = {}
        for at, pair in enumerate(pairwise(ids)):
            found[row, at] = at - seen.get(pair, at)
            seen[pair] = at
    return found


def bin_masks(windows: Windows) -> dict[str, Bool[np.ndarray, "windows length"]]:
    """Return the masks of the bins of `DISTANCES` that have tokens, by name."""
    distance, edges = repeated(windows), (0, *DISTANCES, max(DISTANCES[-1], windows.shape[1]))
    found = {f"{low + 1}–{high}": (distance > low) & (distance <= high) for low, high in pairwise(edges)}
    return {name: mask for name, mask in found.items() if mask.any()}


def arm(how: Rounding, plain: Scores, found: Scores, masks: Sequence[np.ndarray], seed: int) -> Arm:
    """Return the summary of a rounding against the plain run; intervals are over windows, paired."""
    change, less = found - plain
    every = np.ones(change.shape)
    sums = [(change, every), (np.abs(change), every), (found[1], every), *((less, mask) for mask in (every, *masks))]
    above, below = (np.stack([each.sum(1) for each in part], axis=1) for part in zip(*((v * m, m) for v, m in sums)))
    rows = ratio(*np.split(resampled_sums(np.concatenate([above, below], axis=1), seed=seed), 2, axis=1))
    first, size, accuracy, fewer, *at = (
        Estimate(*one) for one in estimates(rows if len(change) > 1 else rows[:1]).tolist()
    )
    return Arm(how.name, how.bits, how.every, how.seed is not None, first, size, accuracy, fewer, tuple(at))


def broken_heads(model: Model, windows: Windows, how: Rounding, plain: Scores) -> Float[np.ndarray, "layers heads"]:
    """Return the mean |change| of the loss where each head alone is rounded, NaN beyond a layer's heads."""
    counts = [layer.recurrences[0].shape[2] for layer in model.trace(ids=windows[0, :2].tolist()).layers]
    found = np.full((len(counts), max(counts)), np.nan)
    for row, (layer, count) in enumerate(zip(model.layer_numbers, counts)):
        for head in range(count):
            losses, _ = token_scores(model, windows, state_rounded(how, (layer,), (head,)))
            found[row, head] = np.abs(losses - plain[0]).mean()
    return found
