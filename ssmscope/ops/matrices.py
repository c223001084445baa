"""Whole attention matrices: means over groups of heads, and single heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ssmscope.ops import delta_matrices, triangle
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence
from ssmscope.ops.terms import (
    GateAndTaps,
    decays,
    diagonals,
    is_diagonal,
    needs_gradients,
    segments,
    shared_by_heads,
    skips,
)

MAX_FACTOR_COLUMNS = 1024
"""Heads × states whose factors, three matrices of length × columns, are held at once."""
MAX_MATRIX_NUMBERS = 2**24
"""Entries of single heads' matrices that are held at once."""


def whole(
    r: Recurrence, groups: int, absolute: bool, skip: bool, around: GateAndTaps
) -> Float[Tensor, "batch groups t s"]:
    """Return the mean over each group's channels, or of their absolute values."""
    batch, length, heads, width, state = r.shape
    around = _cut(around, length)
    single = width == 1 or around.is_empty  # A head is one matrix.
    each = groups == heads and not needs_gradients(r, around)  # Nothing is summed.
    if not absolute and not each and is_diagonal(r) and shares_scores(r, around):
        return _through_scores(r, groups, skip, around)
    if absolute or each or not single or not is_diagonal(r):
        return _through_heads(r, groups, absolute, skip, around)
    out = r.b.new_zeros(batch, groups, length, length)
    if not length:
        return out
    per_group = heads // groups
    rows = []
    for row in range(batch):
        means = []
        for group in range(groups):
            place = slice(group * per_group, (group + 1) * per_group)
            part, near = r.of_rows(row, row + 1).of_heads(place.start, place.stop), around.of_rows(row, row + 1)
            means.append(_mean(part, near.of_heads(place.start, place.stop), skip, out[row, group]))
        rows.append(torch.stack(means))
    return torch.stack(rows) if needs_gradients(r, around) else out


def _cut(around: GateAndTaps, length: int) -> GateAndTaps:
    if around.taps is None or around.taps.shape[2] <= max(length, 1):
        return around
    return GateAndTaps(around.left, around.taps[:, :, :length])


# ---- the sum over the heads of a group, as one product


class Factors(NamedTuple):
    """Factors of some heads' matrices: a, R and W of the strict triangle (batch, steps, heads, state), which begins
    `reach` − 1 rows down, and `near`, the entries at distances 0 … reach − 1 from the diagonal, (batch, length −
    distance, heads) each."""

    a: Tensor
    R: Tensor
    W: Tensor
    near: list[Tensor]


def factors(r: Recurrence, around: GateAndTaps) -> Factors:
    """Return the factors of heads of one matrix each; the parts of an input that taps spread are gathered at their last
    step."""
    batch, length, heads, _, state = r.shape
    a = decays(r).expand(batch, length, heads, state)
    b, c, step = shared_by_heads(r.b, heads), shared_by_heads(r.c, heads), r.step
    write = (b if step is None else b * step.unsqueeze(-1)).expand(batch, length, heads, state)
    read = (c if around.left is None else c * around.left).expand(batch, length, heads, state)
    taps = around.taps
    gathered = write if taps is None else write * taps[:, :, 0]
    near = [(read * gathered).sum(-1)]
    for i in range(1, around.reach):
        assert taps is not None
        gathered = torch.addcmul(a[:, i:] * gathered[:, :-1], write[:, i:], taps[:, : length - i, i])
        near.append((read[:, i:] * gathered).sum(-1))
    late = around.reach - 1
    return Factors(a[:, late:], read[:, late:] * a[:, late:], gathered, near)


def _mean(r: Recurrence, around: GateAndTaps, skip: bool, out: Tensor) -> Tensor:
    """Return the mean over the heads of one sequence, (length, length), in `out` if no gradient is asked for."""
    _, length, heads, _, state = r.shape
    with_gradients = needs_gradients(r, around)
    late = around.reach - 1
    step = max(1, MAX_FACTOR_COLUMNS // state)
    near = [r.b.new_zeros(length - i) for i in range(around.reach)]
    corner = out[late:, : length - late]
    parts = []
    for first in range(0, heads, step):
        chunk, part_around = r.of_heads(first, first + step), around.of_heads(first, first + step)
        if with_gradients:
            strict, *close = checkpoint(_strict, chunk, part_around, use_reentrant=False, preserve_rng_state=False)
            parts.append(strict)
        else:
            a, R, W, close = factors(chunk, part_around)
            flat = [rearrange(t, "1 t h n -> 1 t (h n)") for t in (a, R, W)]
            triangle.add(corner.unsqueeze(0), flat[0], flat[1].contiguous(), flat[2].contiguous())
            close = [each.sum(-1) for each in close]
        near = [total + each[0] for total, each in zip(near, close)]
    if skip and r.D is not None:
        near = [total + each[0].sum(-1) for total, each in zip(near, diagonals(r, around))]
    if with_gradients:
        below = torch.nn.functional.pad(torch.stack(parts).sum(0)[0], (0, late, late, 0))
        out = below + sum(_on_diagonal(each, i, length) for i, each in enumerate(near))
        return out / heads
    for i, each in enumerate(near):
        out.diagonal(-i).copy_(each)
    return out.div_(heads)


def _strict(chunk: Recurrence, part_around: GateAndTaps) -> tuple[Tensor, ...]:
    a, R, W, close = factors(chunk, part_around)
    flat = [rearrange(t, "1 t h n -> 1 t (h n)") for t in (a, R, W)]
    return triangle.differentiable(*flat), *(each.sum(-1) for each in close)


def _on_diagonal(values: Tensor, distance: int, length: int) -> Tensor:
    return torch.diag_embed(values, offset=-distance)[..., :length, :length]


# ---- one decay per head: the scores that heads share, times the sum of their decays


def shares_scores(r: Recurrence, around: GateAndTaps) -> bool:
    """Return True if a head's decay is one number, and products with the heads' shared scores c_t · b_s are cheaper."""
    _, _, heads, width, state = r.shape
    if not r.one_decay_per_head:
        return False
    share = heads // r.b.shape[2]
    single = width == 1 or around.is_empty
    return not single or share * state > state + share * around.reach


def columns_of(around: GateAndTaps) -> tuple[Tensor | None, Tensor | None]:
    """Return `left` and `taps` with the width at which their products are summed: 1 where one of them is absent."""
    left, taps = around
    if left is None or taps is None:
        left = None if left is None else left.mean(-1, keepdim=True)
        taps = None if taps is None else taps.mean(-1, keepdim=True)
    return left, taps


def _through_scores(r: Recurrence, groups: int, skip: bool, around: GateAndTaps) -> Tensor:
    batch, length, heads, _, _ = r.shape
    per_group = heads // groups
    rows = []
    for row in range(batch):
        means = []
        for group in range(groups):
            total = r.b.new_zeros(length, length)
            for first, last in segments(r, group * per_group, (group + 1) * per_group):
                part, part_around = r.of_rows(row, row + 1).of_heads(first, last), around.of_rows(row, row + 1)
                total = total + _segment(part, part_around.of_heads(first, last), skip)
            means.append(total / per_group)
        rows.append(torch.stack(means))
    return torch.stack(rows)


def _segment(r: Recurrence, around: GateAndTaps, skip: bool) -> Float[Tensor, "t s"]:
    """Return the sum over heads that read one group: Σ_i (C Bᵀ ∘ Σ_h,p left_t a_t…a_{r+1} step_r taps_{r−i, i})[t, r =
    s + i] (Mamba-2, Dao & Gu 2024, section 3, for the plain case)."""
    _, length, heads, _, _ = r.shape
    scores = r.c[0, :, 0] @ r.b[0, :, 0].mT
    a = decays(r)[0]
    left, taps = columns_of(around)
    ones = torch.ones_like(a)
    step = ones if r.step is None else r.step[0].unsqueeze(-1)
    read = ones if left is None else left[0]
    total = torch.zeros_like(scores)
    for i in range(around.reach):
        write = step
        if taps is not None:  # The inputs of i steps before arrive here.
            write = step * torch.nn.functional.pad(taps[0, : length - i, i], (0, 0, 0, 0, i, 0))
        sums = _sum_of_decays(a, read, write) / max(read.shape[-1], write.shape[-1])
        total = total + torch.nn.functional.pad((scores * sums)[:, i:], (0, i))
    if skip and r.D is not None:
        for i, each in enumerate(diagonals(r, around)):
            total = total + _on_diagonal(each[0].sum(-1), i, length)
    return total


def _sum_of_decays(a: Tensor, read: Tensor, write: Tensor) -> Float[Tensor, "t s"]:
    """Return Σ_h,p read[t] ∏_{s<r≤t} a[r] write[s] for s ≤ t, from terms (length, heads, 1 or width)."""
    length, heads, _ = a.shape
    width = max(read.shape[-1], write.shape[-1])
    out = torch.diag_embed((read * write).expand(length, heads, width).sum((1, 2)))
    step = max(1, MAX_FACTOR_COLUMNS // width)
    for first in range(0, heads, step):
        few = [t[:, first : first + step].expand(-1, -1, width) for t in (a, read * a, write)]
        flat = [rearrange(t, "t h p -> 1 t (h p)") for t in few]
        if torch.is_grad_enabled() and any(t.requires_grad for t in flat):
            strict = checkpoint(triangle.differentiable, *flat, use_reentrant=False, preserve_rng_state=False)
            out = out + strict[0]
        else:
            triangle.add(out.unsqueeze(0), *(t.clone(memory_format=torch.contiguous_format) for t in flat))
    return out


# ---- heads one by one


def _through_heads(r: Recurrence, groups: int, absolute: bool, skip: bool, around: GateAndTaps) -> Tensor:
    batch, length, heads, width, _ = r.shape
    per_group = heads // groups
    at_once = max(1, MAX_MATRIX_NUMBERS // max(1, batch * length * length))

    def channels(first: int, last: int) -> Tensor:
        part, part_around = r.of_heads(first, last), around.of_heads(first, last)
        return single_heads(part, part_around, skip) if not absolute else _absolute(part, part_around, skip)

    if per_group == 1:
        return torch.cat([channels(first, min(first + at_once, heads)) for first in range(0, heads, at_once)], dim=1)
    means = []
    for group in range(groups):
        total = r.b.new_zeros(batch, length, length)
        for first in range(group * per_group, (group + 1) * per_group, at_once):
            total = total + channels(first, min(first + at_once, (group + 1) * per_group)).sum(1)
        means.append(total / per_group)
    return torch.stack(means, dim=1)


def _absolute(r: Recurrence, around: GateAndTaps, skip: bool) -> Tensor:
    """Return the mean over the width of every head of |matrix|, (batch, heads, length, length)."""
    width = r.shape[3]
    D = skips(r) if skip else None
    alike = D is None or D.shape[1] == 1
    if around.is_empty and alike or width == 1:
        return single_heads(r, around, skip).abs()
    alpha = single_heads(r, GateAndTaps())
    total = torch.zeros_like(alpha)
    for p in range(width):
        each = alpha
        if D is not None:
            own = D[:, min(p, D.shape[1] - 1)].view(1, -1, 1).expand(alpha.shape[:3])
            each = each + _on_diagonal(own, 0, alpha.shape[-1])
        total = total + _spread(each, around.of_width(p), 1).abs()
    return total / width


def single_heads(r: Recurrence, around: GateAndTaps, skip: bool = False) -> Float[Tensor, "batch heads t s"]:
    """Return the mean over the width of every head."""
    batch, length, heads, width, state = r.shape
    around = _cut(around, length)
    skipped = diagonals(r, around) if skip and r.D is not None else []
    if isinstance(r, DeltaRecurrence):
        alpha = _spread(delta_matrices.matrices(r), around, width)
    elif width == 1 or around.is_empty:
        return _folded(r, around, skipped)
    else:
        alpha = _spread(_folded(r, GateAndTaps(), []), around, width)
    for i, each in enumerate(skipped):
        alpha = alpha + _on_diagonal(rearrange(each, "b t h -> b h t"), i, length)
    return alpha


def _folded(r: Recurrence, around: GateAndTaps, skipped: list[Tensor]) -> Tensor:
    batch, length, heads, _, state = r.shape
    late = around.reach - 1
    a, R, W, near = factors(r, around)
    near = [each + skipped[i] if skipped else each for i, each in enumerate(near)]
    flat = [rearrange(t, "b t h n -> (b h) t n") for t in (a, R, W)]
    if needs_gradients(r, around):
        strict = rearrange(triangle.differentiable(*flat), "(b h) t s -> b h t s", b=batch)
        below = torch.nn.functional.pad(strict, (0, late, late, 0))
        return below + sum(_on_diagonal(rearrange(each, "b t h -> b h t"), i, length) for i, each in enumerate(near))
    out = r.b.new_zeros(batch * heads, length, length)
    triangle.add(out[:, late:, : length - late], flat[0], flat[1].contiguous(), flat[2].contiguous())
    for i, each in enumerate(near):
        out.diagonal(-i, 1, 2).copy_(rearrange(each, "b t h -> (b h) t"))
    return rearrange(out, "(b h) t s -> b h t s", b=batch)


def _spread(alpha: Tensor, around: GateAndTaps, width: int) -> Tensor:
    """Return (1 / width) Σ_p left[t, p] Σ_i α[t, s + i] taps_i[s, p] for every head's α, (batch, heads, t, s)."""
    if around.is_empty:
        return alpha
    length = alpha.shape[-1]
    left = None if around.left is None else rearrange(around.left, "b t h p -> b h t p")
    total = torch.zeros_like(alpha)
    for i in range(around.reach):
        taps = None if around.taps is None else rearrange(around.taps[:, : length - i, i], "b s h p -> b h s p")
        if taps is None:
            assert left is not None
            pairs = left.mean(-1, keepdim=True)
        elif left is None:
            pairs = taps.mean(-1).unsqueeze(-2)
        else:
            pairs = left @ taps.mT / width
        moved = alpha[..., i:] * pairs
        total = total + torch.nn.functional.pad(moved, (0, i))
    return total
