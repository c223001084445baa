"""The Triton kernels of the scan with one decay per head against the definition in float64."""

from __future__ import annotations

from functools import partial

import pytest
import scan_checks
import torch
from scan_checks import DEVICE, gradients, leaves_of, slow_interpreted, triton_only

from ssmscope import ssm
from ssmscope.scans import scalar, scalar_fused
from ssmscope.ssm import Recurrence

NAMES = ("log_a", "b", "c", "x", "initial", "delta", "D")


def draw(batch=2, length=37, heads=6, groups=1, width=5, state=4, *, scale=1.0, seed=0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE)

    return {
        "log_a": (-5 * scale * torch.rand(batch, length, heads, generator=g) ** 3).to(DEVICE),
        "b": normal(batch, length, groups, state),
        "c": normal(batch, length, groups, state),
        "x": normal(batch, length, heads, width),
        "initial": normal(batch, heads, width, state),
        "delta": torch.rand(batch, length, heads, generator=g).to(DEVICE),
        "D": normal(heads),
    }


def run(terms):
    return scalar_fused.scan(*(terms[name] for name in NAMES))


needs_kernels = triton_only(scalar_fused, lambda: run(draw(1, 1, 1)))


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes a while for each."""
    if DEVICE == "cpu":
        monkeypatch.setattr(scalar_fused, "FILL", 2)


def definition(terms) -> ssm.Scan:
    t = {name: value.double() for name, value in terms.items()}
    initial, log_a = t.pop("initial"), t.pop("log_a")
    return ssm.scan_reference(Recurrence(**t, log_a=log_a[..., None]), initial)


near = partial(scan_checks.near, tolerance=2e-6)


def agree(terms, tolerance=2e-6) -> None:
    """Values and gradients are those of the definition."""
    terms = leaves_of(terms)
    ours, exact = run(terms), definition(terms)
    near(ours[0], exact.y, tolerance=tolerance)
    near(ours[1], exact.state, tolerance=tolerance)
    for a, b in zip(gradients(ours, terms.values()), gradients(exact, terms.values()), strict=True):
        a, b = (g * (g.abs() > 1e-30) for g in (a, b))  # decays are at least e⁻⁸⁰
        near(a, b.double(), tolerance=tolerance)


SHAPES = [
    (1, 1, 1, 1, 2, 2),
    (1, 5, 2, 1, 16, 16),
    (2, 70, 4, 2, 5, 7),
    (1, 2 * scalar_fused.STEPS, 3, 1, 40, 20),
    (1, 10, 4, 2, 80, 64),
    (1, 70, 4, 1, 16, 64),
    (1, 70, 2, 1, 64, 16),
]


@needs_kernels
@pytest.mark.parametrize("fill", [1, 3], ids=lambda fill: f"{fill} programs")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_definition(shape, fill, monkeypatch):
    monkeypatch.setattr(scalar_fused, "FILL", fill)
    agree(draw(*shape))


@needs_kernels
@pytest.mark.parametrize("log_a", [0.0, -90.0, -1e5])
def test_without_decay_and_where_all_is_forgotten(log_a):
    terms = draw(1, scalar_fused.STEPS + 3, 2, 1, 4, 5)
    terms["log_a"][:, ::2] = log_a
    agree(terms)


@needs_kernels
def test_a_state_can_be_wiped():
    terms = draw(1, 90, 2, 1, 4, 5)
    terms["log_a"][:, 40] = -torch.inf
    ours, exact = run(terms), definition(terms)
    near(ours[0], exact.y)
    near(ours[1], exact.state)


@needs_kernels
def test_a_nan_stays():
    plain, terms = draw(1, 90, 2, 1, 4, 5), draw(1, 90, 2, 1, 4, 5)
    terms["log_a"][:, 70, 1] = torch.nan
    ours, other = run(terms), run(plain)
    for a, b, steps in ((ours[0], other[0], slice(None)), (ours[1], other[1], None)):
        assert torch.equal(a[:, steps, 0] if steps else a[:, 0], b[:, steps, 0] if steps else b[:, 0])
    assert torch.equal(ours[0][:, :70], other[0][:, :70])
    assert ours[0][:, 70:, 1].isnan().all() and ours[1][:, 1].isnan().all()


@needs_kernels
@pytest.mark.parametrize(("precision", "tolerance", "least"), [("high", 2e-3, 1e-5), ("medium", 3e-2, 1e-4)])
def test_products_are_as_exact_as_torchs_own(precision, tolerance, least):
    terms = draw(1, 70, 2, 1, 20, 24)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        y = run(terms)[0]
        agree(terms, tolerance)
    finally:
        torch.set_float32_matmul_precision(before)
    exact = definition({name: t.detach() for name, t in terms.items()}).y
    assert (y - exact).abs().max() >= least * exact.abs().max()


@needs_kernels
@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_long_steps_write_nothing_of_nothing(size):
    """Steps above 8, as trained models have, times one over the smallest unit are no float32."""
    terms = draw(1, 70, 2, 1, 4, 5)
    terms = {**terms, "x": size * terms["x"], "initial": size * terms["initial"], "delta": 100 * terms["delta"]}
    ours, exact = run(terms), definition(terms)
    near(ours[0], exact.y)
    near(ours[1], exact.state)


@needs_kernels
@pytest.mark.parametrize("groups", [pytest.param(1, marks=slow_interpreted), 2])
def test_rows_heads_and_segments_one_after_the_other(groups, monkeypatch):
    """The gradients where memory is short, the walks where programs are few, and more states than a walk keeps."""
    monkeypatch.setattr(scalar_fused, "HELD", 1)
    monkeypatch.setattr(scalar_fused, "SPAN", 1)
    monkeypatch.setattr(scalar_fused, "WALKS", 40)
    terms = draw(2, 2 * scalar_fused.STEPS + 3, 4, groups, 5, 130)
    plan = scalar_fused._plan(terms["x"], terms["b"], terms["delta"], "highest")
    rows, heads = plan.cuts(terms["x"].nbytes)
    assert len(rows) * len(heads) == 4
    agree(terms)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_terms_of_16_bits_are_read_as_they_are(dtype):
    terms = {name: t if name == "log_a" else t.to(dtype) for name, t in draw(1, 70, 2, 1, 20, 24).items()}
    terms = leaves_of(terms)
    ours, exact = run(terms), definition(terms)
    rounding = torch.finfo(dtype).eps * (1.01 if DEVICE == "cpu" else 0.51)  # the interpreter cuts bfloat16 off
    for a, b in zip(ours, (exact.y, exact.state), strict=True):
        assert a.dtype == dtype
        assert ((a - b).abs() <= rounding * b.abs() + 2e-6 * b.abs().max()).all()
    cotangents = [torch.ones_like(out) for out in ours]
    found = torch.autograd.grad(ours, list(terms.values()), cotangents)
    wanted = torch.autograd.grad([exact.y, exact.state], list(terms.values()), [g.double() for g in cotangents])
    for t, a, b in zip(terms.values(), found, wanted, strict=True):
        assert a.dtype == t.dtype
        assert (a.double() - b.double()).abs().max() <= (2 * rounding if t.dtype == dtype else 2e-6) * b.abs().max()


@needs_kernels
def test_a_small_step_is_right_beside_a_large_one():
    """Steps of any size: each is as right as the sum of its own terms' magnitudes, as where gates are exponentials."""
    terms = draw(1, 70, 2, 1, 5, 6, scale=0.1)
    g = torch.Generator().manual_seed(1)
    for name in ("b", "c", "x", "delta"):
        size = 10 ** (12 * torch.rand(1, 70, *[1] * (terms[name].ndim - 2), generator=g) - 9)
        terms[name] = terms[name] * size.to(DEVICE)
    terms["initial"] = terms["initial"] * 1e-20
    sizes = leaves_of({name: t.clone() if name == "log_a" else t.abs() for name, t in terms.items()})
    terms = leaves_of(terms)
    ours, exact, most = run(terms)[0], definition(terms).y, definition(sizes).y
    assert most.detach().amax((0, 2, 3)).aminmax()[0] < 1e-12 * most.detach().max()
    assert ((ours - exact).abs() <= 2e-6 * most).all()
    names = ("b", "c", "x", "delta")
    weights = 1 / most.detach()
    all_grads = (
        torch.autograd.grad(y, [t[name] for name in names], weights.to(y.dtype))
        for y, t in ((ours, terms), (exact, terms), (most, sizes))
    )
    for a, b, most_of in zip(*all_grads, strict=True):
        bound = most_of.flatten(2).amax(2)
        assert ((a - b).abs().flatten(2).amax(2) <= 4e-6 * bound).all()


@needs_kernels
def test_terms_and_heads_of_any_size():
    """Products are of float16, whose range is that of none of these: each step is over a unit of its own."""
    terms = draw(1, 70, 3, 1, 4, 5)
    sizes = torch.tensor([1e-6, 1.0, 1e6]).to(DEVICE).view(1, 1, 3, 1)
    x, b, c = terms["x"] * sizes, terms["b"] * 1e6, terms["c"] * 1e-9
    terms = {**terms, "x": x, "b": b, "c": c, "initial": terms["initial"] * sizes.view(1, 3, 1, 1)}
    ours, exact = run(terms), definition(terms)
    for head in range(3):
        near(ours[0][:, :, head], exact.y[:, :, head])
        near(ours[1][:, head], exact.state[:, head])
    agree(terms)


@needs_kernels
def test_what_wants_no_gradient_gets_none():
    terms = draw(1, 70, 2, 1, 4, 5)
    x = terms["x"].requires_grad_()
    y, final = run(terms)
    of_y, of_final = torch.autograd.grad(y.sum(), x, retain_graph=True)[0], torch.autograd.grad(final.sum(), x)[0]
    exact = definition(terms)
    near(of_y, torch.autograd.grad(exact.y.sum(), x, retain_graph=True)[0].double())
    near(of_final, torch.autograd.grad(exact.state.sum(), x)[0].double())
    without = scalar_fused.scan(*(terms[name] for name in NAMES[:-2]))
    neither = {**terms, "delta": torch.ones_like(terms["delta"]), "D": torch.zeros_like(terms["D"])}
    near(without[0].detach(), definition(neither).y.detach())
    from_zero = scalar_fused.scan(*(terms[name] for name in NAMES[:4]), None, terms["delta"], terms["D"])
    exact = definition({**terms, "initial": torch.zeros_like(terms["initial"])})
    for a, b in zip(from_zero, (exact.y, exact.state), strict=True):
        near(a.detach(), b.detach())
    of_both = torch.autograd.grad(from_zero[0].sum() + from_zero[1].sum(), x)[0]
    near(of_both, torch.autograd.grad(exact.y.sum() + exact.state.sum(), x)[0].double())


@needs_kernels
def test_a_gradient_through_a_closed_gate_has_its_digits_however_small():
    """A straight-through gate divides by its value, so an error of 1e-7 of anything else would be all that is seen."""
    terms = draw(1, 40, 2, 1, 3, 4, scale=0.1)
    terms["log_a"][:, [3, 17, 38]] = -30.0
    terms = leaves_of(terms)
    ours, exact = (gradients(out, terms.values())[0] for out in (run(terms), definition(terms)))
    closed = terms["log_a"] == -30.0
    assert exact[closed].abs().max() < 1e-10
    assert ((ours - exact).abs()[closed] <= 1e-3 * exact.abs()[closed].max()).all()


@needs_kernels
def test_any_strides():
    terms = draw(2, 20, 4, 1, 8, 8)
    plain = run(terms)
    strided = dict(terms)
    strided["x"] = terms["x"].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    strided["log_a"] = terms["log_a"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["b"], strided["c"] = torch.cat([terms["b"], terms["c"]], dim=-1).split(8, dim=-1)
    strided["initial"] = terms["initial"].transpose(2, 3).contiguous().transpose(2, 3)
    for a, b in zip(plain, run(strided), strict=True):
        assert torch.equal(a, b)


def test_on_a_cpu_scans_stay_with_torch(monkeypatch):
    terms = draw(1, 9, 2)
    if DEVICE == "cpu":
        assert not scalar_fused.applicable(*(terms[name] for name in NAMES))
        assert scalar_fused.why_not("cpu") == "they run on GPUs only"
    monkeypatch.setenv("SSMSCOPE_NATIVE", "0")
    assert scalar_fused.why_not() == "SSMSCOPE_NATIVE=0"
    monkeypatch.setattr(scalar_fused, "scan", lambda *_: pytest.fail("the kernels ran"))
    y, final = scalar.scan(*(terms[name].requires_grad_() for name in NAMES))
    near(y.detach(), definition(terms).y)
