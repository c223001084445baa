"""Modules' forward passes taken over or watched by one run; other threads that use the same modules notice nothing.

A model in memory is shared: by threads, by a training loop, by libraries that have put a forward pass of their own on
its modules. What a run changes is therefore kept in its own context (`contextvars`, so per thread and per task), and
all that stands on a module meanwhile is a `Switch`, which asks whether the caller is such a run and else passes the
call on to whatever stood there before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

from torch import nn

from ssmscope.errors import InputError

Handler = Callable[..., Any]
"""Called with the forward pass that stood there before, then with the call's own arguments; what it returns is returned
to the caller."""
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the module and its arguments; may return others, as (args, kwargs)."""
After = Callable[[nn.Module, Any], Any]
"""Called with the module and its output."""


class _Taken(NamedTuple):
    module: nn.Module
    handler: Handler
    kept: bool


_lock = threading.RLock()
_taken: ContextVar[Mapping[int, _Taken]] = ContextVar("taken", default=MappingProxyType({}))
_watching: ContextVar[frozenset[object]] = ContextVar("watching", default=frozenset())


class Switch:
    """Stands as a module's forward pass while a run anywhere has taken it over; see `taken_over`."""

    _torchdynamo_disable = True  # a compiled caller asks anew at every call

    def __init__(self, module: nn.Module, below: Callable[..., Any]) -> None:
        self.module, self.below = module, below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taken = _taken.get().get(id(self.module))
        if taken is None or taken.module is not self.module:
            return self.below(*args, **kwargs)
        return taken.handler(self.below, *args, **kwargs)


@dataclass
class _Installed:
    module: nn.Module
    name: str
    switch: Switch
    below: Any
    """What stood in the module's own attributes; None for its class's method."""
    runs: int = 0


_installed: dict[int, _Installed] = {}


def _install(module: nn.Module) -> None:
    with _lock:
        found = _installed.get(id(module))
        if found is None:
            # accelerate's hooks run the forward pass that they found, and keep it under this name
            name = "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"
            switch = Switch(module, getattr(module, name))
            found = _installed[id(module)] = _Installed(module, name, switch, module.__dict__.get(name))
            module.__dict__[name] = switch
        found.runs += 1


def _remove(module: nn.Module) -> None:
    with _lock:
        found = _installed[id(module)]
        found.runs -= 1
        if found.runs:
            return
        del _installed[id(module)]
        if module.__dict__.get(found.name) is not found.switch:
            return  # somebody has put another one over it, through which calls still pass
        if found.below is None:
            del module.__dict__[found.name]
        else:
            module.__dict__[found.name] = found.below


@contextmanager
def taken_over(handlers: Iterable[tuple[nn.Module, Handler]], *, kept: bool = False) -> Iterator[None]:
    """Within the context, and in this thread alone, modules run through their handlers instead of their forward passes.

    The innermost context that names a module decides. On leaving, and after an error, what stood on the modules
    stands there again.

    Args:
        handlers: modules with the `Handler` of each.
        kept: whether contexts within that ask `is_kept` leave these modules alone.
    """
    chosen = list(handlers)
    with ExitStack() as stack:
        for module, _ in chosen:
            _install(module)
            stack.callback(_remove, module)
        new = {id(module): _Taken(module, handler, kept) for module, handler in chosen}
        token = _taken.set(MappingProxyType({**_taken.get(), **new}))
        stack.callback(_taken.reset, token)
        yield


def is_kept(module: nn.Module) -> bool:
    """Whether a context around this one has taken the module over and wants to keep it."""
    taken = _taken.get().get(id(module))
    return taken is not None and taken.module is module and taken.kept


def is_own(module: nn.Module, below: Callable[..., Any]) -> bool:
    """Whether a forward pass is that of the module's class, not one that somebody has put on the module."""
    own = getattr(type(module), "forward", None)
    return isinstance(below, MethodType) and below.__self__ is module and below.__func__ is own


@contextmanager
def watched(
    before: Iterable[tuple[nn.Module, Before]] = (), after: Iterable[tuple[nn.Module, After]] = ()
) -> Iterator[None]:
    """Within the context, and in this thread alone, functions are called as modules begin to run and have run."""
    run = object()

    def entering(show: Before) -> Callable[..., Any]:
        return lambda module, args=(), kwargs=None: show(module, args, kwargs) if run in _watching.get() else None

    def leaving(show: After) -> Callable[..., Any]:
        return lambda module, args, output: show(module, output) if run in _watching.get() else None

    with ExitStack() as stack:
        for module, first in before:
            stack.callback(module.register_forward_pre_hook(entering(first), with_kwargs=True).remove)
        for module, last in after:
            stack.callback(module.register_forward_hook(leaving(last)).remove)
        token = _watching.set(_watching.get() | {run})
        stack.callback(_watching.reset, token)
        yield


class _Lease:
    """How many runs need a module in evaluation, and which of its parts were in training before."""

    def __init__(self) -> None:
        self.runs = 0
        self.training: list[nn.Module] = []


_leases: weakref.WeakKeyDictionary[nn.Module, _Lease] = weakref.WeakKeyDictionary()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within the context the module is in evaluation; when the last of such contexts ends, in whichever thread, its
    parts are in the modes that they were in before."""
    with _lock:
        lease = _leases.setdefault(module, _Lease())
        training = [part for part in module.modules() if part.training]
        for part in training:
            part.training = False
        lease.training += training
        lease.runs += 1
    try:
        yield
    finally:
        with _lock:
            lease.runs -= 1
            if not lease.runs:
                for part in lease.training:
                    part.training = True
                lease.training = []


def check_plain(module: nn.Module, name: str) -> None:
    """Refuse a model of which parts were compiled in place: what is compiled does not ask who runs it.

    Raises:
        InputError: naming the part.
    """
    for path, part in module.named_modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            raise InputError(
                f"{name}: {path or 'the model'} was compiled in place with .compile(), and what runs in it cannot be "
                "read; analyse the model before it is compiled, or a copy that is not"
            )
