"""The C passes without gradients against plain torch in float64, and what they are not given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, silu

from ssmscope.models.parts import activated_convolution
from ssmscope.scans import passes_native

pytestmark = pytest.mark.skipif(not passes_native.available(), reason=f"no C kernel here: {passes_native.why_not()}")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    assert (ours.double() - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize(("length", "channels", "taps"), [(1, 1, 1), (2, 16, 4), (33, 20, 4), (70, 130, 3)])
def test_convolution(length, channels, taps):
    x, weight, bias = drawn(2, length, 2 * channels)[..., channels:], drawn(channels, taps), drawn(channels, seed=1)
    for tail in (None, drawn(2, taps - 1, channels, seed=2)):
        before = torch.zeros(2, taps - 1, channels) if tail is None else tail
        whole = torch.cat([before, x], dim=1).double().mT
        exact = conv1d(whole, weight.double().unsqueeze(1), bias.double(), groups=channels).mT
        near(passes_native.silu_convolution(x, weight, bias, tail), silu(exact))
        near(passes_native.silu_convolution(x, weight, None, tail), silu(exact - bias.double()))


@pytest.mark.parametrize(("length", "channels", "size"), [(1, 3, 3), (9, 40, 40), (5, 66, 33)])
def test_norms(length, channels, size):
    y, z, weight = drawn(2, length, channels), drawn(2, length, 2 * channels, seed=1)[..., :channels], drawn(channels)
    groups = (y.double() * silu(z.double())).unflatten(-1, (-1, size))
    normed = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)
    near(passes_native.gated_norm(y, z, weight, 1e-5, size), normed * weight.double())


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


def test_what_they_are_not_given():
    x, weight = drawn(1, 5, 8), drawn(8, 1, 4).requires_grad_()
    assert not passes_native.applicable(x, weight) and not passes_native.applicable(
        x.double(), weight.detach().double()
    )
    assert not passes_native.applicable(x.mT) and passes_native.applicable(x, None)
    with torch.no_grad():
        assert passes_native.applicable(x, weight)
        found = activated_convolution(x, weight, None, nn.SiLU())
        near(found, silu(conv1d(pad(x, (0, 0, 3, 0)).mT.double(), weight.double(), groups=8).mT))
