"""Blocks of a model that writes, traced as they read one token, and compiled.

A trace holds the tensor operations of a step and nothing else, so tracing a block is how its family is asked whether a
step is the same whatever the token: one that waits for a number, or keeps tensors elsewhere, has no trace. Blocks whose
traces are equal but for their weights share one compiled function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ssmscope.core.affine import agree
from ssmscope.core.intercept import Handler, active_override
from ssmscope.core.mixers import mixers
from ssmscope.core.trace import LayerState, States, mapped, tensors
from ssmscope.core.weights import weights_prepared
from ssmscope.errors import InputError

Signature = tuple[tuple[Any, ...], ...]


class Unsettled(InputError):
    """Step that depends on more than the shapes of its tensors, or could not be compiled."""


class Traced(NamedTuple):
    """Step of a block: `run` takes the given tensors, whose states it changes in place, and these weights, and returns
    the tensors of `output`."""

    run: Callable[..., Sequence[Tensor]]
    weights: list[Tensor]
    output: Any


ROUNDING: dict[str, str | int | bool] = {"emulate_precision_casts": True}
"""Option of torch's compiler to round 16-bit numbers where the layers do: the tokens are the same."""

_compiled: dict[tuple[str, Signature], Callable[..., Sequence[Tensor]]] = {}


def put(own: States, new: States) -> None:
    """Copy states into tensors that stay where they are. Raises Unsettled if their shapes differ."""
    before, after = tensors(own), tensors(new)
    if [(t.shape, t.dtype) for t in before] != [(t.shape, t.dtype) for t in after]:
        raise Unsettled("states change their shapes from token to token")
    places = {t.untyped_storage().data_ptr() for t in before}
    pairs = [(old, each) for old, each in zip(before, after) if each is not old]
    apart = [each.clone() if each.untyped_storage().data_ptr() in places else each for _, each in pairs]
    for (old, _), each in zip(pairs, apart):
        old.copy_(each)


def signature(given: Sequence[Tensor]) -> Signature:
    """Return shape, strides, type and device of tensors."""
    return tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in given)


class Blocks:
    """Blocks of a model, or its mixers by themselves, whose steps are traced as the model runs under `handlers`.

    Attributes:
        own: states before the run, of every mixer in turn.
        ends: states after it, to which each block adds those of its mixers.
        traces: steps by the block and what it is given, kept from one text to the next.
        compiles: whether blocks run compiled, and change their states in place; otherwise they run as they are, and the
            first of each class is traced, to find out whether it can be.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        own: list[LayerState],
        ends: list[LayerState],
        traces: dict[Any, Traced],
        compiles: bool,
    ) -> None:
        self.own, self.ends, self.traces, self.compiles = own, ends, traces, compiles
        place = {id(mixer): at for at, mixer in enumerate(mixers(module))}
        self.weights = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
        self.asked: set[type[nn.Module]] = set()
        self.handlers: list[tuple[nn.Module, Handler]] = []
        for block in blocks:
            places = [place[id(mixer)] for mixer in mixers(block)]
            self.handlers.append((block, partial(self.run, block, places, active_override(block))))

    def run(
        self, block: nn.Module, places: list[int], handler: Handler | None, below: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a block. Raises Unsettled if it has no trace."""
        run = below if handler is None else partial(handler, below)
        step = partial(self._step, run, places)
        record = (args, kwargs, tuple(self.own[place] for place in places))
        if not self.compiles:
            if type(block) not in self.asked:
                self.asked.add(type(block))
                self._traced(step, record)
            return run(*args, **kwargs)
        given = tensors(record)
        key = (id(block), signature(given))
        if key not in self.traces:
            self.traces[key] = self._compiled(step, record)
        found = self.traces[key]
        results = iter(found.run(*given, *found.weights))
        self.ends.extend(record[2])
        return mapped(found.output, lambda _: next(results))

    def _step(
        self, run: Callable[..., Any], places: Sequence[int], args: Any, kwargs: Any, states: States
    ) -> tuple[Any, States]:
        """Return a block's output from given states of its mixers, and the states after it."""
        before, count = list(self.own), len(self.ends)
        try:
            for place, state in zip(places, states):
                self.own[place] = state
            return run(*args, **kwargs), tuple(self.ends[count:])
        finally:
            self.own[:] = before
            del self.ends[count:]

    def _compiled(self, step: Callable[..., tuple[Any, States]], record: Any) -> Traced:
        """Return a block's trace, compiled and compared with the block itself on what it was given."""
        graph, weights, output = self._traced(step, record)
        key = (graph.code, signature([*tensors(record), *weights]))
        if key not in _compiled:
            _compiled[key] = torch.compile(
                graph, fullgraph=True, dynamic=False, options={"emulate_precision_casts": True}
            )
        mine, own = (mapped(record, torch.clone) for _ in range(2))
        try:
            results = _compiled[key](*tensors(mine), *weights)
        except RuntimeError as error:
            del _compiled[key]
            said = " ".join(str(error).split())
            raise Unsettled(f"torch cannot compile its layers here ({said:.200}): leave compile out") from error
        right = step(*own)
        pairs = zip([*results, *tensors(mine[2])], [*tensors(right[0]), *tensors(right[1])])
        dtype = min((t.dtype for t in weights if t.is_floating_point()), key=lambda each: each.itemsize)
        if not all(agree(one.to(dtype), other.to(dtype)) for one, other in pairs if one.is_floating_point()):
            raise Unsettled("compiled layers compute something else than the layers")
        return Traced(_compiled[key], weights, output)

    def _traced(self, step: Callable[..., tuple[Any, States]], record: Any) -> tuple[GraphModule, list[Tensor], Any]:
        """Return the graph of a block's step without its weights, these, and the structure of its output."""
        outputs: list[Any] = []

        def in_place(*given: Tensor) -> list[Tensor]:
            left = iter(given)
            args, kwargs, states = mapped(record, lambda _: next(left))
            output, after = step(args, kwargs, states)
            put(states, after)
            outputs.append(output)
            return tensors(output)

        table = {torch.ops.aten.bmm.default: _matvec}
        try:
            with weights_prepared():
                graph = make_fx(in_place, decomposition_table=table)(*mapped(tuple(tensors(record)), torch.clone))
        except RuntimeError as error:
            raise Unsettled("a step of its layers waits for a number") from error
        if not tensors(outputs[0]):
            raise Unsettled(f"a block gives a {type(outputs[0]).__name__}, not tensors")
        weights = self._lifted(graph)
        return GraphModule({}, graph.graph), weights, mapped(outputs[0], lambda t: t.new_empty(0))

    def _lifted(self, graph: GraphModule) -> list[Tensor]:
        """Make a graph's weights its last inputs, and return them. Raises Unsettled if it holds other tensors, or an
        operation whose result's shape depends on numbers."""
        found: dict[str, tuple[Any, Tensor]] = {}
        first = next(node for node in graph.graph.nodes if node.op != "placeholder")
        for node in list(graph.graph.nodes):
            if node.op == "get_attr":
                if node.target not in found:
                    weight = getattr(graph, node.target)
                    if weight.untyped_storage().data_ptr() not in self.weights:
                        raise Unsettled("a layer reads tensors that it is not given")
                    with graph.graph.inserting_before(first):
                        found[node.target] = graph.graph.placeholder(f"weight_{len(found)}"), weight
                node.replace_all_uses_with(found[node.target][0])
                graph.graph.erase_node(node)
            elif node.op == "call_function" and torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
                by_place = node.target is torch.ops.aten.index.Tensor and all(
                    at is None or at.meta["val"].dtype == torch.long for at in node.args[1]
                )
                if not by_place:
                    raise Unsettled("shapes within a layer depend on numbers")
        return [weight for _, weight in found.values()]


def _matvec(x: Tensor, y: Tensor) -> Any:
    """Return a batch of products with one column as sums, which are fused with what computes the factors."""
    return (x * y.mT).sum(-1, keepdim=True) if y.shape[-1] == 1 else NotImplemented
