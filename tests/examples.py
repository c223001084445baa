"""Small random models of every architecture, and what is often done to the terms of their layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

import ssmscope.models
from ssmscope import ssm

EXAMPLES = {
    name: (architecture, index)
    for architecture in ssmscope.models.architectures().values()
    for index, name in enumerate(architecture.examples())
}
TEXTS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9], [90, 1, 2, 3, 4, 5]]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def log_decay(r: ssm.Recurrence) -> torch.Tensor:
    return r.log_a if r.log_a is not None else r.log_decay()


def decayed(r: ssm.Recurrence, change: Callable[[torch.Tensor], torch.Tensor]) -> ssm.Recurrence:
    return replace(r, A=None, log_a=change(log_decay(r)), expected=False)
