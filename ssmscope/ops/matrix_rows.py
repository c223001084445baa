"""Chosen rows of attention matrices: what one output takes from every input, without the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ssmscope.ops import delta_matrices
from ssmscope.ops.exponents import smallest_exponent
from ssmscope.ops.matrices import columns_of
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence
from ssmscope.ops.terms import GateAndTaps, segments, shared_by_heads, skips

MAX_DECAYS_HELD = 2**20
"""Decays held at once, so that they stay in the cache."""
MAX_ROW_NUMBERS = 2**22
"""Entries of single heads' rows that are held at once."""


def rows(
    r: Recurrence, positions: Sequence[int], groups: int, absolute: bool, skip: bool, around: GateAndTaps
) -> Float[Tensor, "batch groups rows s"]:
    """Return the rows at these positions of the mean over each group's channels, or of their absolute values."""
    batch, length, heads, _, _ = r.shape
    per_group = heads // groups
    of_delta = delta_matrices.rows(r, positions) if isinstance(r, DeltaRecurrence) else None
    at_once = max(1, MAX_ROW_NUMBERS // max(1, batch * length))
    found = []
    for group in range(groups):
        total: list[Tensor] = [r.b.new_zeros(batch, length) for _ in positions]
        alike = [(group * per_group, (group + 1) * per_group)]
        if heads > r.b.shape[2]:  # Heads that read one group share it.
            alike = segments(r, *alike[0])
        for first, last in ((i, min(i + at_once, end)) for begin, end in alike for i in range(begin, end, at_once)):
            part, part_around = r.of_heads(first, last), around.of_heads(first, last)
            for i, t in enumerate(positions):
                if of_delta is not None:
                    alpha = of_delta[:, first:last, i, : t + 1]
                else:
                    alpha = _row(part, t)
                total[i] = total[i] + _around_row(part, alpha, t, skip, part_around, absolute)
        found.append(torch.stack(total, dim=1) / per_group)
    return torch.stack(found, dim=1)


def _row(r: Recurrence, t: int) -> Float[Tensor, "batch heads s"]:
    """Return α[t, s] = Σ_n c_t b_s ∏_{s<r≤t} a_r of every head, up to s = t, from sums of log-decays backwards from t,
    chunk by chunk."""
    batch, _, heads, _, state = r.shape
    per_state = 1 if r.one_decay_per_head else state
    step = max(16, MAX_DECAYS_HELD // (batch * heads * per_state))
    later = r.b.new_zeros(batch, 1, heads, per_state)  # It holds Σ_{s<r≤t} log a_r at the chunk's last s.
    read = shared_by_heads(r.c[:, t : t + 1], heads)
    last = t
    floor = smallest_exponent(r.b.dtype)
    parts = []
    while last >= 0:
        first = max(0, last - step + 1)
        log_a = r.log_decay(first + 1, last + 1)
        sums = torch.cat([log_a, torch.zeros_like(later)], dim=1).flip(1).cumsum(1).flip(1) + later
        write = shared_by_heads(r.b[:, first : last + 1], heads)
        if r.one_decay_per_head:
            weight = sums.squeeze(-1).clamp(min=floor).exp() * (write * read).sum(-1)
        else:
            weight = (sums.clamp(min=floor).exp() * (write * read)).sum(-1)
        if r.step is not None:
            weight = weight * r.step[:, first : last + 1]
        parts.append(weight)
        if first:
            later = sums[:, :1] + r.log_decay(first, first + 1)
        last = first - 1
    parts.reverse()
    return rearrange(torch.cat(parts, dim=1), "b s h -> b h s")


def _around_row(r: Recurrence, alpha: Tensor, t: int, skip: bool, around: GateAndTaps, absolute: bool) -> Tensor:
    """Return row t with gate, taps and D, (batch, length), from α (batch, heads, t + 1): the sum over heads of means
    over their widths."""
    length = r.shape[1]
    D = skips(r) if skip else None
    left, taps = around.left, around.taps
    if not absolute and (D is None or D.shape[1] == 1):
        left, taps = columns_of(around)
    alpha = alpha.unsqueeze(2)
    if D is not None:
        alpha = alpha.expand(-1, -1, D.shape[1], -1).clone()
        alpha[..., t] += D
    total = alpha if taps is None else torch.zeros_like(alpha)
    if taps is not None:
        for i in range(min(around.reach, t + 1)):
            spread = alpha[..., i:] * rearrange(taps[:, : t + 1 - i, i], "b s h p -> b h p s")
            total = total + torch.nn.functional.pad(spread, (0, i))
    if left is not None:
        total = total * rearrange(left[:, t], "b h p -> b h p 1")
    each = (total.abs() if absolute else total).mean(2).sum(1)
    return torch.nn.functional.pad(each, (0, length - t - 1))
