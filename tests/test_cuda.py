"""Modules of one's own on a GPU: read as in float64 on a CPU, with inputs from anywhere, or refused in one line."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from own_layers import LRU, S4D, SS2D, BothWays, CopiedMamba, Mamba2, Unit, unit_terms
from refusals import refused
from torch import Tensor, nn
import ssmscope
from ssmscope import testing
from ssmscope.core.encoding import Batch

without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = pytest.param("cuda", marks=without_gpu)
DEVICES = ["cpu", GPU]
WAYS = [("cpu", torch.float32), *(pytest.param("cuda", t, marks=without_gpu) for t in (torch.float64, torch.float32))]
"""Devices and dtypes that are compared with float64 on the CPU."""
LABELS, VOCABULARY, WIDTH, LENGTH = list("abcd"), 20, 8, 9
ROWS = [[4, 9, 8, 1, 2, 6, 7, 5, 4], [3, 5, 7, 1, 2], [11, 2]]


class Opposed(nn.Module):
    """Two units, of which the second reads from the end; its order is made on the CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = Unit(width), Unit(width)

    def forward(self, u: Tensor) -> Tensor:
        return 1.5 * self.one(u) - self.other(u.flip(1)).flip(1)


def opposed_terms(layer: Any, u: Tensor) -> list[ssmscope.Recurrence]:
    back = unit_terms(layer.other, u)
    order = torch.arange(u.shape[1]).flip(0)
    return [unit_terms(layer.one, u), ssmscope.Recurrence(back.x, back.b, back.c, log_a=back.log_a, order=order)]


class Network(nn.Module):
    """Two layers between norms that read tokens, series or images, and answer at every position or once."""

    def __init__(self, make: Callable[[int], nn.Module], reads: str, once: bool, outputs: int) -> None:
        super().__init__()
        entries = {"tokens": nn.Embedding(VOCABULARY, WIDTH), "series": nn.Linear(3, WIDTH)}
        self.enter = entries.get(reads) or nn.Conv2d(3, WIDTH, 2, 2)
        self.layers = nn.ModuleList(make(WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head, self.reads, self.once = nn.Linear(WIDTH, outputs), reads, once

    def forward(self, given: Tensor) -> Tensor:
        x = self.enter(given)
        x = x.movedim(1, -1) if self.reads == "images" else x
        for norm, layer in zip(self.norms, self.layers):
            y = layer(norm(x))
            x = x + (y[0] if isinstance(y, tuple) else y)
        return self.head(x.flatten(1, -2).mean(1) if self.once else x)


@dataclass(frozen=True)
class Case:
    """A network, and which levels of attention and whether relevance is declared of its layers."""

    make: Callable[[int], nn.Module]
    reads: str = "tokens"
    once: bool = False
    writes: bool = False
    declared: bool = True

    def module(self) -> Network:
        torch.manual_seed(0)
        module = Network(self.make, self.reads, self.once, VOCABULARY if self.writes else len(LABELS))
        with torch.no_grad():
            for name, weight in module.named_parameters():
                weight.mul_(2) if weight.ndim > 1 and "A_log" not in name and "kernel" not in name else None
        return module.double().eval()

    def given(self) -> Any:
        shape = {"series": (3, LENGTH, 3), "images": (3, 3, 4, 6)}.get(self.reads)
        made = torch.Generator().manual_seed(0)
        return ROWS if shape is None else torch.randn(shape, generator=made, dtype=torch.float64)

    def options(self) -> dict[str, Any]:
        return ({} if self.writes else {"labels": LABELS}) | ({} if self.once or self.writes else {"at": -1})

    def load(self, module: nn.Module, given: Any) -> ssmscope.Model:
        return ssmscope.load(module, example=given if self.reads != "tokens" else None, **self.options())

    def encode(self, model: ssmscope.Model, given: Any) -> Batch:
        return model.encode(ids=given) if self.reads == "tokens" else model.encode(given)

    def parts(self, model: ssmscope.Model, one: Any) -> tuple[Batch, Batch]:
        """Encode the first four positions, and the rest."""
        first, rest = ([one[0][:4]], [one[0][4:]]) if self.reads == "tokens" else (one[:, :4], one[:, 4:])
        return self.encode(model, first), self.encode(model, rest)


CASES = {
    "token classifier": Case(CopiedMamba), "language model": Case(Unit, writes=True),
    "language model of Mamba": Case(CopiedMamba, writes=True), "Mamba-2 on texts": Case(Mamba2, once=True),
    "series": Case(Unit, "series"), "complex states": Case(LRU, "series", declared=False),
    "long convolution": Case(lambda width: S4D(width, transposed=False), "series", once=True, declared=False),
    "pair": Case(BothWays, once=True, declared=False), "own pair": Case(Opposed, "series", declared=False),
    "images": Case(SS2D, "images", once=True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def adapted() -> None:
    ssmscope.adapt(Unit, terms=unit_terms, form=ssmscope.Form(values="candidate", out=None))
    output: Any = lambda layer, u, ys: 1.5 * ys[0] - ys[1]  # noqa: E731
    ssmscope.adapt(Opposed, terms=opposed_terms, output=output, both_ways=True)


def moved(given: Any, device: str, dtype: torch.dtype) -> Any:
    return given.to(device, dtype) if isinstance(given, Tensor) else given


def questions(case: Case, model: ssmscope.Model, given: Any) -> Iterator[tuple[str, Any]]:
    """Yield what each verb finds, by name."""
    one = given[:1]
    batch, alone = case.encode(model, given), case.encode(model, one)
    yield "logits", model.logits(batch)
    trace = model.trace(batch)
    yield "survival", torch.cat([row.flatten() for row in trace.survival()])
    yield "retention", trace.retention
    yield "heatmap", np.concatenate([np.asarray(text.scores).ravel() for text in ssmscope.heatmap(model, batch)])
    for level in ("ssm", "block") if case.declared else ("ssm",):
        yield f"attention, {level}", ssmscope.attention(model, alone, level=level).to_frame()["weight"]
        cut = ssmscope.knockout(model, alone, from_="2", level=level, **({"to": "5"} if case.once else {}))
        yield f"knockout, {level}", cut.to_frame()["change"]
    methods = ["gradxinput", "ig", "occlusion", *(["lrp"] if case.declared else [])]
    for text in ssmscope.explain(model, batch, methods=methods, option={"ig": {"fixed": 4}}):
        for each in text.attributions:
            yield f"explain, {each.method}", each.scores
    other = alone.input_ids if alone.values is None else alone.values
    changed = other.clone()
    changed[:, 2:4] = other[:, 4:6]
    changed = changed[0].tolist() if alone.values is None else model.encode(unpatched(case, changed))
    pair = (1, 2) if case.writes else ("b", "c")
    about = {"answer": pair[0], "contrast": pair[1], "metric": "difference"}
    clean = given[0] if case.reads == "tokens" else one
    for site in ("output",) if trace.bidirectional else ("output", "state"):
        yield f"patch, {site}", ssmscope.patch(model, clean=clean, corrupted=changed, site=site, **about).values
    if model.continues:
        first, rest = case.parts(model, one)
        yield "continued", model.run(rest, model.run(first).states).logits
    if case.writes:
        for compiled in (False, model.device.type == "cuda"):
            yield "written", torch.tensor(model.generate(ids=given, max_new_tokens=7, compile=compiled).ids)
    elif case.reads == "series":
        data = ssmscope.labelled_series(given.cpu(), ["a", "b", "c"], LABELS)
        yield "fidelity", ssmscope.fidelity(model, data, methods=["gradxinput"], steps=3).to_frame()["value"]
        yield "noise", [each.accuracy.value for each in ssmscope.noise(model, data, change="gaussian").levels]
    if not trace.bidirectional:
        yield "stability", ssmscope.stability(model, length=12).to_frame().select_dtypes("number").to_numpy()


def unpatched(case: Case, values: Tensor) -> Tensor:
    if case.reads != "images":
        return values
    return values.view(1, 2, 3, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 3, 4, 6)


def array(found: Any) -> np.ndarray:
    return np.asarray(found.detach().cpu().double() if isinstance(found, Tensor) else found, dtype=np.float64)


known = pytest.fixture(scope="module")(lambda: {})


def gathered(case: Case, model: ssmscope.Model, given: Any) -> dict[str, list[np.ndarray]]:
    found: dict[str, list[np.ndarray]] = {}
    for name, each in questions(case, model, given):
        found.setdefault(name, []).append(array(each))
    return found


@pytest.mark.parametrize(("device", "dtype"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_every_verb_finds_the_same(name: str, device: str, dtype: torch.dtype, known: dict) -> None:
    case, given = CASES[name], CASES[name].given()
    if name not in known:
        known[name] = gathered(case, case.load(case.module(), given), given)
    given = moved(given, device, dtype)
    model = case.load(case.module().to(device, dtype), given)
    assert model.device.type == device
    close = 1e-9 if dtype is torch.float64 else 2e-3
    found = gathered(case, model, given)
    assert found.keys() == known[name].keys()
    apart = {}
    for question, right in known[name].items():
        for one, other in zip(found[question], right, strict=True):
            assert one.shape == other.shape and np.array_equal(np.isnan(one), np.isnan(other)), question
            size = np.nanmax(np.abs(other), initial=0.1)
            apart[question] = max(apart.get(question, 0.0), np.nanmax(np.abs(one - other), initial=0.0) / size)
    assert not {question: gap for question, gap in apart.items() if gap > close}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_inputs_from_elsewhere_are_moved(name: str, device: str) -> None:
    case, given = CASES[name], CASES[name].given()
    model, here = case.load(case.module().to(device), given), torch.device("cpu")
    if case.reads == "tokens":
        batches = [case.encode(model, given), case.encode(model, given).to(here)]
        example: Any = torch.tensor([ROWS[0], ROWS[0][::-1]])
        batches += [case.encode(model, torch.tensor(ROWS[:1], device=each)) for each in (device, here)]
    else:
        batches = [case.encode(model, each) for each in (given.to(device), given, given.numpy())]
        batches, example = [*batches, batches[0].to(here)], given
    own, *others = (model.logits(batch) for batch in batches)
    assert own.device == model.device and own.std() > 0.1
    for found in others:
        torch.testing.assert_close(found, own[: len(found)])
    torch.testing.assert_close(model.trace(batches[-1]).retention, model.trace(batches[-2]).retention)
    checked = testing.check_adapter(case.module().to(device), example, **case.options())
    copied = ssmscope.load(case.module(), device=device, example=example, **case.options())
    for found in (checked, copied):
        torch.testing.assert_close(found.logits(case.encode(found, given)), own)
    if model.continues:
        first, rest = case.parts(model, given[:1])
        states = case.load(case.module(), given)
        states = states.run(case.parts(states, given[:1])[0]).states
        torch.testing.assert_close(model.run(rest, states).logits, model.run(rest, model.run(first).states).logits)


class Stray(Unit):
    """Makes a tensor without saying where."""

    def forward(self, u: Tensor) -> Tensor:
        return super().forward(u) + torch.zeros(u.shape[1], 1)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("part", ["layers.1", "head", "enter", ""])
def test_tensors_on_two_devices_are_refused_in_one_line(device: str, part: str) -> None:
    case = CASES["series"] if part else Case(Stray, "series")
    module = case.module().to(device)
    module.get_submodule(part).cpu() if part else None
    assert "device" in refused(case.load, module, case.given())
