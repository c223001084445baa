"""Inputs of attention matrices: a recurrence's terms, and the gate and taps around it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssmscope.ops.exponents import smallest_exponent
from ssmscope.ops.recurrence import DeltaRecurrence, Recurrence, by_head


class GateAndTaps(NamedTuple):
    """Gate and taps around a recurrence: y_t = left_t ⊙ (α + D)(Σ_i taps_{t−i, i} ⊙ x_{t−i}).

    `left` is (batch, length, heads, width); `taps` (batch, length, reach, heads, width) has the factors of the input at
    s when it arrives at step s + i. None stands for no factor.
    """

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
        left = None if self.left is None else self.left[:, :, start:stop]
        return GateAndTaps(left, None if self.taps is None else self.taps[:, :, :, start:stop])

    def of_rows(self, start: int, stop: int) -> GateAndTaps:
        left = None if self.left is None else self.left[start:stop]
        return GateAndTaps(left, None if self.taps is None else self.taps[start:stop])

    def of_width(self, place: int) -> GateAndTaps:
        """Return the gate and taps of one channel of every head."""
        left = None if self.left is None else self.left[..., place : place + 1]
        return GateAndTaps(left, None if self.taps is None else self.taps[..., place : place + 1])


def decays(r: Recurrence) -> Tensor:
    """Return a_t, (batch, length, heads, state) or (…, 1), clamped from below to the smallest that is fast."""
    log_a = r.log_decay()
    return log_a.clamp(min=smallest_exponent(log_a.dtype)).exp()


def shared_by_heads(t: Tensor, heads: int) -> Tensor:
    """Return `b` or `c` (batch, length, groups, state) for every head; one group broadcasts as it is."""
    return t if t.shape[2] == 1 else by_head(t, heads)


def is_diagonal(r: Recurrence) -> bool:
    """Return True where the states decay one by one."""
    return not isinstance(r, DeltaRecurrence)


def segments(r: Recurrence, start: int, stop: int) -> list[tuple[int, int]]:
    """Return the heads start ≤ h < stop as ranges of heads that read the same group of b and c."""
    share = r.shape[2] // r.b.shape[2]
    cuts = [start, *range((start // share + 1) * share, stop, share), stop]
    return list(zip(cuts[:-1], cuts[1:]))


def skips(r: Recurrence) -> Tensor | None:
    """Return D as (heads, width) or (heads, 1)."""
    return None if r.D is None else r.D if r.D.ndim == 2 else r.D.unsqueeze(-1)


def needs_gradients(r: Recurrence, around: GateAndTaps) -> bool:
    """Return True if gradients are enabled and some term asks for one."""
    tensors = (r.b, r.c, r.D, r.step, *around, getattr(r, "A", None), getattr(r, "log_a", None))
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def diagonals(r: Recurrence, around: GateAndTaps) -> list[Tensor]:
    """Return D's contributions at distances 0 … reach − 1 from the diagonal, (batch, length − distance, heads) each, as
    the mean over the width of heads."""
    D = skips(r)
    assert D is not None
    batch, length, heads, _, _ = r.shape
    found = []
    for i in range(around.reach):
        each = D.expand(batch, length - i, heads, -1)
        if around.left is not None:
            each = each * around.left[:, i:]
        if around.taps is not None:
            each = each * around.taps[:, : length - i, i]
        found.append(each.mean(-1))
    return found


def gate_and_taps(x: Tensor, groups: int, left: Tensor | None, taps: Tensor | None) -> GateAndTaps:
    """Return `left` and `taps` of a recurrence with the input `x` (batch, length, heads, width), whose heads go in
    `groups`. Raises ValueError if the groups do not divide the heads, or a shape does not fit."""
    batch, length, heads, width = x.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups do not divide {heads} heads")
    for name, given, leading in (("left", left, (batch, length, heads)), ("taps", taps, (batch, length, heads))):
        if given is None:
            continue
        shape = given.shape if name == "left" else (*given.shape[:2], *given.shape[3:])
        if tuple(shape[:3]) != leading or shape[3] not in (1, width):
            raise ValueError(f"{name} {tuple(given.shape)} does not fit x {tuple(x.shape)}")
    left, taps = (None if t is None else t.expand(*t.shape[:-1], width) for t in (left, taps))
    return GateAndTaps(left, taps)
