"""The C passes and their gradients against plain torch in float64, and what they are not given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, silu, softplus

from ssmscope.models.parts import activated_convolution
from ssmscope.scans import passes_native

pytestmark = pytest.mark.skipif(not passes_native.available(), reason=f"no C kernel here: {passes_native.why_not()}")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(ours: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    if exact.numel():
        assert (ours.double() - exact).abs().max() <= tolerance * exact.abs().max()


def agree(ours: Callable[..., Tensor], plain: Callable[..., Tensor], terms: Sequence[Tensor | None]) -> None:
    """Values, and gradients by every term, are those of plain torch in float64."""
    given = [t if t is None else t.detach().requires_grad_() for t in terms]
    exact = [t if t is None else t.detach().double().requires_grad_() for t in terms]
    with torch.no_grad():
        alone = ours(*given)
    found, expected = ours(*given), plain(*exact)
    near(found, expected)
    assert torch.equal(alone, found)
    weights = drawn(*found.shape, seed=9)
    grads = (
        torch.autograd.grad((y * weights.to(y)).sum(), [t for t in of if t is not None], materialize_grads=True)
        for y, of in ((found, given), (expected, exact))
    )
    for one, other in zip(*grads, strict=True):
        near(one, other, 4e-6)


@pytest.mark.parametrize(
    ("length", "channels", "taps"), [(1, 1, 1), (2, 16, 4), (33, 20, 4), (70, 130, 3), (130, 70, 4)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tail", [True, False])
def test_convolution(length, channels, taps, bias, tail):
    def plain(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None) -> Tensor:
        before = x.new_zeros(2, taps - 1, channels) if tail is None else tail
        whole = torch.cat([before, x], dim=1).mT
        return silu(conv1d(whole, weight.unsqueeze(1), bias, groups=channels).mT)

    x, weight = drawn(2, length, 2 * channels)[..., channels:], drawn(channels, taps)
    rest = (drawn(channels, seed=1) if bias else None, drawn(2, taps - 1, channels, seed=2) if tail else None)
    agree(passes_native.silu_convolution, plain, (x, weight, *rest))


@pytest.mark.parametrize(("length", "channels", "size"), [(1, 3, 3), (9, 40, 40), (5, 66, 33), (70, 24, 24)])
def test_norms(length, channels, size):
    def plain(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        groups = (y * silu(z)).unflatten(-1, (-1, size))
        return (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * weight

    terms = (drawn(2, length, channels), drawn(2, length, 2 * channels, seed=1)[..., :channels], drawn(channels))
    agree(lambda *given: passes_native.gated_norm(*given, 1e-5, size), plain, terms)

    def without_gate(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    agree(lambda *given: passes_native.rms_norm(*given, 1e-5), without_gate, (terms[1], terms[2]))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 37), (3, 40, 32)])
def test_gates_and_steps(shape):
    wide = drawn(*shape[:2], 2 * shape[2], seed=1)
    agree(passes_native.gated, lambda y, z: y * silu(z), (drawn(*shape), wide[..., : shape[2]]))
    agree(passes_native.softplus, softplus, (8 * wide[..., shape[2] :],))


def test_steps_are_precise_where_they_are_small():
    v = torch.linspace(-80, 100, 20000).view(1, 200, 100)
    exact = v.double().exp().log1p()
    assert (passes_native.softplus(v) / exact - 1).abs().max() <= 4e-7
    ends = torch.tensor([[[-3e38, -100.0, 3e38, torch.inf, torch.nan]]])
    torch.testing.assert_close(passes_native.softplus(ends), softplus(ends), equal_nan=True, rtol=0, atol=1e-30)


def test_numbers_do_not_depend_on_rows_and_threads():
    x, weight = drawn(5, 300, 40), drawn(40, 4)
    whole, before = passes_native.silu_convolution(x, weight, None, None), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(passes_native.silu_convolution(x[2:3], weight, None, None), whole[2:3])
    finally:
        torch.set_num_threads(before)


def test_extremes_are_those_of_silu():
    x = torch.tensor([[[-1e4], [-88.0], [0.0], [88.0], [3e38], [torch.nan]]])
    y = passes_native.silu_convolution(x, torch.ones(1, 1), None, None)
    torch.testing.assert_close(y, silu(x), equal_nan=True, rtol=1e-6, atol=1e-30)


def test_gradients_do_not_depend_on_threads():
    x, weight, z = (t.requires_grad_() for t in (drawn(3, 200, 80), drawn(80, 4), drawn(3, 200, 80, seed=1)))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = passes_native.silu_convolution(x, weight, None, None)
            out = passes_native.gated_norm(y, z, weight[:, 0].contiguous(), 1e-5, 40)
            found.append(torch.autograd.grad(out.square().sum(), (x, weight, z)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_what_they_are_not_given():
    x, weight = drawn(1, 5, 8), drawn(8, 1, 4).requires_grad_()
    assert passes_native.applicable(x, weight) and passes_native.applicable(x, None)
    assert not passes_native.applicable(x.double(), weight) and not passes_native.applicable(x.mT)
    found = activated_convolution(x, weight, None, nn.SiLU())
    near(found, silu(conv1d(pad(x, (0, 0, 3, 0)).mT.double(), weight.double(), groups=8).mT))


@pytest.mark.parametrize(("length", "channels"), [(1, 3), (70, 64), (33, 130)])
def test_sum_and_norm(length, channels):
    x, added = drawn(2, length, 2 * channels)[..., channels:], drawn(2, length, channels, seed=1)
    weight = drawn(channels, seed=2)
    total, normed = passes_native.add_and_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(total, x + added) and torch.equal(normed, passes_native.rms_norm(total, weight, 1e-5))
    exact = total.double()
    near(normed, weight.double() * exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt())
