"""Steps of a model that writes, on tensors that stay where they are: compiled, or recorded as a CUDA graph, or both.

A token takes some thirty short kernels in every layer, and launching them one by one takes longer than they run. A
recorded step reads its ids and states where it has put them, and draws the next ids itself, so a GPU can be handed the
kernels of several tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
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

Step = Callable[[Tensor, States], tuple[Tensor, States]]
"""Function from ids (texts,) and the states before them to logits (texts, vocabulary) and the states after them."""
Numbers = Callable[[Tensor, Tensor | None], Tensor]
"""Function from logits (texts, vocabulary) and draws from 0 to 1, (texts,), to what `Sampling.numbers` gives."""


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


def marks_of(module: nn.Module) -> list[Any]:
    """Return where a model's weights are, and the plain attributes and the configurations of its parts."""
    found: list[Any] = [t.data_ptr() for t in (*module.parameters(), *module.buffers())]
    for part in module.modules():
        plain = [each for each in vars(part).items() if isinstance(each[1], bool | int | float | str)]
        found += [type(part), *(each for each in plain if each[0] != "training")]  # A run sets and restores it.
    return [*found, repr(getattr(module, "config", None))]


class StepInPlace:
    """Step on tensors of its own: it reads `ids`, changes `states`, draws the next `ids` and notes their `numbers`, for
    as many texts as it was made for. A GPU records it.

    Attributes:
        ids: (texts,), read next.
        logits: (texts, vocabulary), from which they were drawn.
        states: those that these logits came from.
        prepared: what the step reads that was computed from weights, see `core.weights`.
    """

    logits: Tensor

    def __init__(
        self,
        step: Step,
        choose: Numbers,
        ids: Tensor,
        states: States,
        draws: bool,
        prepared: Mapping[tuple[Any, ...], Any],
    ) -> None:
        self.step, self.choose, self.prepared = step, choose, prepared
        with torch.inference_mode(False), torch.no_grad():
            self.ids, self.states = mapped((ids, states), torch.clone)
            self.at = torch.zeros(1, dtype=torch.long, device=ids.device)
            self.draws = self.at.new_zeros(STEPS_AT_ONCE, len(ids), dtype=torch.float64) if draws else None
            self.numbers: Tensor | None = None
            self.run = self._run
            if ids.device.type == "cuda":
                self._run()
                self.at.zero_()
                self.run = recorded(self._run, ids.device)
                self.begin(ids, states)

    def begin(self, ids: Tensor, states: States) -> None:
        """Go on from these ids and states, with the weights as they now are."""
        with torch.inference_mode(False), torch.no_grad():
            found = [(old, compute(*given)) for (compute, *given), old in self.prepared.items()]
            for own, each in [((self.ids, *self.states), (ids, *states)), *found]:
                for old, new in zip(tensors(own), tensors(each)):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

    def take(self, count: int, draws: np.ndarray | None) -> None:
        """Take so many steps, without waiting for a GPU; `draws` (steps, texts) choose the tokens."""
        with torch.inference_mode(False), torch.no_grad():
            self.at.zero_()
            if self.draws is not None and draws is not None:
                self.draws[:count, : draws.shape[1]].copy_(torch.from_numpy(draws))
            for _ in range(count):
                self.run()

    def taken(self, count: int) -> list[list[list[float]]]:
        """Return the numbers of each of the steps taken last."""
        assert self.numbers is not None
        return self.numbers[:count].tolist()  # A GPU is waited for once.

    def of_texts(self, rows: Sequence[int], states: bool) -> tuple[Tensor, States]:
        """Return copies of the logits and, if asked for, the states of some texts."""
        chosen = torch.tensor([*rows], dtype=torch.long)
        return self.logits[chosen.to(self.logits.device)], gathered(self.states, chosen) if states else ()

    def _run(self) -> None:
        logits, after = self.step(self.ids, self.states)
        put(self.states, after)
        self.logits = logits
        drawn = None if self.draws is None else self.draws.index_select(0, self.at)[0]
        numbers = self.choose(logits, drawn)
        if self.numbers is None:
            self.numbers = numbers.new_zeros(STEPS_AT_ONCE, *numbers.shape)
        self.ids.copy_(numbers[0])
        self.numbers.index_copy_(0, self.at, numbers.unsqueeze(0))
        self.at += 1


_recording = Lock()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def recorded(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that replays a run on a GPU."""
    graph, aside = torch.cuda.CUDAGraph(), _stream(device)
    with _recording:
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            run()  # Libraries prepare themselves for this stream.
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                run()
    return graph.replay
