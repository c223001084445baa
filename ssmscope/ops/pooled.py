"""Attention matrices in cells: the mean over the causal pairs of a cell, s ≤ t, without the matrix.

Other cells need four numbers of a cell per (head, state): R = Σ_t read_t ∏_{e≤r≤t} a_r from the cell's start e,
W = Σ_s write_s ∏_{s<r} a_r up to its end, the product of its decays, and, for inputs that spread over several steps,
the writing of the cell before in this one. The cells are then steps of a triangle as single positions are. The part on
the diagonal is a scan within each cell.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ssmscope.errors import InputError
from ssmscope.ops import delta_matrices, triangle
from ssmscope.ops.exponents import smallest_exponent
from ssmscope.ops.matrices import columns_of, shares_scores, whole
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence
from ssmscope.ops.terms import GateAndTaps, decays, diagonals, segments, shared_by_heads, skips

MAX_EXACT_DELTA_LENGTH = 8192
"""Steps of a delta rule whose matrices are made whole, one head at a time."""
MAX_CELL_STATES_HELD = 2**20
"""(cell, head, state) triples that a step of all cells works on at once."""
MAX_CELL_MATRIX_NUMBERS = 2**22
"""(head, cell, cell) triples whose matrices are held at once."""
MAX_PAIRS_HELD = 2**18
"""Pairs within cells held at once, so that they stay in the cache."""


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
    smallest = int(edge.diff().min())
    if smallest < around.reach:
        sums = _sums_of_whole(r, edge, groups, skip, around)
    elif isinstance(r, DeltaRecurrence):
        sums = _sums_of_delta(r, edge, groups, skip, around)
    elif shares_scores(r, around):
        sums = _sums_through_scores(r, edge, groups, skip, around)
    elif width == 1 or around.is_empty:
        sums = _sums(r, edge, groups, skip, around)
    else:
        sums = r.b.new_zeros(batch, groups, cells, cells)
        for p in range(width):
            sums += _sums(r.of_width(p), edge, groups, skip, around.of_width(p))
        sums /= width
    return sums / causal_pairs(edge).clamp(min=1).to(sums)


def _sums_of_whole(r: Recurrence, edge: Tensor, groups: int, skip: bool, around: GateAndTaps) -> Tensor:
    matrix = whole(r, groups, False, skip, around)
    place = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(matrix.device)
    cells = len(edge) - 1
    rows = matrix.new_zeros(*matrix.shape[:2], cells, matrix.shape[-1]).index_add_(2, place, matrix)
    return matrix.new_zeros(*matrix.shape[:2], cells, cells).index_add_(3, place, rows)


class Cells(NamedTuple):
    """Numbers of the cells of some heads: the product of each cell's decays `across`, `R` and `W` (batch, cells, heads,
    state); `spilt`, as `W`, for inputs of the cell before that spread into this one; and the sums over the cells' own
    pairs, and over pairs with the cell before that such inputs make, (batch, cells, heads)."""

    across: Tensor
    R: Tensor
    W: Tensor
    spilt: Tensor | None
    own: Tensor
    with_before: Tensor | None


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


def cells_of(r: Recurrence, edge: Tensor, around: GateAndTaps) -> Cells:
    """Compute the numbers of all cells in one pass over the steps of a cell."""
    batch, _, heads, _, state = r.shape
    cells, longest = len(edge) - 1, int(edge.diff().max())
    log_a = _log_decays_by_cell(r, edge)
    b, c = (_steps(shared_by_heads(t, heads), edge) for t in (r.b, r.c))
    step = None if r.step is None else _steps(r.step, edge)
    left = None if around.left is None else _steps(around.left.squeeze(-1), edge)
    taps = around.taps
    own_taps, before_taps = (None, None) if taps is None else _own_and_before(taps.squeeze(-1), edge)

    shape = (batch, cells, heads, state)
    across, R, W = (r.b.new_full(shape, fill) for fill in (1.0, 0.0, 0.0))
    spilt = torch.zeros_like(W) if before_taps is not None else None
    own, with_before = r.b.new_zeros(shape[:3]), (r.b.new_zeros(shape[:3]) if spilt is not None else None)
    for t in range(longest):
        a = log_a(t).exp()
        write = b[:, :, t] if step is None else b[:, :, t] * step[:, :, t, :, None]
        read = c[:, :, t] if left is None else c[:, :, t] * left[:, :, t, :, None]
        across *= a
        R += read * across
        W *= a
        W += write if own_taps is None else write * own_taps[:, :, t, :, None]
        own += (read * W).sum(-1)
        if spilt is not None and with_before is not None and before_taps is not None:
            spilt *= a
            if t < before_taps.shape[2]:
                spilt += write * before_taps[:, :, t, :, None]
            with_before += (read * spilt).sum(-1)
    return Cells(across, R, W, spilt, own, with_before)


def _log_decays_by_cell(r: Recurrence, edge: Tensor):
    """Return a function from the step to the log-decays of all cells, (batch, cells, heads, state or 1)."""
    size = edge.diff()
    floor = smallest_exponent(r.b.dtype)

    def at(t: int) -> Tensor:
        place = (edge[:-1] + t).clamp(max=int(edge[-1]) - 1)
        chosen = r.at(place)
        log_a = chosen.log_decay().clamp(min=floor)
        if bool((t < size).all()):
            return log_a
        return log_a.masked_fill((t >= size).view(1, -1, 1, 1).to(log_a.device), 0.0)

    return at


def _own_and_before(taps: Tensor, edge: Tensor, back: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return the total factors of the inputs of a cell, and of the cell before, on arrival at each step of the cell.

    The taps (batch, length, reach, …) begin `back` steps before the cells. The second result has reach − 1 steps, as
    only the first steps of a cell get anything from the one before; None without any.
    """
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


def _sums(r: Recurrence, edge: Tensor, groups: int, skip: bool, around: GateAndTaps) -> Tensor:
    """Return the sums over the pairs of each cell of the mean over a group's heads, each of them one matrix."""
    batch, _, heads, _, state = r.shape
    cells = len(edge) - 1
    out = r.b.new_zeros(batch, groups, cells, cells)
    per_group = heads // groups
    at_once = max(1, MAX_CELL_STATES_HELD // (cells * state))
    for row in range(batch):
        for group in range(groups):
            total = out[row, group]
            for first in range(group * per_group, (group + 1) * per_group, at_once):
                last = min(first + at_once, (group + 1) * per_group)
                part, part_around = r.of_rows(row, row + 1).of_heads(first, last), around.of_rows(row, row + 1)
                _add_cells(total, cells_of(part, edge, part_around.of_heads(first, last)))
            total /= per_group
    return out + _sums_of_skips(r, edge, groups, around) if skip else out


def _sums_of_skips(r: Recurrence, edge: Tensor, groups: int, around: GateAndTaps) -> Tensor:
    """Return D's part of `_sums`."""
    batch, length, heads, width, _ = r.shape
    cells, per_group = len(edge) - 1, heads // groups
    cell = torch.repeat_interleave(torch.arange(cells), edge.diff()).to(r.b.device)
    out = r.b.new_zeros(batch, groups, cells, cells)
    if r.D is None:
        return out
    at_once = max(1, MAX_CELL_STATES_HELD // (length * width))
    for group in range(groups):
        for first in range(group * per_group, (group + 1) * per_group, at_once):
            last = min(first + at_once, (group + 1) * per_group)
            for i, each in enumerate(diagonals(r.of_heads(first, last), around.of_heads(first, last))):
                where = cell[i:] * cells + cell[: length - i]
                out[:, group].flatten(1).index_add_(1, where, each.sum(-1) / per_group)
    return out


# ---- one decay per head: the scores that heads share, within cells


def _sums_through_scores(r: Recurrence, edge: Tensor, groups: int, skip: bool, around: GateAndTaps) -> Tensor:
    """Return `_sums` where a head's decay is one number: matrix products within cells, and of cells."""
    batch, _, heads, _, _ = r.shape
    cells, per_group = len(edge) - 1, heads // groups
    longest = int(edge.diff().max())
    out = r.b.new_zeros(batch, groups, cells, cells)
    for row in range(batch):
        for group in range(groups):
            total = out[row, group]
            for first, last in segments(r, group * per_group, (group + 1) * per_group):
                part = r.of_rows(row, row + 1).of_heads(first, last)
                part_around = around.of_rows(row, row + 1).of_heads(first, last)
                at_once = max(1, MAX_PAIRS_HELD // longest**2)
                for begin in range(0, cells, at_once):
                    place = slice(begin, min(begin + at_once, cells))
                    _add_own_pairs(total, part, edge, part_around, place)
                # A head has one column, or with a gate or taps its whole width.
                together = max(1, MAX_CELL_MATRIX_NUMBERS // cells**2) if part_around.is_empty else 1
                for head in range(0, last - first, together):
                    chosen = head, head + together
                    _add_heads(total, part.of_heads(*chosen), edge, part_around.of_heads(*chosen))
            total /= per_group
    return out + _sums_of_skips(r, edge, groups, around) if skip else out


class _Within(NamedTuple):
    """Terms of some heads by cells and steps: decays (cells, steps, heads); b and c (cells, steps, state) of their
    group; the factors of reading, `left`, and of writing, `mine` for inputs of the cell itself and `before` for those
    of the cell before, at its first steps alone (cells, steps, heads, 1 or width); and the divisor of sums over the
    width."""

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
    left, taps = columns_of(around)
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
        triangle.add(own, w.a.clone(), w.left[..., 0] * w.a, w.mine[..., 0].clone())
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
    if place.stop > first:
        total.diagonal(-1)[first - 1 : place.stop - 1] += with_before[first - place.start :] / w.width


def _add_heads(total: Tensor, r: Recurrence, edge: Tensor, around: GateAndTaps) -> None:
    """Add the pairs of different cells, for all these heads."""
    cells, heads = len(edge) - 1, r.shape[2]
    w = _within(r, edge, around, slice(0, cells))
    begun = w.a.cumprod(1)  # It is ∏_{e≤r≤t} a_r.
    across = begun[:, -1].mT
    ending = torch.cat(
        [w.a[:, 1:].flip(1).cumprod(1).flip(1), torch.ones_like(w.a[:, :1])], dim=1
    )  # It is ∏_{s<r} a_r.

    def gathered(rows: Tensor, factor: Tensor, columns: Tensor) -> Tensor:
        """Return Σ_t rows_t factor_t columns_tᵀ, (heads, cells, state · width)."""
        found = rows.mT @ rearrange(columns * factor.unsqueeze(-1), "cell t h p -> cell t (h p)")
        found = rearrange(found, "cell n (h p) -> h cell n p", h=heads)
        return found.expand(-1, -1, -1, w.width).flatten(2)

    R, W = gathered(w.c, begun, w.left), gathered(w.b, ending, w.mine)
    if w.before is None:
        total += ((R @ W.mT) * _between(across)).sum(0) / w.width
        return
    if cells == 1:
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


def _between(across: Float[Tensor, "*heads cells"]) -> Float[Tensor, "*heads cells cells"]:
    """Return ∏_{J<q<I} of the decays across cells, 0 on and above the diagonal."""
    a = across.reshape(-1, across.shape[-1], 1)
    out = across.new_zeros(len(a), a.shape[1], a.shape[1])
    triangle.add(out, a.clone(), torch.ones_like(a), torch.ones_like(a))
    return out.view(*across.shape, across.shape[-1])


# ---- cells of heads with a decay per state


def _add_cells(total: Tensor, of: Cells) -> None:
    """Add the pairs of all cells, for heads with a decay per state."""
    across, R, W = (rearrange(t, "1 cell h n -> 1 cell (h n)") for t in (of.across, of.R, of.W))
    total.diagonal().add_(of.own[0].sum(-1))
    if of.spilt is None or of.with_before is None:
        triangle.add(total.unsqueeze(0), across.clone(), R, W)
        return
    # An input of cell J has arrived when J + 1 ends; for cells from J + 2 on, J is one step that ends there.
    spilt = rearrange(of.spilt, "1 cell h n -> 1 cell (h n)")
    cells = total.shape[0]
    if cells > 1:
        total.diagonal(-1).add_((R[0, 1:] * W[0, :-1]).sum(-1) + of.with_before[0, 1:].sum(-1))
    if cells > 2:
        arrived = torch.addcmul(spilt[:, 1:], across[:, 1:], W[:, :-1])
        triangle.add(total[1:, :-1].unsqueeze(0), across[:, 1:].clone(), R[:, 1:].clone(), arrived)


def _sums_of_delta(r: DeltaRecurrence, edge: Tensor, groups: int, skip: bool, around: GateAndTaps) -> Tensor:
    """Return `_sums` for the delta rule: from the matrix of one head after the other or, if that is too large and there
    are no gate and taps, by the adjoint recurrence."""
    length = r.shape[1]
    if length <= MAX_EXACT_DELTA_LENGTH:
        return _sums_of_whole(r, edge, groups, skip, around)
    if not around.is_empty:
        raise InputError(
            "the pooled map of a delta rule with its gates is made from the whole matrix, of at most "
            f"{MAX_EXACT_DELTA_LENGTH:,} tokens, not {length:,}: give a shorter text, or ask for the level of the "
            "recurrence alone"
        )
    sums = delta_matrices.pooled_rows(r, edge)
    place = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(sums.device)
    found = sums.new_zeros(*sums.shape[:3], len(edge) - 1).index_add_(3, place, sums)
    if skip and (D := skips(r)) is not None:
        found += D.mean(-1)[:, None, None] * torch.diag(edge.diff()).to(found)
    return rearrange(found, "b (g h) t s -> b g h t s", g=groups).mean(2)
