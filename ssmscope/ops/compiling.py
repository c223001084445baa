"""Functions that a training step may run compiled, many short operations on large tensors, which a GPU then fuses; and
functions traced as tensor operations, of which equal ones are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from ssmscope.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


@contextmanager
def compiling() -> Iterator[None]:
    """Run functions marked `compilable` compiled where gradients are enabled, in this thread alone."""
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


def compilable(function: F) -> F:
    """Mark a pure function of tensors that is compiled within `compiling`."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _compiling.get() and torch.is_grad_enabled():
            return compiled(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # type: ignore[return-value]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


# ---- traces


class Unsettled(InputError):
    """Function that depends on numbers in its tensors, or on other tensors; or that could not be compiled."""


Signature = tuple[tuple[Any, ...], ...]
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "combo_kernels": True}
"""Options of torch's compiler: round 16-bit numbers where the function does, and launch as one kernel what can run side
by side."""

_graphs: dict[tuple[str, Signature], Callable[..., Sequence[Tensor]]] = {}


def signature(given: Sequence[Tensor]) -> Signature:
    """Return shape, strides, type and device of tensors."""
    return tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in given)


def traced(
    function: Callable[..., list[Tensor]], given: Sequence[Tensor], weights: set[int]
) -> tuple[GraphModule, list[Tensor]]:
    """Return a function's tensor operations on these tensors, which it may change, as a graph, and the weights, at
    these addresses of storage, that the graph takes after them. Raises Unsettled if what it does depends on numbers in
    tensors, or on tensors that are neither given nor weights."""
    try:
        found = make_fx(function, decomposition_table={torch.ops.aten.bmm.default: _matvec})(*given)
    except RuntimeError as error:
        raise Unsettled("a layer waits for a number") from error
    nodes = list(found.graph.nodes)
    inputs: dict[Any, Any] = {}
    first = next(node for node in nodes if node.op != "placeholder")
    for node in nodes:
        if node.op == "get_attr":
            if getattr(found, node.target).untyped_storage().data_ptr() not in weights:
                raise Unsettled("a layer reads tensors that it is not given")
            if node.target not in inputs:
                with found.graph.inserting_before(first):
                    inputs[node.target] = found.graph.placeholder(f"weight_{len(inputs)}")
            node.replace_all_uses_with(inputs[node.target])
        elif torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            by_place = node.target is torch.ops.aten.index.Tensor
            if not by_place or any(at is not None and at.meta["val"].dtype != torch.long for at in node.args[1]):
                raise Unsettled("shapes within a layer depend on numbers")
    for node in nodes:
        if node.op == "get_attr":
            found.graph.erase_node(node)
    return GraphModule({}, found.graph), [getattr(found, name) for name in inputs]


def _matvec(x: Tensor, y: Tensor) -> Any:
    """Return a batch of products with one column as sums, which are fused with what computes the factors."""
    return (x * y.mT).sum(-1, keepdim=True) if y.shape[-1] == 1 else NotImplemented


def compiled_once(graph: GraphModule, given: Sequence[Tensor]) -> tuple[Callable[..., Sequence[Tensor]], Any]:
    """Return a graph compiled for such tensors, the same function for equal graphs, and what it gives for these. Raises
    Unsettled if torch cannot compile it."""
    key = (graph.code, signature(given))
    run = _graphs[key] if key in _graphs else torch.compile(graph, fullgraph=True, dynamic=False, options=OPTIONS)
    try:
        results = run(*given)
    except RuntimeError as error:
        raise Unsettled(f"torch cannot compile the layers here ({' '.join(str(error).split()):.200})") from error
    return _graphs.setdefault(key, run), results
