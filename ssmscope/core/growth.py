"""Largest possible growth of a state in a step, where a family's gates bound it whatever the input."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from ssmscope import ops


class GrowthLimit(NamedTuple):
    """Largest log-gain of a step of each head, and its reason in words."""

    possible: Float[Tensor, " heads"]
    reason: str
    mixes: bool = False
    """True if the transition is a matrix, a delta rule's."""
    bare: Float[Tensor, " channels"] | None = None
    """Decays of an RWKV's numerator and denominator on their own."""


def gates_at_most_one(recurrence: ops.Recurrence, bare: Tensor | None = None) -> GrowthLimit:
    """Return the limit of transitions that are at most 1 by construction."""
    none = torch.zeros(recurrence.shape[2], dtype=torch.float64, device=recurrence.x.device)
    return GrowthLimit(none, "gates are at most 1", isinstance(recurrence, ops.DeltaRecurrence), bare)
