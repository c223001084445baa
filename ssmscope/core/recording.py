"""Step of a model that writes, recorded as a CUDA graph: a GPU is handed all kernels of a token at once.

A token takes some thirty short kernels in every layer, and launching them one by one takes longer than they run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.edits import edits_of
from ssmscope.core.intercept import active_override, forward_without_transfer, is_changed, is_observed
from ssmscope.core.mixers import adapter_for, mixers, runs_own
from ssmscope.core.trace import States, mapped, tensors

STEPS_BEFORE = 2
"""Steps that run as they are before one is recorded: short answers are not worth it."""

Step = Callable[[Tensor, States], tuple[Tensor, States]]
"""Function from ids (texts,) and the states before them to logits (texts, vocabulary) and the states after them."""


def recordable(module: Any, device: torch.device) -> bool:
    """Return True if a model's step on this device, unedited, runs the same kernels whatever the token: there are no
    keys and values, which grow, and nothing is put on its parts."""
    if device.type != "cuda" or not declared(module, "RECORDABLE_STEPS") or edits_of(module):
        return False
    if attention_modules(module):
        return False
    parts, weights = list(module.modules()), list(module.parameters())
    if any(is_changed(part) or is_observed(part) or active_override(part) is not None for part in parts):
        return False
    plain = all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in weights)
    one_place = len({weight.device for weight in weights}) == 1
    return plain and one_place and all(runs_own(each, forward_without_transfer(each)) for each in mixers(module))


def declared(module: Any, name: str) -> bool:
    """Return True if the adapters of all mixers declare the model's type in the tuple `name`, see `LayerAdapter`."""
    config = module.config
    kind = getattr(getattr(config, "backbone", config), "model_type", None)
    return all(kind in getattr(adapter_for(each), name, ()) for each in mixers(module))


class RecordedStep:
    """Recording of a step, from the texts' ids and states to the logits and states, for as many texts or fewer.

    A call copies ids and states into the tensors that the recording reads, replays it, and returns copies of what it
    found; rows beyond the given texts are read and unused.
    """

    def __init__(self, step: Step, ids: Tensor, states: States) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.given = mapped((ids, states), torch.clone)
            self.replay, self.found = recorded(lambda: step(*self.given), ids.device)

    def __call__(self, ids: Tensor, states: States) -> tuple[Tensor, States]:
        for own, each in zip(_tensors(self.given), _tensors((ids, states))):
            own[: len(each)].copy_(each)
        self.replay()
        return mapped(self.found, lambda t: t[: len(ids)].clone())


def _tensors(terms: tuple[Tensor, States]) -> list[Tensor]:
    return [terms[0], *tensors(terms[1])]


def record(step: Step, ids: Tensor, states: States) -> Step:
    """Return a recording of the step for these texts; the step itself if it cannot be recorded, for want of memory,
    say."""
    try:
        return RecordedStep(step, ids, states)
    except RuntimeError:
        return step


_recording = Lock()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def recorded(
    run: Callable[[], tuple[Tensor, States]], device: torch.device
) -> tuple[Callable[[], None], tuple[Tensor, States]]:
    """Return a function that replays a run on a GPU, and the run's results, which each replay overwrites."""
    graph, aside = torch.cuda.CUDAGraph(), _stream(device)
    with _recording:
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            run()  # Libraries prepare themselves for this stream.
            with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                found = run()
    return graph.replay, found
