"""Attention matrices in cells: the mean over the causal pairs of a cell, s ≤ t, without the matrix.

Cells off the diagonal need four numbers of a cell per (head, state): R = Σ_t read_t ∏_{e≤r≤t} a_r from the cell's start
e, W = Σ_s write_s ∏_{s<r} a_r up to its end, the product of its decays, and, for inputs that spread over several steps,
the writing of the cell before in this one. The cells are then steps of a triangle as single positions are. The part on
the diagonal is a scan within each cell.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from ssmscope.errors import InputError
from ssmscope.ops import delta_rule, triangle
from ssmscope.ops.matrices import whole
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence, smallest_exponent
from ssmscope.ops.terms import GateAndTaps, decays, diagonals, mean_over_heads, shares_scores, skips

MAX_EXACT_DELTA_LENGTH = 8192
"""Steps of a delta rule whose matrices are made whole, one head at a time."""
MAX_CELL_STATES_HELD = 2**20
"""(cell, head, state) triples that a step of all cells works on at once."""
MAX_CELL_MATRIX_NUMBERS = 2**22
"""(head, cell, cell) triples whose matrices are held at once."""
MAX_PAIRS_HELD = 2**18


def edges(length: int, cells: int) -> Int[Tensor, " cells+1"]:
    """Return the first position of each cell, and the length: sizes differ by one at most."""
    return torch.arange(cells + 1) * length // cells


def causal_pairs(edge: Tensor) -> Float[Tensor, "cells cells"]:
    """Return the number of pairs (t, s) with s ≤ t in each cell."""
    size = edge.diff().double()
    return torch.tril(size[:, None] * size, -1) + torch.diag(size * (size + 1) / 2)


def pooled(
    r: Recurrence, cells: int, groups: int, skip: bool, around: GateAndTaps
) -> Float[Tensor, "batch groups cells cells"]:
    """Return the mean over each group's channels, and over the pairs of each cell in which s ≤ t."""
    batch, length, heads, width, state = r.shape
    edge = edges(length, cells)
    short = isinstance(r, DeltaRecurrence) and length <= MAX_EXACT_DELTA_LENGTH
    if short or int(edge.diff().min()) < around.reach:
        sums = _over_cells(_over_cells(whole(r, groups, False, skip, around), edge, 2), edge, 3)
    elif isinstance(r, DeltaRecurrence):
        sums = _sums_of_long_delta(r, edge, groups, skip, around)
    else:
        if shares_scores(r, around):
            compute = partial(_sums_through_scores, edge=edge)
            sums = mean_over_heads(r, around, groups, compute, by_row=True, shared=True)
        else:
            at_once, compute = max(1, MAX_CELL_STATES_HELD // (cells * state)), partial(_sums, edge=edge)
            parts = [(r, around)]  # A head is one matrix, or one for each of its channels.
            if not (width == 1 or around.is_empty):
                parts = [(r.of_width(p), around.of_width(p)) for p in range(width)]
            found = [mean_over_heads(*part, groups, compute, at_once=at_once, by_row=True) for part in parts]
            sums = torch.stack(found).mean(0)
        sums = sums + _sums_of_skips(r, edge, groups, around) if skip else sums
    return sums / causal_pairs(edge).clamp(min=1).to(sums)


def _over_cells(t: Tensor, edge: Tensor, dim: int) -> Tensor:
    """Return the sums over the positions of each cell, along one dimension."""
    cell = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(t.device)
    shape = [*t.shape[:dim], len(edge) - 1, *t.shape[dim + 1 :]]
    return t.new_zeros(shape).index_add_(dim, cell, t)


def _sums_of_skips(r: Recurrence, edge: Tensor, groups: int, around: GateAndTaps) -> Tensor:
    batch, length, _, width, _ = r.shape
    cells = len(edge) - 1
    cell = torch.repeat_interleave(torch.arange(cells), edge.diff()).to(r.b.device)

    def sums(part: Recurrence, near: GateAndTaps, _: slice) -> Tensor:
        out = r.b.new_zeros(batch, cells**2)
        for i, each in enumerate(diagonals(part, near)):
            out.index_add_(1, cell[i:] * cells + cell[: length - i], each.sum(-1))
        return out.unflatten(1, (cells, cells))

    at_once = max(1, MAX_CELL_STATES_HELD // (length * width))
    return mean_over_heads(r, around, groups, sums, at_once=at_once)


def _steps(t: Tensor, edge: Tensor, fill: float = 0.0) -> Tensor:
    """Return `t` (batch, length, …) by cells, (batch, cells, steps, …), shorter cells padded with `fill`."""
    size = edge.diff()
    longest = int(size.max())
    if bool((size == longest).all()):
        return t.unflatten(1, (len(size), longest))
    place = edge[:-1, None] + torch.arange(longest)
    inside = (torch.arange(longest) < size[:, None]).to(t.device)
    found = t[:, place.clamp(max=t.shape[1] - 1).to(t.device)]
    return found.masked_fill(~inside.view(1, *inside.shape, *[1] * (t.ndim - 2)), fill)


def _own_and_before(taps: Tensor, edge: Tensor, back: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return the total factors of the inputs of a cell, and of the cell before, on arrival at each step of the cell.
    The taps (batch, length, reach, …) begin `back` steps before the cells. The second result has reach − 1 steps, as
    only the first steps of a cell get anything from the one before; None without any."""
    length, reach = taps.shape[1:3]
    arriving = taps[:, :, 0].clone()
    for i in range(1, reach):
        arriving[:, i:] += taps[:, : length - i, i]
    own = _steps(arriving[:, back:], edge)
    if reach == 1:
        return own, None
    before = torch.zeros_like(own[:, :, : reach - 1])
    begin = edge[:-1] + back
    for o in range(reach - 1):
        own[:, :, o] = sum(taps[:, begin + o - i, i] for i in range(o + 1))
        for i in range(o + 1, reach):
            place = begin + o - i
            before[:, place >= 0, o] += taps[:, place[place >= 0], i]
    return own, before


# ---- a decay per state


def _sums(r: Recurrence, around: GateAndTaps, _: slice, edge: Tensor) -> Float[Tensor, "batch cells cells"]:
    """Return one sequence's sums over the pairs of cells, over heads of one matrix each, in one pass over steps."""
    heads, state = r.shape[2], r.shape[4]
    cells, size, floor = len(edge) - 1, edge.diff(), smallest_exponent(r.b.dtype)
    b, c = (_steps(t, edge) for t in (r.b, r.c))
    step = None if r.step is None else _steps(r.step, edge)
    left = None if around.left is None else _steps(around.left.squeeze(-1), edge)
    arriving, before = (None, None) if around.taps is None else _own_and_before(around.taps.squeeze(-1), edge)
    across, R, W, spilt = (r.b.new_full((1, cells, heads, state), fill) for fill in (1.0, 0.0, 0.0, 0.0))
    own, with_before = r.b.new_zeros(2, 1, cells, heads)
    for t in range(int(size.max())):
        log_a = r.at(edge[:-1] + t).log_decay().clamp(min=floor)  # The last cell is one of the longest.
        if bool((ended := t >= size).any()):
            log_a = log_a.masked_fill(ended.view(1, -1, 1, 1).to(log_a.device), 0.0)
        a = log_a.exp()
        write = b[:, :, t] if step is None else b[:, :, t] * step[:, :, t, :, None]
        read = c[:, :, t] if left is None else c[:, :, t] * left[:, :, t, :, None]
        across *= a
        R += read * across
        W *= a
        W += write if arriving is None else write * arriving[:, :, t, :, None]
        own += (read * W).sum(-1)
        if before is not None:
            spilt *= a
            if t < before.shape[2]:
                spilt += write * before[:, :, t, :, None]
            with_before += (read * spilt).sum(-1)
    across, R, W, spilt = (rearrange(t, "1 cell h n -> 1 cell (h n)") for t in (across, R, W, spilt))
    total = torch.diag_embed(own.sum(-1))
    if before is None:
        return total + triangle.strict(across, R, W)
    # An input of cell J has arrived when J + 1 ends; for cells from J + 2 on, J is one step that ends there.
    total.diagonal(-1, 1, 2).add_((R[:, 1:] * W[:, :-1]).sum(-1) + with_before[:, 1:].sum(-1))
    arrived = torch.addcmul(spilt[:, 1:], across[:, 1:], W[:, :-1])
    total[:, 1:, :-1] += triangle.strict(across[:, 1:], R[:, 1:], arrived)
    return total


# ---- one decay per head: the scores that heads share, within cells


def _sums_through_scores(r: Recurrence, around: GateAndTaps, _: slice, edge: Tensor) -> Tensor:
    """Return `_sums` of heads that read one group and have one decay: products within cells, and of cells."""
    cells, longest = len(edge) - 1, int(edge.diff().max())
    total = r.b.new_zeros(cells, cells)
    at_once = max(1, MAX_PAIRS_HELD // longest**2)
    for begin in range(0, cells, at_once):
        _add_own_pairs(total, r, edge, around, slice(begin, min(begin + at_once, cells)))
    # A head has one column, or with a gate or taps its whole width.
    together = max(1, MAX_CELL_MATRIX_NUMBERS // cells**2) if around.is_empty else 1
    for head in range(0, r.shape[2], together):
        _add_heads(total, r.of_heads(head, head + together), edge, around.of_heads(head, head + together))
    return total.unsqueeze(0)


class _Within(NamedTuple):
    """Terms of some heads by cells and steps: decays (cells, steps, heads); b and c (cells, steps, state); the factors
    of reading, `left`, and of writing, `mine` for inputs of the cell and `before` for those of the cell before,
    (cells, steps, heads, 1 or width); and the divisor of sums over the width."""

    a: Tensor
    b: Tensor
    c: Tensor
    left: Tensor
    mine: Tensor
    before: Tensor | None
    width: int


def _within(r: Recurrence, edge: Tensor, around: GateAndTaps, place: slice) -> _Within:
    """Return the terms of the cells `place`; padded steps keep the state as it is, and neither write nor read."""
    first, last = int(edge[place.start]), int(edge[place.stop])
    back = min(around.reach - 1, first)  # The inputs of the cell before arrive in these steps.
    left, taps = around.columns()
    mine = before = None
    if taps is not None:
        mine, before = _own_and_before(taps[:, first - back : last], edge[place.start : place.stop + 1] - first, back)
    edge = edge[place.start : place.stop + 1] - first
    cut = r.between(first, last)
    a = _steps(decays(cut)[..., 0], edge, 1.0)[0]
    b, c = (_steps(t[:, :, 0], edge)[0] for t in (cut.b, cut.c))
    ones = torch.ones_like(a)
    step = (ones if cut.step is None else _steps(cut.step, edge)[0]).unsqueeze(-1)
    read = ones.unsqueeze(-1) if left is None else _steps(left[:, first:last], edge)[0]
    write = step if mine is None else step * mine[0]
    spilt = None if before is None else step[:, : before.shape[2]] * before[0]
    return _Within(a, b, c, read, write, spilt, max(read.shape[-1], write.shape[-1]))


def _add_own_pairs(total: Tensor, r: Recurrence, edge: Tensor, around: GateAndTaps, place: slice) -> None:
    """Add the pairs within each of these cells, and those with the cell before whose inputs spread into it."""
    w = _within(r, edge, around, place)
    scores = w.c @ w.b.mT
    cells, _, heads = w.a.shape
    own = torch.zeros_like(scores)
    if w.width == 1:
        own = triangle.strict(w.a, w.left[..., 0] * w.a, w.mine[..., 0])
        own.diagonal(0, 1, 2).add_((w.left * w.mine).sum((2, 3)))
    else:
        left, mine = (rearrange(t, "cell t h p -> h cell t p") for t in (w.left, w.mine))
        for head in range(heads):
            own.addcmul_(left[head] @ mine[head].mT, _decays_within(w.a[..., head]))
    total.diagonal()[place] += (scores * own).sum((1, 2)) / w.width
    if w.before is None:
        return
    with_before = total.new_zeros(cells)
    for s in range(w.before.shape[1]):
        since = torch.cat([torch.ones_like(w.a[:, :1]), w.a[:, s + 1 :].cumprod(1)], dim=1) * scores[:, s:, s, None]
        reads = torch.einsum("eth,ethp->ehp", since, w.left[:, s:])
        with_before += (reads * w.before[:, s]).sum((1, 2))
    first = max(place.start, 1)
    total.diagonal(-1)[first - 1 : place.stop - 1] += with_before[first - place.start :] / w.width


def _add_heads(total: Tensor, r: Recurrence, edge: Tensor, around: GateAndTaps) -> None:
    """Add the pairs of different cells, for all these heads."""
    cells, heads = len(edge) - 1, r.shape[2]
    w = _within(r, edge, around, slice(0, cells))
    begun = w.a.cumprod(1)  # ∏_{e≤r≤t} a_r
    across = begun[:, -1].mT
    ending = torch.cat([w.a[:, 1:].flip(1).cumprod(1).flip(1), torch.ones_like(w.a[:, :1])], dim=1)  # ∏_{s<r} a_r

    def gathered(rows: Tensor, factor: Tensor, columns: Tensor) -> Tensor:
        """Return Σ_t rows_t factor_t columns_tᵀ, (heads, cells, state · width)."""
        found = rows.mT @ rearrange(columns * factor.unsqueeze(-1), "cell t h p -> cell t (h p)")
        found = rearrange(found, "cell n (h p) -> h cell n p", h=heads)
        return found.expand(-1, -1, -1, w.width).flatten(2)

    R, W = gathered(w.c, begun, w.left), gathered(w.b, ending, w.mine)
    if w.before is None:
        total += ((R @ W.mT) * _between(across)).sum(0) / w.width
        return
    late = w.before.shape[1]
    spilt = gathered(w.b[:, :late], ending[:, :late], w.before)
    total.diagonal(-1).add_((R[:, 1:] * W[:, :-1]).sum((0, 2)) / w.width)
    arrived = spilt[:, 1:] + across[:, 1:, None] * W[:, :-1]
    total[1:, :-1] += ((R[:, 1:] @ arrived.mT) * _between(across[:, 1:])).sum(0) / w.width


def _decays_within(a: Float[Tensor, "cells steps"]) -> Float[Tensor, "cells t s"]:
    """Return ∏_{s<r≤t} a_r for s ≤ t, 0 above."""
    cells, steps = a.shape
    out = a.new_zeros(cells, steps, steps)
    for t in range(steps):
        if t:
            torch.mul(out[:, t - 1, :t], a[:, t, None], out=out[:, t, :t])
        out[:, t, t] = 1
    return out


def _between(across: Float[Tensor, "heads cells"]) -> Float[Tensor, "heads cells cells"]:
    """Return ∏_{J<q<I} of the decays across cells, 0 on and above the diagonal."""
    a = across.unsqueeze(-1)
    return triangle.strict(a, torch.ones_like(a), torch.ones_like(a))


# ---- the delta rule


def _sums_of_long_delta(r: DeltaRecurrence, edge: Tensor, groups: int, skip: bool, around: GateAndTaps) -> Tensor:
    """Return a delta rule's sums by the adjoint recurrence. Raises InputError with gate and taps."""
    if not around.is_empty:
        raise InputError(
            "the pooled map of a delta rule with its gates is made from the whole matrix, of at most "
            f"{MAX_EXACT_DELTA_LENGTH:,} tokens, not {r.shape[1]:,}: give a shorter text, or ask for the level of the "
            "recurrence alone"
        )
    found = _over_cells(delta_rule.pooled_rows(r, edge), edge, 3)
    if skip and (D := skips(r)) is not None:
        found += D.mean(-1)[:, None, None] * torch.diag(edge.diff()).to(found)
    return rearrange(found, "b (g h) t s -> b g h t s", g=groups).mean(2)
