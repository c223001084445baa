"""States of layers as rows: chosen, joined and measured, whatever an architecture keeps in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssmscope.core.trace import LayerState

T = TypeVar("T")
States = tuple[LayerState, ...]
"""States of all layers, from which a run continues; each tensor's first dimension is the batch."""


def gathered(states: States, rows: Tensor) -> States:
    """Return the states of these rows, one or several times each."""
    return mapped(states, lambda t: t.index_select(0, rows.to(t.device)))


def joined(parts: Sequence[States]) -> States:
    """Return the states of several batches as those of one; shorter kept keys are padded."""
    if len(parts) == 1:
        return parts[0]
    columns = iter(list(zip(*map(tensors, parts))))
    return mapped(parts[0], lambda _: _stacked(next(columns))) if parts else ()


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    longest = max((t.shape[1] for t in rows if t.ndim > 1), default=0)
    return torch.cat([t if t.ndim == 1 else pad(t, (0, 0) * (t.ndim - 2) + (0, longest - t.shape[1])) for t in rows])


def alone(state: LayerState) -> LayerState:
    """Return a state whose tensors are no parts of larger ones, which it would keep in memory."""
    return mapped(state, lambda t: t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t)


def size(states: States) -> int:
    """Return the size of states in bytes."""
    return sum(t.numel() * t.element_size() for t in tensors(states))


def mapped(record: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return a state, or any part of it, with every tensor changed."""
    if isinstance(record, Tensor):
        return change(record)  # type: ignore[return-value]
    if isinstance(record, tuple):
        return tuple(mapped(each, change) for each in record)  # type: ignore[return-value]
    if is_dataclass(record) and not isinstance(record, type):
        return replace(record, **{each.name: mapped(getattr(record, each.name), change) for each in fields(record)})
    return record


def tensors(states: States) -> list[Tensor]:
    """Return all tensors in states."""
    found: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        found.append(t)
        return t

    mapped(states, keep)
    return found
