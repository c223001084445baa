"""Steps of a model that writes, recorded as a CUDA graph; on a machine without a GPU, a stand-in for the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
import torch
from examples import EXAMPLES, VARIANTS, random_example
from exhaustive import ALL
from loud import loud
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ssmscope.core import generation, recording
from ssmscope.core.attention_layers import attention_layers
from ssmscope.core.edits import Edit, edited
from ssmscope.core.generation import Continuation, TokenRuns, Written
from ssmscope.core.intercept import observe
from ssmscope.core.model import Model
from ssmscope.core.recording import STEPS_BEFORE, declared, recordable
from ssmscope.core.trace import mapped, tensors

GPU = torch.device("cuda")
IDS = [[5, 17, 3, 9], [7, 8], [90, 1, 2, 3, 4, 5, 11]]


def example(name: str) -> Model:
    """A model that nothing ends."""
    module = loud(random_example(name))
    module.generation_config.eos_token_id = None
    return Model(module)


def writes(module: nn.Module) -> bool:
    return declared(module, "RECORDABLE_STEPS") and module.get_output_embeddings() is not None


class Waits(TorchDispatchMode):
    """List operations whose results the program waits for, and tensors made of the program's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_place = operation is torch.ops.aten.index.Tensor and all(
            at is None or at.dtype == torch.long for at in args[1]
        )
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*operation.tags}
        if (waits and not by_place) or operation is torch.ops.aten.lift_fresh.default:
            self.found.append(operation)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", [name for name, made in EXAMPLES.items() if writes(made.models[name]) and (ALL or name not in VARIANTS)]
)
def test_a_step_waits_for_nothing_and_keeps_shapes(name: str) -> None:
    model = example(name)
    assert recordable(model.module, GPU) == (not attention_layers(model.module))
    if attention_layers(model.module):
        return
    ids, states = torch.tensor([3, 4]), model.run(model.encode(ids=[[5, 17, 3], [9, 2, 7]])).states
    runs = TokenRuns(model, [], copy_context())
    for _ in range(STEPS_BEFORE):
        _, states = runs(ids, states)
    with Waits() as waits:
        _, after = runs(ids, states)
    runs.close()
    assert not waits.found
    assert [(t.shape, t.dtype) for t in tensors(after)] == [(t.shape, t.dtype) for t in tensors(states)]


def test_a_written_token_is_waited_for_once() -> None:
    model = example("mamba")
    steps = model.generate_stream(ids=IDS, max_new_tokens=3)
    next(steps)
    with Waits() as waits:
        next(steps)
    assert [str(each) for each in waits.found] == ["aten.lift_fresh.default"]  # The ids; the answer is one list.


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of texts of each replay; recordings, without a GPU, run again into the same tensors."""
    seen: list[int] = []

    def recorded(run: Callable[[], Any], device: torch.device) -> Any:
        found = run()

        def replay() -> None:
            seen.append(len(found[0]))
            for own, each in zip(_tensors(found), _tensors(run())):
                own.copy_(each)

        return replay, found

    if not torch.cuda.is_available():
        monkeypatch.setattr(recording, "recorded", recorded)
        monkeypatch.setattr(generation, "recordable", lambda module, device: recordable(module, GPU))
    return seen


def _tensors(terms: Any) -> list[torch.Tensor]:
    return [terms[0], *tensors(terms[1])]


def written(model: Model, **options: Any) -> Any:
    """Return the written tokens, and each step's logits and states as they were when the step ended."""
    kept, steps = [], []
    for step in model.generate_stream(ids=IDS, max_new_tokens=9, keep_states=True, **options):
        steps.append(step)
        kept.append(mapped((step.logits, step.states), torch.clone))
    assert all(
        torch.equal(*pair)
        for step, each in zip(steps, kept)
        for pair in zip(_tensors((step.logits, step.states)), _tensors(each))
    )
    return [[token.id for token in step.written] for step in steps], kept


@pytest.mark.parametrize("name", ["mamba", "mamba2", "diff-mamba"])
@pytest.mark.parametrize("stops", [False, True])
def test_a_recorded_step_is_the_step(
    name: str, stops: bool, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = example(name)
    if torch.cuda.is_available():
        model.module.to(GPU)
    second = model.generate(ids=IDS, max_new_tokens=5).ids[1]
    replays.clear()
    stop = (lambda ids: tuple(ids) == second) if stops else ()
    found, kept = written(model, stop=stop)
    if not torch.cuda.is_available():
        assert replays == [3] * (8 - STEPS_BEFORE)
    monkeypatch.setattr(generation, "recordable", lambda module, device: False)
    expected, plain = written(model, stop=stop)
    assert found == expected and [*map(len, found)] == [3] * 5 + [2 if stops else 3] * 4
    for one, other in zip(kept, plain):
        for own, right in zip(_tensors(one), _tensors(other)):
            size = float(right.abs().max())  # A loud model's states reach 100.
            torch.testing.assert_close(own, right, atol=1e-5 * size, rtol=1e-5)


def test_who_continues_second_from_a_state_is_as_alone(replays: list[int]) -> None:
    model = example("mamba2")
    following = Continuation(model, model.run(model.encode(ids=IDS), last_only=True))
    for number in range(STEPS_BEFORE + 1):
        following.read([Written(row, number, 4 + row, "", 0.0, 0.0) for row in range(3)])
    before = following.logits, following.states
    for token in (7, 9):
        following.logits, following.states = before
        following.read([Written(row, 4, token, "", 0.0, 0.0) for row in range(3)])
        whole = model.encode(ids=[[*ids, *[4 + row] * (STEPS_BEFORE + 1), token] for row, ids in enumerate(IDS)])
        torch.testing.assert_close(following.logits, model.run(whole, last_only=True).logits, atol=1e-5, rtol=1e-4)
    following.close()


def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = example("mamba2")
    expected = written(model)[0]

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(recording, "recorded", fail)
    monkeypatch.setattr(generation, "recordable", lambda module, device: True)
    assert written(model)[0] == expected


def idle() -> Edit:
    return Edit("nothing", "output", lambda value, site: value)


def _ways(model: Model) -> Iterator[Any]:
    yield model.running()
    yield edited(model, idle())
    yield observe(after=[(model.mixers[0], lambda module, output: None)])
    yield model.module.register_forward_hook(lambda *_: None)


def test_edited_watched_and_growing_models_are_not_recorded() -> None:
    model = example("mamba2")
    assert recordable(model.module, GPU) and not recordable(model.module, torch.device("cpu"))
    for way in _ways(model):
        with way:
            assert not recordable(model.module, GPU)
    assert recordable(model.module, GPU)
    assert not recordable(random_example("bamba"), GPU) and not recordable(random_example("gfssm"), GPU)
    model.module.half()
    assert recordable(model.module, GPU)
    mixer = model.mixers[0]
    mixer.forward = lambda *args, **kwargs: type(mixer).forward(mixer, *args, **kwargs)
    assert not recordable(model.module, GPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", ["falcon-mamba", "rwkv", "gated-deltanet"])
def test_a_recording_on_a_gpu_is_made_and_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = recording.recorded
    monkeypatch.setattr(recording, "recorded", lambda run, device: made.append(device) or real(run, device))
    model = example(name)
    model.module.to(GPU)
    found, kept = written(model)
    assert made
    with edited(model, idle()):
        expected, plain = written(model)
    assert found == expected and len(made) == 1
    for one, other in zip(kept, plain):
        torch.testing.assert_close(one[0], other[0], atol=1e-4, rtol=1e-4)
