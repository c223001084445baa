"""Modules' forward passes taken over or watched by one run; other threads that use the same modules notice nothing.

A model in memory is shared: by threads, by a training loop, by libraries that have put a forward pass of their own on
its modules. What a run changes is therefore kept in its own context (`contextvars`, so per thread and per task), and
all that stands on a module meanwhile is a `Switch`, which asks whether the caller is such a run and else passes the
call on to whatever stood there before.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

import torch
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
    """Stands as a module's forward pass while a run anywhere has taken it over; see `override_forward`."""

    _torchdynamo_disable = True  # a compiled caller asks anew at every call

    def __init__(self, module: nn.Module, below: Callable[..., Any]) -> None:
        self.module, self.below = module, below
        self.run = _uncompiled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taken = _taken.get().get(id(self.module))
        if taken is None or taken.module is not self.module:
            return self.below(*args, **kwargs)
        return self.run(taken.handler, self.below, *args, **kwargs)


def _call(handler: Handler, *args: Any, **kwargs: Any) -> Any:
    return handler(*args, **kwargs)


@cache
def _uncompiled() -> Callable[..., Any]:
    """`_call` of a compiled caller: what a handler calls is not compiled, so that it asks anew at every call too."""
    return torch.compiler.disable(_call)


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
def override_forward(handlers: Iterable[tuple[nn.Module, Handler]], *, kept: bool = False) -> Iterator[None]:
    """Within the context, and in this thread alone, modules run through their handlers instead of their forward passes.

    The innermost context that names a module decides. On leaving, and after an error, what stood on the modules
    stands there again.

    Args:
        handlers: modules with the `Handler` of each.
        kept: whether contexts within that ask `is_kept` leave these modules alone.
    """
    chosen = list(handlers)
    new = {id(module): _Taken(module, handler, kept) for module, handler in chosen}
    installed: list[nn.Module] = []
    try:
        for module, _ in chosen:
            _install(module)
            installed.append(module)
        token = _taken.set(MappingProxyType({**_taken.get(), **new}))
        try:
            yield
        finally:
            _taken.reset(token)
    finally:
        for module in reversed(installed):
            _remove(module)


def active_override(module: nn.Module) -> Handler | None:
    """By what the innermost context around this one has taken the module over; None where none has."""
    taken = _taken.get().get(id(module))
    return taken.handler if taken is not None and taken.module is module else None


def is_kept(module: nn.Module) -> bool:
    """Whether a context around this one has taken the module over and wants to keep it."""
    taken = _taken.get().get(id(module))
    return taken is not None and taken.module is module and taken.kept


def is_own(module: nn.Module, below: Any) -> bool:
    """Whether a forward pass is that of the module's class, not one that somebody has put on the module."""
    while isinstance(below, Switch):
        below = below.below
    own = getattr(type(module), "forward", None)
    return isinstance(below, MethodType) and below.__self__ is module and below.__func__ is own


def unmoved(module: nn.Module) -> Any:
    """A module's forward pass, without the hook of accelerate's that sends its input to where its weights are."""
    hooks = sys.modules.get("accelerate.hooks")  # not imported for this: where it is not, there is none of its hooks
    hook = vars(module).get("_hf_hook")
    moves = hooks is not None and type(hook) is hooks.AlignDevicesHook and not hook.offload
    return vars(module).get("_old_forward", module.forward) if moves else module.forward


def stayed(module: nn.Module) -> nn.Module:
    """The module itself, after its hooks of accelerate's, if it has any, are taken off for good."""
    hooks = sys.modules.get("accelerate.hooks")
    return module if hooks is None else hooks.remove_hook_from_module(module, recurse=True)


@dataclass(frozen=True)
class _Entering:
    run: object
    show: Before

    def __call__(self, module: nn.Module, args: Any = (), kwargs: Any = None) -> Any:
        return self.show(module, args, kwargs) if self.run in _watching.get() else None


@dataclass(frozen=True)
class _Leaving:
    run: object
    show: After

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.show(module, output) if self.run in _watching.get() else None


@dataclass(frozen=True)
class _Hook:
    """Somebody else's hook, which a run may leave out; see `unhooked`."""

    module: nn.Module
    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if id(self.module) in _unhooked.get() else self.hook(*args, **kwargs)


_unhooked: ContextVar[frozenset[int]] = ContextVar("unhooked", default=frozenset())
_hooked: dict[int, int] = {}
"""How many runs leave out a module's hooks."""


def _hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks


def _others(hooks: dict[int, Any]) -> dict[int, Any]:
    """Those that are not of a run."""
    return {
        number: hook.hook if isinstance(hook, _Hook) else hook
        for number, hook in list(hooks.items())
        if not isinstance(hook, _Entering | _Leaving)
    }


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward pass that are not those of a run (`observe`)."""
    return any(map(_others, _hooks(module)))


def is_changed(module: nn.Module) -> bool:
    """Return True if a module has hooks of its forward pass, or another forward pass than its class's."""
    return has_hooks(module) or not is_own(module, unmoved(module))


def has_backward_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks of its backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


@contextmanager
def unhooked(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context, and in this thread alone, other people's hooks of these modules do not run."""
    chosen = [module for module in modules if has_hooks(module)]
    with ExitStack() as stack:
        for module in chosen:
            with _lock:
                _hooked[id(module)] = _hooked.get(id(module), 0) + 1
                for hooks in _hooks(module):
                    hooks.update({number: _Hook(module, hook) for number, hook in _others(hooks).items()})
            stack.callback(_hook_again, module)
        token = _unhooked.set(_unhooked.get() | {id(module) for module in chosen})
        stack.callback(_unhooked.reset, token)
        yield


def _hook_again(module: nn.Module) -> None:
    with _lock:
        _hooked[id(module)] -= 1
        if not _hooked[id(module)]:
            del _hooked[id(module)]
            for hooks in _hooks(module):
                hooks.update({number: hook.hook for number, hook in hooks.items() if isinstance(hook, _Hook)})


def twin(module: nn.Module) -> nn.Module:
    """A module that computes what this one does, with its weights, parts, forward pass and hooks, whatever runs have
    put on this one."""
    found = object.__new__(type(module))
    before, after = (OrderedDict(_others(hooks)) for hooks in _hooks(module))
    vars(found).update(vars(module), _forward_pre_hooks=before, _forward_hooks=after)
    for name in ("forward", "_old_forward"):  # the latter where accelerate has put the former there
        forward = vars(found).pop(name, None)
        while isinstance(forward, Switch):
            forward = forward.below
        if isinstance(forward, partial) and forward.args[:1] == (module,):
            forward = partial(forward.func, found, *forward.args[1:], **forward.keywords)
        elif isinstance(forward, MethodType) and forward.__self__ is module and name != "forward":
            forward = MethodType(forward.__func__, found)
        if forward is not None and (name != "forward" or not is_own(module, forward)):
            vars(found)[name] = forward
    return found


@contextmanager
def observe(
    before: Iterable[tuple[nn.Module, Before]] = (), after: Iterable[tuple[nn.Module, After]] = ()
) -> Iterator[None]:
    """Within the context, and in this thread alone, functions are called as modules begin to run and have run."""
    run = object()

    with ExitStack() as stack:
        for module, first in before:
            stack.callback(module.register_forward_pre_hook(_Entering(run, first), with_kwargs=True).remove)
        for module, last in after:
            stack.callback(module.register_forward_hook(_Leaving(run, last)).remove)
        token = _watching.set(_watching.get() | {run})
        stack.callback(_watching.reset, token)
        yield


@contextmanager
def out_of_inference() -> Iterator[None]:
    """Within the context a caller's `torch.inference_mode` is `torch.no_grad`: gradients can be asked for again, and
    tensors that are made can be in them."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclass(slots=True)
class _Lease:
    """A part of a model that runs need in evaluation."""

    part: nn.Module
    runs: int = 0
    was_training: bool = False


_leases: dict[int, _Lease] = {}


DYNAMIC = "torch.ao.nn.quantized.dynamic"


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within the context the module is in evaluation; when the last of the contexts that need a part of it ends, in
    whichever thread, that part is in the mode that it was in before."""
    parts = list(module.modules())
    with _lock:
        for part in parts:
            lease = _leases.get(id(part))
            if lease is None:
                lease = _leases[id(part)] = _Lease(part)
            if part.training:
                part.training = False
                lease.was_training = True
            lease.runs += 1
    try:
        yield
    finally:
        with _lock:
            for part in parts:
                lease = _leases[id(part)]
                lease.runs -= 1
                if not lease.runs:
                    del _leases[id(part)]
                    if lease.was_training:
                        part.training = True


def check_plain(module: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Refuse a model of which parts were compiled in place, or round what they read by its largest number.

    What is compiled does not ask who runs it. What torch's dynamic quantisation makes of a text depends on the texts
    beside it.

    Args:
        parts: all of the model's.

    Raises:
        InputError: naming the part.
    """
    for part in parts:
        compiled = getattr(part, "_compiled_call_impl", None) is not None
        if not compiled and not type(part).__module__.startswith(DYNAMIC):
            continue
        path = next(path for path, each in module.named_modules() if each is part)
        if compiled:
            raise InputError(
                f"{type(module).__name__}: {path or 'the model'} was compiled in place with .compile(), and what runs "
                "in it cannot be read; analyse the model before it is compiled, or a copy that is not"
            )
        raise InputError(
            f"{type(module).__name__}: {path} is a {type(part).__name__} of {type(part).__module__}, which rounds what "
            "it reads by the largest number of a batch: no text's numbers are its own; analyse the model before that"
        )
