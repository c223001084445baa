"""Implicit attention of linear recurrences: α with y = α x (Differential Mamba, Eq. 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from ssmscope.ops import delta_rule, matrices, pooled
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence, check_one_way, map_in_order, smallest_exponent
from ssmscope.ops.scans import scan_reference
from ssmscope.ops.terms import GateAndTaps, gate_and_taps, mean_over_heads, skips

Gate = Float[Tensor, "batch length heads #width"] | None
Taps = Float[Tensor, "batch length reach heads #width"] | None

MAX_DECAYS_HELD = 2**20
"""Decays held at once, so that they stay in the cache."""
MAX_ROW_NUMBERS = 2**22


def attention_reference(recurrence: Recurrence) -> Float[Tensor, "batch heads length length"]:
    """Return α[t, s] of every head, without D, one column at a time: the reading at each step of a 1 that is written at
    s alone (Differential Mamba, Eq. 8). Slow; the reference for tests of `attention`."""
    batch, length, heads, _, _ = recurrence.shape
    found = recurrence.x.new_zeros(batch, heads, length, length)
    for s in range(length):
        x = recurrence.x.new_zeros(batch, length, heads, 1)
        x[:, s] = 1
        found[..., s] = rearrange(scan_reference(replace(recurrence, x=x, D=None)).y, "b t h 1 -> b h t")
    return found


@map_in_order
def attention(
    recurrence: Recurrence,
    *,
    groups: int = 1,
    absolute: bool = False,
    skip: bool = False,
    rows: Sequence[int] | None = None,
    left: Gate = None,
    taps: Taps = None,
) -> Float[Tensor, "batch groups rows length"]:
    """Return the implicit attention matrix α[t, s] = c_tᵀ (∏_{s<r≤t} a_r) b_s Δ_s, so that y = α x (Differential Mamba,
    Eq. 8), as the signed mean over channels, differentiable in every term.

    Args:
        recurrence: the terms; `x` has no part in α and gives only the number of channels.
        groups: number of groups of neighbouring heads, each with its mean: 1 gives the mean over all channels, the
            number of heads every head by itself.
        absolute: take the mean of absolute values, which is not the absolute value of the signed mean; it makes every
            channel's matrix, and takes as many times longer.
        skip: add D to the diagonal.
        rows: these rows only, 0-based, in the order given: O(length · heads · state) each.
        left: a factor of each output channel, as a gate.
        taps: factors of the input at s when it arrives at step s + i, as of a convolution before the recurrence. With
            these two the matrix is that of left ⊙ (α + D) · taps.

    Raises ValueError if the groups do not divide the heads, a row is outside the sequence, or `left` or `taps` do not
    fit the recurrence.
    """
    around, (batch, length, heads, _, _) = gate_and_taps(recurrence.x, groups, left, taps), recurrence.shape
    if rows is None:
        return matrices.whole(recurrence, groups, absolute, skip, around)
    outside = [t for t in rows if not 0 <= t < length]
    if outside or not len(rows):
        raise ValueError(f"rows {outside or list(rows)}: give at least one, each from 0 to {length - 1}")
    of_delta = delta_rule.rows(recurrence, rows) if isinstance(recurrence, DeltaRecurrence) else None

    def sums(part: Recurrence, near: GateAndTaps, chosen: slice) -> Tensor:
        each = (_row(part, t) if of_delta is None else of_delta[:, chosen, i, : t + 1] for i, t in enumerate(rows))
        return torch.stack([_around_row(part, a, t, skip, near, absolute) for a, t in zip(each, rows)], dim=1)

    at_once, shared = max(1, MAX_ROW_NUMBERS // max(1, batch * length)), heads > recurrence.b.shape[2]
    return mean_over_heads(recurrence, around, groups, sums, at_once=at_once, shared=shared)


def pooled_attention(
    recurrence: Recurrence, cells: int, *, groups: int = 1, skip: bool = False, left: Gate = None, taps: Taps = None
) -> Float[Tensor, "batch groups cells cells"]:
    """Return `attention` in `cells` × `cells` cells: the mean over the pairs of each cell in which s ≤ t.

    The matrix is never held: its factors are summed within cells, which is exact, and multiplied then. Memory grows
    with the cells, not with the length. Cell i holds the positions from ⌊i · length / cells⌋ on. No gradient
    flows through it.

    Args: as `attention`; there is no mean of absolute values, which are not products of factors. Raises ValueError as
    `attention`, and for cells that are not from 1 to the length.
    """
    check_one_way([recurrence], "a pooled map")
    around = gate_and_taps(recurrence.x, groups, left, taps)
    if not 1 <= cells <= recurrence.shape[1]:
        raise ValueError(f"{cells} cells: give from 1 to the length, {recurrence.shape[1]}")
    with torch.no_grad():
        return pooled.pooled(recurrence, cells, groups, skip, around)


# ---- chosen rows: what one output takes from every input, without the others


def _row(r: Recurrence, t: int) -> Float[Tensor, "batch heads s"]:
    """Return α[t, s] of every head up to s = t, from sums of log-decays backwards from t, chunk by chunk."""
    batch, _, heads, _, state = r.shape
    per_state = 1 if r.one_decay_per_head else state
    step, floor = max(16, MAX_DECAYS_HELD // (batch * heads * per_state)), smallest_exponent(r.b.dtype)
    later = r.b.new_zeros(batch, 1, heads, per_state)  # It holds Σ_{s<r≤t} log a_r at the chunk's last s.
    read = r.c[:, t : t + 1]
    parts = []
    for last in range(t, -1, -step):
        first = max(0, last - step + 1)
        log_a = r.log_decay(first + 1, last + 1)
        sums = torch.cat([log_a, torch.zeros_like(later)], dim=1).flip(1).cumsum(1).flip(1) + later
        write = r.b[:, first : last + 1]
        if r.one_decay_per_head:
            weight = sums.squeeze(-1).clamp(min=floor).exp() * (write * read).sum(-1)
        else:
            weight = (sums.clamp(min=floor).exp() * (write * read)).sum(-1)
        if r.step is not None:
            weight = weight * r.step[:, first : last + 1]
        parts.append(weight)
        later = sums[:, :1] + r.log_decay(first, first + 1)
    return rearrange(torch.cat(parts[::-1], dim=1), "b s h -> b h s")


def _around_row(r: Recurrence, alpha: Tensor, t: int, skip: bool, around: GateAndTaps, absolute: bool) -> Tensor:
    """Return row t with gate, taps and D, (batch, length), from α (batch, heads, t + 1), summed over heads."""
    D = skips(r) if skip else None
    left, taps = around if absolute or D is not None and D.shape[1] > 1 else around.columns()
    alpha = alpha.unsqueeze(2)
    if D is not None:
        alpha = alpha.expand(-1, -1, D.shape[1], -1).clone()
        alpha[..., t] += D
    total = alpha if taps is None else torch.zeros_like(alpha)
    for i in range(0 if taps is None else min(around.reach, t + 1)):
        assert taps is not None
        spread = alpha[..., i:] * rearrange(taps[:, : t + 1 - i, i], "b s h p -> b h p s")
        total = total + pad(spread, (0, i))
    if left is not None:
        total = total * rearrange(left[:, t], "b h p -> b h p 1")
    each = (total.abs() if absolute else total).mean(2).sum(1)
    return pad(each, (0, r.shape[1] - t - 1))
