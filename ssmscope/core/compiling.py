"""Elementwise parts of a model's layers, fused by torch.compile in training.

Only norms and causal convolutions with their activation are compiled, each by itself. A model compiled as a whole has
had the right loss and wrong gradients, so whoever compiles compares gradients with those of plain torch first, as
`ssmscope.training.fitting` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch import nn

from ssmscope.core.intercept import is_own, override_forward

F = TypeVar("F", bound=Callable[..., Any])

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


@contextmanager
def compiled_parts(module: nn.Module) -> Iterator[None]:
    """Run a model's norms and the functions marked `compilable` compiled where gradients are enabled, within the
    context and in this thread alone; the first call of each takes seconds."""
    norms = [part for part in module.modules() if type(part).__name__.endswith(("RMSNorm", "RMSNormGated"))]
    token = _compiling.set(True)
    try:
        with override_forward([(norm, partial(_normed, norm)) for norm in norms]):
            yield
    finally:
        _compiling.reset(token)


def compilable(function: F) -> F:
    """Mark a pure function of tensors that `compiled_parts` compiles."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _compiling.get() and torch.is_grad_enabled():
            return _compiled(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def _normed(norm: nn.Module, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(norm)
    if is_own(norm, below) and torch.is_grad_enabled():
        return _compiled(kind.forward)(norm, *args, **kwargs)
    return below(*args, **kwargs)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
