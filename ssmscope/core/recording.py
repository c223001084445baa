"""Steps of a model that writes, on tensors that stay where they are: compiled, or recorded as a CUDA graph, or both.

A token takes some thirty short kernels in every layer, and launching them one by one takes longer than they run. A
recorded step reads its ids and states where it has put them, and draws the next ids itself, so a GPU can be handed the
kernels of several tokens at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.edits import edits_of
from ssmscope.core.intercept import active_override, forward_without_transfer, is_changed, is_observed
from ssmscope.core.mixers import mixers, runs_own
from ssmscope.core.trace import States, gathered, mapped, tensors
from ssmscope.ops.compiling import Unsettled

STEPS_BEFORE = 2
"""Steps that run as they are before one is recorded: short answers are not worth it."""
STEPS_AT_ONCE = 16
"""Steps after which a GPU is waited for, where nobody waits for each token."""
MAX_PROMPT_STEPS = 64
"""Tokens of a prompt up to which recorded steps may read it, where that takes no longer than a whole run."""

Step = Callable[[Tensor, States, States], tuple[Tensor, States]]
"""Function from ids (texts,), the states before them and tensors for those after them to logits (texts, vocabulary) and
the states after them, in these tensors or others."""
Note = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], None]
"""Function of logits (texts, vocabulary), draws from 0 to 1, (texts,), and three tensors that it changes: the ids that
it chooses, the `Sampling.numbers` of the latest steps, (steps, 5, texts), and the number of the step, (1,)."""


def can_record_steps(module: Any) -> bool:
    """Return True if nothing is put on a model's parts, its weights are plain and in one place, and it keeps no keys
    and values, which grow. Its blocks are asked what else they need, see `core.token_runs`."""
    if edits_of(module) or attention_modules(module):
        return False
    parts, weights = list(module.modules()), list(module.parameters())
    if any(is_changed(part) or is_observed(part) or active_override(part) is not None for part in parts):
        return False
    plain = all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in weights)
    one_place = len({weight.device for weight in weights}) == 1
    return plain and one_place and all(runs_own(each, forward_without_transfer(each)) for each in mixers(module))


class Traced(NamedTuple):
    """Step of a block: `run` takes the given tensors, whose states it changes in place, and these weights, and returns
    the tensors of `output`."""

    run: Callable[..., Sequence[Tensor]]
    weights: list[Tensor]
    output: Any


def alike(own: States, new: States) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of states. Raises Unsettled if their shapes or types differ."""
    before, after = tensors(own), tensors(new)
    if [(t.shape, t.dtype) for t in before] != [(t.shape, t.dtype) for t in after]:
        raise Unsettled("states change their shapes from token to token")
    return before, after


def put(own: States, new: States) -> None:
    """Copy states into tensors that stay where they are. Raises Unsettled if their shapes or types differ."""
    before, after = alike(own, new)
    places = {t.untyped_storage().data_ptr() for t in before}
    pairs = [(old, each) for old, each in zip(before, after) if each is not old]
    apart = [each.clone() if each.untyped_storage().data_ptr() in places else each for _, each in pairs]
    for (old, _), each in zip(pairs, apart):
        old.copy_(each)


class Kept:
    """Traces and recordings of a model, as long as it stays as it is: numbers may change within its weights.

    Attributes:
        traces: of its blocks, see `core.token_runs`.
        steps: the latest two recordings, of whole batches and the last one, say, unless somebody uses them.
    """

    def __init__(self, marks: Any) -> None:
        self.marks = marks
        self.traces: dict[Any, Traced] = {}
        self.steps: dict[Any, StepInPlace] = {}

    @classmethod
    def of(cls, model: Any) -> Kept:
        """Return what is kept of a model."""
        marks, found = marks_of(model.module), model.__dict__.get("_kept")
        if found is None or found.marks != marks:
            found = model.__dict__["_kept"] = cls(marks)
        return found

    def put(self, key: Any, step: StepInPlace) -> None:
        self.steps = {**dict([*self.steps.items()][-1:]), key: step}


PLAIN = {bool, int, float, str}


def marks_of(module: nn.Module) -> list[Any]:
    """Return where a model's weights are, and the plain attributes and the configurations of its parts."""
    found: list[Any] = [t.data_ptr() for t in (*module.parameters(), *module.buffers())]
    for part in module.modules():
        found.append(type(part))  # A run sets and restores `training`.
        found += [each for each in vars(part).items() if type(each[1]) in PLAIN and each[0] != "training"]
    return [*found, repr(getattr(module, "config", None))]


class StepInPlace:
    """Step on tensors of its own: it reads `ids`, replaces `states`, draws the next `ids` and notes their `numbers`,
    for as many texts as it was made for. A GPU records it, once for each direction between two places of the states.

    Attributes:
        ids: (texts,), read next.
        reads: number of tokens of a prompt up to which `read` reads it.
        prepared: what the step reads that was computed from weights, see `core.weights`.
    """

    def __init__(
        self,
        step: Step,
        note: Note,
        ids: Tensor,
        states: States,
        draws: bool,
        prepared: Mapping[tuple[Any, ...], Any],
    ) -> None:
        self.step, self.note, self.prepared, self.reads = step, note, prepared, 0
        with torch.inference_mode(False), torch.no_grad():
            self.ids, *self.places = mapped((ids, states, states), torch.clone)
            self.outcomes: list[Tensor] = [self.ids, self.ids]
            self.at, self.turn = torch.zeros(1, dtype=torch.long, device=ids.device), 0
            self.draws = self.at.new_zeros(STEPS_AT_ONCE, len(ids), dtype=torch.float64) if draws else None
            self.numbers = torch.zeros(STEPS_AT_ONCE, 5, len(ids), dtype=torch.float64, device=ids.device)
            self.runs: list[Callable[[], None]] = [partial(self._run, turn) for turn in range(2)]
            if ids.device.type == "cuda":
                self._run(0)
                self.runs = recorded(self.runs, ids.device)
                self.begin(ids, states)

    @property
    def logits(self) -> Tensor:
        """Those from which `ids` were drawn, (texts, vocabulary)."""
        return self.outcomes[1 - self.turn]

    @property
    def states(self) -> States:
        """Those that `logits` came from."""
        return self.places[self.turn]

    def begin(self, ids: Tensor, states: States | None) -> None:
        """Go on from these ids and states, of zeros if they are None, with the weights as they now are."""
        with torch.inference_mode(False), torch.no_grad():
            self.at.zero_()
            found = [(old, compute(*given)) for (compute, *given), old in self.prepared.items()]
            for own, each in [(self.ids, ids), (self.states, self.states if states is None else states), *found]:
                for old, new in zip(tensors(own), tensors(each)):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            if states is None:
                for t in tensors(self.states):
                    t.zero_()

    def time_reading(self, ids: Tensor, states: States, whole: float) -> None:
        """Let prompts of so many tokens be read as steps do in the seconds of a `whole` run, of models that begin with
        states of zeros; then go on from these ids and states."""
        start = time.perf_counter()
        self.take(STEPS_AT_ONCE, None)
        self.taken(1)
        seconds = (time.perf_counter() - start) / STEPS_AT_ONCE
        self.reads = min(MAX_PROMPT_STEPS, int(whole / seconds))
        self.begin(ids, states)

    def read(self, prompts: Tensor) -> None:
        """Go on from prompts (texts, tokens) but for their last tokens, which are read next."""
        self.begin(prompts[:, 0], None)
        for ids in prompts.T[1:]:
            self.take(1, None)
            self.ids.copy_(ids)

    def take(self, count: int, draws: np.ndarray | None) -> None:
        """Take so many steps, without waiting for a GPU; `draws` (steps, texts) choose the tokens."""
        with torch.inference_mode(False), torch.no_grad():
            self.at.zero_()
            if self.draws is not None and draws is not None:
                self.draws[:count, : draws.shape[1]].copy_(torch.from_numpy(draws))
            for _ in range(count):
                self.runs[self.turn]()
                self.turn = 1 - self.turn

    def taken(self, count: int) -> list[list[list[float]]]:
        """Return the numbers of each of the steps taken last."""
        return self.numbers[:count].tolist()  # A GPU is waited for once.

    def of_texts(self, rows: Sequence[int], states: bool) -> tuple[Tensor, States]:
        """Return copies of the logits and, if asked for, the states of some texts."""
        chosen = torch.tensor([*rows], dtype=torch.long)
        return self.logits[chosen.to(self.logits.device)], gathered(self.states, chosen) if states else ()

    def _run(self, turn: int) -> None:
        into = self.places[1 - turn]
        self.outcomes[turn], after = self.step(self.ids, self.places[turn], into)
        if turn == 0:  # What is recorded stays where it is.
            alike(into, after)
            self.places[1] = after
        else:
            put(into, after)
        drawn = None if self.draws is None else self.draws.index_select(0, self.at)[0]
        self.note(self.outcomes[turn], drawn, self.ids, self.numbers, self.at)


_recording = Lock()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def recorded(runs: Sequence[Callable[[], None]], device: torch.device) -> list[Callable[[], None]]:
    """Return functions that replay runs on a GPU, one at a time."""
    graphs, aside = [torch.cuda.CUDAGraph() for _ in runs], _stream(device)
    with _recording:
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            runs[0]()  # Libraries prepare themselves for this stream.
            for graph, run in zip(graphs, runs):
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    run()
    return [graph.replay for graph in graphs]
