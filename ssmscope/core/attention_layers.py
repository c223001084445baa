"""The softmax attention of hybrids: its layers found, run from kept keys and values, and its edges cut.

The library's own code runs them: it asks a cache for the keys and values that it attends to, and adds a mask to its
scores. Both are handed to it here: the cache puts what a state holds before its own keys and values, and the mask lets
a query read those of its row that are not after it. Nothing that a state holds is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ssmscope.core.intercept import observe, override_forward, twin
from ssmscope.core.mixers import arguments, is_bidirectional, mixers
from ssmscope.core.states import alone
from ssmscope.core.trace import LayerState

IMPLEMENTATIONS = ("eager", "sdpa")
"""Those of transformers that add a mask of any shape to their scores."""

Change = Callable[[int, nn.Module, Tensor], Tensor]
"""From a layer's number among `attention_layers`, the layer, and which keys each query reads, (batch, heads or 1,
queries, keys) bool, to which it reads instead."""


@dataclass(frozen=True, eq=False)
class AttentionState(LayerState):
    """From where a layer of softmax attention continues: its `keys` and `values` (batch, keys, heads, width), rotated
    where the layer rotates them, and their `places` (batch, keys) in the text, counted from 1; 0 at padding."""

    keys: Tensor
    values: Tensor
    places: Tensor


def attention_modules(module: nn.Module) -> dict[str, nn.Module]:
    """What is called attention in a model beside its state-space layers, by name, in the order of the layers; a part
    that stands at several depths is there several times."""
    called = {id(part) for part in module.modules() if type(part).__name__.endswith(("Attention", "Attention2"))}
    if not called:
        return {}
    outside = called - {id(part) for mixer in mixers(module) for part in mixer.modules()}
    return {name: part for name, part in module.named_modules(remove_duplicate=False) if id(part) in outside}


def attention_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Those of `attention_modules` that fill a cache of keys and values."""
    return {name: part for name, part in attention_modules(module).items() if _name_of_cache(part) is not None}


def attention_numbers(module: nn.Module) -> tuple[int, ...]:
    """The numbers of `attention_layers` in the model's list of layers."""
    return tuple(int(next(part for part in name.split(".") if part.isdigit())) for name in attention_layers(module))


def keeps_caches(module: Any) -> bool:
    """Whether all that looks back in a model keeps a state, or keys and values, from which a run can continue."""
    if is_bidirectional(module):
        return False
    found = attention_layers(module)
    adds = getattr(module.config, "_attn_implementation", "eager") in IMPLEMENTATIONS
    return not found.keys() ^ attention_modules(module).keys() and (adds or not found)


def _name_of_cache(part: nn.Module) -> str | None:
    """What a part's forward pass calls its cache of keys and values; None where it takes none."""
    return next((name for name in arguments(part) if name in ("past_key_values", "cache")), None)


_changes: ContextVar[Mapping[int, Change]] = ContextVar("edges changed", default=MappingProxyType({}))
"""How the attention of a model is changed in this thread's runs, by the id of its module."""


@contextmanager
def attention_changed(module: nn.Module, change: Change) -> Iterator[None]:
    """Within the context, and in this thread alone, queries of the model's layers of attention read other keys."""
    token = _changes.set(MappingProxyType({**_changes.get(), id(module): change}))
    try:
        with attending(module):
            yield
    finally:
        _changes.reset(token)


@contextmanager
def attending(
    module: Any,
    *,
    mask: Tensor | None = None,
    states: Sequence[LayerState] | None = None,
    keep: list[LayerState] | None = None,
    see: Callable[[int, Tensor], None] | None = None,
) -> Iterator[None]:
    """Within the context, and in this thread alone, a model's layers of attention continue from `states`, one for each,
    and put those after the run into `keep`.

    Args:
        mask: (batch, length) bool, True at real positions; all by default.
        see: called with a layer's number among `attention_layers` and its weights (batch, heads, queries, keys), which
            are made for it.
    """
    change = _changes.get().get(id(module))
    asked = any(each is not None for each in (states, keep, change, see))
    layers = list(attention_layers(module).values()) if asked else []
    if not layers:
        yield
        return
    run = _Run(layers, mask, states, keep, change, see)
    with ExitStack() as around:
        around.enter_context(observe(before=[(module.base_model, run.begin)]))
        parts = {id(part): part for part in layers}.values()
        around.enter_context(override_forward([(part, partial(run.attend, part)) for part in parts]))
        yield


@dataclass(eq=False)
class _Run:
    layers: Sequence[nn.Module]
    mask: Tensor | None
    states: Sequence[LayerState] | None
    keep: list[LayerState] | None
    change: Change | None
    see: Callable[[int, Tensor], None] | None
    called: dict[int, int] = field(default_factory=dict)
    """How often each layer ran, by its id: which of its depths is next."""

    def begin(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The backbone's arguments, with the positions behind those of the states."""
        self.called.clear()
        if not self.states:
            return None
        assert isinstance(self.states[0], AttentionState)
        given = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        given = args[0] if given is None else given
        steps = torch.arange(given.shape[1], device=given.device)
        return args, {**kwargs, "position_ids": self.states[0].places.amax(1, keepdim=True).to(steps.device) + steps}

    def attend(self, part: nn.Module, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(arguments(part), args)) | kwargs
        depths = [number for number, each in enumerate(self.layers) if each is part]
        time = self.called.get(id(part), 0)
        self.called[id(part)] = time + 1
        number, hidden = depths[time % len(depths)], named["hidden_states"]
        state = None if self.states is None else self.states[number]
        assert state is None or isinstance(state, AttentionState)
        mask = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if self.mask is None else self.mask
        real = mask.to(hidden.device)
        own = real * torch.arange(1, real.shape[1] + 1, device=real.device)
        before = None if state is None else state.places.to(own.device)
        places = own if before is None else torch.cat([before, _behind(own, before)], dim=1)
        if not all(each is None for each in (state, self.change, self.see)):
            reads = (
                _causal(part, places, own.shape[1]) if state is not None else _read(named.get("attention_mask"), own)
            )
            if self.change is not None:
                reads = self.change(number, part, reads)
            least = torch.finfo(hidden.dtype).min
            named["attention_mask"] = torch.zeros_like(reads, dtype=hidden.dtype).masked_fill(~reads, least)
        after = _Cache(state)
        output = (below if self.see is None else _eager(part))(**{**named, str(_name_of_cache(part)): after})
        if self.see is not None:
            self.see(number, output[1])
        if self.keep is not None:
            self.keep.append(after.state(places))
        return output


def _eager(part: nn.Module) -> Callable[..., Any]:
    """A layer's forward pass that returns its weights beside its output."""
    other = twin(part)
    vars(other)["config"] = copy.copy(part.config)
    other.config._attn_implementation = "eager"
    if "output_attentions" not in arguments(part):
        return other.forward
    kinds: Any = type(part).__mro__  # a class for each implementation, that of the plain one below the others
    plain = kinds[1] if issubclass(kinds[1], nn.Module) and kinds[1] is not nn.Module else kinds[0]
    return lambda **kwargs: plain.forward(other, **{**kwargs, "output_attentions": True})


class _Cache:
    """What a layer asks for the keys and values that it attends to, (batch, heads, keys, width); a layer with a
    convolution before them finds its last inputs in `tail`, (batch, taps − 1, channels), and puts those after the run
    there."""

    def __init__(self, before: AttentionState | None) -> None:
        self.before = before
        self.tail = None if before is None else before.conv

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.before is not None:
            keys = torch.cat([self.before.keys.transpose(1, 2).to(keys), keys], dim=2)
            values = torch.cat([self.before.values.transpose(1, 2).to(values), values], dim=2)
        self.keys, self.values = keys, values
        return keys, values

    def state(self, places: Tensor) -> LayerState:
        """That after the run, without what is padding in every row."""
        real = places.any(0)
        keys, values = (t.transpose(1, 2)[:, real] for t in (self.keys, self.values))
        return alone(AttentionState(self.tail, (), keys, values, places[:, real]))


def _behind(own: Tensor, before: Tensor) -> Tensor:
    """Places (batch, length) counted on from those before; 0 stays 0."""
    return torch.where(own > 0, own + before.amax(1, keepdim=True), 0)


def _causal(part: nn.Module, places: Tensor, queries: int) -> Tensor:
    """Which keys (batch, 1, queries, keys) the last so many of them read: their row's that are not after them, nor, in
    a layer with a window, too far back."""
    keys, rows = places[:, None, None], places[:, None, -queries:, None]
    steps = torch.arange(places.shape[1], device=places.device)
    reads = (keys > 0) & (steps <= steps[-queries:, None])
    window = getattr(part, "sliding_window", None)
    return reads if window is None else reads & (rows - keys < window)


def _read(mask: Tensor | None, own: Tensor) -> Tensor:
    """Which keys (batch, 1, queries, keys) are read by the mask that the model hands to a layer."""
    length = own.shape[1]
    if mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=own.device).tril().expand(len(own), 1, -1, -1)
    mask = mask[..., :length]
    return (mask if mask.dtype == torch.bool else mask == 0).expand(len(own), -1, -1, -1)
