"""Interventions: pure functions on a model's layer computations, applied inside one run, in its thread alone.

An `Edit` changes one thing at one place of some layers: the residual stream that a block reads, the mixer's input, its
convolution's input or taps, its terms, its state after a token, its scans, or its output. Edits of one thing compose
in the given order, others in the order of `PLACES`, and none leaves anything on the model:

    with ssmscope.edited(model, [cut_edges([3], [9]), replaced("output", values, [4], layers=[2])]):
        model.logits(batch)
    model.run(batch, edits=[…])

Edges between tokens are cut by `ssmscope.core.cuts`.

Positions are those of the run; in a run that continues from states they count from its own first token.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from ssmscope.core.affine import is_linear
from ssmscope.core.attention_layers import attention_changed, attention_modules, attention_numbers
from ssmscope.core.blocks import block_part, declared_parts
from ssmscope.core.intercept import After, Before, observe
from ssmscope.core.mixers import (
    Compute,
    Edits,
    adapter_for,
    check_causal,
    computed_by,
    fast_scan,
    layer_numbers,
    mixers,
    numbers_in,
    state_after,
    terms_of,
)
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError, Unanswerable, check_model, did_you_mean

Place = Literal[
    "residual", "input", "convolution", "taps", "terms", "state", "scans", "output", "attention", "attention-output",
    "feed-forward",
]  # fmt: skip
PLACES: tuple[str, ...] = get_args(Place)
"""Places of edits, in the order of a layer's run, with the value that an edit's function changes:

residual: the block's input, the residual stream, (batch, length, width).
input: the mixer's input, as the residual stream.
convolution: the causal convolution's input, (batch, length, channels).
taps: mask of the tokens that every position of the convolution (or of RWKV's token shifts) reads, its own first,
    (batch, length, taps) bool.
terms: the `LayerTrace`.
state: the `LayerState` after token `after`, from which the later tokens continue; after −1 that of each text's end,
    from which a later run continues, or what the model writes.
scans: a `Scan` for each recurrence; their states are not read again.
output: the mixer's output, (batch, length, width).
attention: mask of the keys that every query of a layer of softmax attention reads, (batch, heads or 1, queries, keys)
    bool. Keys of states come before the run's own.
attention-output, feed-forward: the output of a layer of softmax attention, or of a feed-forward part or experts,
    (batch, length, width), of `block_parts`.
"""
BLOCK_PLACES: tuple[Place, ...] = ("attention-output", "feed-forward")
"""Places outside the state-space layers."""


@dataclass(frozen=True, eq=False)
class Site:
    """Place at which a function is asked to change something.

    Attributes:
        layer: number of the layer of the `mixer`, attention module or part in the model's list of layers.
        start: position of the value's first token; not 0 where states after tokens are edited.
        part: number of the convolution, in a layer that has several.
        trace: the layer's terms, for edits of "scans".
    """

    layer: int
    mixer: nn.Module
    start: int = 0
    part: int = 0
    trace: LayerTrace | None = None


@dataclass(frozen=True, eq=False)
class Edit:
    """Intervention at one of `PLACES` in some layers.

    Attributes:
        name: description in a few words.
        change: function from the value at the place, and its site, to the value that the run goes on with; it changes
            no tensor in place.
        layers: the layers in which it acts, by their numbers in the model's list; None for all.
        after: for "state" alone, the token, counted from 0, after which the state is changed; −1 for each text's last.
        options: arguments that it was made with, for the provenance.
        key: identifier that differs between edits with different effects.

    Raises InputError if there is no such place, or if `after` is missing for "state" or given for another place.
    """

    name: str
    place: Place
    change: Callable[[Any, Site], Any]
    layers: tuple[int, ...] | None = None
    after: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            hint = did_you_mean(str(self.place), PLACES)
            raise InputError(f"an edit has no place {self.place!r}; allowed are {', '.join(PLACES)}{hint}")
        if (self.place == "state") != (self.after is not None):
            raise InputError("after is the token after which a state is edited; give it with the place 'state' alone")

    def describe(self) -> dict[str, Any]:
        """Return the edit as plain values, for the provenance of a result."""
        layers = None if self.layers is None else list(self.layers)
        described = {"name": self.name, "place": self.place, "layers": layers, **self.options, "key": self.key}
        return described if self.after is None else {**described, "after": self.after}

    def acts_in(self, layer: int) -> bool:
        return self.layers is None or layer in self.layers


_active: ContextVar[Mapping[int, tuple[Edit, ...]]] = ContextVar("edits", default=MappingProxyType({}))
"""Edits of this thread's runs, by the id of the model's module."""


def edits_of(module: nn.Module) -> tuple[Edit, ...]:
    """Return the edits under which a model runs here and now."""
    return _active.get().get(id(module), ())


@contextmanager
def edited(model: Any, edits: Edit | Sequence[Edit]) -> Iterator[None]:
    """Edit every run of the model within the context, in this thread alone, whoever starts the run.

    Edits of one thing are applied in the given order, those of an outer context first. Raises InputError if there is no
    such layer, or one layer has edits of both "state" and "scans", whose scans would be in pieces; as it runs, if the
    model fills a cache, no token comes after an edited state, or a run that ends with one does not keep it.
    """
    if not hasattr(model, "module"):
        check_model(model, "edited")
    module, found = model.module, mixers(model.module)
    new = (edits,) if isinstance(edits, Edit) else tuple(edits)
    every = (*edits_of(module), *new)
    attention = [edit for edit in every if edit.place == "attention"]
    outputs = {place: block_parts(module, place) for place in BLOCK_PLACES if place in {edit.place for edit in every}}
    numbers, attending = layer_numbers(module), attention_numbers(module) if attention else ()
    for edit in every:
        own = numbers_in(outputs[edit.place]) if edit.place in outputs else numbers
        known = attending if edit in attention else own
        absent = [layer for layer in edit.layers or () if layer not in known]
        if absent:
            lacks = "feed-forward parts" if edit.place == "feed-forward" else "layers of softmax attention"
            which = f"the layers {in_words(known)}" if known else f"no {lacks}"
            raise InputError(f"{edit.name}: there is no layer {absent[0]}; the model has {which}")
    instead: dict[int, Compute] = {}
    conv_inputs: dict[int, Callable[[Tensor], Tensor]] = {}
    taps: dict[int, Callable[[Tensor], Tensor]] = {}
    ends: dict[int, Callable[[LayerState], LayerState]] = {}
    blocks: list[tuple[nn.Module, Before]] = []
    for index, (number, mixer, block) in enumerate(zip(numbers, found, blocks_of(module))):
        layer = _Layer(index, number, mixer, tuple(edit for edit in every if edit.acts_in(number)))
        if layer.between() and layer.at("scans"):
            raise InputError(f"layer {number}: a state and its scans cannot be edited in one run; edit one of them")
        instead[id(mixer)] = layer.compute
        conv_inputs |= layer.of_convolutions("convolution")
        taps |= layer.of_convolutions("taps")
        ends |= {id(mixer): layer.end} if len(layer.at("state")) > len(layer.between()) else {}
        again = replace(layer, edits=tuple(edit for edit in new if edit.acts_in(number)))
        if again.at("residual"):  # Those of an outer context are on the block already.
            blocks.append((block, again.enter))

    def change(index: int, part: nn.Module, reads: Tensor) -> Tensor:
        for edit in attention:
            reads = edit.change(reads, Site(attending[index], part)) if edit.acts_in(attending[index]) else reads
        return reads

    token = _active.set(MappingProxyType({**_active.get(), id(module): every}))
    try:
        with ExitStack() as around:
            around.enter_context(computed_by(Edits(instead, conv_inputs, taps, ends)))
            around.enter_context(observe(before=blocks, after=_of_outputs(new, outputs)))
            around.enter_context(fast_scan(module))
            if attention:
                around.enter_context(attention_changed(module, change))
            yield
    finally:
        _active.reset(token)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the block of each mixer in the residual stream: the innermost numbered module around it, or the mixer."""
    named = dict(module.named_modules())
    names = {id(part): name for name, part in named.items()}
    found = []
    for mixer in mixers(module):
        parts = names[id(mixer)].split(".")
        numbered = [at for at, part in enumerate(parts) if part.isdigit()]
        found.append(named[".".join(parts[: numbered[-1] + 1])] if numbered else mixer)
    return found


def block_parts(module: nn.Module, place: Place) -> dict[str, nn.Module]:
    """Return the parts of a model's blocks whose output is this place's value, each once, by name and in order. A
    feed-forward part, or experts with their router, is the outermost part of a block that neither is in a mixer or
    attention nor holds one, and that the family declares as such or, where it says nothing, has two linear maps."""
    if place == "attention-output":
        return {name: part for name, part in module.named_modules() if part in {*attention_modules(module).values()}}
    read = [*mixers(module), *attention_modules(module).values()]
    inside = {id(part) for own in read for part in own.modules()}
    around = {id(part) for part in module.modules() if any(id(own) in inside for own in part.modules())}
    declared = declared_parts(module)
    blocks = {id(block) for block in blocks_of(module)}
    stacks = {name.rpartition(".")[0] for name, part in module.named_modules() if id(part) in blocks}
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        above = name.split(".")[:-1]
        in_block = any(".".join(above[:at]) in stacks for at in range(len(above)))
        rule = block_part(part, declared)
        feeds = _maps(part) > 1 if rule is None else rule.feed_forward
        if feeds and in_block and id(part) not in inside | around:
            found[name] = part
            inside |= {id(own) for own in part.modules()}
    return found


def in_words(numbers: Sequence[int]) -> str:
    """Return the numbers of a model's layers, for messages."""
    return f"0 to {len(numbers) - 1}" if [*numbers] == [*range(len(numbers))] else ", ".join(map(str, numbers))


def _maps(part: nn.Module) -> int:
    """Return the number of linear maps within a part: layers, and other matrices, such as those of experts."""
    linear = [own for own in part.modules() if is_linear(own)]
    within = {id(weight) for own in linear for weight in own.parameters()}
    return len(linear) + sum(weight.ndim > 1 and id(weight) not in within for weight in part.parameters())


def _of_outputs(edits: Sequence[Edit], parts: Mapping[Place, Mapping[str, nn.Module]]) -> list[tuple[nn.Module, After]]:
    def changed(own: Sequence[Edit], number: int, part: nn.Module, output: Any) -> Any:
        value, *others = output if isinstance(output, tuple) else (output,)
        for edit in own:
            value = edit.change(value, Site(number, part, _starts.get()))
        return (value, *others) if isinstance(output, tuple) else value

    found = [
        (part, partial(changed, [edit for edit in edits if edit.place == place and edit.acts_in(number)], number))
        for place, own in parts.items()
        for number, part in zip(numbers_in(own), own.values())
    ]
    return [(part, change) for part, change in found if change.args[0]]


_starts: ContextVar[int] = ContextVar("start", default=0)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer with its edits."""

    index: int
    number: int
    mixer: nn.Module
    edits: tuple[Edit, ...]

    def at(self, place: Place) -> list[Edit]:
        return [edit for edit in self.edits if edit.place == place]

    def between(self) -> list[Edit]:
        """Return the edits of states after which the same run goes on."""
        return [edit for edit in self.at("state") if edit.after != -1]

    def end(self, state: LayerState) -> LayerState:
        """Return the state with which a run ends."""
        for edit in self.at("state"):
            state = edit.change(state, Site(self.number, self.mixer)) if edit.after == -1 else state
        return state

    def changed(self, place: Place, value: Any, **more: Any) -> Any:
        for edit in self.at(place):
            value = edit.change(value, Site(self.number, self.mixer, _starts.get(), **more))
        return value

    def of_convolutions(self, place: Place) -> dict[int, Callable[[Tensor], Tensor]]:
        """Return changes to the inputs or masks ("taps") of its convolutions, by the id of their mixers."""
        if not self.at(place):
            return {}
        parts = [part for child in self.mixer.children() for part in mixers(child)] or [self.mixer]
        return {id(part): partial(self.changed, place, part=number) for number, part in enumerate(parts)}

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = args[0] if args else kwargs["hidden_states"]
        if stream.ndim != 3:
            said = f"the residual stream at layer {self.number} is {tuple(stream.shape)}, not (batch, length, width):"
            raise Unanswerable(f"{said} edit outputs or states instead")
        stream = self.changed("residual", stream)
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    def terms(self, u: Tensor, mask: Tensor | None, state: LayerState | None = None) -> LayerTrace:
        if self.at("state"):
            check_causal(self.mixer, "a state after a token")
        layer = terms_of(self.mixer, u, mask, state)
        if self.at("taps") and layer.conv_input is None:
            name = self.at("taps")[0].name
            raise InputError(f"{name}: layer {self.number}, a {type(self.mixer).__name__}, has no convolution")
        return self.changed("terms", layer)

    def compute(
        self, mixer: nn.Module, u: Tensor, mask: Tensor | None, state: Any, retention: bool, visit: Any, own: bool
    ) -> Tensor:
        """Return the mixer's output; the layer runs in pieces between tokens after which states are edited."""
        if not own:
            said = f"a forward pass was put on layer {self.number}, which an edited run cannot keep;"
            raise InputError(f"{said} remove it")
        adapter, u = adapter_for(mixer), self.changed("input", u)
        length = u.shape[1]
        cuts: dict[int, list[Edit]] = {}
        for edit in self.between():
            assert edit.after is not None
            if not 0 <= edit.after < length - 1:
                said = f"{edit.name}: no token comes after token {edit.after} of {length};"
                raise InputError(f"{said} allowed are 0 to {length - 2}, and −1 for the end of a run that keeps states")
            cuts.setdefault(edit.after + 1, []).append(edit)
        outputs, ends = [], [*sorted(cuts), length]
        for start, stop in zip([0, *ends], ends):
            token = _starts.set(start)
            try:
                layer = self.terms(u[:, start:stop], None if mask is None else mask[:, start:stop], state)
                scans = layer.scan(state, retention=retention)
                changed = self.changed("scans", scans, trace=layer)
                scans = tuple(scan._replace(y=other.y) for scan, other in zip(scans, changed))
                if visit is not None and stop == length:
                    visit(self.index, layer, scans)
                state = state_after(mixer, layer, scans) if stop < length else state
                outputs.append(adapter.output(mixer, layer, scans))
                for edit in cuts.get(stop, ()):
                    state = edit.change(state, Site(self.number, mixer, stop))
            finally:
                _starts.reset(token)
        return self.changed("output", outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1))


def recompute_terms(model: Any, edits: Sequence[Edit], index: int, u: Tensor, mask: Tensor | None) -> LayerTrace:
    """Return a layer's terms under these edits, from the input that it had with them."""
    mixer = mixers(model.module)[index]
    if not edits:
        return terms_of(mixer, u, mask)
    number = layer_numbers(model.module)[index]
    layer = _Layer(index, number, mixer, tuple(edit for edit in edits if edit.acts_in(number)))
    with computed_by(Edits({}, layer.of_convolutions("convolution"), layer.of_convolutions("taps"))):
        return layer.terms(u, mask)


# ---- common edits


def replaced(
    place: Place,
    values: Tensor | Mapping[Any, Tensor],
    positions: Sequence[int] | slice = slice(None),
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Mapping[int, Tensor] | None = None,
) -> Edit:
    """Replace this run's values by another run's at some positions, by default at all.

    Args:
        place: "residual", "input", "convolution", "output", or "scans", of which the outputs y are replaced.
        values: (batch or 1, length, …) of one layer; or of several by their numbers, for convolutions by number and
            part, for scans by number and recurrence.
        heads: for "scans", the heads whose outputs are replaced.
        rows: mask by layer, (batch, length) or (batch, length, heads) bool, in place of layers, positions and heads.
    """

    def value(site: Site, like: Tensor, part: int = 0) -> Tensor:
        found = values
        if isinstance(values, Mapping):
            found = values[(site.layer, part) if place in ("convolution", "scans") else site.layer]
        assert isinstance(found, Tensor)
        if rows is not None:
            chosen = rows[site.layer].to(like.device)
        else:
            places, own = torch.zeros(like.shape[1], dtype=torch.bool), torch.zeros(like.shape[2], dtype=torch.bool)
            places[positions if isinstance(positions, slice) else list(positions)] = True
            own[slice(None) if heads is None else list(heads)] = True
            chosen = (places[:, None] & own).expand(like.shape[:3]).to(like.device)
        chosen = chosen.view(*chosen.shape, *[1] * (like.ndim - chosen.ndim))
        return torch.where(chosen, found.to(like), like)

    def change(old: Any, site: Site) -> Any:
        if place == "scans":
            return tuple(scan._replace(y=value(site, scan.y, number)) for number, scan in enumerate(old))
        return value(site, old, site.part)

    where = str(positions) if isinstance(positions, slice) else list(map(int, positions))
    options = {"positions": where, "heads": heads and list(heads)}
    tensors = list(values.values()) if isinstance(values, Mapping) else [values]
    own = tuple(rows) if rows is not None else None if layers is None else tuple(layers)
    key = digest([place, own, options], [*tensors, *(rows or {}).values()])
    return Edit(f"{place} replaced", place, change, own, options=options, key=key)


def new_state(
    after: int, change: Callable[[LayerState, Site], LayerState], *, layers: Sequence[int] | None = None, name: str = ""
) -> Edit:
    """Change the state after token `after`, counted from 0; later tokens continue from it. The layer runs in pieces,
    but for −1, the end of each text, from which a later run or what is written continues."""
    return Edit(name or "state replaced", "state", change, None if layers is None else tuple(layers), after)


def recorded(place: Place, into: dict[Any, Any], *, layers: Sequence[int] | None = None) -> Edit:
    """Record the values at a place: by layer, by layer and part of convolutions, by layer and recurrence of scans."""

    def keep(value: Any, site: Site) -> Any:
        if place == "scans":
            into.update({(site.layer, number): scan.y for number, scan in enumerate(value)})
        else:
            into[(site.layer, site.part) if place == "convolution" else site.layer] = value
        return value

    return Edit(f"{place} recorded", place, keep, None if layers is None else tuple(layers))


def digest(described: Any, tensors: Sequence[Tensor | None]) -> str:
    """Return an edit's key, a hash of the arguments that it was made with."""
    found = hashlib.sha256(json.dumps(described).encode())
    for tensor in tensors:
        if tensor is not None:
            values = tensor.detach().cpu().contiguous()
            found.update(f"{values.dtype} {tuple(values.shape)}".encode())
            found.update(values.view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return found.hexdigest()[:16]
