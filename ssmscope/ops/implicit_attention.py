"""Implicit attention of linear recurrences: α with y = α x (Differential Mamba, Eq. 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ssmscope.ops import matrices, matrix_rows, pooled
from ssmscope.ops.order import check_one_way, map_in_order
from ssmscope.ops.recurrence import Recurrence
from ssmscope.ops.scans import scan_reference
from ssmscope.ops.terms import gate_and_taps


def attention_reference(recurrence: Recurrence) -> Float[Tensor, "batch heads length length"]:
    """Return α[t, s] of every head, without D, one column at a time: the reading at each step of a 1 that is written at
    s alone (Differential Mamba, Eq. 8). Slow; the reference for tests of `attention`."""
    batch, length, heads, _, _ = recurrence.shape
    columns = []
    for s in range(length):
        x = recurrence.x.new_zeros(batch, length, heads, 1)
        x[:, s] = 1
        columns.append(scan_reference(replace(recurrence, x=x, D=None)).y.squeeze(-1))
    empty = recurrence.x.new_zeros(batch, heads, 0, 0)
    return rearrange(torch.stack(columns, dim=-1), "b t h s -> b h t s") if columns else empty


@map_in_order
def attention(
    recurrence: Recurrence,
    *,
    groups: int = 1,
    absolute: bool = False,
    skip: bool = False,
    rows: Sequence[int] | None = None,
    left: Float[Tensor, "batch length heads #width"] | None = None,
    taps: Float[Tensor, "batch length reach heads #width"] | None = None,
) -> Float[Tensor, "batch groups rows length"]:
    """Return the implicit attention matrix α[t, s] = c_tᵀ (∏_{s<r≤t} a_r) b_s Δ_s, so that y = α x (Differential Mamba,
    Eq. 8), as the signed mean over channels.

    Differentiable in every term.

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
    around = gate_and_taps(recurrence.x, groups, left, taps)
    if rows is None:
        return matrices.whole(recurrence, groups, absolute, skip, around)
    length = recurrence.shape[1]
    outside = [t for t in rows if not 0 <= t < length]
    if outside or not len(rows):
        raise ValueError(f"rows {outside or list(rows)}: give at least one, each from 0 to {length - 1}")
    return matrix_rows.rows(recurrence, rows, groups, absolute, skip, around)


def pooled_attention(
    recurrence: Recurrence,
    cells: int,
    *,
    groups: int = 1,
    skip: bool = False,
    left: Float[Tensor, "batch length heads #width"] | None = None,
    taps: Float[Tensor, "batch length reach heads #width"] | None = None,
) -> Float[Tensor, "batch groups cells cells"]:
    """Return `attention` in `cells` × `cells` cells: the mean over the pairs of each cell in which s ≤ t.

    The matrix is never held: its factors are summed within cells, which is exact, and multiplied then. Memory grows
    with the cells, not with the length. Cell i holds the positions from ⌊i · length / cells⌋ on. No gradient
    flows through it.

    Args: as `attention`; there is no mean of absolute values, which are no products of factors. Raises ValueError as
    `attention`, and for cells that are not from 1 to the length.
    """
    check_one_way([recurrence], "a pooled map")
    around = gate_and_taps(recurrence.x, groups, left, taps)
    if not 1 <= cells <= recurrence.shape[1]:
        raise ValueError(f"{cells} cells: give from 1 to the length, {recurrence.shape[1]}")
    with torch.no_grad():
        return pooled.pooled(recurrence, cells, groups, skip, around)
