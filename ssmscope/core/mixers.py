"""How a model's layers are read: architectures by the classes of their layers, and runs through `ops.scan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrize import type_before_parametrizations

from ssmscope import ops
from ssmscope.core.affine import innermost
from ssmscope.core.agreement import agree, changed_parts, described, same_outcome
from ssmscope.core.intercept import check_plain, is_kept, is_own, observe, override_forward
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.states import alone
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError


class Architecture(Protocol):
    """How to read one family of layers: the names that a file in `ssmscope.architectures` defines.

    More where a family needs them: `returned(output)`, what the mixer's own forward returns where that is not its
    output alone; `reading(module)`, a context manager for the whole model while `fast_scan` reads its mixers;
    `stored(module)`, a model's or a mixer's weights where its library rescales them in place; `HAS_RECURRENT_STATE`,
    False for layers that keep nothing, as short convolutions do; and `BIDIRECTIONAL`, True for those that read later
    tokens too.
    """

    MIXERS: tuple[type[nn.Module], ...]
    MODEL_TYPES: tuple[str, ...]

    def compute_terms(
        self, mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
    ) -> LayerTrace:
        """The layer's terms from its input and weights."""
        ...

    def output(self, mixer: nn.Module, layer: LayerTrace, scans: tuple[ops.Scan, ...] | None = None) -> Tensor:
        """The mixer's output from its terms."""
        ...

    def linearized(self, mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
        """The layer as a linear map of its input, with everything else frozen at its value."""
        ...

    def state_after(self, mixer: nn.Module, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> LayerState:
        """Where a run continues from."""
        ...

    def examples(self) -> dict[str, nn.Module]:
        """Small random models of the family, for tests."""
        ...


_READERS: dict[type[nn.Module], Architecture] = {}
_WAITING: dict[str, Callable[[], Architecture]] = {}


def register(architecture: Architecture) -> None:
    """Make the mixers of an architecture readable."""
    for mixer in architecture.MIXERS:
        _READERS[mixer] = architecture


def register_later(module: str, architecture: Callable[[], Architecture]) -> None:
    """Make an architecture's mixers, which stand in the module of this name, readable once a model has some of that
    module's: neither is imported before."""
    _WAITING[module] = architecture


def adapter_for(mixer: nn.Module) -> Architecture:
    """The architecture that reads this mixer.

    Raises:
        InputError: when none does.
    """
    reader = _reader(mixer)
    if reader is None:
        raise InputError(f"{type(mixer).__name__} is no layer that can be read; these are: {known_mixers()}")
    return reader


def _reader(module: nn.Module) -> Architecture | None:
    kind = _known(module)
    return None if kind is None else _READERS[kind]


def _known(module: nn.Module) -> type[nn.Module] | None:
    """The class of layers that can be read that a module is of: its own, or that which somebody's is made from."""
    for kind in type_before_parametrizations(module).__mro__:
        if kind not in _READERS and kind.__module__ in _WAITING:
            register(_WAITING[kind.__module__]())
            _WAITING.pop(kind.__module__, None)  # another thread may have been here
        if kind in _READERS:
            return kind
    return None


def runs_own(mixer: nn.Module, below: Any) -> bool:
    """Return True if a mixer's forward pass is that of the layers that can be read: no other is put on it, nor is it of
    a subclass."""
    return is_own(mixer, below) and type_before_parametrizations(mixer) in _READERS


def known_mixers() -> str:
    """The names of all layer classes that can be read, and of the model types whose layers can."""
    waiting = ", ".join(sorted(name.split(".")[-2] for name in _WAITING))
    return ", ".join(sorted(cls.__name__ for cls in _READERS)) + (f", and those of {waiting}" if waiting else "")


def mixers(module: nn.Module) -> list[nn.Module]:
    """The state-space mixers of a model, first layer first; a mixer's own parts are not mixers.

    Raises:
        InputError: for a mixer in an adapter of its parameters, which are the adapted ones in a forward pass only.
    """
    if _reader(module) is not None:
        return [module]
    inside = innermost(module)
    if inside is not module and _reader(inside) is not None:
        raise InputError(
            f"a {type(module).__name__} of {type(module).__module__} stands around a {type(inside).__name__} and "
            "adapts its parameters within its own forward pass only: merge it (peft's merge_and_unload())"
        )
    return [found for child in module.children() for found in mixers(child)]


def has_recurrent_state(module: nn.Module) -> bool:
    """Whether some layer of a model keeps a recurrent memory."""
    return any(getattr(adapter_for(mixer), "HAS_RECURRENT_STATE", True) for mixer in mixers(module))


def is_bidirectional(module: nn.Module) -> bool:
    """Whether some layer of a model reads tokens that come after."""
    return any(getattr(adapter_for(mixer), "BIDIRECTIONAL", False) for mixer in mixers(module))


def memory_of(module: nn.Module) -> dict[str, bool]:
    """Return what a trace says of a model: if some layer has a recurrent state, and if some reads both ways."""
    return {"has_recurrent_state": has_recurrent_state(module), "bidirectional": is_bidirectional(module)}


def check_looks_back(module: nn.Module, what: str) -> None:
    """Refuse a question about what a token makes of those before it alone, of a model that looks ahead.

    Raises:
        InputError: as said.
    """
    if is_bidirectional(module):
        raise InputError(f"the model's layers read their input both ways, and {what} is of models that only look back")


Visit = Callable[[int, LayerTrace, "tuple[ops.Scan, ...]"], None]


def keeping(module: nn.Module, into: list[LayerState], visit: Visit | None = None) -> Visit:
    """A `Visit` that puts every mixer's state after the run into a list, after what `visit` does."""
    found = mixers(module)

    def keep(index: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
        if visit is not None:
            visit(index, layer, scans)
        into.append(alone(adapter_for(found[index]).state_after(found[index], layer, scans)))

    return keep


@contextmanager
def fast_scan(
    module: nn.Module,
    *,
    mask: Tensor | None = None,
    states: Sequence[LayerState] | None = None,
    retention: bool = False,
    visit: Visit | None = None,
) -> Iterator[None]:
    """Within the context, and in this thread alone, the model's mixers run through `ops.scan`, in training too.

    A forward pass that somebody has put on a mixer (accelerate's hooks) is called as before, and what stood on the
    modules stands there again on leaving. Caches are off within the context unless a call asks for one; such a call (as
    in generation) takes the model's own path.

    Args:
        module: any model with readable mixers.
        mask: (batch, length) bool, True at real positions; else the mask that the model hands to its mixers.
        states: one per mixer, from which the run continues.
        retention: sum the retention map inside the scans.
        visit: called with each mixer's index, terms and scans as it runs.

    Raises:
        InputError: for a model of which parts were compiled in place, and, as it runs, for a forward pass put on a
            mixer that computes something else than the mixer.
    """
    parts = list(module.modules())
    check_plain(module, parts)
    found = mixers(module)
    whole = mask is not None and bool(mask.all())  # asked once: a GPU would be waited for in each layer
    configured = [part for part in parts if "config" in vars(part) or hasattr(type(part), "config")]
    told = [part for part in configured if _may_cache(part)]
    caching = [part for part in told if getattr(part.config, "use_cache", False)]
    handlers = [
        (mixer, partial(_forward, mixer, index, mask, whole, states and states[index], retention, visit))
        for index, mixer in enumerate(found)
        if not is_kept(mixer)
    ]
    if any(is_kept(mixer) and id(mixer) in _computed_by.get() for mixer in found):
        raise InputError(
            "relevance is propagated through a model as it is, not through an edited run: leave the edits out"
        )
    with ExitStack() as around:
        around.enter_context(observe(before=[(part, _without_cache) for part in caching]))
        for reader in dict.fromkeys(map(adapter_for, found)):
            if hasattr(reader, "reading"):
                around.enter_context(reader.reading(module))
        around.enter_context(override_forward(handlers))
        yield


CACHES = ("cache_params", "past_key_values", "cache", "state")
"""What mixers and layers of attention call a cache that they continue from and fill; transformers says `cache` for all
of it from 5.24 on."""


def arguments(part: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a part's own forward pass; of a mixer, of the one that can be read."""
    kind: Any = _known(part) or type(part)
    return _parameters(kind)


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _accepted(kind: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a class's forward pass takes."""
    takes = inspect.signature(kind.forward).parameters
    every = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    return {name: value for name, value in kwargs.items() if every or name in takes}


@cache
def _place_of_cache(kind: Any) -> int | None:
    """How many arguments stand before `use_cache` in a forward pass; None where it takes none of that name."""
    names = list(inspect.signature(kind.forward).parameters.values())[1:]
    for place, parameter in enumerate(names):
        if parameter.name == "use_cache":
            return place if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else len(names) + 1
    return None


def _may_cache(part: nn.Module) -> bool:
    """Whether a part's forward pass takes `use_cache`."""
    kind: Any = type(part)
    return _place_of_cache(kind) is not None


def _without_cache(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind: Any = type(part)
    place = _place_of_cache(kind)
    if place is None or len(args) > place or kwargs.get("use_cache") is not None:
        return None
    return args, {**kwargs, "use_cache": False}


@contextmanager
def weights_constant(module: nn.Module) -> Iterator[None]:
    """Within the context, and in this thread alone, linear layers and what mixers read ask for no gradient by their
    weights: a backward pass to the input is shorter by theirs and keeps less."""
    parts = [(part, partial(run_linear, part)) for part in module.modules() if type(part) is nn.Linear]
    token = _constant.set(True)
    try:
        with override_forward(parts):
            yield
    finally:
        _constant.reset(token)


_constant: ContextVar[bool] = ContextVar("constant", default=False)


def as_constant(weight: Tensor) -> Tensor:
    """A weight that is read, without its gradient within `weights_constant`."""
    return weight.detach() if _constant.get() else weight


def _with_constants(r: ops.Recurrence) -> ops.Recurrence:
    return replace(r, A=None if r.A is None else r.A.detach(), D=None if r.D is None else r.D.detach())


def run_linear(part: nn.Linear, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """A linear layer's output in place of `below`, `as_constant`, where that is its own forward pass."""
    if not is_own(part, below) or len(args) != 1:
        return below(*args, **kwargs)
    return linear(args[0], as_constant(part.weight), None if part.bias is None else as_constant(part.bias))


def _forward(mixer, index, mask, whole, state, retention, visit, /, below, *args, **kwargs):
    given = dict(zip(arguments(mixer), args)) | kwargs
    u = args[0] if args else kwargs["hidden_states"]
    kwargs = _accepted(_known(mixer), kwargs)  # RWKV's blocks are called with a mask, which their own take none of
    if any(given.get(name) is not None for name in CACHES):
        if id(mixer) in _computed_by.get():
            raise InputError("an edited run fills no cache: call the model with use_cache=False")
        return below(*args, **kwargs)  # the caches of Mamba and of RWKV
    reader = adapter_for(mixer)
    mask = None if whole else given.get("attention_mask") if mask is None else mask
    own = runs_own(mixer, below)
    if own:
        check_parts(mixer, u, mask, below, args, kwargs)
    instead = _computed_by.get().get(id(mixer))
    if instead is not None:
        result = instead(mixer, u, mask, state, retention, visit, own)
        return reader.returned(result) if hasattr(reader, "returned") else result
    layer = terms_of(mixer, u, mask, state)
    scans = layer.scan(state, retention=retention)
    if visit is not None:
        visit(index, layer, scans)
    result = reader.output(mixer, layer, scans)
    result = reader.returned(result) if hasattr(reader, "returned") else result
    return result if own else _same(index, below(*args, **kwargs), result, layer.mask, state)


def _unedited() -> Context:
    """This context without the edits of what convolutions read."""
    context = copy_context()
    for edits in (_entering, _taps):
        context.run(edits.set, MappingProxyType({}))
    return context


def check_parts(
    mixer: nn.Module,
    u: Tensor,
    mask: Tensor | None,
    below: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse a mixer that computes something else than is read of it because of what somebody has put on its parts.

    Args:
        below: its own forward pass, and the arguments that it was called with.

    Raises:
        InputError: naming the parts.
    """
    parts = changed_parts(mixer)
    if not parts and runs_own(mixer, below):
        return
    named = {name: value for name, value in _accepted(_known(mixer), kwargs).items() if name != "hidden_states"}

    def theirs(v: Tensor) -> Any:
        return _unedited().run(below, v, *args[1:], **named)

    def ours(v: Tensor) -> Tensor:
        return adapter_for(mixer).output(mixer, _unedited().run(terms_of, mixer, v, mask))

    if not same_outcome(mixer, parts, theirs, ours, u, mask if mask is not None and mask.ndim == 2 else None):
        raise InputError(f"{described(mixer, parts)} make it compute something else than is read of it: take them off")


def linearize(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """A mixer as a linear map of its input, everything else frozen.

    Raises:
        InputError: where what somebody has put on its parts makes that map another one.
    """
    reader, parts = adapter_for(mixer), changed_parts(mixer)
    if parts:
        bare = _unedited().run(terms_of, mixer, layer.u, layer.mask)
        found, real = reader.linearized(mixer, bare), slice(None) if layer.mask is None else layer.mask
        if not agree((found.matvec(found.u) + found.bias)[real], reader.output(mixer, bare)[real]):
            raise InputError(f"{described(mixer, parts)} make it another map than is read of it: take them off")
    return reader.linearized(mixer, layer)


def terms_of(mixer: nn.Module, u: Tensor, mask: Tensor | None, state: LayerState | None = None) -> LayerTrace:
    """A mixer's terms, without gradients by its weights within `weights_constant`."""
    layer = adapter_for(mixer).compute_terms(mixer, u, mask if mask is None else mask.to(u.device), state)
    if _constant.get():
        layer = replace(layer, recurrences=tuple(_with_constants(r) for r in layer.recurrences))
    return layer


Compute = Callable[..., Tensor]
"""A mixer's output, from (mixer, u, mask, state, retention, visit, whether its forward pass is its own)."""

_computed_by: ContextVar[Mapping[int, Compute]] = ContextVar("computed by", default=MappingProxyType({}))
_entering: ContextVar[Mapping[int, Callable[[Tensor], Tensor]]] = ContextVar(
    "edit_conv_input", default=MappingProxyType({})
)
_taps: ContextVar[Mapping[int, Callable[[Tensor], Tensor]]] = ContextVar("taps", default=MappingProxyType({}))


@contextmanager
def computed_by(
    instead: Mapping[int, Compute],
    edit_conv_input: Mapping[int, Callable[[Tensor], Tensor]],
    taps: Mapping[int, Callable[[Tensor], Tensor]],
) -> Iterator[None]:
    """Within the context, and in this thread alone, `fast_scan` computes mixers (by their id) with these functions, and
    what their convolutions read is changed by `edit_conv_input`, and which of it by `taps`."""
    tokens = (
        _computed_by.set(MappingProxyType({**_computed_by.get(), **instead})),
        _entering.set(MappingProxyType({**_entering.get(), **edit_conv_input})),
        _taps.set(MappingProxyType({**_taps.get(), **taps})),
    )
    try:
        yield
    finally:
        _computed_by.reset(tokens[0])
        _entering.reset(tokens[1])
        _taps.reset(tokens[2])


def edit_conv_input(mixer: nn.Module, conv_input: Tensor) -> Tensor:
    """What a mixer's convolution reads, as it was computed or as a run changes it."""
    change = _entering.get().get(id(mixer))
    return conv_input if change is None else change(conv_input)


def conv_tap_mask(mixer: nn.Module, conv_input: Tensor, count: int) -> Tensor | None:
    """Which of the last `count` inputs each position of a mixer's convolution reads, (batch, length, count) bool, its
    own first; None where it reads them all."""
    change = _taps.get().get(id(mixer))
    if change is None:
        return None
    return change(torch.ones(*conv_input.shape[:2], count, dtype=torch.bool, device=conv_input.device))


def _same(index: int, theirs: Any, ours: Any, mask: Tensor | None, state: LayerState | None) -> Any:
    """What a forward pass that somebody has put on a mixer returns, where it is what the mixer computes.

    Raises:
        InputError: where it is not, or where the run continues from a state, of which that forward pass knows nothing.
    """
    y, expected = (each[0] if isinstance(each, tuple) else each for each in (theirs, ours))
    real = slice(None) if mask is None else mask
    if state is not None or not agree(y[real], expected[real]):
        raise InputError(
            f"a forward pass was put on layer {index} that computes something else than the layer, so the layer cannot "
            "be read; take it off first"
        )
    return theirs


def stored_weights(module: nn.Module) -> dict[str, Any]:
    """The weights of a model or of a mixer as they were stored, where a library rescales them in place."""
    for reader in dict.fromkeys(map(adapter_for, mixers(module))):
        if hasattr(reader, "stored"):
            return reader.stored(module)
    return module.state_dict()


class BackboneOutput:
    """What stands for a backbone's output: `last_hidden_state`, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def head_logits(module: Any, hidden: Tensor) -> Tensor:
    """A language model's own logits (…, vocabulary) of what its head reads, (…, width): its forward pass with the
    backbone's output in place, so that multipliers, caps and biases behind the head are in them."""
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    backbone = module.base_model
    if backbone is module:
        found = module.get_output_embeddings()(flat)
    else:
        ids = torch.zeros(flat.shape[:2], dtype=torch.long, device=flat.device)
        with override_forward([(backbone, lambda below, *args, **kwargs: BackboneOutput(flat))]):
            found = module(input_ids=ids, use_cache=False).logits
    return found.reshape(*hidden.shape[:-1], found.shape[-1]).to(hidden.device)
