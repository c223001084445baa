"""Chosen rows of attention matrices: what one output takes from every input, without the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ssmscope.matrices import delta
from ssmscope.matrices.terms import Around, Terms, by_head, skips
from ssmscope.matrices.whole import is_diagonal
from ssmscope.scans.scalar import smallest_exponent

NUMBERS = 2**20  # decays that are held at once: they stay in the cache


def rows(
    r: Terms, positions: Sequence[int], groups: int, absolute: bool, skip: bool, around: Around
) -> Float[Tensor, "batch groups rows s"]:
    """The rows at these positions of the mean over each group's channels, or of their absolute values."""
    batch, length, heads, width, state = r.shape
    if is_diagonal(r):
        alpha = torch.stack([_row(r, t) for t in positions], dim=2)
    else:
        alpha = delta.rows(r, positions)
    weights = [_around_row(r, alpha[:, :, i], t, skip, around, absolute) for i, t in enumerate(positions)]
    each = torch.stack(weights, dim=2)
    return rearrange(each, "b (g h) t s -> b g h t s", g=groups).mean(2)


def _row(r: Terms, t: int) -> Float[Tensor, "batch heads s"]:
    """α[t, s] = Σ_n c_t b_s ∏_{s<r≤t} a_r of every head: sums of log-decays from t backwards, chunk by chunk."""
    batch, length, heads, _, state = r.shape
    found = r.b.new_zeros(batch, heads, length)
    per_state = 1 if r.one_decay_per_head else state
    step = max(16, NUMBERS // (batch * heads * per_state))
    behind = r.b.new_zeros(batch, 1, heads, per_state)  # Σ_{s<r≤t} log a_r at the last s of the chunk before
    read = by_head(r.c[:, t : t + 1], heads)
    last = t
    floor = smallest_exponent(r.b.dtype)
    parts = []
    while last >= 0:
        first = max(0, last - step + 1)
        log_a = r.log_decay(first + 1, last + 1)
        sums = torch.cat([log_a, torch.zeros_like(behind)], dim=1).flip(1).cumsum(1).flip(1) + behind
        write = by_head(r.b[:, first : last + 1], heads)
        if r.one_decay_per_head:
            weight = sums.squeeze(-1).clamp(min=floor).exp() * (write * read).sum(-1)
        else:
            weight = (sums.clamp(min=floor).exp() * (write * read)).sum(-1)
        if r.step is not None:
            weight = weight * r.step[:, first : last + 1]
        parts.append(weight)
        if first:
            behind = sums[:, :1] + r.log_decay(first, first + 1)
        last = first - 1
    parts.reverse()
    row = rearrange(torch.cat(parts, dim=1), "b s h -> b h s")
    return torch.nn.functional.pad(row, (0, found.shape[-1] - t - 1))


def _around_row(r: Terms, alpha: Tensor, t: int, skip: bool, around: Around, absolute: bool) -> Tensor:
    """A row (batch, heads, length) with what stands around it, as the mean over the width of every head."""
    batch, length, heads, width, _ = r.shape
    left = None if around.left is None else around.left[:, t]
    total = torch.zeros_like(alpha).unsqueeze(-1)
    D = skips(r) if skip else None
    for i in range(min(around.reach, t + 1)):
        given = alpha[:, :, i:, None]
        if D is not None:  # a diagonal entry of α, which the input at t − i reaches
            own = torch.zeros_like(given)
            own[:, :, t - i] = 1
            given = given + own * rearrange(D, "h p -> h 1 p")
        if around.taps is not None:
            given = given * rearrange(around.taps[:, : length - i, i], "b s h p -> b h s p")
        total = total + torch.nn.functional.pad(given, (0, 0, 0, i))
    if left is not None:
        total = total * left.unsqueeze(2)
    return (total.abs() if absolute else total).mean(-1)
