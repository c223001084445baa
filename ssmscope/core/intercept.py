"""Forward passes of modules, overridden or observed by one run; other threads that use the same modules are unaffected.

A model in memory is shared: by threads, by a training loop, by libraries that have put a forward pass of their own on
its modules. A run's changes are therefore kept in its own context (`contextvars`, so per thread and per task), and a
module only has a `Switch`, which passes the calls of other runs on to its earlier forward pass.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, OrderedDict
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
"""Function called with the earlier forward pass and then the call's own arguments; its result is returned to the
caller."""
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Function called with the module and its arguments; it may return others, as (args, kwargs)."""
After = Callable[[nn.Module, Any], Any]
"""Function called with the module and its output."""


class _Override(NamedTuple):
    module: nn.Module
    """Overridden module, held so that its id stays its own."""
    handler: Handler
    kept: bool


_lock = threading.RLock()
_overrides: ContextVar[Mapping[int, _Override]] = ContextVar("override", default=MappingProxyType({}))
_observing: ContextVar[frozenset[object]] = ContextVar("watching", default=frozenset())


class Switch:
    """Forward pass of a module while any run overrides it; see `override_forward`."""

    _torchdynamo_disable = True  # A compiled caller asks anew at every call.

    def __init__(self, module: nn.Module, below: Callable[..., Any]) -> None:
        self.module, self.below = module, below
        self.run = _uncompiled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = active_override(self.module)
        return self.below(*args, **kwargs) if handler is None else self.run(handler, self.below, *args, **kwargs)


def _call(handler: Handler, *args: Any, **kwargs: Any) -> Any:
    return handler(*args, **kwargs)


@cache
def _uncompiled() -> Callable[..., Any]:
    """Return `_call`, which looks up its handler at every call, excluded from compilation with all that it calls."""
    return torch.compiler.disable(_call)


@dataclass
class _Installed:
    module: nn.Module
    name: str
    switch: Switch
    below: Any
    """Earlier forward pass among the module's own attributes; None for its class's method."""
    runs: int = 0


_installed: dict[int, _Installed] = {}


def _install(module: nn.Module) -> None:
    with _lock:
        found = _installed.get(id(module))
        if found is None:
            # accelerate's hooks keep the forward pass that they found under this name, and run it.
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
            return  # Another forward pass was put over it, which still calls it.
        if found.below is None:
            del module.__dict__[found.name]
        else:
            module.__dict__[found.name] = found.below


@contextmanager
def override_forward(handlers: Iterable[tuple[nn.Module, Handler]], *, kept: bool = False) -> Iterator[None]:
    """Run modules through their handlers instead of their forward passes within the context, in this thread alone.

    The innermost context that names a module decides, but callers that check `is_kept` leave modules overridden with
    `kept` alone. On leaving, and after an error, the modules have their earlier forward passes again.
    """
    chosen = list(handlers)
    new = {id(module): _Override(module, handler, kept) for module, handler in chosen}
    with ExitStack() as stack:
        for module, _ in chosen:
            _install(module)
            stack.callback(_remove, module)
        token = _overrides.set(MappingProxyType({**_overrides.get(), **new}))
        stack.callback(_overrides.reset, token)
        yield


def active_override(module: nn.Module) -> Handler | None:
    """Return the handler of the innermost context that overrides the module; None without one."""
    override = _overrides.get().get(id(module))
    return None if override is None else override.handler


def is_kept(module: nn.Module) -> bool:
    """Return True if a context around this one overrides the module with `kept`."""
    override = _overrides.get().get(id(module))
    return override is not None and override.kept


def is_own(module: nn.Module, below: Any) -> bool:
    """Return True if a forward pass is that of the module's class, not one put on the module."""
    while isinstance(below, Switch):
        below = below.below
    own = getattr(type(module), "forward", None)
    return isinstance(below, MethodType) and below.__self__ is module and below.__func__ is own


def forward_without_transfer(module: nn.Module) -> Any:
    """Return a module's forward pass, without accelerate's hook that moves its input to the device of its weights."""
    hooks = sys.modules.get("accelerate.hooks")  # If it is not imported, there are none of its hooks.
    hook = vars(module).get("_hf_hook")
    moves = hooks is not None and type(hook) is hooks.AlignDevicesHook and not hook.offload
    return vars(module).get("_old_forward", module.forward) if moves else module.forward


def remove_accelerate_hooks(module: nn.Module) -> nn.Module:
    """Return the module itself, after removing accelerate's hooks from it and its parts."""
    hooks = sys.modules.get("accelerate.hooks")
    return module if hooks is None else hooks.remove_hook_from_module(module, recurse=True)


@dataclass(frozen=True)
class _OwnHook:
    """Hook of a run, without effect in others."""

    run: object
    show: Callable[[nn.Module, Any, Any], Any]

    def __call__(self, module: nn.Module, args: Any = (), last: Any = None) -> Any:
        return self.show(module, args, last) if self.run in _observing.get() else None


@dataclass(frozen=True)
class _Hook:
    """Hook of another library, which a run may skip; see `unhooked`."""

    module: nn.Module
    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if id(self.module) in _skipped.get() else self.hook(*args, **kwargs)


_skipped: ContextVar[frozenset[int]] = ContextVar("unhooked", default=frozenset())
_skipping_runs: Counter[int] = Counter()
"""Number of runs that skip a module's hooks."""


def _hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_pre_hooks, module._forward_hooks


def _hooks_of_others(hooks: dict[int, Any]) -> dict[int, Any]:
    theirs = {number: hook for number, hook in list(hooks.items()) if not isinstance(hook, _OwnHook)}
    return {number: hook.hook if isinstance(hook, _Hook) else hook for number, hook in theirs.items()}


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has forward hooks other than those of a run (`observe`)."""
    return any(map(_hooks_of_others, _hooks(module)))


def is_observed(module: nn.Module) -> bool:
    """Return True if a module has forward hooks of any kind, those of runs too."""
    return any(_hooks(module))


def is_changed(module: nn.Module) -> bool:
    """Return True if a module has forward hooks, or a forward pass other than its class's."""
    return has_hooks(module) or not is_own(module, forward_without_transfer(module))


@contextmanager
def unhooked(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Skip other libraries' hooks on these modules within the context, in this thread alone."""
    chosen = [module for module in modules if has_hooks(module)]
    with ExitStack() as stack:
        for module in chosen:
            with _lock:
                _skipping_runs[id(module)] += 1
                for hooks in _hooks(module):
                    hooks.update({number: _Hook(module, hook) for number, hook in _hooks_of_others(hooks).items()})
            stack.callback(_restore_hooks, module)
        token = _skipped.set(_skipped.get() | {id(module) for module in chosen})
        stack.callback(_skipped.reset, token)
        yield


def _restore_hooks(module: nn.Module) -> None:
    with _lock:
        _skipping_runs[id(module)] -= 1
        if not _skipping_runs[id(module)]:
            del _skipping_runs[id(module)]
            for hooks in _hooks(module):
                hooks.update({number: hook.hook for number, hook in hooks.items() if isinstance(hook, _Hook)})


def twin(module: nn.Module) -> nn.Module:
    """Return a module with this one's weights, parts, forward pass and hooks, without anything that runs put on it."""
    found = object.__new__(type(module))
    before, after = (OrderedDict(_hooks_of_others(hooks)) for hooks in _hooks(module))
    vars(found).update(vars(module), _forward_pre_hooks=before, _forward_hooks=after)
    for name in ("forward", "_old_forward"):  # accelerate keeps the first under the second name.
        forward = vars(found).pop(name, None)
        while isinstance(forward, Switch):
            forward = forward.below
        if isinstance(forward, partial) and forward.args[:1] == (module,):
            forward = partial(forward.func, found, *forward.args[1:], **forward.keywords)
        elif isinstance(forward, MethodType) and forward.__self__ is module and name != "forward":
            forward = MethodType(forward.__func__, found)
        if forward is not None and not is_own(module, forward):
            vars(found)[name] = forward
    return found


@contextmanager
def observe(
    before: Iterable[tuple[nn.Module, Before]] = (), after: Iterable[tuple[nn.Module, After]] = ()
) -> Iterator[None]:
    """Call functions as modules begin to run, and after they have run, within the context and in this thread alone."""
    run = object()

    with ExitStack() as stack:
        for module, first in before:
            stack.callback(module.register_forward_pre_hook(_OwnHook(run, first), with_kwargs=True).remove)
        for module, last in after:
            show = lambda module, _, output, last=last: last(module, output)  # noqa: E731
            stack.callback(module.register_forward_hook(_OwnHook(run, show)).remove)
        token = _observing.set(_observing.get() | {run})
        stack.callback(_observing.reset, token)
        yield


@contextmanager
def out_of_inference() -> Iterator[None]:
    """Replace a caller's `torch.inference_mode` by `torch.no_grad`: gradients can be enabled again."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


_needed: Counter[int] = Counter()
"""Number of runs that need a part, by its id, in evaluation mode."""
_trained: dict[int, nn.Module] = {}
"""Those of these parts that were in training mode."""


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode within the context. When the last context that needs a part ends, in
    whichever thread, that part is in its earlier mode again."""
    parts = list(module.modules())
    with _lock:
        _needed.update(map(id, parts))
        for part in parts:
            if part.training:
                part.training, _trained[id(part)] = False, part
    try:
        yield
    finally:
        with _lock:
            _needed.subtract(map(id, parts))
            for key in {id(part) for part in parts if not _needed[id(part)]}:
                del _needed[key]
                if key in _trained:
                    _trained.pop(key).training = True


def check_plain(module: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Raise InputError if any parts of a model were compiled in place, where overrides have no effect, or dynamically
    quantised by torch, which makes a text's numbers depend on the other texts of its batch."""
    for part in parts:
        compiled = getattr(part, "_compiled_call_impl", None) is not None
        if not compiled and not type(part).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            continue
        path = next(path for path, each in module.named_modules() if each is part)
        if compiled:
            said = f"{type(module).__name__}: {path or 'the model'} was compiled in place with .compile(), and its runs"
            raise InputError(f"{said} cannot be read; analyse the model before it is compiled, or a copy that is not")
        raise InputError(
            f"{type(module).__name__}: {path} is a {type(part).__name__} of {type(part).__module__}, which rounds its "
            "inputs by the largest number of a batch: each text's results depend on the others; analyse it before it "
            "is quantised"
        )
