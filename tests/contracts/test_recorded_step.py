"""Steps of a model that writes, on tensors that stay where they are: recorded on a GPU, compiled, or neither."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any

import pytest
import torch
from examples import EXAMPLES, SAME, VARIANTS, random_example
from exhaustive import ALL, in_turns
from loud import loud
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.mamba.modeling_mamba import MambaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
import ssmscope
from ssmscope import backends
from ssmscope.core import generation, recording
from ssmscope.core.adapted import AdaptedState, adapt
from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.edits import Edit, edited
from ssmscope.core.heads import gives
from ssmscope.core.intercept import observe, override_forward
from ssmscope.core.lasting_edits import while_writing
from ssmscope.core.mixers import collect_states, fast_scan
from ssmscope.core.model import Model
from ssmscope.core.recording import MAX_PROMPT_STEPS, STEPS_AT_ONCE, STEPS_BEFORE, Kept, StepInPlace, can_record_steps
from ssmscope.core.sampling import Sampling
from ssmscope.core.token_runs import Blocks, OneKernelNorm, TokenRuns
from ssmscope.core.trace import mapped, tensors
from ssmscope.ops import compiling
from ssmscope.ops.compiling import Unsettled

GPU = torch.device("cuda")
IDS = [[5, 17, 3, 9], [7, 8], [90, 1, 2, 3, 4, 5, 11]]


def example(name: str, dtype: torch.dtype = torch.float32) -> Model:
    """A model that nothing ends."""
    module = loud(random_example(name)).to(dtype)
    module.generation_config.eos_token_id = None
    return Model(module)


@pytest.fixture
def unstacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch from noting where in the program it traces each tensor, which takes a quarter of the time."""
    monkeypatch.setattr("torch._subclasses.fake_tensor.traceback.extract_stack", lambda *_, **__: [])


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


CONSTANTS = {"baleen-b-soft-mamba2", "retnet", "retnet-unrotated"}
"""Models whose layers read tensors that are neither given to them nor weights."""


@pytest.mark.parametrize("name", [name for name in EXAMPLES if ALL or name not in VARIANTS | SAME])
def test_layers_that_are_recorded_wait_for_nothing_and_keep_shapes(name: str, unstacked: None) -> None:
    module = random_example(name)
    if gives(module) != "next tokens" or not can_record_steps(module):
        assert attention_modules(module) or gives(module) != "next tokens"
        return
    model = Model(loud(module))
    ids, states = torch.tensor([3, 4]), model.run(model.encode(ids=[[5, 17, 3], [9, 2, 7]])).states
    runs = TokenRuns(model, [], copy_context())
    with Waits() as waits:
        _, after = runs(ids, states)
    with pytest.raises(Unsettled) if name in CONSTANTS else nullcontext():
        runs.in_place(ids, states, Sampling().note, False, {}, False)
        assert not waits.found
        assert [(t.shape, t.dtype) for t in tensors(after)] == [(t.shape, t.dtype) for t in tensors(states)]
    runs.close()


FORGETTING: dict[str, Callable[[torch.Tensor], float]] = {
    "weights": lambda u: 1.0,
    "a number": lambda u: float(u.sum() > 0),
    "a shape": lambda u: 1.0 + len(u[u > 0]),
}


class Forgetting(nn.Module):
    """Layer whose decay depends on weights, a number of its input, or a shape that follows from such numbers."""

    def __init__(self, by: str = "weights") -> None:
        super().__init__()
        self.by, self.proj = by, nn.Linear(8, 8)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        return self.proj(ssmscope.ops.scan(terms_of(self, u)).y.flatten(2))


def terms_of(layer: Forgetting, u: torch.Tensor) -> ssmscope.ops.Recurrence:
    x = layer.proj(u).unflatten(-1, (2, 4))
    return ssmscope.ops.Recurrence(x=x, b=x.sigmoid(), c=x, log_a=-x.exp() / (1 + FORGETTING[layer.by](u)))


@pytest.mark.parametrize("by", FORGETTING)
def test_layers_that_depend_on_numbers_are_not_recorded(by: str) -> None:
    layer = Forgetting(by)
    adapt(Forgetting, terms=terms_of, output=lambda layer, u, ys: layer.proj(ys[0]))
    own, ends = [AdaptedState(None, (torch.randn(1, 2, 4, 4),), torch.tensor([3]))], []
    with torch.no_grad(), fast_scan(layer, states=own, visit=collect_states(layer, ends)):
        blocks = Blocks(layer, [layer], (own, own, ends), {}, False)
        with override_forward(blocks.handlers), nullcontext() if by == "weights" else pytest.raises(Unsettled):
            layer(torch.ones(1, 1, 8))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "gated-deltanet", "groupmamba"])
def test_short_texts_are_read_in_place_where_they_begin_at_zero(name, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = example(name), torch.tensor([[5, 17, 3, 9, 41], [9, 2, 7, 7, 8]])
    expected, ids = model.run(model.encode(ids=texts.tolist()), last_only=True), texts[:, 0]
    runs = TokenRuns(model, [], copy_context())
    assert 0 < runs._seconds_from_zero(ids, expected.states) < 60
    step = runs.in_place(ids, expected.states, Sampling().note, False, {}, False)
    step.time_reading(ids, expected.states, 0.0)
    assert step.reads == 0
    step.time_reading(ids, expected.states, 60.0)
    assert step.reads == MAX_PROMPT_STEPS and torch.equal(step.ids, ids)
    assert all(map(torch.equal, tensors(step.states), tensors(expected.states)))
    for _ in range(2):  # The second begins where the first ended.
        step.read(texts)
        step.take(1, None)
        for own, right in zip(_tensors((step.logits, step.states)), _tensors((expected.logits, expected.states))):
            torch.testing.assert_close(own, right, atol=1e-5 * float(right.abs().max()), rtol=1e-5)
        assert step.taken(1)[0][0] == step.ids.tolist() == expected.logits.argmax(-1).tolist()
    first = model.run(model.encode(ids=ids.unsqueeze(1).tolist()), last_only=True)
    monkeypatch.setattr(Model, "run", lambda *_, **__: first._replace(logits=first.logits.flip(-1)))
    assert not runs._seconds_from_zero(ids, expected.states)
    runs.close()


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 4}])
def test_a_step_that_is_kept_reads_short_prompts(options: dict[str, Any], taken: list[int], monkeypatch) -> None:
    model, ids, new = example("mamba2"), [[5, 17, 3, 9, 41], [9, 2, 7, 7, 8]], STEPS_AT_ONCE + 4
    monkeypatch.setattr(generation, "can_record_steps", lambda module: not taken)
    expected, sampling = model.generate(ids=ids, max_new_tokens=new, **options), Sampling(**options)
    states, kept = model.run(model.encode(ids=ids)).states, Kept.of(model)
    key = 2, False, Sampling(**options | {"seed": 0})
    runs = TokenRuns(model, [], copy_context())
    step = runs.in_place(torch.tensor([3, 4]), states, sampling.note, bool(options), {}, False)
    for step.reads, steps in (5, [1] * 4 + [STEPS_AT_ONCE, 4]), (4, [STEPS_AT_ONCE, 3]):
        kept.steps = {key: step}
        monkeypatch.setattr(generation, "can_record_steps", lambda module: True)
        taken.clear()
        found = model.generate(ids=ids, max_new_tokens=new, **options)
        assert taken == steps and found.ids == expected.ids
        assert bool(kept.steps) == (step.reads == 5)  # A GPU's are kept however they begin.
        torch.testing.assert_close(torch.tensor(found.log_probabilities), torch.tensor(expected.log_probabilities))
    kept.steps = {key: step}
    model.generate(ids=[ids[0], ids[0][:3]], max_new_tokens=2, **options)
    assert taken[len(steps) :] == [1]  # Texts of two lengths are read by a run.
    runs.close()


NORMS: dict[str, tuple[nn.Module, int]] = {
    "mamba": (MambaRMSNorm(12), 1), "gated": (MambaRMSNormGated(12), 2), "torch": (nn.RMSNorm(12), 1)
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_norms_in_one_kernel(name: str, dtype: torch.dtype) -> None:
    norm, given = NORMS[name]
    norm = copy.deepcopy(norm).to(dtype).requires_grad_(False)
    norm.weight.normal_()
    x, one = torch.randn(2, 3, 4, 12).to(dtype), OneKernelNorm(norm)
    for rows in x.flip(0):
        found = one(norm.forward, *[rows, x[0]][:given])
        torch.testing.assert_close(
            found, norm(*[rows, x[0]][:given]), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=0
        )
    assert one.fits
    for other in (nn.LayerNorm(12), type("Shifted", (MambaRMSNorm,), {"forward": lambda self, x: x + self.weight})(12)):
        one = OneKernelNorm(other)
        assert torch.equal(one(other.forward, rows.float()), other(rows.float())) and not one.fits


def test_kernels_are_left_out_of_traces() -> None:
    """A trace is run on other numbers, which a kernel outside torch would not see."""
    x, delta, A, keys = torch.randn(2, 5, 2, 1), torch.rand(2, 5, 2), -torch.rand(2, 4), torch.randn(2, 2, 5, 1, 4)
    scan = lambda b: ssmscope.ops.scan(ssmscope.ops.Recurrence(x=x, b=b, c=b, delta=delta, A=A)).y  # noqa: E731
    assert backends.find("selective_scan", x, keys[0], keys[0], None, delta, A)
    with torch.no_grad():
        torch.testing.assert_close(make_fx(scan)(keys[0])(keys[1]), scan(keys[1]))


def test_a_written_token_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = example("mamba")
    steps = model.generate_stream(ids=IDS, max_new_tokens=9)
    next(steps)
    with Waits() as waits:
        next(steps)
    assert [str(each) for each in waits.found] == ["aten.lift_fresh.default"]  # The ids; the answer is one list.
    monkeypatch.setattr(generation, "RECORDING_DEVICES", ("cuda", "cpu"))
    steps = model.generate_stream(ids=IDS, max_new_tokens=9)
    for _ in range(STEPS_BEFORE + 2):
        next(steps)
    with Waits() as waits:
        next(steps)
    assert [str(each) for each in waits.found] == ["aten.lift_fresh.default"]  # The places of the texts.


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of steps that are taken at once, in place on a CPU too."""
    seen: list[int] = []
    real = StepInPlace.take
    monkeypatch.setattr(StepInPlace, "take", lambda step, count, draws: seen.append(count) or real(step, count, draws))
    monkeypatch.setattr(generation, "RECORDING_DEVICES", ("cuda", "cpu"))
    return seen


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, taken: list[int], unstacked: None) -> list[Any]:
    """The graphs that would be compiled, which run as they are: torch compiles one of these layers in ten seconds."""
    graphs: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graphs.append(graph) or graph)
    monkeypatch.setattr(compiling, "_graphs", {})
    return graphs


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


@pytest.mark.parametrize(("name", "stops"), in_turns(["mamba", "mamba2", "diff-mamba", "groupmamba"], [False, True]))
def test_a_step_in_place_is_the_step(name: str, stops: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = example(name)
    if torch.cuda.is_available():
        model.module.to(GPU)
    second = model.generate(ids=IDS, max_new_tokens=5).ids[1]
    taken.clear()
    stop = (lambda ids: tuple(ids) == second) if stops else ()
    found, kept = written(model, stop=stop)
    assert taken[-(8 - STEPS_BEFORE) :] == [1] * (8 - STEPS_BEFORE)
    monkeypatch.setattr(generation, "can_record_steps", lambda module: False)
    expected, plain = written(model, stop=stop)
    assert found == expected and [*map(len, found)] == [3] * 5 + [2 if stops else 3] * 4
    for one, other in zip(kept, plain):
        for own, right in zip(_tensors(one), _tensors(other)):
            size = float(right.abs().max())  # A loud model's states reach 100.
            torch.testing.assert_close(own, right, atol=1e-5 * size, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "top_k": 40, "seed": 4}])
def test_several_tokens_at_once_are_those_of_one_after_another(options, taken, monkeypatch) -> None:
    model, new = example("mamba2"), STEPS_BEFORE + 2 + STEPS_AT_ONCE
    one_by_one = [step.written for step in model.generate_stream(ids=IDS, max_new_tokens=new, **options)]
    assert {*taken} == {1}
    taken.clear()
    second = tuple(step[1].id for step in one_by_one[: STEPS_BEFORE + 4])
    found = model.generate(ids=IDS, max_new_tokens=new, stop=lambda ids: tuple(ids) == second, **options)
    assert taken == [STEPS_AT_ONCE, 1]
    for row, tokens in enumerate(found.written):
        expected = [step[row] for step in one_by_one[: len(second) if row == 1 else new]]
        assert [token.id for token in tokens] == [token.id for token in expected]
        assert [token.log_probability for token in tokens] == pytest.approx([t.log_probability for t in expected])
        assert [token.entropy for token in tokens] == pytest.approx([token.entropy for token in expected], abs=1e-5)


class Written(nn.Module):
    """Language model of one's own, with layers that `adapt` says how to read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)
        self.layers = nn.ModuleList(Forgetting() for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def model_of(name: str, dtype: torch.dtype) -> Model:
    if name != "adapted":
        return example(name, dtype)
    adapt(Forgetting, terms=terms_of, output=lambda layer, u, ys: layer.proj(ys[0]))
    torch.manual_seed(0)
    return ssmscope.load(loud(Written()).to(dtype), answer="next")


def as_rows(steps: list[Any]) -> tuple[list[list[int]], torch.Tensor]:
    """Return the tokens of each text, and the logits (texts, steps, vocabulary) that they came from."""
    logits = torch.stack([step.logits for step in steps], dim=1)
    return [[step.written[row].id for step in steps] for row in range(len(logits))], logits


def check_uncached(model: Model, found: list[list[int]], logits: torch.Tensor) -> None:
    """Check written tokens and their logits against a run of each whole text."""
    for ids, said, own in zip(IDS, found, logits):
        whole = model.run(model.encode(ids=[[*ids, *said]])).logits[0, len(ids) - 1 : -1]
        torch.testing.assert_close(own, whole, atol=1e-5 * float(whole.abs().max()), rtol=0)
        assert whole.argmax(-1).tolist() == said


COMPILED = ["mamba", "mamba2", "gated-deltanet", "groupmamba", "bamba", "adapted"]


@pytest.mark.parametrize(("name", "dtype"), in_turns(COMPILED, [torch.float32, torch.bfloat16]))
def test_a_compiled_step_writes_what_whole_texts_say(name, dtype, traced, taken, monkeypatch) -> None:
    model = model_of(name, dtype)
    monkeypatch.setattr(generation, "RECORDING_DEVICES", ())
    steps = list(model.generate_stream(ids=IDS, max_new_tokens=9, compile=True))
    found, logits = as_rows(steps)
    if dtype == torch.float32:
        check_uncached(model, found, logits)
    else:  # A whole text is rounded elsewhere; a step rounds where the step does that is not compiled.
        plain, expected = as_rows(list(model.generate_stream(ids=IDS, max_new_tokens=9, compile=False)))
        assert found == plain
        torch.testing.assert_close(logits, expected, atol=1e-2 * float(expected.abs().max()), rtol=0)
    assert bool(traced) == bool(taken) == (name != "bamba")  # Attention keeps more with every token.
    kinds = len(traced)
    if dtype == torch.float32 and name != "groupmamba":  # The layers of a group read different numbers of others.
        assert kinds == (name != "bamba") and len(model.mixers) > 1
    model.module.train()
    again = model.generate(ids=IDS, max_new_tokens=9, compile=True)
    assert [list(row) for row in again.ids] == found and len(traced) == kinds
    assert not any(len([*graph.parameters(), *graph.buffers()]) for graph in traced)


def test_weights_that_change_between_texts_are_read(traced: list[Any]) -> None:
    model = example("mamba2")
    first = model.generate(ids=IDS, max_new_tokens=9, compile=True).ids
    for change in ("in place", "replaced", "attribute"):
        with torch.no_grad():
            for mixer in model.mixers:
                if change == "in place":
                    mixer.A_log.add_(1.5)
                elif change == "replaced":
                    mixer.out_proj.weight = nn.Parameter(mixer.out_proj.weight.flip(0))
                else:
                    mixer.time_step_limit = (0.0, 0.05)
        found = model.generate(ids=IDS, max_new_tokens=9, compile=True).ids
        assert found == model.generate(ids=IDS, max_new_tokens=9, compile=False).ids != first
        first = found


def test_a_step_is_compiled_by_torch() -> None:
    model = example("mamba")
    check_uncached(model, *as_rows(list(model.generate_stream(ids=IDS, max_new_tokens=9, compile=True))))
    assert model.__dict__["_kept"].traces


def test_what_torch_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = example("mamba2")
    expected = written(model)[0]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda graph, **_: fail)
    monkeypatch.setattr(compiling, "_graphs", {})
    assert written(model, compile=True)[0] == expected and not compiling._graphs


def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    model = example("mamba2")
    expected = written(model, compile=False)[0]
    taken.clear()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(StepInPlace, "__init__", fail)
    assert written(model)[0] == expected and not taken


def idle() -> Edit:
    return Edit("nothing", "output", lambda value, site: value)


def _ways(model: Model) -> Iterator[Any]:
    yield model.running()
    yield edited(model, idle())
    yield observe(after=[(model.mixers[0], lambda module, output: None)])
    yield model.module.register_forward_hook(lambda *_: None)


def test_edited_watched_and_growing_models_are_not_recorded(taken: list[int]) -> None:
    model = example("mamba2")
    assert can_record_steps(model.module)
    for way in _ways(model):
        with way:
            assert not can_record_steps(model.module)
            model.generate(ids=IDS, max_new_tokens=5, compile=True)
    model.generate(ids=IDS, max_new_tokens=5, compile=True, edits=while_writing(idle()))
    assert not taken
    assert can_record_steps(model.module) and not can_record_steps(random_example("bamba"))
    model.module.half()
    assert can_record_steps(model.module)
    mixer = model.mixers[0]
    mixer.forward = lambda *args, **kwargs: type(mixer).forward(mixer, *args, **kwargs)
    assert not can_record_steps(model.module)


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
    again, _ = written(model)
    with edited(model, idle()):
        expected, plain = written(model)
    assert found == expected == again and len(made) == 1
    for one, other in zip(kept, plain):
        torch.testing.assert_close(one[0], other[0], atol=1e-4, rtol=1e-4)
