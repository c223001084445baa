"""Complex recurrences as real ones, whose states turn with them.

    h_t = a_t h_{t−1} + b_t x_t,    y_t = c_t h_t,    a_t = |a_t| exp(iθ_t)

is, with φ_t = θ_1 + … + θ_t and g_t = exp(−iφ_t) h_t,

    g_t = |a_t| g_{t−1} + exp(−iφ_t) b_t x_t,    y_t = exp(iφ_t) c_t g_t.

Real x has its real part of y, from states that hold both parts of g; complex x, of one state a head, has all of y.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from ssmscope.errors import InputError
from ssmscope.ops import Recurrence


def is_complex(recurrence: Recurrence) -> bool:
    """Return True if a recurrence has complex terms."""
    given = recurrence.x, recurrence.b, recurrence.c, recurrence.log_a, recurrence.A
    return any(t.is_complex() for t in given if t is not None)


def as_real(recurrence: Recurrence, before: Tensor | None) -> tuple[Recurrence, Tensor, Tensor | None]:
    """Return a complex recurrence as a real one; the angles φ (batch, length, heads, states), which go on from those
    `before` (batch, heads, states); and what complex x has its outputs multiplied by, (batch, length, heads, 1)."""
    x, heads = recurrence.x, recurrence.x.shape[2]
    b, c = (t.repeat_interleave(heads // t.shape[2], 2) for t in (recurrence.b, recurrence.c))
    log_a = recurrence.log_a
    if log_a is None:
        assert recurrence.delta is not None and recurrence.A is not None
        delta = recurrence.delta.unsqueeze(-1)
        b, log_a = b * delta, delta * recurrence.A
    if recurrence.expected or x.is_complex() and (b.shape[-1] > 1 or recurrence.D is not None):
        raise InputError(
            "a complex recurrence is given by its decay; where x is complex too, each head has one state and no D: "
            "give several states as heads, and add D x in output"
        )
    phi = _angles(log_a, recurrence.order, before)
    turn = torch.polar(torch.ones_like(log_a.real), phi.to(log_a.real))
    written, read = b * turn.conj(), c * turn
    rate = log_a.real.expand(*b.shape[:3], -1) if log_a.is_complex() else log_a
    again: dict[str, Any] = {"delta": None, "A": None}
    if x.is_complex():
        one = torch.ones_like(rate[..., :1])
        values = torch.view_as_real((x * written).resolve_conj()).flatten(-2)
        return replace(recurrence, x=values, b=one, c=one, log_a=rate, **again), phi, read
    both, signed = torch.cat([written.real, written.imag], -1), torch.cat([read.real, -read.imag], -1)
    rate = rate.repeat(1, 1, 1, 2) if rate.shape[-1] > 1 else rate
    return replace(recurrence, b=both, c=signed, log_a=rate, **again), phi, None


def _angles(log_a: Tensor, order: Tensor | None, before: Tensor | None) -> Tensor:
    """Return φ, in float64 as they add up over positions."""
    theta = (log_a.imag if log_a.is_complex() else torch.zeros_like(log_a)).double()
    if order is None:
        phi = theta.cumsum(1)
    else:
        phi = torch.empty_like(theta).index_copy(1, order, theta[:, order].cumsum(1))
    return (phi if before is None else phi + before.unsqueeze(1)).remainder(2 * math.pi)


def complex_output(y: Tensor, read: Tensor) -> Tensor:
    """Return y (batch, length, heads, width) of complex x from that of `as_real`, its parts side by side."""
    return torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * read.to(torch.complex(y, y).dtype)
