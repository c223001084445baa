"""Attention matrices in cells: the mean over the pairs of a cell, without the matrix.

Within a cell of steps four numbers per (head, state) say all that other cells need: R = Σ_t read_t ∏_{e≤r≤t} a_r from
the cell's start e, W = Σ_s write_s ∏_{s<r} a_r up to its end, the product of its decays, and, of inputs that spread
over several steps, what the cell before has written here. The cells are then steps of a triangle as single positions
are. What lies on the diagonal is a scan within each cell.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ssmscope.errors import InputError
from ssmscope.matrices import delta, triangle
from ssmscope.matrices.terms import Around, Terms, by_head, decays, skips
from ssmscope.matrices.whole import is_diagonal, whole

MOST_OF_DELTA = 8192  # steps of a delta rule whose matrices are made whole, one head at a time
NUMBERS = 2**20  # (cell, head, state) triples that a step of all cells works on at once


def edges(length: int, cells: int) -> Int[Tensor, " cells+1"]:
    """Where each of the cells begins, and the length: sizes differ by one at most."""
    return torch.arange(cells + 1) * length // cells


def causal_pairs(edge: Tensor) -> Float[Tensor, "cells cells"]:
    """How many pairs (t, s) with s ≤ t each cell has."""
    size = edge.diff().double()
    return torch.tril(size[:, None] * size, -1) + torch.diag(size * (size + 1) / 2)


def pooled(r: Terms, cells: int, groups: int, skip: bool, around: Around) -> Float[Tensor, "batch groups cells cells"]:
    """The mean over each group's channels, and over the pairs of each cell in which s ≤ t."""
    batch, length, heads, width, state = r.shape
    edge = edges(length, cells)
    smallest = int(edge.diff().min())
    if smallest < around.reach:
        sums = _sums_of_whole(r, edge, groups, skip, around)
    elif not is_diagonal(r):
        sums = _sums_of_delta(r, edge, groups, skip, around)
    elif width == 1 or around.is_empty:
        sums = _sums(r, edge, groups, skip, around)
    else:
        sums = r.b.new_zeros(batch, groups, cells, cells)
        for p in range(width):
            from ssmscope.matrices.whole import _narrow

            sums += _sums(_narrow(r, p), edge, groups, skip, around.of_width(p))
        sums /= width
    return sums / causal_pairs(edge).clamp(min=1).to(sums)


def _sums_of_whole(r: Terms, edge: Tensor, groups: int, skip: bool, around: Around) -> Tensor:
    matrix = whole(r, groups, False, skip, around)
    place = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(matrix.device)
    cells = len(edge) - 1
    rows = matrix.new_zeros(*matrix.shape[:2], cells, matrix.shape[-1]).index_add_(2, place, matrix)
    return matrix.new_zeros(*matrix.shape[:2], cells, cells).index_add_(3, place, rows)


class Cells(NamedTuple):
    """Of some heads: the product of each cell's decays `across`, `R` and `W` (batch, cells, heads, state); `spilt`, as
    `W`, what inputs of the cell before write here; and the sums over the cells' own pairs, and over pairs with the cell
    before that spill, (batch, cells, heads)."""

    across: Tensor
    R: Tensor
    W: Tensor
    spilt: Tensor | None
    own: Tensor
    beside: Tensor | None


def _steps(t: Tensor, edge: Tensor, fill: float = 0.0) -> Tensor:
    """`t` (batch, length, …) by cells, (batch, cells, steps, …), the shorter cells filled up."""
    size = edge.diff()
    longest = int(size.max())
    if bool((size == longest).all()):
        return t.unflatten(1, (len(size), longest))
    place = edge[:-1, None] + torch.arange(longest)
    inside = (torch.arange(longest) < size[:, None]).to(t.device)
    found = t[:, place.clamp(max=t.shape[1] - 1).to(t.device)]
    return found.masked_fill(~inside.view(1, *inside.shape, *[1] * (t.ndim - 2)), fill)


def cells_of(r: Terms, edge: Tensor, skip: bool, around: Around) -> Cells:
    """One pass over the steps of all cells side by side."""
    batch, _, heads, _, state = r.shape
    cells, longest = len(edge) - 1, int(edge.diff().max())
    log_a = _log_decays_by_cell(r, edge)
    b, c = (_steps(by_head(t, heads), edge) for t in (r.b, r.c))
    step = None if r.step is None else _steps(r.step, edge)
    left = None if around.left is None else _steps(around.left.squeeze(-1), edge)
    own_taps, before_taps = _taps_by_cell(around, edge)
    D = skips(r) if skip else None
    D = None if D is None else D.mean(-1)

    shape = (batch, cells, heads, state)
    across, R, W = (r.b.new_full(shape, fill) for fill in (1.0, 0.0, 0.0))
    spilt = torch.zeros_like(W) if before_taps is not None else None
    own, beside = r.b.new_zeros(shape[:3]), (r.b.new_zeros(shape[:3]) if spilt is not None else None)
    for t in range(longest):
        a = log_a(t).exp()
        write = b[:, :, t] if step is None else b[:, :, t] * step[:, :, t, :, None]
        read = c[:, :, t] if left is None else c[:, :, t] * left[:, :, t, :, None]
        across *= a
        R += read * across
        W *= a
        W += write if own_taps is None else write * own_taps[:, :, t, :, None]
        own += (read * W).sum(-1)
        if spilt is not None and beside is not None and before_taps is not None:
            spilt *= a
            if t < before_taps.shape[2]:
                spilt += write * before_taps[:, :, t, :, None]
            beside += (read * spilt).sum(-1)
        if D is not None:
            each = D if left is None else D * left[:, :, t]
            # a filled-up step must add nothing: its taps and factors are 0, without either it is masked here
            own += _inside(each if own_taps is None else each * own_taps[:, :, t], edge, t)
            if beside is not None and before_taps is not None and t < before_taps.shape[2]:
                beside += _inside(each * before_taps[:, :, t], edge, t)
    return Cells(across, R, W, spilt, own, beside)


def _inside(t: Tensor, edge: Tensor, step: int) -> Tensor:
    inside = (step < edge.diff()).to(t)[:, None]
    return t * inside


def _log_decays_by_cell(r: Terms, edge: Tensor):
    """A function of the step that gives the log-decays of all cells, (batch, cells, heads, state or 1)."""
    from ssmscope.scans.scalar import smallest_exponent

    size = edge.diff()
    floor = smallest_exponent(r.b.dtype)

    def at(t: int) -> Tensor:
        place = (edge[:-1] + t).clamp(max=int(edge[-1]) - 1)
        chosen = r.at(place)  # type: ignore[attr-defined]
        log_a = chosen.log_decay().clamp(min=floor)
        if bool((t < size).all()):
            return log_a
        return log_a.masked_fill((t >= size).view(1, -1, 1, 1).to(log_a.device), 0.0)

    return at


def _taps_by_cell(around: Around, edge: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """By what the inputs of a cell, and of the cell before, are multiplied in all when they arrive at a step of it.

    The second (batch, cells, reach − 1, heads), as only the first steps of a cell get anything from the one before.
    """
    taps = around.taps
    if taps is None:
        return None, None
    taps = taps.squeeze(-1)
    length = taps.shape[1]
    # arriving[r, i] = taps[r − i, i]
    arriving = torch.stack([torch.nn.functional.pad(taps[:, : length - i, i], (0, 0, i, 0)) for i in range(around.reach)])
    offset = torch.arange(length) - torch.repeat_interleave(edge[:-1], edge.diff())  # within its cell
    same = (torch.arange(around.reach)[:, None] <= offset).to(taps)[:, None, :, None]
    own = _steps((arriving * same).sum(0), edge)
    if around.reach == 1:
        return own, None
    before = _steps((arriving * (1 - same)).sum(0), edge)
    return own, before[:, :, : around.reach - 1]


def _sums(r: Terms, edge: Tensor, groups: int, skip: bool, around: Around) -> Tensor:
    """The sums over the pairs of each cell of the mean over a group's heads, each of them one matrix."""
    batch, _, heads, _, state = r.shape
    cells = len(edge) - 1
    out = r.b.new_zeros(batch, groups, cells, cells)
    per_group = heads // groups
    at_once = max(1, NUMBERS // (cells * state))
    for row in range(batch):
        for group in range(groups):
            total = out[row, group]
            for first in range(group * per_group, (group + 1) * per_group, at_once):
                last = min(first + at_once, (group + 1) * per_group)
                part, beside = r.of_rows(row, row + 1).of_heads(first, last), around.of_rows(row, row + 1)
                _add_cells(total, cells_of(part, edge, skip, beside.of_heads(first, last)))
            total /= per_group
    return out


def _add_cells(total: Tensor, of: Cells) -> None:
    across, R, W = (rearrange(t, "1 cell h n -> 1 cell (h n)") for t in (of.across, of.R, of.W))
    total.diagonal().add_(of.own[0].sum(-1))
    if of.spilt is None or of.beside is None:
        triangle.add(total.unsqueeze(0), across.clone(), R, W)
        return
    # An input of cell J has arrived when J + 1 ends: from J + 2 on its cell is as one step that ends there.
    spilt = rearrange(of.spilt, "1 cell h n -> 1 cell (h n)")
    cells = total.shape[0]
    if cells > 1:
        total.diagonal(-1).add_((R[0, 1:] * W[0, :-1]).sum(-1) + of.beside[0, 1:].sum(-1))
    if cells > 2:
        arrived = torch.addcmul(spilt[:, 1:], across[:, 1:], W[:, :-1])
        triangle.add(total[1:, :-1].unsqueeze(0), across[:, 1:].clone(), R[:, 1:].clone(), arrived)


def _sums_of_delta(r: Terms, edge: Tensor, groups: int, skip: bool, around: Around) -> Tensor:
    """The same where transitions are no decays: from the matrix of one head after the other, or, where that is too
    large and nothing stands around the recurrence, by the adjoint recurrence."""
    length, heads = r.shape[1], r.shape[2]
    if length <= MOST_OF_DELTA:
        return _sums_of_whole(r, edge, groups, skip, around)
    if not around.is_empty:
        raise InputError(
            f"the pooled map of a delta rule with its gates is made from the whole matrix, of at most {MOST_OF_DELTA:,} "
            f"tokens, not {length:,}: give a shorter text, or ask for the level of the recurrence alone"
        )
    sums = delta.pooled_rows(r, edge)
    place = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(sums.device)
    found = sums.new_zeros(*sums.shape[:3], len(edge) - 1).index_add_(3, place, sums)
    if skip and (D := skips(r)) is not None:
        found += D.mean(-1)[:, None, None] * torch.diag(edge.diff()).to(found)
    return rearrange(found, "b (g h) t s -> b g h t s", g=groups).mean(2)
