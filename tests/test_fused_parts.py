"""The Triton kernels of the causal convolution with SiLU and of the gated norm against torch in float64.

On a machine with a GPU the compiled kernels are tested; elsewhere the same kernels in triton's interpreter, where
triton is installed and TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from ssmscope.models.parts import causal_convolution
from ssmscope.scans import fused_parts, scalar_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def why_skipped() -> str | None:
    if DEVICE == "cuda":
        return scalar_fused.why_not()
    try:
        library = fused_parts._kernels()
    except ImportError as error:
        return str(error)
    if not library.INTERPRETED:
        return "no GPU; with TRITON_INTERPRET=1 the kernels are interpreted"
    try:
        fused_parts.gated_norm(*torch.ones(3, 1, 1), eps=1e-5)
    except library.triton.runtime.errors.InterpreterError as error:  # that of triton 3.6.0 needs numpy below 2.4
        return f"triton's interpreter does not work here: {error}"
    return None


WHY = why_skipped()
needs_kernels = pytest.mark.skipif(WHY is not None, reason=f"no Triton kernels here: {WHY}")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32 and torch.isfinite(ours).all()
    assert (ours - exact).abs().max() <= 5e-6 * exact.abs().max()


def compare(ours, exact, inputs, weights) -> None:
    found, expected = ours(*inputs), exact(*(t.double() for t in inputs))
    near(found, expected)
    gradients = [torch.autograd.grad((y * weights.to(y)).sum(), inputs) for y in (found, expected)]
    for mine, its in zip(*gradients):
        near(mine, its)


@needs_kernels
@pytest.mark.parametrize(("channels", "taps", "length"), [(70, 4, 37), (16, 3, 33), (1, 1, 5), (192, 4, 2)])
def test_the_convolution_and_its_gradients(channels: int, taps: int, length: int) -> None:
    x = draw(2, length, channels + 9)[:, :, 3 : 3 + channels].requires_grad_()  # a part of a projection
    weight, bias = (draw(*shape, seed=1).requires_grad_() for shape in ((channels, taps), (channels,)))

    def exact(x, weight, bias):
        return silu(causal_convolution(x, weight.unsqueeze(1), bias))

    compare(fused_parts.silu_convolution, exact, (x, weight, bias), draw(2, length, channels, seed=2))


@needs_kernels
@pytest.mark.parametrize(("channels", "length"), [(70, 37), (64, 16), (3, 1)])
def test_the_gated_norm_and_its_gradients(channels: int, length: int) -> None:
    y, weight = draw(2, length, channels).requires_grad_(), draw(channels, seed=1).requires_grad_()
    z = draw(2, length, channels + 5, seed=2)[:, :, 2 : 2 + channels].requires_grad_()

    def ours(y, z, weight):
        return fused_parts.gated_norm(y, z, weight, 1e-5)

    def exact(y, z, weight):
        opened = y * silu(z)
        return weight * opened * torch.rsqrt(opened.square().mean(-1, keepdim=True) + 1e-5)

    compare(ours, exact, (y, z, weight), draw(2, length, channels, seed=3))


def test_only_plain_tensors_on_a_gpu_are_taken() -> None:
    assert not fused_parts.applicable(torch.ones(2, 3, 4))
    if WHY is None and DEVICE == "cuda":
        assert fused_parts.applicable(draw(2, 3, 4))
        assert not fused_parts.applicable(draw(2, 3, 4).double()) and not fused_parts.applicable(draw(2, 3, 4).mT)
