"""Runs of a model that reads one token of each text at a time, as they are or on tensors that stay where they are.

Tracing a layer is how its family is asked whether a step is the same whatever the token: one that waits for a number,
or reads tensors kept elsewhere, has no trace. Layers whose traces are equal but for weights share a compiled function.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import Context
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.functional import rms_norm, silu
from ssmscope.core.affine import agree, is_norm, norm_constants
from ssmscope.core.attention_layers import attending
from ssmscope.core.edits import Edit, edited
from ssmscope.core.forms import at_least_float32
from ssmscope.core.heads import own_logits
from ssmscope.core.intercept import Handler, active_override, evaluating, override_forward
from ssmscope.core.interface import Runs
from ssmscope.core.mixers import collect_states, fast_scan, mixers
from ssmscope.core.progress import count_tokens
from ssmscope.core.recomputing import stacked
from ssmscope.core.recording import Note, Step, StepInPlace, Traced, put
from ssmscope.core.trace import LayerState, States, mapped, tensors
from ssmscope.core.weights import weights_prepared
from ssmscope.errors import InputError
from ssmscope.ops.compiling import Unsettled, compiled_once, signature, traced


class TokenRuns:
    """Runs of one token a text, from states and under the same edits: what one run has in common with the next is
    prepared once. They run in a copy of the caller's context, as the caller goes on in between. Logits may be infinite
    or NaN."""

    def __init__(self, model: Runs, edits: Sequence[Edit], context: Context) -> None:
        self.model, self.around, self.context = model, ExitStack(), context.copy()
        # A stream may be open as the interpreter ends, which takes the names of modules away before it closes streams.
        self.leave = weakref.finalize(self, self.context.run, self.around.close)
        self.layers = model.num_layers
        self.before: tuple[list[LayerState], list[LayerState]] = [], []
        self.after: tuple[list[LayerState], list[LayerState]] = [], []
        self.into: list[LayerState] = []
        try:
            self.context.run(self._enter, edits)
        except BaseException:
            self.close()
            raise

    def _enter(self, edits: Sequence[Edit]) -> None:
        module, (own, attended), (ends, kept) = self.model.module, self.before, self.after
        if edits:
            self.around.enter_context(edited(self.model, edits))
        self.around.enter_context(evaluating(module))
        self.prepared = self.around.enter_context(weights_prepared())
        self.around.enter_context(fast_scan(module, states=own, visit=collect_states(module, ends)))
        self.around.enter_context(attending(module, states=attended, keep=kept, writing=True))

    def close(self) -> None:
        self.leave()

    def __call__(self, ids: Int[Tensor, " texts"], states: States) -> tuple[Tensor, States]:
        """Return the logits after these tokens, (texts, vocabulary), and the states."""
        return self.context.run(self._run, ids, states)

    def in_place(
        self, ids: Tensor, states: States, note: Note, draws: bool, traces: dict[Any, Traced], compiles: bool
    ) -> StepInPlace:
        """Return the step on tensors of its own, which begin as these. Raises Unsettled if it differs from token to
        token or its blocks cannot be compiled, and RuntimeError if a GPU does not record it."""
        whole = self._seconds_from_zero(ids, states) if ids.device.type == "cuda" else 0.0
        self.context.run(self._prepare, ids, states, traces, compiles)
        step: Step = lambda *given: self.context.run(self._step, *given)  # noqa: E731
        found = StepInPlace(step, note, ids, states, draws, self.prepared)
        if whole:
            found.time_reading(ids, states, whole)
        return found

    def _seconds_from_zero(self, ids: Tensor, states: States) -> float:
        """Return the seconds of a run of these tokens as the first of texts, if that gives what they give after states
        of zeros; 0 otherwise."""
        first, start = self.model.encode(ids=ids.unsqueeze(1).tolist()), time.perf_counter()
        right = self.model.run(first, last_only=True)
        right.logits.tolist()  # A GPU is waited for.
        seconds = time.perf_counter() - start
        with torch.no_grad():
            found = self.context.run(self._step, ids, mapped(states, torch.zeros_like))
        pairs = zip(tensors(found), tensors((right.logits, right.states)))
        same = all(one.shape == other.shape and agree(one.to(other), other) for one, other in pairs)
        return seconds if same else 0.0

    def _prepare(self, ids: Tensor, states: States, traces: dict[Any, Traced], compiles: bool) -> None:
        """Ask the mixers whether a step is the same for all tokens; or compile the blocks, else the mixers alone."""
        module, failed = self.model.module, None
        given = ids, states, states
        run = lambda: self._step(*mapped(given, torch.clone))[0].to(next(module.parameters()))  # noqa: E731
        with torch.inference_mode(False), torch.no_grad():
            if ids.device.type == "cuda":
                inside = {id(part) for block in stacked(module) for part in block.modules()} if compiles else ()
                norms = [part for part in module.modules() if is_norm(part) and id(part) not in inside]
                self.around.enter_context(override_forward([(norm, OneKernelNorm(norm)) for norm in norms]))
                run()
            expected = run() if compiles else None
            for blocks in filter(None, [*[[*stacked(module)]] * compiles, mixers(module)]):
                with ExitStack() as around:
                    made = Blocks(module, blocks, (self.before[0], self.into, self.after[0]), traces, compiles)
                    around.enter_context(override_forward(made.handlers))
                    try:
                        run()
                        if expected is None or agree(run(), expected):
                            self.around.enter_context(around.pop_all())
                            return
                    except (InputError, RuntimeError) as error:
                        failed = error
        raise failed or Unsettled("compiled layers pass on less than the layers")

    def _run(self, ids: Tensor, states: States) -> tuple[Tensor, States]:
        count_tokens(len(ids))
        with torch.no_grad():
            return self._step(ids, states)

    def _step(self, ids: Tensor, states: States, into: States = ()) -> tuple[Tensor, States]:
        self.before[0][:], self.before[1][:] = states[: self.layers], states[self.layers :]
        self.into[:] = into[: self.layers]
        for each in self.after:
            each.clear()
        logits = own_logits(self.model.module, {"input_ids": ids.unsqueeze(1)}, None)[:, 0]
        return logits.to(self.model.device), tuple(sum(self.after, []))


class OneKernelNorm:
    """Norm by the root mean square, before it perhaps opened by a gate, in torch's own kernel, if that gave the same on
    what the norm was first given."""

    def __init__(self, norm: nn.Module) -> None:
        self.weight: Any = norm.weight
        self.eps, centred = norm_constants(norm)
        self.fits = False if centred or self.weight.ndim > 1 else None

    def __call__(self, below: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) > 2 or self.fits is False or args[0].shape[-1:] != self.weight.shape:
            return below(*args, **kwargs)
        x, plain = args[0], len(args) == 1 and args[0].dtype == self.weight.dtype
        wide = x if plain else at_least_float32(x)
        wide = wide if len(args) == 1 else wide * silu(at_least_float32(args[1]))
        found = rms_norm(wide, self.weight.shape, self.weight if plain else None, self.eps)
        found = found if plain else self.weight * found.to(x.dtype)
        if self.fits is None:
            right = below(*args)
            self.fits = found.shape == right.shape and found.dtype == right.dtype and agree(found, right)
        return found if self.fits else below(*args)


class Blocks:
    """Blocks of a model, or its mixers by themselves, whose steps are traced as the model runs under `handlers`.

    Attributes:
        own: states before the run, of every mixer in turn.
        into: tensors for those after it.
        ends: states after it, to which each block adds those of its mixers.
        traces: steps by the block and what it is given, kept from one text to the next.
        compiles: whether blocks run compiled, and write states `into` their tensors; otherwise they run as they are,
            and the first of each class is traced, to find out whether it can be.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        states: tuple[list[LayerState], list[LayerState], list[LayerState]],
        traces: dict[Any, Traced],
        compiles: bool,
    ) -> None:
        (self.own, self.into, self.ends), self.traces, self.compiles = states, traces, compiles
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
        own, into = (tuple(states[place] for place in places) for states in (self.own, self.into or self.own))
        record = (args, kwargs, own, into)
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
        self.ends.extend(into)
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
        mine, own = (mapped(record, torch.clone) for _ in range(2))
        run, results = compiled_once(graph, [*tensors(mine), *weights])
        right = step(*own[:3])
        pairs = zip([*results, *tensors(mine[3])], [*tensors(right[0]), *tensors(right[1])])
        dtype = min((t.dtype for t in weights if t.is_floating_point()), key=lambda each: each.itemsize)
        if not all(agree(one.to(dtype), other.to(dtype)) for one, other in pairs if one.is_floating_point()):
            raise Unsettled("compiled layers compute something else than the layers")
        return Traced(run, weights, output)

    def _traced(self, step: Callable[..., tuple[Any, States]], record: Any) -> tuple[GraphModule, list[Tensor], Any]:
        """Return the graph of a block's step, its weights, and the structure of its output."""
        outputs: list[Any] = []

        def in_place(*given: Tensor) -> list[Tensor]:
            left = iter(given)
            args, kwargs, states, into = mapped(record, lambda _: next(left))
            output, after = step(args, kwargs, states)
            put(into, after)
            outputs.append(output)
            return tensors(output)

        with weights_prepared():
            graph, weights = traced(in_place, mapped(tuple(tensors(record)), torch.clone), self.weights)
        if not tensors(outputs[0]):
            raise Unsettled(f"a block gives a {type(outputs[0]).__name__}, not tensors")
        return graph, weights, mapped(outputs[0], lambda t: t.new_empty(0))
