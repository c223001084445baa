"""Functions that a training step may run compiled: many short operations on large tensors, which a GPU then fuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


@contextmanager
def compiling() -> Iterator[None]:
    """Run functions marked `compilable` compiled where gradients are enabled, in this thread alone."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


def compilable(function: F) -> F:
    """Mark a pure function of tensors that is compiled within `compiling`."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _compiling.get() and torch.is_grad_enabled():
            return compiled(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
