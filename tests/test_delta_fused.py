"""The Triton kernels of the delta rule against its definition in float64."""

from __future__ import annotations

from functools import partial

import pytest
import scan_checks
import torch
from scan_checks import DEVICE, gradients, leaves_of, slow_interpreted, triton_only

from ssmscope import ssm, survival
from ssmscope.scans import delta, delta_exact, delta_fused, delta_plan
from ssmscope.ssm import DeltaRecurrence

NAMES = ("log_a", "beta", "b", "c", "x", "initial")
near = partial(scan_checks.near, tolerance=2e-6)


def draw(batch=2, length=37, heads=4, groups=2, width=5, state=4, *, decays=1, seed=0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE)

    b = normal(batch, length, groups, state)
    return {
        "log_a": (-5 * torch.rand(batch, length, heads, decays, generator=g) ** 3).to(DEVICE),
        "beta": torch.rand(batch, length, heads, generator=g).to(DEVICE),
        "b": b / b.norm(dim=-1, keepdim=True),
        "c": normal(batch, length, groups, state),
        "x": normal(batch, length, heads, width),
        "initial": normal(batch, heads, width, state),
    }


def run(terms):
    return delta_fused.scan(*(terms[name] for name in NAMES))


def keys_of(terms) -> torch.Tensor:
    found = list(delta_exact.keys_left(terms["log_a"], terms["beta"], terms["b"]))
    return torch.cat([keys for _, keys in reversed(found)], dim=1)


needs_kernels = triton_only(delta_fused, lambda: run(draw(1, 1, 1, 1)))


def recurrence(terms) -> DeltaRecurrence:
    return DeltaRecurrence(**{name: terms[name] for name in NAMES[:-1]})


def definition(terms) -> ssm.Scan:
    t = {name: value.double() for name, value in terms.items()}
    return ssm.scan_reference(recurrence(t), t["initial"])


def agree(terms, tolerance=2e-6) -> None:
    """Values and, where there are kernels for them, gradients are those of the definition."""
    by_head = terms["log_a"].shape[-1] == 1
    terms = leaves_of(terms) if by_head else terms
    ours, exact = run(terms), definition(terms)
    near(ours[0], exact.y, tolerance=tolerance)
    near(ours[1], exact.state, tolerance=tolerance)
    if by_head:
        both = (gradients(out, terms.values()) for out in (ours, exact))
        for name, a, b in zip(terms, *both, strict=True):
            a, b = (g * (g.abs() > 1e-30) for g in (a, b))
            assert torch.isfinite(a).all(), name
            near(a, b.double(), tolerance=tolerance)


SHAPES = [(1, 1, 1, 1, 2, 2), (2, 5, 2, 2, 16, 16), (1, 70, 4, 2, 5, 7), (1, 128, 3, 1, 40, 20), (1, 70, 2, 1, 80, 130)]


@needs_kernels
@pytest.mark.parametrize("decays", ["by head", "by state"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_definition(shape, decays):
    agree(draw(*shape, decays=1 if decays == "by head" else shape[-1]))


@needs_kernels
@pytest.mark.parametrize("decays", [1, 5])
@pytest.mark.parametrize("log_a", [0.0, -90.0, -1e5])
def test_without_decay_and_where_all_is_forgotten(log_a, decays):
    terms = draw(1, 67, 2, 1, 4, 5, decays=decays)
    terms["log_a"][:, ::2] = log_a
    agree(terms)
    agree({**terms, "log_a": torch.full_like(terms["log_a"], log_a)})


@needs_kernels
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_what_is_exchanged_is_nothing_all_or_more(beta):
    """At 2 the transition turns the state's part under the key around."""
    terms = draw(1, 150, 2, 1, 4, 5)
    terms["log_a"] *= 0.01
    terms["beta"][:, ::3] = beta
    agree(terms)


@needs_kernels
def test_one_key_again_and_again():
    """The triangular system is then as far from the identity as it can be."""
    terms = draw(1, 150, 2, 1, 4, 5)
    terms["b"] = terms["b"][:, :1].expand(-1, 150, -1, -1).clone()
    terms["log_a"] = torch.zeros_like(terms["log_a"])
    agree(terms)


@needs_kernels
@pytest.mark.parametrize("decays", [1, 5])
def test_a_state_can_be_wiped(decays):
    terms = draw(1, 90, 2, 1, 4, 5, decays=decays)
    terms["log_a"][:, 40] = -torch.inf
    ours, exact = run(terms), definition(terms)
    near(ours[0], exact.y)
    near(ours[1], exact.state)


@needs_kernels
@pytest.mark.parametrize("decays", [1, 5])
def test_a_nan_stays(decays):
    plain, terms = (draw(1, 200, 2, 1, 4, 5, decays=decays) for _ in range(2))
    terms["log_a"][:, 150, 1] = torch.nan
    ours, other = run(terms), run(plain)
    assert torch.equal(ours[0][:, :128], other[0][:, :128]) and torch.equal(ours[0][:, :, 0], other[0][:, :, 0])
    assert ours[0][:, 150:, 1].isnan().all() and ours[1][:, 1].isnan().all()


@needs_kernels
@pytest.mark.parametrize(("width", "state"), [(20, 24), (20, 64), (80, 64), (5, 130)])
@pytest.mark.parametrize(("precision", "tolerance", "least"), [("high", 3e-3, 1e-5), ("medium", 5e-2, 1e-4)])
def test_products_are_as_exact_as_torchs_own(precision, tolerance, least, width, state):
    terms = draw(1, 70, 2, 1, width, state)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        y = run(terms)[0]
        agree(terms, tolerance)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = definition({name: t.detach() for name, t in terms.items()}).y
    if DEVICE == "cuda" or precision == "medium":  # the interpreter has no TF32
        assert (y - exact).abs().max() >= least * exact.abs().max()


@needs_kernels
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_decays_of_states_have_the_precision_of_products(precision):
    terms = draw(1, 70, 2, 1, 20, 24, decays=24)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        agree(terms, 5e-2)
    finally:
        torch.set_float32_matmul_precision(before)


@needs_kernels
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_terms_may_be_of_16_bits(precision):
    """They are read as they are: with products of 22 bits only what is written has lost digits."""
    terms = draw(1, 70, 2, 1, 20, 24)
    terms |= {name: terms[name].bfloat16() for name in ("b", "c", "x")}
    terms = leaves_of(terms)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        ours = run(terms)
        found = gradients(ours, terms.values())
    finally:
        torch.set_float32_matmul_precision(before)
    exact = definition(terms)
    expected = gradients(exact, terms.values())
    most = 5e-2 if precision == "medium" else 8e-3
    pairs = [(*ours, *found), (exact.y, exact.state, *expected), (terms["x"], terms["initial"], *terms.values())]
    for a, b, like in zip(*pairs, strict=True):
        assert a.dtype == like.dtype and (a.double() - b).abs().max() <= most * b.abs().max()
    if precision == "highest":
        near(ours[1], exact.state)


@needs_kernels
def test_what_wants_no_gradient_gets_none():
    terms = draw(1, 70, 2, 1, 4, 5)
    x = terms["x"].requires_grad_()
    (y, final), exact = run(terms), definition(terms)
    for ours, slow in ((y, exact.y), (final, exact.state)):
        near(*(torch.autograd.grad(out.sum(), x, retain_graph=True)[0].to(out.dtype) for out in (ours, slow)))


@needs_kernels
def test_any_strides():
    terms = draw(2, 20, 4, 2, 8, 8)
    strided = dict(terms)
    strided["x"] = terms["x"].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for name in ("log_a", "beta"):
        strided[name] = terms[name].transpose(1, 2).contiguous().transpose(1, 2)
    strided["b"], strided["c"] = torch.cat([terms["b"], terms["c"]], dim=-1).split(8, dim=-1)
    strided["initial"] = terms["initial"].transpose(2, 3).contiguous().transpose(2, 3)
    for a, b in zip(run(terms), run(strided), strict=True):
        assert torch.equal(a, b)


@needs_kernels
@pytest.mark.parametrize("decays", [1, 7])
@pytest.mark.parametrize("length", [1, 70])
def test_what_is_left_is_that_of_the_definition(length, decays):
    terms = draw(1, length, 4, 2, 3, 7, decays=decays)
    terms["log_a"] *= 0.05
    left = survival.left_reference(recurrence({name: t.double() for name, t in terms.items()}))
    keys = keys_of(terms)
    near(keys.norm(dim=-1) * (terms["x"] * terms["beta"][..., None]).norm(dim=-1), left.flatten(3).norm(dim=-1))


@needs_kernels
@pytest.mark.parametrize("decays", [1, pytest.param(5, marks=slow_interpreted)])
def test_long_sequences_are_worked_in_segments(decays, monkeypatch):
    terms = draw(1 if DEVICE == "cpu" else 2, 150, 2, 1, 4, 5, decays=decays)
    whole, keys = run(terms), keys_of(terms)
    monkeypatch.setattr(delta_plan, "AT_ONCE", 2 * delta_plan.STEPS)
    assert all(map(torch.equal, (*run(terms), keys_of(terms)), (*whole, keys)))
    if decays == 1:
        agree(terms)


@needs_kernels
def test_padding_holds_the_state():
    terms = draw(2, 100, 2, 1, 4, 5)
    terms["b"][1, 40:] = terms["log_a"][1, 40:] = 0.0
    agree(terms)
    short = {name: t[1:] if name == "initial" else t[1:, :40] for name, t in terms.items()}
    near(run(terms)[1][1], run(short)[1][0].double())


@pytest.mark.skipif(DEVICE == "cpu", reason="scans on a CPU stay with torch")
@needs_kernels
@pytest.mark.parametrize("decays", [1, 7])
def test_recurrences_on_a_gpu_go_through_the_kernels(decays, monkeypatch):
    r = recurrence(draw(1, 70, 4, 2, 3, 7, decays=decays))
    whole, left = ssm.scan(r, retention=True), survival.left_norms(r)
    half = ssm.states(r, [20, 69])
    monkeypatch.setattr(delta_fused, "applicable", lambda *_: False)
    for ours, theirs in zip((*whole, left, half), (*ssm.scan(r, retention=True), survival.left_norms(r), whole.state)):
        if ours is half:
            ours = ours[:, 1]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_on_a_cpu_scans_stay_with_torch(monkeypatch):
    terms = draw(1, 9, 2)
    if DEVICE == "cpu":
        assert not delta_fused.applicable(*(terms[name] for name in NAMES))
        assert delta_fused.why_not("cpu") == "they run on GPUs only"
    monkeypatch.setenv("SSMSCOPE_NATIVE", "0")
    assert delta_fused.why_not() == "SSMSCOPE_NATIVE=0"
    monkeypatch.setattr(delta_fused, "scan", lambda *_: pytest.fail("the kernels ran"))
    terms = leaves_of(terms)
    near(delta.scan(*(terms[name] for name in NAMES))[0].detach(), definition(terms).y.detach())
