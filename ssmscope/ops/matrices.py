"""Whole attention matrices: means over groups of heads, and single heads."""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from ssmscope.ops import delta_rule, triangle
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence, checkpointed
from ssmscope.ops.terms import GateAndTaps, decays, diagonals, mean_over_heads, needs_gradients, shares_scores, skips

MAX_FACTOR_COLUMNS = 1024
"""Heads × states whose factors, three matrices of length × columns, are held at once."""
MAX_MATRIX_NUMBERS = 2**24


def whole(
    r: Recurrence, groups: int, absolute: bool, skip: bool, around: GateAndTaps
) -> Float[Tensor, "batch groups t s"]:
    """Return the mean over each group's channels, or of their absolute values."""
    batch, length, heads, width, state = r.shape
    if not length:
        return r.b.new_zeros(batch, groups, 0, 0)
    around = GateAndTaps(around.left, None if around.taps is None else around.taps[:, :, :length])
    single = width == 1 or around.is_empty  # A head is one matrix.
    apart = groups == heads
    each = apart and not needs_gradients(r, around)  # Nothing is summed.
    scores = not absolute and not each and shares_scores(r, around)
    if scores or not (absolute or each or isinstance(r, DeltaRecurrence)) and single:
        compute = partial(_sum_through_scores if scores else partial(_of_one_matrix, summed=True), skip=skip)
        if needs_gradients(r, around):
            compute = partial(checkpointed, compute)
        at_once = None if scores else max(1, MAX_FACTOR_COLUMNS // state)
        sums = lambda part, near, _: compute(part, near)[:, 0]  # noqa: E731
        return mean_over_heads(r, around, groups, sums, at_once=at_once, by_row=True, shared=scores)
    of_heads = partial(_absolute if absolute else single_heads, skip=skip)
    at_once = max(1, MAX_MATRIX_NUMBERS // max(1, batch * length * length))
    if apart:
        parts = [(first, first + at_once) for first in range(0, heads, at_once)]
        return torch.cat([of_heads(r.of_heads(*part), around.of_heads(*part)) for part in parts], dim=1)
    return mean_over_heads(r, around, groups, lambda part, near, _: of_heads(part, near).sum(1), at_once=at_once)


def _banded(strict: Tensor, near: list[Tensor]) -> Tensor:
    """Return matrices (…, length, length) from the diagonals `near` the main one, (…, length − distance) for distances
    0, 1, …, and the strict triangle of the entries farther away, which begins len(near) − 1 rows down."""
    late = len(near) - 1
    out = pad(strict, (0, late, late, 0)) if late else strict
    for i, each in enumerate(near):
        out.diagonal(-i, -2, -1).add_(each)
    return out


# ---- heads of one matrix each, by their factors


def _of_one_matrix(
    r: Recurrence, around: GateAndTaps, skip: bool, summed: bool = False
) -> Float[Tensor, "batch heads t s"]:
    """Return the matrices of heads of one matrix each, or their sum. Spread inputs are gathered at their last step."""
    batch, length, heads, _, state = r.shape
    a = decays(r).expand(batch, length, heads, state)
    b, c, step, (left, taps) = r.b, r.c, r.step, around
    write = (b if step is None else b * step.unsqueeze(-1)).expand(batch, length, heads, state)
    read = (c if left is None else c * left).expand(batch, length, heads, state)
    gathered = write if taps is None else write * taps[:, :, 0]
    near = [(read * gathered).sum(-1)]
    for i in range(1, around.reach):
        assert taps is not None
        gathered = torch.addcmul(a[:, i:] * gathered[:, :-1], write[:, i:], taps[:, : length - i, i])
        near.append((read[:, i:] * gathered).sum(-1))
    near = [own + each for own, each in zip(near, diagonals(r, around))] if skip and r.D is not None else near
    late, maps = around.reach - 1, "b t (h n)" if summed else "(b h) t n"
    factors = (a[:, late:], read[:, late:] * a[:, late:], gathered)
    strict = triangle.strict(*(rearrange(t, f"b t h n -> {maps}") for t in factors))
    near = [each.sum(-1, keepdim=True) if summed else each for each in near]
    found = _banded(strict, [rearrange(each, "b t h -> (b h) t") for each in near])
    return rearrange(found, "(b h) t s -> b h t s", b=batch)


# ---- one decay per head: the scores that heads share, times the sum of their decays


def _sum_through_scores(r: Recurrence, around: GateAndTaps, skip: bool) -> Float[Tensor, "batch one t s"]:
    """Return the sum over heads that read one group: Σ_i (C Bᵀ ∘ Σ_h,p left_t a_t…a_{r+1} step_r taps_{r−i, i})[t, r =
    s + i] (Mamba-2, Dao & Gu 2024, section 3, for the plain case). The batch is one sequence."""
    length = r.shape[1]
    scores, a, (left, taps) = r.c[0, :, 0] @ r.b[0, :, 0].mT, decays(r)[0], around.columns()
    ones = torch.ones_like(a)
    step = ones if r.step is None else r.step[0].unsqueeze(-1)
    read = ones if left is None else left[0]
    total = torch.zeros_like(scores)
    for i in range(around.reach):
        write = step
        if taps is not None:  # The inputs of i steps before arrive here.
            write = step * pad(taps[0, : length - i, i], (0, 0, 0, 0, i, 0))
        sums = _sum_of_decays(a, read, write) / max(read.shape[-1], write.shape[-1])
        total = total + pad((scores * sums)[:, i:], (0, i))
    for i, each in enumerate(diagonals(r, around) if skip else ()):
        total.diagonal(-i).add_(each[0].sum(-1))
    return total[None, None]


def _sum_of_decays(a: Tensor, read: Tensor, write: Tensor) -> Float[Tensor, "t s"]:
    """Return Σ_h,p read[t] ∏_{s<r≤t} a[r] write[s] for s ≤ t, from terms (length, heads, 1 or width)."""
    length, heads, _ = a.shape
    width = max(read.shape[-1], write.shape[-1])
    out = torch.diag_embed((read * write).expand(length, heads, width).sum((1, 2)))
    step = max(1, MAX_FACTOR_COLUMNS // width)
    for first in range(0, heads, step):
        few = [t[:, first : first + step].expand(-1, -1, width) for t in (a, read * a, write)]
        out = out + triangle.strict(*(rearrange(t, "t h p -> 1 t (h p)") for t in few))[0]
    return out


# ---- heads one by one


def _absolute(r: Recurrence, around: GateAndTaps, skip: bool) -> Tensor:
    """Return the mean over the width of every head of |matrix|, (batch, heads, length, length)."""
    width, D = r.shape[3], skips(r) if skip else None
    if around.is_empty and (D is None or D.shape[1] == 1) or width == 1:
        return single_heads(r, around, skip).abs()
    alpha = single_heads(r, GateAndTaps())
    total = torch.zeros_like(alpha)
    for p in range(width):
        each = alpha
        if D is not None:
            each = alpha + torch.diag_embed(D[:, min(p, D.shape[1] - 1), None].expand(alpha.shape[:3]))
        total = total + _spread(each, around.of_width(p), 1).abs()
    return total / width


def single_heads(r: Recurrence, around: GateAndTaps, skip: bool = False) -> Float[Tensor, "batch heads t s"]:
    """Return the mean over the width of every head."""
    width = r.shape[3]
    if isinstance(r, DeltaRecurrence):
        alpha = delta_rule.matrices(r)
    elif width == 1 or around.is_empty:
        return _of_one_matrix(r, around, skip)
    else:
        alpha = _of_one_matrix(r, GateAndTaps(), False)
    alpha = _spread(alpha, around, width)
    for i, each in enumerate(diagonals(r, around) if skip else ()):
        alpha.diagonal(-i, -2, -1).add_(rearrange(each, "b t h -> b h t"))
    return alpha


def _spread(alpha: Tensor, around: GateAndTaps, width: int) -> Tensor:
    """Return (1 / width) Σ_p left[t, p] Σ_i α[t, s + i] taps_i[s, p] for every head's α, (batch, heads, t, s)."""
    if around.is_empty:
        return alpha
    length = alpha.shape[-1]
    left = None if around.left is None else rearrange(around.left, "b t h p -> b h t p")
    total = torch.zeros_like(alpha)
    for i in range(around.reach):
        taps = None if around.taps is None else rearrange(around.taps[:, : length - i, i], "b s h p -> b h s p")
        if left is None:
            assert taps is not None
            pairs = taps.mean(-1).unsqueeze(-2)
        else:
            pairs = left.mean(-1, keepdim=True) if taps is None else left @ taps.mT / width
        total = total + pad(alpha[..., i:] * pairs, (0, i))
    return total
