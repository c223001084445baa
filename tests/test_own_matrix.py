"""Every layer of others' code that is read, under every question: equal to slow references that run step by step."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loud import TrueFloat64
from own_layers import LRU, S4D, SS2D, BothWays, CopiedMamba, Mamba2, Unit, unit_terms
from own_matrix import Run
from refusals import refuses
from torch import Tensor, nn
import ssmscope
from ssmscope.render import numbers

WIDTH, LENGTH, NODES, LABELS = 8, 7, 16, list("abcd")
CLOSE: dict[str, Any] = dict(rtol=1e-6, atol=1e-6)


class Network(nn.Module):
    """Two layers between norms, on series, images or tokens; the mean over positions, or the next token."""

    def __init__(self, make: Callable[[int], nn.Module], reads: str = "series") -> None:
        super().__init__()
        entries = {"series": nn.Linear(3, WIDTH), "images": nn.Conv2d(3, WIDTH, 2, 2), "tokens": nn.Embedding(9, WIDTH)}
        self.enter, self.reads, self.head = entries[reads], reads, nn.Linear(WIDTH, 9 if reads == "tokens" else 4)
        self.layers = nn.ModuleList(make(WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, given: Tensor, run: Run | None = None) -> Tensor:
        x = self.enter(given)
        x = x.movedim(1, -1) if self.reads == "images" else x
        for norm, layer in zip(self.norms, self.layers):
            u = norm(x) if run is None else run.norm(norm, x)[0]
            first = getattr(layer, "transposed", False)
            u = u.mT if first else u
            y = layer(u) if run is None else run.layer(layer, u)
            y = y[0] if isinstance(y, tuple) else y
            x = x + (y.mT if first else y)
        return self.head(x if self.reads == "tokens" else x.flatten(1, -2).mean(1))


def package(name: str, kind: str, **fields: Any) -> Callable[[int], nn.Module]:
    def make(width: int) -> nn.Module:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            pytest.skip(f"{name} is not installed")
        library = importlib.import_module(name)
        found = getattr(library, kind)
        if kind == "MambaBlock":
            return found(library.MambaConfig(d_model=width, n_layers=1, d_state=5, pscan=False, bias=True))
        if kind == "S6":
            return found(
                importlib.import_module("minimamba.config").MambaConfig(d_model=width, n_layer=1, vocab_size=9)
            )
        if kind == "mLSTMLayer":
            return found(library.mLSTMLayerConfig(embedding_dim=width, context_length=16, num_heads=2))
        return found(width, **fields)

    return make


LAYERS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "mamba-minimal": (CopiedMamba, "declared"),
    "mamba_ssm Mamba2": (Mamba2, "declared"),
    "mamba_ssm Mamba2, norm first": (lambda width: Mamba2(width, before=True, limit=0.4), "declared"),
    "mambapy": (package("mambapy.mamba", "MambaBlock"), "declared"),
    "minimamba": (package("minimamba.s6", "S6"), "declared"),
    "own": (Unit, "declared"),
    "S4D": (S4D, ""),
    "S4D of rows": (lambda width: S4D(width, transposed=False), ""),
    "LRU": (LRU, ""),
    "LRU_pytorch": (package("LRU_pytorch.LRU", "LRU", out_features=WIDTH, state_features=5), ""),
    "s5": (package("s5.s5_model", "S5", state_width=8), ""),
    "s5 both ways": (package("s5.s5_model", "S5", state_width=8, bidir=True), "both ways"),
    "minGRU_pytorch": (package("minGRU_pytorch.minGRU", "minGRU", expansion_factor=1.5), ""),
    "xlstm": (package("xlstm.blocks.mlstm.layer", "mLSTMLayer"), ""),
    "both ways": (BothWays, "both ways"),
    "VMamba": (SS2D, "declared, images, both ways"),
}
"""Layers by name, and what they are: whether what stands around the recurrence is declared, and what they read."""


@pytest.fixture(autouse=True)
def precise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Double precision in code that asks for single."""
    ssmscope.adapt(Unit, terms=unit_terms, form=ssmscope.Form(values="candidate", out=None))
    if importlib.util.find_spec("s5"):
        monkeypatch.setattr("s5.s5_model.as_complex", lambda t: torch.view_as_complex(t.contiguous()))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made(name: str, reads: str = "series") -> Network:
    """A network in double precision with weights so large that a wrong scan is seen, in its complex parts too."""
    make, about = LAYERS[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    module = Network(make, "images" if "images" in about else reads)
    torch.set_default_dtype(torch.float64)
    for part, weight in module.double().named_parameters():
        weight.data = weight.data.to(torch.complex128) if weight.is_complex() else weight.data
        if part.endswith("log_step"):
            weight.data += 2
        elif part.endswith("bias"):
            weight.data += torch.randn(weight.shape) / 2
        elif weight.ndim > 1 and "A_log" not in part and "kernel" not in part:
            weight.data *= 2
    for layer in module.layers:
        vars(layer).update({at: t.to(torch.complex128) for at, t in vars(layer).items() if isinstance(t, Tensor)})
    return module.eval()


class Case:
    def __init__(self, name: str) -> None:
        self.name, self.about, self.module = name, LAYERS[name][1], made(name)
        shape = (2, 3, 4, 6) if "images" in self.about else (2, LENGTH, 3)
        self.given = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.positions = 6 if "images" in self.about else LENGTH
        self.model = ssmscope.load(self.module, inputs="floats", example=self.given, labels=LABELS)
        self.own = self.module(self.given).detach()
        self.best = self.own.argmax(1)


cases = pytest.fixture(scope="module")(lambda: {})


@pytest.fixture(params=LAYERS)
def case(request, cases: dict[str, Case]) -> Case:
    if request.param not in cases:
        cases[request.param] = Case(request.param)
    return cases[request.param]


def test_memories_are_those_of_the_steps(case: Case) -> None:
    run = Run()
    with torch.no_grad():
        torch.testing.assert_close(case.module(case.given, run), case.own, **CLOSE)
    torch.testing.assert_close(case.model.logits(case.model.encode(case.given)), case.own, **CLOSE)
    trace = case.model.trace(case.given)
    levels = ("ssm", "block") if "declared" in case.about else ("ssm",)
    for layer, memories in enumerate(run.memories):
        held = torch.stack([memory.a.abs().mean((2, 3)) for memory in memories]).mean(0)
        torch.testing.assert_close(trace.retention[layer].double(), held, **CLOSE)
        left = sum(memory.left_at_end() for memory in memories)
        torch.testing.assert_close(trace.survival()[layer], left / left.sum(1, keepdim=True), **CLOSE)
        for level in levels:
            expected = sum(memory.attention(level) for memory in memories)
            assert expected.abs().max() > 0.05
            torch.testing.assert_close(trace.linearized[layer].attention(level)[:, 0], expected, **CLOSE)


def by_patch(case: Case, given: Tensor) -> Tensor:
    """Sums over channels, of images over the pixels of patches, (batch, positions)."""
    if given.ndim == 3:
        return given.sum(-1)
    return given.unflatten(2, (2, 2)).unflatten(-1, (3, 2)).sum((1, 3, 5)).flatten(1)


def test_scores_are_those_of_the_module(case: Case) -> None:
    module, x = case.module, case.given
    options = {"ig": {"baseline": "zero", "fixed": NODES}, "occlusion": {"baseline": "zero"}}
    methods = ["ig", "occlusion", *["lrp"] * ("declared" in case.about)]
    found = ssmscope.explain(case.model, x, methods=methods, option=options)
    places, weights = (torch.tensor(each) / 2 for each in np.polynomial.legendre.leggauss(NODES))
    of_path = lambda t: t.view(-1, *[1] * (x.ndim - 1))  # noqa: E731
    for row in range(2):
        scores = {each.method: torch.tensor(each.scores) for each in found[row].attributions}
        path = (of_path(places + 0.5) * x[row]).requires_grad_()
        (slopes,) = torch.autograd.grad(module(path)[:, case.best[row]].sum(), path)
        slope = (slopes * of_path(weights)).sum(0)
        torch.testing.assert_close(scores["ig"].double(), by_patch(case, slope[None] * x[row])[0], **CLOSE)
        hidden = []
        for place in range(case.positions):
            one = x[row : row + 1].clone()
            if x.ndim == 3:
                one[:, place] = 0
            else:
                one[..., place // 3 * 2 : place // 3 * 2 + 2, place % 3 * 2 : place % 3 * 2 + 2] = 0
            hidden.append(one)
        lost = case.own[row, case.best[row]] - module(torch.cat(hidden))[:, case.best[row]]
        torch.testing.assert_close(scores["occlusion"].double(), lost.detach(), **CLOSE)
        if "lrp" in methods:
            start = x[row : row + 1].clone().requires_grad_()
            (slope,) = torch.autograd.grad(module(start, Run(relevance=True))[0, case.best[row]], start)
            torch.testing.assert_close(scores["lrp"].double(), by_patch(case, slope * x[row])[0], **CLOSE)
            assert next(each.delta for each in found[row].attributions if each.method == "lrp") < 1e-9


def test_edges_that_are_cut_are_read_by_none(case: Case) -> None:
    for level in ("ssm", "block") if "declared" in case.about else ("ssm",):
        for sources, targets in (([0, 1, 3], [3, 4, 5]), *[([3, 4, 5], [0, 1])] * ("both ways" in case.about)):
            ends: dict[str, Any] = {"from_": [sources], "to": targets}
            found = ssmscope.knockout(case.model, case.given[:1], level=level, **ends).to_frame()
            cuts = [Run(sources=sources, targets=targets, layers=layers, level=level) for layers in ([0, 1], [0], [1])]
            with torch.no_grad():
                expected = [float(case.module(case.given[:1], run)[0, case.best[0]]) for run in cuts]
            np.testing.assert_allclose(found["logit_cut"], expected, **CLOSE)
            assert np.abs(np.array(expected) - float(case.own[0, case.best[0]])).max() > 1e-3


def test_the_number_of_a_regression_changes_by_what_was_cut() -> None:
    module, x = made("mamba-minimal"), torch.randn(3, LENGTH, 3)
    module.head = nn.Linear(WIDTH, 1)
    model = ssmscope.load(module, answer="number", example=x)
    found = ssmscope.knockout(model, x, from_=["1:4"], to=[4, 5])
    with torch.no_grad():
        own = module(x)[:, 0]
        runs = [Run(sources=[1, 2, 3], targets=[4, 5], layers=at, level="block") for at in ([0, 1], [0], [1])]
        changes = torch.stack([module(x, run)[:, 0] - own for run in runs], 1).numpy()
    np.testing.assert_allclose(found.to_frame()["change"], changes.flatten(), **CLOSE)
    np.testing.assert_allclose(found.changes[0, :, 0], changes.mean(0), **CLOSE)
    assert np.abs(changes).max() > 1e-3 and "LABEL_0" not in found.headline and "%" not in found.headline
    one = ssmscope.knockout(model, x[:1], from_=["1:4"], to=[4, 5])
    assert f"from {numbers.number(float(own[0]))} to {numbers.number(float(own[0] + changes[0, 0]))}" in one.headline
    refuses("is a regression model and writes nothing", ssmscope.generate, model, x)


def test_patched_positions_are_those_of_the_other_run(case: Case) -> None:
    clean, corrupted = case.given[:1], case.given[:1].clone()
    corrupted[..., 2:4, :] += 1.5
    outputs: list[Tensor] = []
    keep = [layer.register_forward_hook(lambda m, a, y: outputs.append(y)) for layer in case.module.layers]
    change = (case.module(clean) - case.module(corrupted)).detach()[0]
    for hook in keep:
        hook.remove()
    answer, contrast = int(change.argmax()), int(change.argmin())
    asked: dict[str, Any] = {"answer": LABELS[answer], "contrast": LABELS[contrast], "metric": "difference"}
    found = ssmscope.patch(case.model, clean=clean, corrupted=corrupted, site="output", **asked)
    for number, layer in enumerate(case.module.layers):
        for column, place in enumerate(found.positions):

            def put(m: nn.Module, a: Any, y: Any, number: int = number, place: int = place) -> Any:
                given, source = (t[0] if isinstance(t, tuple) else t for t in (y, outputs[number]))
                rows = [t.mT if getattr(m, "transposed", False) else t.flatten(1, -2) for t in (given, source)]
                mixed = rows[0].clone()
                mixed[:, place] = rows[1][:, place]
                mixed = mixed.mT if getattr(m, "transposed", False) else mixed.view_as(given)
                return (mixed, *y[1:]) if isinstance(y, tuple) else mixed

            hook = layer.register_forward_hook(put)
            with torch.no_grad():
                logits = case.module(corrupted)[0]
            hook.remove()
            expected = float(logits[answer] - logits[contrast])
            assert found.values[number, column, 1] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", [name for name, (_, about) in LAYERS.items() if "both ways" not in about])
def test_a_language_model_writes_and_continues(name: str) -> None:
    module = made(name, "tokens")
    model, rows = ssmscope.load(module), [[4, 7, 8, 1, 2, 6], [3, 5, 7, 1]]
    with torch.no_grad():
        whole = module(torch.tensor(rows[:1]))
        for cut in (1, 3):
            first = model.run(model.encode(ids=[rows[0][:cut]]))
            rest = model.run(model.encode(ids=[rows[0][cut:]]), first.states).logits
            torch.testing.assert_close(rest, whole[:, cut:], **CLOSE)
        for row, written in zip(rows, model.generate(ids=rows, max_new_tokens=4).ids):
            text = list(row)
            for token in written:
                assert token == int(module(torch.tensor([text]))[0, -1].argmax())
                text.append(token)
        clean, corrupted = rows[0], [*rows[0][:2], 5, 3, *rows[0][4:]]
        found = ssmscope.patch(model, clean=clean, corrupted=corrupted, answer=1, contrast=2, metric="difference")
        for column, place in enumerate(found.positions):  # The whole memory is that of the clean tokens up to it.
            logits = module(torch.tensor([clean[: place + 1] + corrupted[place + 1 :]]))[0, -1]
            assert found.values[-1, column, 1] == pytest.approx(float(logits[1] - logits[2]), rel=1e-6, abs=1e-6)


def test_rwkv7_hf_is_read_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("rwkv7_hf.modeling_rwkv7")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 48}
    module = library.RWKV7ForCausalLM(library.RWKV7Config(**sizes)).double().eval()
    for weight in module.parameters():
        weight.data += torch.randn(weight.shape) * 0.3
    model, ids, scan = ssmscope.load(module), torch.tensor([[1, 7, 3, 9, 13, 2]]), library.rwkv7_recurrent
    decays: list[Tensor] = []
    cut = torch.zeros(2, 9, 1, 1)

    def observed(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *more: Any) -> Any:
        decays.append(w + a * b)  # The diagonal of the transition.
        y, state = scan(r, w, k, v, a, b, *more)
        sources, targets = cut[:, : v.shape[1]]
        return y - scan(r, w, k, v * sources, a, b, *more)[0] * targets, state

    def own(rows: Tensor) -> Tensor:
        name = "inputs_embeds" if rows.is_floating_point() else "input_ids"
        with TrueFloat64():
            return module(**{name: rows}, use_cache=False).logits

    monkeypatch.setattr(library, "rwkv7_recurrent", observed)
    whole, x = own(ids).detach(), module.get_input_embeddings()(ids).detach()
    best = int(whole[0, -1].argmax())
    torch.testing.assert_close(model.logits(model.encode(ids=ids)), whole, **CLOSE)
    for held, found in zip(decays, model.trace(ids=ids).retention):
        torch.testing.assert_close(found.double(), held.mean((2, 3)), **CLOSE)
    first = model.run(model.encode(ids=ids[:, :2]))
    torch.testing.assert_close(model.run(model.encode(ids=ids[:, 2:]), first.states).logits, whole[:, 2:], **CLOSE)
    options = {"ig": {"baseline": "mean", "fixed": 4}, "occlusion": {"baseline": "zero"}}
    found = ssmscope.explain(model, ids=ids, methods=["ig", "occlusion"], target=best, option=options)[0]
    scores = {each.method: torch.tensor(each.scores).double() for each in found.attributions}
    start = module.get_input_embeddings().weight.mean(0).detach().expand_as(x)
    total = torch.zeros_like(x)
    for node, weight in zip(*np.polynomial.legendre.leggauss(4)):
        point = (start + (node + 1) / 2 * (x - start)).requires_grad_()
        total += weight / 2 * torch.autograd.grad(own(point)[0, -1, best], point)[0]
    torch.testing.assert_close(scores["ig"], ((x - start) * total).sum(-1)[0], **CLOSE)
    hidden = [x * (torch.arange(6) != place).unsqueeze(-1) for place in range(6)]
    lost = torch.stack([whole[0, -1, best] - own(one).detach()[0, -1, best] for one in hidden])
    torch.testing.assert_close(scores["occlusion"], lost, **CLOSE)
    cut[0, 1:3] = cut[1, 5] = 1
    edges = ssmscope.knockout(model, ids=ids, from_=[[1, 2]], to=[5], level="ssm", answer=best).to_frame()
    assert edges["logit_cut"][0] == pytest.approx(own(ids)[0, -1, best].item(), rel=1e-6)
    assert abs(edges["logit_cut"][0] - edges["logit"][0]) > 1e-3
    written = model.generate(ids=ids, max_new_tokens=3).ids[0]
    cut.zero_()
    for token in written:
        assert token == int(own(ids)[0, -1].argmax())
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
