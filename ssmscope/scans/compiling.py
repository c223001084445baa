"""Parts of the scans that torch.compile may fuse while a model is trained.

Only whole, pure functions of tensors are compiled, one by one. A model compiled as a whole is faster still, but torch
2.11 then gave Mamba and Mamba-2 gradients that were wrong several hundred times over on an H200, with the right loss:
whoever compiles checks gradients against those of plain torch first (`ssmscope.training.fitting`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_compiling = False


@contextmanager
def compiled_pieces() -> Iterator[None]:
    """Within the context functions marked as a `piece` run compiled; the first call of each takes seconds."""
    global _compiling
    before, _compiling = _compiling, True
    try:
        yield
    finally:
        _compiling = before


def compiling() -> bool:
    """Whether pieces run compiled now."""
    return _compiling and torch.is_grad_enabled()


def piece(function: F) -> F:
    """Marks a pure function of tensors of settled shapes that may be compiled."""
    made: list[Callable[..., Any]] = []

    @wraps(function)
    def run(*args: Any) -> Any:
        if not compiling():
            return function(*args)
        if not made:
            made.append(torch.compile(function, dynamic=False))
        return made[0](*args)

    return run  # type: ignore[return-value]
