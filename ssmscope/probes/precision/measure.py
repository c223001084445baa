"""Loss and hits of every token under rounded states, and their summary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from ssmscope.core.batching import tokens_at_once
from ssmscope.core.bootstrap import Estimate, estimates, ratio, resampled_sums
from ssmscope.core.edits import Edit, edited
from ssmscope.core.model import Model
from ssmscope.evaluation.forking import Rows
from ssmscope.probes.long_rows import head_logits, pieces_of
from ssmscope.probes.loss.measure import MAX_LOGITS
from ssmscope.probes.precision.result import Arm
from ssmscope.probes.precision.rounding import Rounding, state_rounded

DISTANCES = (16, 64, 256)
"""Ends of the bins of distances between the two places of a repeated pair of tokens; the last bin has all others."""

Windows = Int[np.ndarray, "windows length+1"]
Losses = Float[np.ndarray, "windows length"]


def token_scores(
    model: Model, windows: Windows, edit: Edit | None = None
) -> tuple[Losses, Bool[np.ndarray, "windows length"]]:
    """Return −ln p of every token of a window but the first, and whether it is the likeliest."""
    number, length = windows.shape[0], windows.shape[1] - 1
    losses, hits = np.empty((number, length)), np.empty((number, length), dtype=bool)
    rows = Rows(windows[:, :-1].ravel(), np.arange(number + 1) * length)
    step = tokens_at_once(model.device, model.vocabulary, MAX_LOGITS)
    with edited(model, edit) if edit is not None else nullcontext():
        for part in pieces_of(model, rows, piece=length):
            hidden = part.hidden.flatten(0, 1)
            targets = torch.from_numpy(windows[part.rows, 1:]).to(hidden.device).reshape(-1, 1)
            found = []
            for at in range(0, len(hidden), step):
                log_p = head_logits(model, hidden[at : at + step]).double().log_softmax(-1)
                wanted = targets[at : at + step]
                hit = (log_p.argmax(-1, keepdim=True) == wanted).double()
                found.append(torch.cat([-log_p.gather(1, wanted), hit], dim=1))
            both = torch.cat(found).view(len(part.rows), length, 2).cpu().numpy()
            losses[part.rows], hits[part.rows] = both[..., 0], both[..., 1] > 0
    return losses, hits


def repeated(windows: Windows) -> Int[np.ndarray, "windows length"]:
    """Return for every token but the first how many tokens before it the same pair, it and its predecessor, occurred
    last; 0 where it did not. Such a token can be retrieved."""
    found = np.zeros((windows.shape[0], windows.shape[1] - 1), dtype=np.int64)
    for row, ids in enumerate(windows.tolist()):
        seen: dict[tuple[int, int], int] = {}
        for at, pair in enumerate(zip(ids, ids[1:])):
            found[row, at] = at - seen[pair] if pair in seen else 0
            seen[pair] = at
    return found


def bin_masks(windows: Windows) -> tuple[tuple[str, ...], list[Bool[np.ndarray, "windows length"]]]:
    """Return names and masks of the bins of `DISTANCES` that have tokens."""
    distance, low = repeated(windows), 0
    names, masks = [], []
    for high in (*DISTANCES, windows.shape[1]):
        mask = (distance > low) & (distance <= high)
        if mask.any():
            names.append(f"{low + 1}–{high}")
            masks.append(mask)
        low = max(low, high)
    return tuple(names), masks


def arm(
    how: Rounding,
    plain: tuple[Losses, np.ndarray],
    found: tuple[Losses, np.ndarray],
    masks: Sequence[np.ndarray],
    seed: int,
) -> Arm:
    """Return the summary of a rounding against the plain run; intervals are over windows, paired."""
    change, hits = found[0] - plain[0], found[1].astype(float)
    less, every = hits - plain[1], np.ones(change.shape)
    sums = [(change, every), (np.abs(change), every), (hits, every), (less, every), *((less, mask) for mask in masks)]
    above, below = (np.stack([each.sum(1) for each in part], axis=1) for part in zip(*((v * m, m) for v, m in sums)))
    rows = ratio(*np.split(resampled_sums(np.concatenate([above, below], axis=1), seed=seed), 2, axis=1))
    each = [Estimate(*one) for one in estimates(rows if len(change) > 1 else rows[:1]).tolist()]
    first, size, accuracy, fewer, *at = each
    return Arm(how.name, how.bits, how.every, how.seed is not None, first, size, accuracy, fewer, tuple(at))


def broken_heads(model: Model, windows: Windows, how: Rounding, plain: Losses) -> Float[np.ndarray, "layers heads"]:
    """Return the mean |change| of the loss where each head alone is rounded, NaN beyond a layer's heads."""
    counts = [layer.recurrences[0].shape[2] for layer in model.trace(ids=windows[0, :2].tolist()).layers]
    found = np.full((len(counts), max(counts)), np.nan)
    for layer, count in enumerate(counts):
        for head in range(count):
            losses, _ = token_scores(model, windows, state_rounded(how, (layer,), (head,)))
            found[layer, head] = np.abs(losses - plain).mean()
    return found
