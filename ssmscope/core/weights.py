"""Weights of a model as runs need them: as constants of a backward pass, and what is computed from them once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.functional import linear
from ssmscope.core.intercept import is_own, override_forward

R = TypeVar("R")


@contextmanager
def weights_constant(module: nn.Module) -> Iterator[None]:
    """Treat the weights of linear layers and mixers as constants, in this thread alone, so that backward passes keep
    less."""
    parts = [(part, partial(run_linear, part)) for part in module.modules() if type(part) is nn.Linear]
    token = _weights_constant.set(True)
    try:
        with override_forward(parts):
            yield
    finally:
        _weights_constant.reset(token)


_weights_constant: ContextVar[bool] = ContextVar("constant", default=False)


def are_constant() -> bool:
    """Return True within `weights_constant`."""
    return _weights_constant.get()


def as_constant(weight: Tensor) -> Tensor:
    """Return a weight, detached within `weights_constant`."""
    return weight.detach() if _weights_constant.get() else weight


@contextmanager
def weights_prepared() -> Iterator[dict[tuple[Any, ...], Any]]:
    """Compute what is `prepared` from mixers' weights once, within the context and in this thread alone; mixers must
    stay as they are. The context's value holds what was computed, by (compute, mixer, *args)."""
    found: dict[tuple[Any, ...], Any] = {}
    token = _prepared.set(found)
    try:
        yield found
    finally:
        _prepared.reset(token)


_prepared: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("prepared", default=None)


def prepared(mixer: nn.Module, compute: Callable[..., R], *args: Any) -> R:
    """Return compute(mixer, *args), which depends on the mixer's weights alone; as it was found before within
    `weights_prepared`."""
    found, key = _prepared.get(), (compute, mixer, *args)
    if found is None:
        return compute(mixer, *args)
    if key not in found:
        found[key] = compute(mixer, *args)
    return found[key]


def run_linear(part: nn.Linear, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Return a linear layer's output, with its weights `as_constant` if `below` is its own forward pass."""
    if not is_own(part, below) or len(args) != 1:
        return below(*args, **kwargs)
    return linear(args[0], as_constant(part.weight), None if part.bias is None else as_constant(part.bias))
