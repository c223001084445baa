"""Softmax attention of hybrids: its layers, runs from kept keys and values, and cut edges.

The library's own code runs the layers: it asks a cache for the keys and values to attend to, and adds a mask to its
scores. This module provides both: the cache puts a state's keys and values before the run's own, and the mask lets a
query read the keys of its row that are not after it. A state is never changed; while a model writes, new keys are put
into the room after those of the state. For layers that choose their keys see `chosen_keys`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.chosen_keys import (
    Choose,
    additive,
    chooses_keys,
    columns,
    in_one_piece,
    is_read,
    masks_by_row,
    with_changed_choice,
)
from ssmscope.core.intercept import observe, override_forward, twin
from ssmscope.core.interface import Runs
from ssmscope.core.known_models import readable_types
from ssmscope.core.mixers import arguments, is_bidirectional, mixers, numbers_in
from ssmscope.core.ngrams import is_ngram_part, looked_up
from ssmscope.core.trace import Earlier, LayerState, alone
from ssmscope.errors import InputError

IMPLEMENTATIONS = ("eager", "sdpa")
"""Implementations of transformers that add a mask of any shape to their scores."""

Change = Callable[[int, nn.Module, Tensor], Tensor]
"""Function from a layer's number among `attention_layers`, the layer, and a mask of the keys that each query reads,
(batch, heads or 1, queries, keys) bool, to a new mask."""


@dataclass(frozen=True, eq=False)
class AttentionState(LayerState):
    """State from which a layer of softmax attention continues: its `keys` and `values` (batch, keys, heads, width),
    rotated if the layer rotates them, and their `places` (batch, keys) in the text, counted from 1; 0 at padding. Keys
    and values may be those at the beginning of a `room`. In `index`, (batch, keys, width) each, are an indexer's own
    keys and, where it rotates them later, the cosines and sines of their places."""

    keys: Tensor
    values: Tensor
    places: Tensor
    room: Room | None = None
    index: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if self.room is not None and not self.room.begins_with(self.keys):  # They were copied elsewhere.
            object.__setattr__(self, "room", None)


class Room:
    """Keys and values of a text that is written, (batch, heads, room, width), with room for as many again.

    The states of the text share it: each one's are the first, which nothing changes. From every state one run continues
    in here, the first that asks; others copy it."""

    def __init__(self, before: AttentionState, keys: Tensor, values: Tensor) -> None:
        count = before.keys.shape[1]
        most = 2 * (count + keys.shape[2])
        self.keys, self.values = (t.new_empty(*t.shape[:2], most, t.shape[3]) for t in (keys, values))
        self.keys[:, :, :count] = before.keys.transpose(1, 2)
        self.values[:, :, :count] = before.values.transpose(1, 2)
        self.taken: dict[int, object] = {}

    def begins_with(self, keys: Tensor) -> bool:
        """Return True if a state's keys are the first of these."""
        return keys.data_ptr() == self.keys.data_ptr() and keys.shape[0] == self.keys.shape[0]

    def takes(self, count: int, keys: Tensor) -> bool:
        """Return True, for the caller alone, if these keys can be put after the first `count`."""
        mine = object()
        kind = (self.keys.dtype, self.keys.device) == (keys.dtype, keys.device)
        writable = torch.is_inference_mode_enabled() or not self.keys.is_inference()
        fits = kind and writable and count + keys.shape[2] <= self.keys.shape[2]
        return fits and self.taken.setdefault(count, mine) is mine

    def put(self, count: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put keys and values after the first `count` and return all of them."""
        end = count + keys.shape[2]
        self.keys[:, :, count:end], self.values[:, :, count:end] = keys, values
        return self.keys[:, :, :end], self.values[:, :, :end]


def attention_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules outside state-space layers, in order, once for each depth at which one is used."""
    called = {id(part) for part in module.modules() if type(part).__name__.endswith(("Attention", "Attention2"))}
    if not called:
        return {}
    outside = called - {id(part) for mixer in mixers(module) for part in mixer.modules()}
    return {name: part for name, part in module.named_modules(remove_duplicate=False) if id(part) in outside}


def check_readable(module: nn.Module, name: str) -> None:
    """Raise InputError if no layer of a model can be read, with a hint if it has attention."""
    if not isinstance(module, nn.Module):
        raise InputError(f"{type(module).__name__} was given as a module; give a model of transformers, or use load")
    if mixers(module):
        return
    kinds = list(dict.fromkeys(type(part).__name__ for part in attention_modules(module).values()))
    own, advice = type(module).__name__, "give"
    said = own if name == own else f"{name} is a {own}, which"
    said += " has no state-space layer that can be read"
    if kinds:
        convolved = " with convolutions" * any(isinstance(part, nn.Conv1d) for part in module.modules())
        said, advice = f"{said}, but attention ({', '.join(kinds[:2])}){convolved}", f"ask captum or inseq, or {advice}"
    raise InputError(f"{said}; {advice} a model of one of these types: {', '.join(readable_types())}")


def attention_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the `attention_modules` that fill a cache of keys and values."""
    return {name: part for name, part in attention_modules(module).items() if _name_of_cache(part) is not None}


def attention_numbers(module: nn.Module) -> tuple[int, ...]:
    """Return the numbers of `attention_layers` in the model's list of layers."""
    return numbers_in(attention_layers(module))


def keeps_caches(module: Any) -> bool:
    """Return True if every part of a model that reads earlier tokens keeps a state to continue from."""
    if is_bidirectional(module):
        return False
    found = attention_layers(module)
    adds = getattr(module.config, "_attn_implementation", "eager") in IMPLEMENTATIONS
    return not found.keys() ^ attention_modules(module).keys() and (adds or not found)


def runs_in_two_pieces(model: Runs) -> bool:
    """Return True if a short text run in two pieces has the logits of the whole text, to rounding, at each position of
    the second piece where there are some."""
    if model.channels is None:
        ids = [(5 * place + place // 7) % model.vocabulary for place in range(24)]
        whole, first, second = (model.encode(ids=part) for part in (ids, ids[:14], ids[14:]))
    else:
        steps = torch.arange(24.0 * model.channels).view(24, -1).sin()
        whole, first, second = (model.encode(values=part) for part in (steps, steps[:14], steps[14:]))
    model.__dict__["_continues"] = True  # The second piece is allowed to continue while this is found out.
    try:
        expected = model.run(whole).logits.double()
        found = model.run(second, model.run(first).states).logits.double()
        expected = expected[:, -found.shape[1] :] if expected.ndim == 3 else expected
    finally:
        del model.__dict__["_continues"]
    allowed = max(1e-3, 16 * torch.finfo(next(model.module.parameters()).dtype).eps)
    spread = (expected - expected.mean()).abs().max() if expected.numel() > 1 else expected.abs().max()
    return bool((found - expected).abs().max() <= allowed * spread)


def reads_positions(model: Runs) -> bool:
    """Return True if attention depends on the positions of tokens, not on their order alone: a text continued one
    position later has other keys or logits."""
    text = model.encode(ids=[*range(min(8, model.vocabulary))])
    before = model.run(text).states
    later = [replace(s, places=s.places + 1) if isinstance(s, AttentionState) else s for s in before]
    runs = [model.run(text, states) for states in (before, later)]
    read = [[run.logits, *(s.keys for s in run.states if isinstance(s, AttentionState))] for run in runs]
    return not all(map(torch.equal, *read))


def _name_of_cache(part: nn.Module) -> str | None:
    return next((name for name in arguments(part) if name in ("past_key_values", "cache")), None)


_changes: ContextVar[Mapping[int, Change]] = ContextVar("edges changed", default=MappingProxyType({}))
"""Change of a model's attention in this thread's runs, by the id of its module."""


@contextmanager
def attention_changed(module: nn.Module, change: Change) -> Iterator[None]:
    """Change the keys that a model's attention layers read, within the context and in this thread alone."""
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
    states: Earlier = None,
    keep: list[LayerState] | None = None,
    see: Callable[[int, Tensor], None] | None = None,
    writing: bool = False,
) -> Iterator[None]:
    """Continue a model's attention layers, and n-gram embeddings, from `states`, one for each in their order in the
    model, and put those after the run into `keep`, within the context and in this thread alone. `mask` (batch, length)
    bool is True at real positions, all by default; `see` is called with an attention layer's number and its weights
    (batch, heads, queries, keys), computed only for it. With `writing` the states have a `Room`, so that runs of few
    tokens do not copy all earlier keys."""
    change = _changes.get().get(id(module))
    asked = any(each is not None for each in (states, keep, change, see))
    found = attention_layers(module) if asked else {}
    every = module.named_modules(remove_duplicate=False) if asked else ()
    layers = [part for name, part in every if name in found or is_ngram_part(part)]
    if not layers:
        yield
        return
    run = _Run(layers, mask, states, keep, change, see, writing)
    with ExitStack() as around:
        around.enter_context(observe(before=[(module.base_model, run.begin)]))
        parts = {id(part): part for part in layers}.values()
        handlers = ((part, run.look_up if is_ngram_part(part) else run.attend) for part in parts)
        around.enter_context(override_forward([(part, partial(handler, part)) for part, handler in handlers]))
        yield


@dataclass(eq=False)
class _Run:
    layers: Sequence[nn.Module]
    mask: Tensor | None
    states: Sequence[LayerState] | None
    keep: list[LayerState] | None
    change: Change | None
    see: Callable[[int, Tensor], None] | None
    writing: bool = False
    called: dict[int, int] = field(default_factory=dict)
    """Number of calls of each layer, by its id: it tells which of its depths is next."""

    def begin(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the backbone's arguments with positions that follow those of the states."""
        self.called.clear()
        attended = [state for state in self.states or () if isinstance(state, AttentionState)]
        if not attended:
            return None
        named = dict(zip(arguments(backbone), args)) | kwargs
        given = named["input_ids"] if named.get("inputs_embeds") is None else named["inputs_embeds"]
        steps = torch.arange(given.shape[1], device=given.device)
        return args, {**kwargs, "position_ids": attended[0].places.amax(1, keepdim=True).to(steps.device) + steps}

    def place_of(self, part: nn.Module) -> int:
        """Return the place of a part among the layers at this call of it."""
        depths = [place for place, each in enumerate(self.layers) if each is part]
        time = self.called.get(id(part), 0)
        self.called[id(part)] = time + 1
        return depths[time % len(depths)]

    def look_up(self, part: nn.Module, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what n-gram embeddings give after their state, and keep their state after the run."""
        state = self.states[self.place_of(part)] if self.states else None
        output, after = looked_up(part, below, state, self.mask, *args, **kwargs)
        if self.keep is not None:
            self.keep.append(after)
        return output

    def attend(self, part: nn.Module, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a layer's output for keys and values of its state and its own, and keep its state after the run."""
        named = dict(zip(arguments(part), args)) | kwargs
        place, hidden = self.place_of(part), named["hidden_states"]
        number = sum(not is_ngram_part(each) for each in self.layers[:place])
        state = self.states[place] if self.states else None
        assert state is None or isinstance(state, AttentionState)
        mask = hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if self.mask is None else self.mask
        real = mask.to(hidden.device)
        own = real * torch.arange(1, real.shape[1] + 1, device=real.device)
        places = own
        if state is not None:
            before = state.places.to(own.device)
            places = torch.cat([before, torch.where(own > 0, own + before.amax(1, keepdim=True), 0)], dim=1)
        change = None if self.change is None else partial(self.change, number, part)
        after = _Cache(state, self.writing)
        if chooses_keys(part):
            part, change = _with_choice(part, named, after, places, change), None
            below = part.forward if self.change is not None else below
        if not masks_by_row(part) and not all(each is None for each in (state, change, self.see)):
            mask = named.get("attention_mask")
            reads = _read(mask, own) if state is None else _causal(part, places, own.shape[1])
            named["attention_mask"] = additive(reads if change is None else change(reads), hidden.dtype)
        output = (below if self.see is None else _eager(part))(**{**named, str(_name_of_cache(part)): after})
        if self.see is not None:
            self.see(number, columns(output[1], after.original, 3))
        if self.keep is not None:
            self.keep.append(after.state(places))
        return output


def _with_choice(
    part: nn.Module, named: dict[str, Any], after: _Cache, places: Tensor, change: Choose | None
) -> nn.Module:
    """Return a layer that chooses its keys, with its choice changed; its cache and its arguments `named` are made
    ready for earlier keys, at `places`."""
    if masks_by_row(part):
        after.arrange(in_one_piece(places > 0, places.shape[1] - named["hidden_states"].shape[1]))
    else:
        rotations = enumerate(named["position_embeddings"], start=1)
        named["position_embeddings"] = tuple(after.extended(at, t.expand(len(places), -1, -1)) for at, t in rotations)
    if change is None:
        return part
    return with_changed_choice(part, lambda reads: columns(change(columns(reads, after.original, 3)), after.order, 3))


def _eager(part: nn.Module) -> Callable[..., Any]:
    """Return a layer's forward pass that returns its weights with its output."""
    other = twin(part)
    vars(other)["config"] = copy.copy(part.config)
    other.config._attn_implementation = "eager"
    if "output_attentions" not in arguments(part):
        return other.forward
    kinds: Any = type(part).__mro__  # Each implementation is a subclass of the plain one.
    plain = kinds[1] if issubclass(kinds[1], nn.Module) and kinds[1] is not nn.Module else kinds[0]
    return lambda **kwargs: plain.forward(other, **{**kwargs, "output_attentions": True})


class _Cache:
    """Cache of the keys and values to attend to, (batch, heads, keys, width). A layer with a convolution before them
    finds its last inputs in `tail`, (batch, taps − 1, channels), and puts those after the run there. An indexer finds
    what it keeps of every key, and the cache itself as that of its layer. Layers are given the keys in `order`, by
    default that in which they are kept."""

    def __init__(self, before: AttentionState | None, writing: bool = False) -> None:
        self.before, self.writing = before, writing
        self.tail = None if before is None else before.conv
        self.room: Room | None = None
        self.index: dict[int, Tensor] = {}
        self.order: Tensor | None = None
        self.original: Tensor | None = None
        self.layers: Mapping[int, _Cache] = defaultdict(lambda: self)

    def arrange(self, order: Tensor | None) -> None:
        """Give the columns in this order, (batch, keys), from now on; `original` undoes it."""
        self.order, self.original = order, None if order is None else order.argsort(dim=1)

    def extended(self, place: int, t: Tensor) -> Tensor:
        """Return the tensor of the `index` at a place, (batch, keys, width), for earlier keys and then the run's."""
        before = () if self.before is None else self.before.index
        self.index[place] = torch.cat([before[place].to(t), t], dim=1) if before else t
        return self.index[place]

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        return columns(self.extended(0, keys), self.order, 1)

    def get_seq_length(self) -> int:
        return self.keys.shape[2]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        before = self.before
        if before is not None and self.writing and not (keys.requires_grad or before.keys.requires_grad):
            count = before.keys.shape[1]
            self.room = before.room
            if self.room is None or not self.room.takes(count, keys):
                self.room = Room(before, keys, values)
                self.room.takes(count, keys)
            keys, values = self.room.put(count, keys, values)
        elif before is not None:
            keys = torch.cat([before.keys.transpose(1, 2).to(keys), keys], dim=2)
            values = torch.cat([before.values.transpose(1, 2).to(values), values], dim=2)
        self.keys, self.values = keys, values
        return columns(keys, self.order, 2), columns(values, self.order, 2)

    def state(self, places: Tensor) -> LayerState:
        """Return the state after the run, in a whole text without columns that are padding in every row."""
        keys, values = (t.transpose(1, 2) for t in (self.keys, self.values))
        index = tuple(self.index[place] for place in sorted(self.index))
        if self.room is not None:
            tail = None if self.tail is None else self.tail.clone()
            return AttentionState(tail, (), keys, values, places, self.room, index)
        real = places.any(0)
        kept = (keys[:, real], values[:, real], places[:, real])
        return alone(AttentionState(self.tail, (), *kept, index=tuple(t[:, real] for t in index)))


def _causal(part: nn.Module, places: Tensor, queries: int) -> Tensor:
    """Return a mask of the keys that the last `queries` of these places read, (batch, 1, queries, keys): those of their
    row that are not after them nor, in a layer with a window, too far back."""
    keys, rows = places[:, None, None], places[:, None, -queries:, None]
    steps = torch.arange(places.shape[1], device=places.device)
    reads = (keys > 0) & (steps <= steps[-queries:, None])
    window = getattr(part, "sliding_window", None)
    return reads if window is None else reads & (rows - keys < window)


def _read(mask: Tensor | None, own: Tensor) -> Tensor:
    """Return a mask of the keys read, (batch, 1, queries, keys), from the mask that the model hands to a layer."""
    length = own.shape[1]
    if mask is None:
        return torch.ones(length, length, dtype=torch.bool, device=own.device).tril().expand(len(own), 1, -1, -1)
    return is_read(mask[..., :length]).expand(len(own), -1, -1, -1)
