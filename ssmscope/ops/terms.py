"""Inputs of attention matrices: a recurrence's terms, the gate and taps around it, and their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence, smallest_exponent
from ssmscope.outline import outlined


@outlined
class GateAndTaps(NamedTuple):
    """Gate and taps around a recurrence: y_t = left_t ⊙ (α + D)(Σ_i taps_{t−i, i} ⊙ x_{t−i}), with `left` (batch,
    length, heads, width) and `taps` (batch, length, reach, heads, width), of inputs at s as they arrive at s + i."""

    left: Tensor | None = None
    taps: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """True without gate and taps."""
        return self.left is None and self.taps is None

    @property
    def reach(self) -> int:
        """Number of steps over which the taps spread an input."""
        return 1 if self.taps is None else self.taps.shape[2]

    def of_heads(self, start: int, stop: int) -> GateAndTaps:
        return GateAndTaps(*(None if t is None else t[..., start:stop, :] for t in self))

    def of_rows(self, start: int, stop: int) -> GateAndTaps:
        return GateAndTaps(*(None if t is None else t[start:stop] for t in self))

    def of_width(self, place: int) -> GateAndTaps:
        """Return the gate and taps of one channel of every head."""
        return GateAndTaps(*(None if t is None else t[..., place : place + 1] for t in self))

    def columns(self) -> GateAndTaps:
        """Return gate and taps with the width at which their products are summed: 1 where one of them is absent."""
        both = self.left is not None and self.taps is not None
        return self if both else GateAndTaps(*(None if t is None else t.mean(-1, keepdim=True) for t in self))


def mean_over_heads(
    r: Recurrence,
    around: GateAndTaps,
    groups: int,
    compute: Callable[[Recurrence, GateAndTaps, slice], Tensor],
    *,
    at_once: int | None = None,
    by_row: bool = False,
    shared: bool = False,
) -> Tensor:
    """Return the mean over each group's heads, (batch, groups, …), of what `compute` sums over some of them.

    Args:
        compute: function from some heads' terms, their gate and taps, and their numbers, to the sum over these heads.
        at_once: heads that are computed together; by default a group's.
        by_row: sequences are computed one by one.
        shared: heads that are computed together read one group of b and c.
    """
    batch, each = r.shape[0], r.shape[2] // groups
    rows = [(row, row + 1) for row in range(batch)] if by_row else [(0, batch)]
    found = []
    for row in rows:
        of_row, near = r.of_rows(*row), around.of_rows(*row)
        for start in range(0, r.shape[2], each):
            heads = [*_parts(r, start, start + each, at_once or each, shared)]
            total = compute(of_row.of_heads(*heads[0]), near.of_heads(*heads[0]), slice(*heads[0]))
            for part in heads[1:]:
                total = total + compute(of_row.of_heads(*part), near.of_heads(*part), slice(*part))
            found.append(total / each)
    return torch.cat(found).unflatten(0, (batch, groups)) if by_row else torch.stack(found, dim=1)


def _parts(r: Recurrence, start: int, stop: int, at_once: int, shared: bool) -> Iterator[tuple[int, int]]:
    """Yield ranges of the heads start ≤ h < stop, each, if `shared`, of heads that read one group of b and c."""
    share = r.shape[2] // r.b.shape[2] if shared else stop
    cuts = [start, *range((start // share + 1) * share, stop, share), stop]
    for begin, end in zip(cuts[:-1], cuts[1:]):
        yield from ((first, min(first + at_once, end)) for first in range(begin, end, at_once))


def decays(r: Recurrence) -> Tensor:
    """Return a_t, (batch, length, heads, state) or (…, 1), clamped from below to the smallest that is fast."""
    log_a = r.log_decay()
    return log_a.clamp(min=smallest_exponent(log_a.dtype)).exp()


def shares_scores(r: Recurrence, around: GateAndTaps) -> bool:
    """Return True if a head's decay is one number, and products with the heads' shared scores c_t · b_s are cheaper."""
    _, _, heads, width, state = r.shape
    if isinstance(r, DeltaRecurrence) or not r.one_decay_per_head:
        return False
    share = heads // r.b.shape[2]
    return not (width == 1 or around.is_empty) or share * state > state + share * around.reach


def skips(r: Recurrence) -> Tensor | None:
    """Return D as (heads, width) or (heads, 1)."""
    return None if r.D is None else r.D if r.D.ndim == 2 else r.D.unsqueeze(-1)


def needs_gradients(r: Recurrence, around: GateAndTaps) -> bool:
    """Return True if gradients are enabled and some term asks for one."""
    tensors = (r.b, r.c, r.D, r.step, *around, getattr(r, "A", None), getattr(r, "log_a", None))
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def diagonals(r: Recurrence, around: GateAndTaps) -> list[Tensor]:
    """Return D's contributions at each distance from the diagonal, (batch, length − distance, heads); [] without D."""
    D, (batch, length, heads, _, _) = skips(r), r.shape
    found = []
    if D is None:
        return []
    for i in range(around.reach):
        each = D.expand(batch, length - i, heads, -1)
        each = each if around.left is None else each * around.left[:, i:]
        each = each if around.taps is None else each * around.taps[:, : length - i, i]
        found.append(each.mean(-1))
    return found


def gate_and_taps(x: Tensor, groups: int, left: Tensor | None, taps: Tensor | None) -> GateAndTaps:
    """Return `left` and `taps` of a recurrence with the input `x` (batch, length, heads, width), whose heads go in
    `groups`. Raises ValueError if the groups do not divide the heads, or a shape does not fit."""
    batch, length, heads, width = x.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups do not divide {heads} heads")
    for name, given in (("left", left), ("taps", None if taps is None else taps[:, :, 0])):
        if given is not None and (tuple(given.shape[:3]) != (batch, length, heads) or given.shape[3] not in (1, width)):
            raise ValueError(f"{name} {tuple(given.shape)} does not fit x {tuple(x.shape)}")
    return GateAndTaps(*(None if t is None else t.expand(*t.shape[:-1], width) for t in (left, taps)))
