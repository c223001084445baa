"""The registry: a call uses an implementation that serves its terms, and torch, with right numbers, elsewhere."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refuses
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from ssmscope import backends
from ssmscope.backends import triton
from ssmscope.backends.c import selective_scan


@pytest.fixture
def terms(monkeypatch):
    monkeypatch.delenv(backends.SWITCH, raising=False)
    monkeypatch.setattr(backends, "_warned", set())
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 1, 1), (2, 5, 1, 3), (2, 5, 1, 3), (2, 1, 1, 3), (2, 5, 1), (1, 3))
    *others, A = (torch.rand(*shape, generator=g) for shape in shapes)
    return *others, -A


def find(*terms):
    return backends.find("selective_scan", *terms)


def scan(x, b, c, H, delta, A):
    """Compute y as an operation does: by what is found, or else in torch."""
    if module := find(x, b, c, H, delta, A):
        return module.scan(x, b, c, H, delta, A, expected=False, retention=False)[0]
    outputs = []
    for t in range(x.shape[1]):
        step = delta[:, t, :, None, None]
        H = (step * A[:, None]).exp() * H + step * x[:, t, :, :, None] * b[:, t, :, None]
        outputs.append((H * c[:, t, :, None]).sum(-1))
    return torch.stack(outputs, 1)


def near(ours, exact):
    torch.testing.assert_close(ours, exact.to(ours.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(selective_scan.why_not() is not None, reason=f"{selective_scan.why_not()}")
def test_plain_terms_use_the_kernel_unless_it_is_switched_off(terms, monkeypatch):
    assert find(*terms) is selective_scan and find(torch.nn.Parameter(terms[0]), *terms[1:]) is selective_scan
    near(scan(*terms), scan(*(t.double() for t in terms)))
    monkeypatch.setenv(backends.SWITCH, "auto")
    assert find(*terms[:3], None, *terms[4:]) is selective_scan
    monkeypatch.setenv(backends.SWITCH, "torch")
    assert find(*terms) is None
    assert {row.reason for row in backends.explain()} == {"switched off by SSMSCOPE_BACKEND=torch"}
    monkeypatch.setenv(backends.SWITCH, "troch")
    refuses("SSMSCOPE_BACKEND=troch is not one of auto, torch; did you mean 'torch'", find, *terms)


def test_what_is_not_in_memory_stays_with_torch(terms):
    x, *others = terms
    with forward_ad.dual_level():
        assert find(forward_ad.make_dual(x, x), *others) is None
    assert find(x.to("meta"), *others) is None and find(x, others[0].to("meta"), *others[1:]) is None
    assert find(torch._neg_view(x), *others) is None and find(x.to_sparse(), *others) is None
    assert find(x.as_subclass(type("Named", (torch.Tensor,), {})), *others) is None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert find(*terms) is None and find(mode.from_tensor(x), *others) is None
    assert all(backends.find(name, x) is None for name in ("ssd", "delta_rule", "survival"))


def test_transforms_of_torch_give_right_numbers(terms):
    *before, delta, A = terms
    plain, one = scan(*terms), torch.ones(())
    exact = delta.double().requires_grad_()
    (slope,) = torch.autograd.grad(scan(*(t.double() for t in before), exact, A).sum(), exact)

    def of_delta(delta):
        return scan(*before, delta, A)

    near(torch.func.vmap(of_delta)(torch.stack([delta, delta])), torch.stack([plain, plain]))
    near(torch.func.vmap(lambda factor: factor * scan(*terms))(torch.ones(2)), torch.stack([plain, plain]))
    near(torch.func.grad(lambda delta: of_delta(delta).sum())(delta), slope)
    near(torch.func.grad(lambda factor: (factor * scan(*terms)).sum())(one), plain.sum())
    near(torch.func.functionalize(of_delta)(delta), plain)
    y, tangent = torch.func.jvp(of_delta, (delta,), (torch.ones_like(delta),))
    near(y, plain)
    near(tangent.sum(), slope.sum())
    near(torch.compile(of_delta, backend="eager", fullgraph=True)(delta), plain)
    near(torch.jit.trace(of_delta, (delta,), check_trace=False)(2 * delta), of_delta(2 * delta))


def test_a_missing_compiler_warns_once_and_torch_computes(terms, monkeypatch):
    plain = scan(*terms)
    with monkeypatch.context() as patch:
        patch.setattr(selective_scan, "_library", lambda: pytest.fail("compiled for terms that it does not fit"))
        assert find(*(t.double() for t in terms)) is None
    monkeypatch.setenv("CC", "no-such-compiler")
    missing = selective_scan._library.__wrapped__()
    monkeypatch.setattr(selective_scan, "_library", lambda: missing)
    with pytest.warns(UserWarning) as caught:
        near(scan(*terms), plain)
        near(scan(*terms), plain)
    assert missing == "the C compiler that CC names, no-such-compiler, is not installed"
    message = f"ssmscope computes selective_scan with torch, which is slower: {missing} (set SSMSCOPE_BACKEND=torch "
    assert [str(w.message) for w in caught] == [message + "to silence this)"]
    assert backends.explain()[0] == ("selective_scan", "cpu", "c.selective_scan", missing)


def test_a_triton_module_is_imported_only_where_triton_works(terms, monkeypatch):
    monkeypatch.setattr(backends, "OPERATIONS", {"ssd": {"cpu": "triton.absent"}})
    monkeypatch.setattr(triton, "why_not", lambda device: "the GPU is too old")
    with pytest.warns(UserWarning, match="computes ssd with torch, which is slower: the GPU is too old"):
        assert backends.find("ssd", *terms) is None
    module = SimpleNamespace(fits=lambda *given: len(given) == 6)
    monkeypatch.setattr(triton, "why_not", lambda device: None)
    monkeypatch.setattr(backends, "_module", lambda path: module)
    assert backends.find("ssd", *terms) is module and backends.find("ssd", terms[0]) is None


def test_every_implementation_is_there():
    for path in (path for paths in backends.OPERATIONS.values() for path in paths.values()):
        file = Path(backends.__file__).parent / (path.replace(".", "/") + ".py")
        assert "\ndef fits(" in file.read_text("utf-8"), path


def test_why_triton_cannot_be_had(monkeypatch):
    tried = []

    def broken(device):
        tried.append(device)
        raise RuntimeError("no ptxas\nin many lines")

    def why_not(installed, capability, doubles):
        trial = SimpleNamespace(doubles=doubles)
        monkeypatch.setitem(sys.modules, "triton", installed)
        monkeypatch.setitem(sys.modules, "ssmscope.backends.triton.trial", trial)
        monkeypatch.setattr(triton, "trial", trial, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        triton.why_not.cache_clear(), triton._trial.cache_clear()
        reasons = {triton.why_not(torch.device("cuda", index)) for index in (0, 1)}
        triton.why_not.cache_clear(), triton._trial.cache_clear()
        return reasons.pop() if len(reasons) == 1 else reasons

    assert why_not(None, (9, 0), broken).startswith("triton cannot be imported: ")
    assert why_not(pytest, (7, 5), broken) == "Tesla T4 has compute capability 7.5, Triton kernels need 8.0"
    assert why_not(pytest, (9, 0), broken) == "a trial kernel of Triton failed: no ptxas" and len(tried) == 1
    assert why_not(pytest, (8, 0), lambda device: False) == "a trial kernel of Triton gave a wrong result"
    assert why_not(pytest, (8, 0), lambda device: True) is None
