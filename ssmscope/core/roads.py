"""Runs in which parts read the residual stream by roads: each entrance of a part from a stream of its own.

A part of a block is a mixer, an attention module or a feed-forward part. What it reads is a sum, the embedding and the
outputs of earlier parts, and it enters by several roads: a mixer's x, B, C, Δ, gate, …, an attention's q, k, v. A run
may shift what one road reads by a difference of one summand. Everything after it, the same part's other roads excepted,
follows. The mixer's terms are computed from the shifted stream, through the block's own norm, and of them the road's
alone are kept, so that edges into a recurrence are exact.

With `taps` the roads through a convolution are its taps, the token itself and those before it. With `heads` a mixer's
heads are parts by themselves: each reads for its own x, B, …, and writes its share of the sum that the mixer's last
linear map takes, as it is in that run, after the norm.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.edits import Edit, Site, block_parts, blocks_of, edited
from ssmscope.core.encoding import Batch
from ssmscope.core.intercept import observe, override_forward
from ssmscope.core.mixers import entered, numbers_in, terms_of
from ssmscope.core.model import Model
from ssmscope.core.road_terms import TAP, heads_of, roads_of, with_road, with_taps
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError, Unanswerable

EMBEDDING, LOGITS = "embedding", "logits"
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
TOLERANCE = 1e-4
"""Largest difference of a block's output from the sum of its parts, relative to the largest output."""


class Edge(NamedTuple):
    """Road from a sender's output into one entrance of a receiver; "" for parts that have one entrance."""

    sender: str
    receiver: str
    road: str = ""

    @property
    def name(self) -> str:
        return f"{self.sender} → {self.receiver}" + f" ({self.road})" * bool(self.road)


@dataclass(frozen=True, eq=False)
class Part:
    """Part of a block, with its number among those of its kind, the block's number, its roads, and the number of its
    heads, where they are parts, which its last linear map reads."""

    name: str
    module: nn.Module
    block: int
    roads: tuple[str, ...] = ("",)
    heads: int = 0
    last: nn.Module | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of its heads, or its own."""
        return tuple(f"{self.name} head {head}" for head in range(self.heads)) or (self.name,)


Shift = Callable[[str, str, Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Function from a receiver, its road, and the run's outputs so far to what is added to the summands that it reads."""


class RoadRun(NamedTuple):
    """Logits at the positions asked about, and the embedding's and all parts' outputs (batch, length, width)."""

    logits: Tensor
    outputs: Mapping[str, Tensor]


class _Outputs(UserDict[str, Any]):
    """Outputs by name; what heads write is computed when it is first read."""

    def __getitem__(self, name: str) -> Tensor:
        found = super().__getitem__(name)
        if callable(found):
            found = self[name] = found()
        return found


class _Captured(Exception):
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Roads:
    """Parts of a model, in the order of their runs, and runs of a batch whose reads are shifted by road.

    Raises Unanswerable if a block's output is not its input plus the outputs of its parts.
    """

    def __init__(self, model: Model, batch: Batch, *, taps: bool = False, heads: bool = False) -> None:
        self.model, self.blocks, self._taps, self._heads = model, _stack(model), taps, heads
        read = zip(model.layer_numbers, model.mixers)
        named: dict[str, nn.Module] = {f"mixer {n}": mixer for n, mixer in read}
        attention, inner = attention_modules(model.module), block_parts(model.module, "feed-forward")
        kinds = {"attention": attention, "feed-forward": inner}
        named |= {f"{kind} {n}": part for kind, own in kinds.items() for n, part in zip(numbers_in(own), own.values())}
        inside = {id(part): number for number, block in enumerate(self.blocks) for part in block.modules()}
        lost = [name for name, part in named.items() if id(part) not in inside]
        if lost:
            raise Unanswerable(f"{lost[0]} of {model.name} is in none of its blocks: its edges cannot be told apart")
        self.parts = [Part(name, part, inside[id(part)]) for name, part in named.items()]
        self._busy = False
        self._look(batch)
        self.block_of = {node: part.block for part in self.parts for node in part.nodes}
        self.block_of[LOGITS] = len(self.blocks) - 1
        if heads:
            with torch.no_grad():
                self._check_heads(self.run(batch).outputs)

    @property
    def names(self) -> tuple[str, ...]:
        return (EMBEDDING, *(node for part in self.parts for node in part.nodes))

    def edges(self) -> list[Edge]:
        """Return all edges, those to the earliest part first."""
        found = []
        for part in self.parts:
            senders = self._nodes_of(self._reads[part.name])
            found += [Edge(sender, node, road) for node in part.nodes for road in part.roads for sender in senders]
        return found + [Edge(sender, LOGITS) for sender in self.names]

    def _nodes_of(self, names: Sequence[str]) -> list[str]:
        nodes = {part.name: part.nodes for part in self.parts}
        return [node for name in names for node in nodes.get(name, (name,))]

    def in_block(self, part: str) -> list[str]:
        """Return the parts of the same block whose output a part reads."""
        block, part = {each.name: each.block for each in self.parts}, _whole(part)
        return self._nodes_of([name for name in self._reads[part] if block.get(name) == block[part]])

    def run(self, batch: Batch, shift: Shift | None = None, embedding: Tensor | None = None) -> RoadRun:
        """Run a batch with shifted reads, in the caller's context of gradients, from another embedding if given."""
        with self.reading(shift, embedding) as outputs, self.model.running(mask=batch.mask):
            logits = self.model.forward(batch, last_only=True)
        return RoadRun(logits, outputs)

    @contextmanager
    def reading(
        self, shift: Shift | None, embedding: Tensor | None = None, terms: Any = None
    ) -> Iterator[Mapping[str, Tensor]]:
        """Shift the reads of every run of the model within the context, which yields the parts' outputs, from another
        embedding if given; `terms` changes mixers' terms in place of the shift."""
        self._outputs = _Outputs()
        self._raw: dict[str, Any] = {}
        self._calls: dict[int, tuple[Tensor, Any, Any]] = {}
        asked = (lambda *_: {}) if shift is None else shift
        before: list[Any] = [(block, partial(self._enter, n, embedding)) for n, block in enumerate(self.blocks)]
        after: list[Any] = [(part.module, partial(self._leave, part.name)) for part in self.parts]
        after.append((self.blocks[-1], partial(self._end, asked)))
        for part in self.parts:
            if part.name.startswith("mixer"):
                if part.last is not None:
                    before.append((part.last, partial(self._write_heads, part)))
                continue
            if part.roads == ("",):
                before.append((part.module, partial(self._change_input, part, asked)))
            else:
                projections = ((road, getattr(part.module, PROJECTIONS[road])) for road in part.roads)
                after += [(own, partial(self._change_projection, part, road, asked)) for road, own in projections]
        change = partial(self._change_terms, asked) if terms is None else terms
        with ExitStack() as around:
            around.enter_context(edited(self.model, Edit("roads", "terms", change)))
            around.enter_context(observe(before=before, after=after))
            yield self._outputs

    def _enter(self, number: int, embedding: Tensor | None, block: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._busy:
            return None
        stream = args[0] if args else kwargs["hidden_states"]
        if number == 0:
            stream = stream if embedding is None else embedding.to(stream)
            self._outputs[EMBEDDING] = stream
            args, kwargs = ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})
        self._calls[number] = (stream, args, kwargs)
        return args, kwargs

    def _leave(self, name: str, part: nn.Module, output: Any) -> None:
        if not self._busy:
            self._raw[name] = output
            self._outputs[name] = output[0] if isinstance(output, tuple) else output

    def _write_heads(self, part: Part, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._busy:
            each = enumerate(part.nodes)
            self._outputs |= {node: partial(_written, module, args[0], head, part.heads) for head, node in each}

    def _end(self, asked: Shift, block: nn.Module, output: Any) -> Any:
        if self._busy:
            return None
        stream, *others = output if isinstance(output, tuple) else (output,)
        self._last = stream
        for moved in asked(LOGITS, "", self._outputs).values():
            stream = stream + moved
        return (stream, *others) if isinstance(output, tuple) else stream

    def _change_input(self, part: Part, asked: Shift, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._busy or not (moved := asked(part.name, "", self._outputs)):
            return None
        u = self._entrance(part, moved)
        return ((u, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": u})

    def _change_projection(self, part: Part, road: str, asked: Shift, module: nn.Module, output: Tensor) -> Any:
        if self._busy or not (moved := asked(part.name, road, self._outputs)):
            return None
        u = self._entrance(part, moved)
        self._busy = True
        try:
            return module(u)
        finally:
            self._busy = False

    def _change_terms(self, asked: Shift, layer: LayerTrace, site: Site) -> LayerTrace:
        part = self._mixers[site.layer]
        changed = layer
        for head, node in enumerate(part.nodes):
            moved = {road: moves for road in part.roads if (moves := asked(node, road, self._outputs))}
            streams = {road: self._entrance(part, moves) for road, moves in moved.items()}
            one = head if part.heads else None
            if taps := {int(road.removeprefix(TAP)): u for road, u in streams.items() if road.startswith(TAP)}:
                other = with_taps(site.mixer, layer, taps)
                for road in self._convolved[part.name]:
                    changed = with_road(changed, other, road, one)
            for road, u in streams.items():
                if not road.startswith(TAP):
                    changed = with_road(changed, terms_of(site.mixer, u, layer.mask), road, one)
        return changed

    def _entrance(self, part: Part, moved: Mapping[str, Tensor]) -> Tensor:
        """Return what the part is called with if the summands of its block's input, and the outputs of earlier parts of
        the block, are moved by so much."""
        stream, args, kwargs = self._calls[part.block]
        whole: dict[str, Tensor] = {}
        for name, change in moved.items():
            whole[_whole(name)] = whole.get(_whole(name), 0) + change
        own = {each.name: each.module for each in self.parts if each.block == part.block and each.name in self._raw}
        for name, change in whole.items():
            stream = stream + change if name not in own else stream
        forced = [(module, partial(_given, _moved(self._raw[name], whole.get(name)))) for name, module in own.items()]
        args, kwargs = ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})
        self._busy = True
        try:
            with override_forward([*forced, (part.module, partial(_capture, part))]):
                self.blocks[part.block](*args, **kwargs)
        except _Captured as found:
            return found.value
        except InputError as error:
            raise Unanswerable(f"a block of {self.model.name} does not run alone ({error})") from error
        finally:
            self._busy = False
        raise Unanswerable(f"{part.name} of {self.model.name} is not run by its block: its edges cannot be told apart")

    def _look(self, batch: Batch) -> None:
        """Find the order of the parts, their roads, what they read, and that blocks add up."""
        roads: dict[str, tuple[str, ...]] = {}
        heads: dict[str, tuple[int, nn.Module]] = {}
        self._convolved: dict[str, tuple[str, ...]] = {}

        def look(layer: LayerTrace, site: Site) -> LayerTrace:
            name = f"mixer {site.layer}"
            roads[name] = roads_of(site.mixer, layer)
            if self._taps and layer.conv_input is not None:
                through = self._convolved[name] = roads_of(site.mixer, layer, convolved=True)
                taps = tuple(f"{TAP}{lag}" for lag in range(layer.reach)) if through else ()
                roads[name] = taps + tuple(road for road in roads[name] if road not in through)
            if self._heads:
                heads[name] = heads_of(self.model, site.mixer, layer)
            return layer

        with torch.no_grad(), self.reading(None, terms=look) as outputs, self.model.running(mask=batch.mask):
            self.model.forward(batch, last_only=True)
            order = {name: place for place, name in enumerate(outputs)}
            if lost := [part.name for part in self.parts if part.name not in order]:
                raise Unanswerable(f"{lost[0]} of {self.model.name} is not called as a part: its edges are not known")
            for part in self.parts:
                if not part.name.startswith("mixer"):
                    split = all(isinstance(getattr(part.module, own, None), nn.Linear) for own in PROJECTIONS.values())
                    roads[part.name] = tuple(PROJECTIONS) if split else ("",)
            known = (Part(p.name, p.module, p.block, roads[p.name], *heads.get(p.name, ())) for p in self.parts)
            self.parts = sorted(known, key=lambda p: order[p.name])
            self._mixers = {int(p.name.split()[1]): p for p in self.parts if p.name.startswith("mixer")}
            self._check_sums(batch)
            self._reads = {part.name: self._senders(part) for part in self.parts}

    def _check_sums(self, batch: Batch) -> None:
        streams = [self._calls[number][0] for number in range(len(self.blocks))] + [self._last]
        for number, (before, after) in enumerate(zip(streams, streams[1:])):
            own = [self._outputs[part.name] for part in self.parts if part.block == number]
            shapes = {tuple(each.shape) for each in (*own, before, after)}
            fits = shapes == {(*batch.mask.shape, after.shape[-1])}
            size = float(after[batch.mask].abs().max()) if fits else 0.0
            if not fits or float((sum(own, before) - after)[batch.mask].abs().max()) > TOLERANCE * size:
                said = f"the output of block {number} of {self.model.name} is not its input plus those of its parts:"
                raise Unanswerable(f"{said} what a part reads of another cannot be told apart; use patch or ablate")

    def _check_heads(self, outputs: Mapping[str, Tensor]) -> None:
        for part in self.parts:
            whole, written = outputs[part.name], sum(outputs[node] for node in part.nodes)
            if float((written - whole).abs().max()) > TOLERANCE * float(whole.abs().max()):
                said = f"what heads of {self.model.name} write does not add up to the output of {part.name};"
                raise Unanswerable(f"{said} leave nodes=… out")

    def _senders(self, part: Part) -> list[str]:
        """Return what a part reads: all of earlier blocks, and the parts of its own whose output changes its input."""
        plain, found = self._entrance(part, {}), [EMBEDDING]
        raw, self._raw = self._raw, {}
        for each in self.parts[: self.parts.index(part)]:
            self._raw[each.name] = raw[each.name]
            if each.block == part.block:
                u = self._entrance(part, {each.name: torch.ones_like(self._outputs[each.name]).cumsum(-1)})
                if torch.equal(u, plain):
                    continue
            found.append(each.name)
        self._raw = raw
        return found


def _whole(node: str) -> str:
    """Return the name of the part that a head is of, or the name itself."""
    return node.partition(" head ")[0]


def _written(last: Any, u: Tensor, head: int, heads: int) -> Tensor:
    """Return what a head writes of the last linear map's output, its constant in equal shares."""
    own, width = torch.zeros_like(u), u.shape[-1] // heads
    own[..., head * width : (head + 1) * width] = u[..., head * width : (head + 1) * width]
    return last.forward(own) - (0 if getattr(last, "bias", None) is None else last.bias) * (1 - 1 / heads)


def _given(output: Any, below: Any, *args: Any, **kwargs: Any) -> Any:
    return output


def _moved(output: Any, change: Tensor | None) -> Any:
    if change is None:
        return output
    return (output[0] + change, *output[1:]) if isinstance(output, tuple) else output + change


def _capture(part: Part, below: Any, *args: Any, **kwargs: Any) -> Any:
    if part.name.startswith("mixer"):
        raise _Captured(entered(part.module, args, kwargs))
    raise _Captured(args[0] if args else kwargs["hidden_states"])


def _stack(model: Model) -> list[nn.Module]:
    """Return the list of blocks that has all mixers' ones. Raise Unanswerable if there is none."""
    homes = [part for part in model.module.modules() if isinstance(part, nn.ModuleList)]
    own = blocks_of(model.module)
    for home in homes:
        if {id(block) for block in own} <= {id(block) for block in home} and len(set(map(id, home))) == len(home):
            return list(home)
    raise Unanswerable(f"the layers of {model.name} are not in one list of blocks: edges between them are not known")


def replacing(others: Mapping[str, Tensor], edges: Sequence[Edge]) -> Shift:
    """Return the shift by which edges read another run's outputs in place of this one's."""
    senders: dict[tuple[str, str], list[str]] = {}
    for edge in edges:
        senders.setdefault((edge.receiver, edge.road), []).append(edge.sender)

    def shift(receiver: str, road: str, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: others[name] - outputs[name] for name in senders.get((receiver, road), ())}

    return shift
