"""The C kernels of the scan with one decay per head against the definition in float64, and when they stay away."""

from __future__ import annotations

import os

import pytest
import torch
from scan_checks import gradients
from warm import TORCH

from ssmscope import ssm
from ssmscope.scans import scalar, scalar_native
from ssmscope.ssm import Recurrence

needs_kernel = pytest.mark.skipif(not scalar_native.available(), reason=f"no C kernel here: {scalar_native.why_not()}")


def draw(batch=2, length=37, heads=6, groups=2, state=5, width=7, *, seed=0) -> tuple[torch.Tensor, ...]:
    """log_a, b, c, x and the initial state."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    return (
        -3 * torch.rand(batch, length, heads, generator=g) ** 3,
        normal(batch, length, groups, state),
        normal(batch, length, groups, state),
        normal(batch, length, heads, width),
        normal(batch, heads, width, state),
    )


def definition(terms: tuple[torch.Tensor, ...]) -> ssm.Scan:
    log_a, b, c, x, initial, *rest = (t.double() for t in terms)
    delta, D = (*rest, None, None)[:2]
    return ssm.scan_reference(Recurrence(x=x, b=b, c=c, log_a=log_a.unsqueeze(-1), delta=delta, D=D), initial)


def near(ours: torch.Tensor, exact: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    assert (ours - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.fixture
def kernel_only(monkeypatch):
    """The torch path fails the test."""
    monkeypatch.setattr(scalar, "_segment", lambda *_: pytest.fail("the torch path ran"))


SHAPES = [
    # batch, length, heads, groups, state, width: below, at and above a vector's lanes, a panel, a chunk
    (1, 1, 1, 1, 1, 1),
    (2, 1, 3, 3, 4, 16),
    (1, 17, 4, 2, 3, 8),
    (3, 33, 6, 2, 16, 16),
    (2, 100, 2, 1, 7, 20),
    (1, 64, 4, 4, 32, 32),
    (1, 50, 2, 1, 128, 64),
    (1, 16, 2, 1, 6, 100),
]


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_those_of_the_definition(shape, kernel_only):
    terms = draw(*shape)
    y, final = scalar.scan(*terms)
    exact = definition(terms)
    near(y, exact.y)
    near(final, exact.state)


@needs_kernel
@pytest.mark.parametrize("decays", ["some", "extreme", "none"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 130, 10, 2, 18, 40)], ids=str)
def test_gradients_are_those_of_the_definition(shape, decays, kernel_only):
    log_a, b, c, x, initial = draw(*shape)
    if decays == "extreme":
        log_a[:, ::3], log_a[:, 1::5] = 0.0, -79.0
    log_a = log_a * (decays != "none")
    terms = [t.requires_grad_() for t in (log_a, b, c, x, initial, torch.rand(log_a.shape))]
    for ours, exact in zip(gradients(scalar.scan(*terms), terms), gradients(definition(tuple(terms)), terms)):
        near(ours, exact, 4e-6)
    for ours, exact in zip(gradients(scalar.scan(*terms[:5]), terms[:5]), gradients(definition(terms[:5]), terms[:5])):
        near(ours, exact, 4e-6)
    heads, width = x.shape[2:]
    for D in (torch.linspace(-1, 2, heads), torch.linspace(-1, 2, heads * width).view(heads, width)):
        terms = [*terms[:6], D.requires_grad_()]
        with torch.no_grad():
            near(scalar.scan(*terms)[0], definition(tuple(terms)).y)
        for ours, exact in zip(gradients(scalar.scan(*terms), terms), gradients(definition(tuple(terms)), terms)):
            near(ours, exact, 4e-6)


@needs_kernel
def test_a_run_in_two_parts_is_the_whole_run(kernel_only):
    log_a, b, c, x, initial = draw(length=40)
    whole, final = scalar.scan(log_a, b, c, x, initial)
    first, held = scalar.scan(*(t[:, :23] for t in (log_a, b, c, x)), initial)
    second, last = scalar.scan(*(t[:, 23:] for t in (log_a, b, c, x)), held)
    near(torch.cat([first, second], dim=1), whole)
    near(last, final)


@needs_kernel
def test_any_strides(kernel_only):
    log_a, b, c, x, initial = draw()
    plain = scalar.scan(log_a, b, c, x, initial)
    together = torch.cat([x.flatten(2), b.flatten(2), c.flatten(2)], dim=-1)  # as a projection leaves them
    x2, b2, c2 = together.split([42, 10, 10], dim=-1)
    strided = (
        log_a.transpose(1, 2).contiguous().transpose(1, 2),
        b2.unflatten(-1, (2, 5)),
        c2.unflatten(-1, (2, 5)),
        x2.unflatten(-1, (6, 7)),
        initial.mT.contiguous().mT,
    )
    assert not any(t.is_contiguous() for t in strided)
    for ours, expected in zip(scalar.scan(*strided), plain):
        assert torch.equal(ours, expected)
    spread = scalar.scan(log_a[:, :, :1].expand(-1, -1, 6), b, c, x, initial)
    held = scalar.scan(log_a[:, :, :1].repeat(1, 1, 6), b, c, x, initial)
    assert torch.equal(spread[0], held[0])


@needs_kernel
def test_extreme_decays(kernel_only):
    log_a, b, c, x, initial = draw(length=64)
    log_a[:, ::3] = 0.0  # decay 1
    log_a[:, 1::3] = -1e30  # decay e^-80
    terms = (log_a, b, c, x, initial)
    y, final = scalar.scan(*terms)
    exact = definition(terms)
    near(y, exact.y)
    near(final, exact.state)


@needs_kernel
def test_nan_and_infinity_are_not_lost(kernel_only):
    log_a, b, c, x, initial = draw()
    x[0, 5, 0, 0] = float("nan")
    x[1, 5, 0, 0] = float("inf")
    y, _ = scalar.scan(log_a, b, c, x, initial)
    assert y[0, 5:, 0, 0].isnan().all() and not y[1, 5:, 0, 0].isfinite().any()
    assert y[:, :5].isfinite().all() and y[:, :, 1:].isfinite().all() and y[:, :, 0, 1:].isfinite().all()


@needs_kernel
def test_threads_change_no_bit():
    terms = [t.requires_grad_() for t in draw(4, 200, 8, 1, 16, 16)]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = scalar.scan(*terms)
            found.append((*out, *gradients(out, terms)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@needs_kernel
@pytest.mark.parametrize("what", ["float64", "forward mode"])
def test_what_it_does_not_take(what):
    terms = (*draw(), None)
    assert scalar_native.applicable(*terms)
    if what == "float64":
        terms = tuple(t if t is None else t.double() for t in terms)
    else:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(terms[3], torch.ones_like(terms[3]))
            assert not scalar_native.applicable(*terms[:3], dual, *terms[4:])
            return
    assert not scalar_native.applicable(*terms)


@needs_kernel
def test_under_vmap_torch_runs():
    log_a, b, c, x, initial = draw()
    many = torch.stack([x, 2 * x])
    y = torch.func.vmap(lambda each: scalar.scan(log_a, b, c, each, initial)[0])(many)
    for ours, each in zip(y, many):
        near(ours, definition((log_a, b, c, each, initial)).y, 1e-5)


def test_it_can_be_switched_off():
    code = (
        "import torch; from ssmscope.scans import scalar, scalar_native as s; t = torch.ones; "
        "print(s.why_not(), s.applicable(t(1, 2, 1), t(1, 2, 1, 3), t(1, 2, 1, 3), t(1, 2, 1, 4), t(1, 1, 4, 3), None))"
    )
    done = TORCH.run(code, env={**os.environ, "SSMSCOPE_NATIVE": "0"})
    done.check_returncode()
    assert done.stdout.split() == ["SSMSCOPE_NATIVE=0", "False"]
