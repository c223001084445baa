"""Adapters, found by a layer's class, and runs of layers through `ops.scan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from ssmscope import ops
from ssmscope.core.affine import agree, changed_parts, described, innermost, same_outcome
from ssmscope.core.intercept import Handler, check_plain, is_kept, is_own, observe, override_forward
from ssmscope.core.known_models import LAYERS
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import Earlier, LayerState, LayerTrace, alone, check_rows, moved
from ssmscope.core.weights import are_constant
from ssmscope.errors import InputError, Unanswerable, kernels_explained

R = TypeVar("R")

CACHES = ("cache_params", "past_key_values", "cache", "state")
"""Names of the caches that mixers and attention layers continue from and fill; transformers calls all of them `cache`
from 5.24 on."""


class LayerAdapter(Protocol):
    """Adapter for one family of layers: what a module of `ssmscope.layers` defines, see its `entries`. Its
    `output` and `linearized`, or one of them, may follow from its `FORM`, a `core.forms.Form`.

    Optional: `state_after(mixer, layer, scans)`, the state from which a run continues, if that is more than
    `LayerTrace.state_after`; `returned(output)`, the result of the mixer's own forward if that is not its output alone;
    `entered(mixer, given)`, `flat(mixer, output)` and `shaped(mixer, u)`, its input as u (batch, length, width), its
    output as such, and u as it is given; `reading(module)`, a context manager for the whole model while `fast_scan`
    reads its mixers; `stored(module)`, the weights of a model or mixer whose library rescales them in place;
    `growth_limit(mixer, layer, recurrence)`, its largest possible growth without Δ and A (`core.growth`);
    `theorem_parameters(mixer)`, what the generalisation bound reads; `HAS_RECURRENT_STATE`, False for layers that keep
    no state, such as short convolutions; `BIDIRECTIONAL`, True for layers that read later tokens too, or a function
    that tells whether a mixer does; `RECORDABLE_TRAINING`, the model types whose training step never waits for a GPU
    nor sends it numbers; `BLOCK_PARTS`, the other parts of its blocks (`core.blocks`); and `SOFT_CAP`, the field of its
    configuration with a soft cap of logits.
    """

    def compute_terms(
        self, mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
    ) -> LayerTrace:
        """Return the layer's terms from its input and weights."""

    def output(self, mixer: nn.Module, layer: LayerTrace, scans: tuple[ops.Scan, ...] | None = None) -> Tensor:
        """Return the mixer's output from its terms."""

    def linearized(self, mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
        """Return the layer as a linear map of its input, with everything else frozen at its value."""


Visit = Callable[[int, LayerTrace, tuple[ops.Scan, ...]], None]

_ADAPTERS: dict[type[nn.Module], LayerAdapter] = {}
_FOUND: WeakSet[type[nn.Module]] = WeakSet()
"""Classes whose adapters were found by their parts; those derived from them may compute something else."""


class _Formed:
    """Family of layers with the pair that follows from its form, where it has none of its own."""

    def __init__(self, family: Any) -> None:
        self.family = family
        self.compute_terms = family.compute_terms
        self.output = getattr(family, "output", family.FORM.output)
        self.linearized = getattr(family, "linearized", family.FORM.linearized)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.family, name)


def adapter_for(mixer: nn.Module) -> LayerAdapter:
    """Return the adapter that reads this mixer. Raises InputError if there is none."""
    adapter = _adapter(mixer)
    if adapter is None:
        raise InputError(f"{type(mixer).__name__} is not a layer that can be read; readable are {known_mixers()}")
    return adapter


def _adapter(module: nn.Module) -> LayerAdapter | None:
    kind = _readable_class(module)
    return None if kind is None else _ADAPTERS[kind]


def _readable_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the readable class that a module is of: its own, or the one it is derived from."""
    kind: Any = type(module)
    return kind if kind in _ADAPTERS else _readable_base(kind, len(LAYERS))


@cache
def _readable_base(derived: type[nn.Module], known: int) -> type[nn.Module] | None:
    """Return the class that a class is read as, when so many are registered: each run asks it of all modules."""
    for kind in derived.__mro__:
        if kind not in _ADAPTERS and full_name(kind) in LAYERS:
            family: Any = LAYERS[full_name(kind)]
            _ADAPTERS[kind] = _Formed(family) if hasattr(family, "FORM") else family
        if kind in _ADAPTERS and kind not in _FOUND:
            return kind
    return None


def full_name(kind: type[nn.Module]) -> str:
    """Return the name of a class under which `LAYERS` has its adapter."""
    return f"{kind.__module__}.{kind.__qualname__}"


def read_as(kind: type[nn.Module], adapter: LayerAdapter | None) -> None:
    """Have layers of exactly this class read by an adapter, or None by what is registered for them now."""
    _ADAPTERS.pop(kind, None)
    _FOUND.discard(kind)
    _readable_base.cache_clear()
    if adapter is not None:
        _ADAPTERS[kind] = adapter
        _FOUND.add(kind)


def is_readable(module: nn.Module) -> bool:
    """Return True if some adapter reads the module as a layer."""
    return _readable_class(module) is not None


def runs_own(mixer: nn.Module, below: Any) -> bool:
    """Return True if a mixer runs the forward pass of a readable class, no subclass's, and no other put on it."""
    return is_own(mixer, below) and _readable_class(mixer) is type_before_parametrizations(mixer)


def known_mixers() -> str:
    """Return the names of all readable layer classes."""
    return ", ".join(sorted(name.rpartition(".")[2] for name in LAYERS))


def mixers(module: nn.Module) -> list[nn.Module]:
    """Return a model's state-space mixers, first layer first: its `read_layers` where it says which are read; parts of
    a mixer are not mixers. Raises InputError if a mixer is in an adapter of its parameters, which are adapted in a
    forward pass only."""
    if _adapter(module) is not None:
        return [module]
    if not (children := [*module.children()]):
        return []
    if hasattr(type(module), "read_layers") and (chosen := module.read_layers) is not None:
        return list(chosen)
    inside = innermost(module)
    if inside is not module and _adapter(inside) is not None:
        said = f"a {type(module).__name__} of {type(module).__module__} wraps a {type(inside).__name__} and adapts its"
        raise InputError(f"{said} parameters within its own forward pass only: merge it (peft's merge_and_unload())")
    return [found for child in children for found in mixers(child)]


def layer_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the numbers of the mixers' layers in a model's list of layers, which in a hybrid has other layers too; 0,
    1, … if several are in one block or there are several lists."""
    names = {id(part): name for name, part in module.named_modules()}
    return numbers_in([names[id(mixer)] for mixer in mixers(module)])


def numbers_in(names: Collection[str]) -> tuple[int, ...]:
    """Return the number in a list of layers that each name of a part has; 0, 1, … if some have none, or the same."""
    within = [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    numbers = tuple(each[0] for each in within if each)
    return numbers if len({*numbers}) == len(names) else tuple(range(len(names)))


def is_bidirectional(module: nn.Module) -> bool:
    """Return True if some layer of a model, or a mixer, reads later tokens."""
    return any(map(reads_both_ways, mixers(module)))


def reads_both_ways(mixer: nn.Module) -> bool:
    """Return True if a mixer reads later tokens."""
    both: Any = getattr(adapter_for(mixer), "BIDIRECTIONAL", False)
    return both(mixer) if callable(both) else both


def memory_of(module: nn.Module) -> dict[str, bool]:
    """Return whether some layer of a model has a recurrent state, and whether some is bidirectional."""
    recurrent = any(getattr(adapter_for(mixer), "HAS_RECURRENT_STATE", True) for mixer in mixers(module))
    return {"has_recurrent_state": recurrent, "bidirectional": is_bidirectional(module)}


def check_causal(module: nn.Module, what: str) -> None:
    """Raise Unanswerable if a model, or a mixer, reads later tokens, for a question that only makes sense without."""
    if is_bidirectional(module):
        said = "the model's layers read their input both ways,"
        raise Unanswerable(f"{said} and {what} needs layers that read earlier tokens alone")


def collect_states(module: nn.Module, into: list[LayerState], visit: Visit | None = None) -> Visit:
    """Return a `Visit` that calls `visit` and then puts the mixer's state after the run, edited, into a list."""
    found = mixers(module)

    def keep(index: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
        if visit is not None:
            visit(index, layer, scans)
        state, end = state_after(found[index], layer, scans), _edits.get().ends.get(id(found[index]))
        into.append(alone(state if end is None else end(state)))

    return keep


def state_after(mixer: nn.Module, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> LayerState:
    """Return the state from which a run continues after a mixer's layer was scanned."""
    own = getattr(adapter_for(mixer), "state_after", None)
    return layer.state_after(scans) if own is None else own(mixer, layer, scans)


@contextmanager
def fast_scan(
    module: nn.Module,
    *,
    mask: Tensor | None = None,
    states: Earlier = None,
    retention: bool = False,
    visit: Visit | None = None,
) -> Iterator[None]:
    """Run the model's mixers through `ops.scan` within the context, in this thread alone, in training too.

    A forward pass that was put on a mixer (accelerate's hooks) is called as before. Caches are off within the context
    unless a call asks for one; such a call takes the model's own path. The run continues from `states`, one per mixer,
    looked up as the model runs; with `retention` the map is summed inside the scans; `visit` is called with each
    mixer's index, terms and scans. The `mask` (batch, length) bool, True at real positions, is by default the one that
    the model hands to its mixers. Raises InputError if parts of the model were compiled in place, if `states` have
    other rows than the mask, and, as it runs, if a forward pass put on a mixer computes something else than the mixer.
    """
    parts = list(module.modules())
    check_plain(module, parts)
    found = mixers(module)
    if mask is not None:
        check_rows(states, len(mask))
    whole = mask is not None and bool(mask.all())  # Asking in each layer would wait for a GPU.
    plain: set[int] = set()
    configured = [part for part in parts if "config" in vars(part) or hasattr(type(part), "config")]
    caching = [p for p in configured if "use_cache" in arguments(p) and getattr(p.config, "use_cache", False)]
    handlers = [
        (mixer, partial(_forward, mixer, index, mask, whole, states, retention, visit, plain))
        for index, mixer in enumerate(found)
        if not is_kept(mixer)
    ]
    if any(is_kept(mixer) and id(mixer) in _edits.get().outputs for mixer in found):
        said = "relevance is propagated through a model as it is, not through an edited run:"
        raise InputError(f"{said} leave the edits out")
    with ExitStack() as around:
        around.enter_context(kernels_explained())
        around.enter_context(observe(before=[(part, _without_cache) for part in caching]))
        for adapter in dict.fromkeys(map(adapter_for, found)):
            if hasattr(adapter, "reading"):
                around.enter_context(adapter.reading(module))
        around.enter_context(override_forward(handlers))
        yield


def _without_cache(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(arguments(part), args)) | kwargs
    return None if given.get("use_cache") is not None else (args, {**kwargs, "use_cache": False})


@cache
def _parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    return dict([*inspect.signature(kind.forward).parameters.items()][1:])


def arguments(part: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a part's own forward pass; for a mixer, of its readable class's."""
    kind: Any = _readable_class(part) or type(part)
    return tuple(_parameters(kind))


def _accepted(mixer: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a mixer's class takes: RWKV's blocks are called with a mask that they do not take."""
    kind: Any = _readable_class(mixer)
    takes = _parameters(kind)
    every = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    return {name: value for name, value in kwargs.items() if every or name in takes}


def _forward(mixer, index, mask, whole, states, retention, visit, plain, /, below, *args, **kwargs):
    """Run a mixer of the numbers `plain` as it is read; the others are first asked what is put on them."""
    given = dict(zip(arguments(mixer), args)) | kwargs
    u = entered(mixer, args, kwargs)
    if any(given.get(name) is not None for name in CACHES):
        if id(mixer) in _edits.get().outputs:
            raise InputError("an edited run fills no cache: call the model with use_cache=False")
        return below(*args, **_accepted(mixer, kwargs))
    adapter, state = adapter_for(mixer), moved(states[index], u.device) if states else None
    mask = None if whole else given.get("attention_mask") if mask is None else mask
    own = index in plain or runs_own(mixer, below)
    if own and index not in plain and check_parts(mixer, u, mask, below, args, kwargs):
        plain.add(index)
    instead = _edits.get().outputs.get(id(mixer))
    if instead is not None:
        return as_returned(mixer, instead(mixer, u, mask, state, retention, visit, own))
    layer = terms_of(mixer, u if own else u.clone(), mask, state)  # Its own pass may write into its input.
    scans = layer.scan(state, retention=retention)
    if visit is not None:
        visit(index, layer, scans)
    result = as_returned(mixer, adapter.output(mixer, layer, scans))
    if own:
        return result
    return _checked_output(index, below(*args, **_accepted(mixer, kwargs)), result, layer.mask, state)


def entered(mixer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the input of a mixer that is called with these arguments, its first, as u (batch, length, width)."""
    first = "hidden_states" if "hidden_states" in kwargs else arguments(mixer)[0]
    given, adapter = args[0] if args else kwargs[first], adapter_for(mixer)
    return adapter.entered(mixer, given) if hasattr(adapter, "entered") else given


def positions(mixer: nn.Module, output: Tensor) -> Tensor:
    """Return an output of a mixer as (batch, length, width)."""
    adapter = adapter_for(mixer)
    return adapter.flat(mixer, output) if hasattr(adapter, "flat") else output


def as_returned(mixer: nn.Module, output: Tensor) -> Any:
    """Return a mixer's output (batch, length, width) as its own forward pass does."""
    adapter = adapter_for(mixer)
    output = adapter.shaped(mixer, output) if hasattr(adapter, "shaped") else output
    return adapter.returned(output) if hasattr(adapter, "returned") else output


def _unedited() -> Context:
    context = copy_context()
    context.run(_edits.set, Edits(_edits.get().outputs))
    return context


def check_parts(
    mixer: nn.Module, u: Tensor, mask: Tensor | None, below: Handler, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Return True if there are no hooks or forward passes on a mixer's parts. Raise InputError if some make `below`,
    its own forward pass with these arguments, compute something other than its terms."""
    parts = changed_parts(mixer)
    if not parts and runs_own(mixer, below):
        return True
    first = "hidden_states" if args or "hidden_states" in kwargs else arguments(mixer)[0]
    named = {name: value for name, value in _accepted(mixer, kwargs).items() if name != first}
    adapter = adapter_for(mixer)

    def theirs(v: Tensor) -> Any:
        found = _unedited().run(
            below, adapter.shaped(mixer, v) if hasattr(adapter, "shaped") else v, *args[1:], **named
        )
        found = found[0] if isinstance(found, tuple) else found
        return adapter.entered(mixer, found) if hasattr(adapter, "entered") else found

    ours = lambda v: adapter.output(mixer, _unedited().run(terms_of, mixer, v, mask))  # noqa: E731
    if not same_outcome(mixer, parts, theirs, ours, u, mask if mask is not None and mask.ndim == 2 else None):
        raise InputError(f"{described(mixer, parts)} make it compute something other than its terms: remove them")
    return False


def linearize(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return a mixer as a linear map, all else frozen. Raises InputError if hooks on its parts make it another map."""
    adapter, parts = adapter_for(mixer), changed_parts(mixer)
    if parts:
        bare = _unedited().run(terms_of, mixer, layer.u, layer.mask)
        found, real = adapter.linearized(mixer, bare), slice(None) if layer.mask is None else layer.mask
        if not agree((found.matvec(found.u) + found.bias)[real], adapter.output(mixer, bare)[real]):
            raise InputError(f"{described(mixer, parts)} make it another map than its terms do: remove them")
    return adapter.linearized(mixer, layer)


def terms_of(mixer: nn.Module, u: Tensor, mask: Tensor | None, state: LayerState | None = None) -> LayerTrace:
    """Return a mixer's terms, without gradients with respect to its weights within `weights_constant`."""
    layer = adapter_for(mixer).compute_terms(mixer, u, mask if mask is None else mask.to(u.device), state)
    if are_constant():
        held = tuple(replace(r, A=_detached(r.A), D=_detached(r.D)) for r in layer.recurrences)
        layer = replace(layer, recurrences=held)
    return layer


def _detached(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach()


Compute = Callable[..., Tensor]
"""Function from (mixer, u, mask, state, retention, visit, own) to the mixer's output; `own` is as `runs_own` says."""


Changes = Mapping[int, Callable[[Tensor], Tensor]]


class Edits(NamedTuple):
    """Functions of an edited run by the mixer's id: its output, its convolution's input, the taps that are used, and
    the state with which the run ends."""

    outputs: Mapping[int, Compute] = MappingProxyType({})
    conv_inputs: Changes = MappingProxyType({})
    taps: Changes = MappingProxyType({})
    ends: Mapping[int, Callable[[LayerState], LayerState]] = MappingProxyType({})


_edits: ContextVar[Edits] = ContextVar("edits", default=Edits())  # noqa: B039


@contextmanager
def computed_by(edits: Edits) -> Iterator[None]:
    """Compute mixers (by their id) with these functions in `fast_scan`, within the context and in this thread alone."""
    every: Any = ({**old, **new} for old, new in zip(_edits.get(), edits))
    token = _edits.set(Edits(*every))
    try:
        yield
    finally:
        _edits.reset(token)


def edit_conv_input(mixer: nn.Module, conv_input: Tensor) -> Tensor:
    """Return the input of a mixer's convolution, as it is or as a run edits it."""
    change = _edits.get().conv_inputs.get(id(mixer))
    return conv_input if change is None else change(conv_input)


def conv_tap_mask(mixer: nn.Module, conv_input: Tensor, count: int) -> Tensor | None:
    """Return a mask of the inputs that each position of a convolution reads, (batch, length, count); None for all."""
    change = _edits.get().taps.get(id(mixer))
    if change is None:
        return None
    return change(torch.ones(*conv_input.shape[:2], count, dtype=torch.bool, device=conv_input.device))


def _checked_output(index: int, theirs: Any, ours: Any, mask: Tensor | None, state: LayerState | None) -> Any:
    """Return the output of a forward pass put on a mixer, which must agree with what the mixer computes."""
    y, expected = (each[0] if isinstance(each, tuple) else each for each in (theirs, ours))
    real = slice(None) if mask is None else mask
    if state is not None or not agree(y[real], expected[real]):
        said = f"a forward pass was put on layer {index} that computes something other than the layer,"
        raise InputError(f"{said} so the layer cannot be read; remove it first")
    return theirs


def stored_weights(module: nn.Module) -> dict[str, Any]:
    """Return the weights of a model or mixer as they were stored, before a library rescales them in place."""
    for adapter in dict.fromkeys(map(adapter_for, mixers(module))):
        if hasattr(adapter, "stored"):
            return adapter.stored(module)
    return module.state_dict()
