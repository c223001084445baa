"""The Triton kernels of the causal convolution with SiLU, of the gate and of norms against torch in float64."""

from __future__ import annotations

import pytest
import torch
from scan_checks import DEVICE, triton_only
from torch.nn.functional import silu

from ssmscope.models import parts
from ssmscope.models.parts import causal_convolution, evenly_projected
from ssmscope.scans import fused_parts, passes, passes_native, scalar_fused
from ssmscope.scans.compiling import compiled_pieces

ROUNDING = 2**-7
"""Of bfloat16, which Triton's interpreter cuts off."""
ALLOWED = {torch.float32: 5e-6, torch.bfloat16: 4 * ROUNDING}
"""Between the kernels, which round once, and torch, which rounds every product."""


def library():
    try:
        return fused_parts._kernels()
    except ImportError as error:
        return str(error)


needs_kernels = triton_only(scalar_fused, lambda: fused_parts.gated_norm(*torch.ones(3, 1, 1), eps=1e-5), library)


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
@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("biased", [True, False])
def test_the_convolution_of_16_bits_and_its_copy_in_float32(ways: tuple[bool, bool], biased: bool) -> None:
    x = draw(2, 37, 79).bfloat16()[:, :, 3:73].requires_grad_()
    weight, bias = (draw(*shape, seed=1).bfloat16().requires_grad_() for shape in ((70, 4), (70,)))
    given = [draw(2, 37, 70, seed=seed) for seed, way in zip((2, 3), ways) if way]
    inputs = (x, weight, bias) if biased else (x, weight)

    def run(x, weight, bias=None):
        if all(ways):
            return fused_parts.silu_convolution_and_wide(x, weight, bias)
        return (fused_parts.silu_convolution(x, weight, bias, wide=ways[1]),)

    found = run(*inputs)
    assert [y.dtype for y in found] == [kind for kind, way in zip((x.dtype, torch.float32), ways) if way]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = silu(causal_convolution(wide[0], wide[1].unsqueeze(1), wide[2] if biased else None))
    expected = torch.autograd.grad((exact * sum(given)).sum(), wide, retain_graph=True)
    mine = torch.autograd.grad(sum((y * w).sum() for y, w in zip(found, given)), inputs)
    for ours, its in zip((*found, *mine), (*(exact for _ in found), *expected), strict=True):
        assert ours.shape == its.shape and (ours - its).abs().max() <= ROUNDING * its.abs().max()
    again = run(x, *(t.detach() for t in inputs[1:]))  # of weights that are constant
    (constant,) = torch.autograd.grad(sum((y * w).sum() for y, w in zip(again, given)), x)
    assert torch.equal(constant, mine[0])
    for y, w in zip(run(*inputs), given):  # the other one is not read
        ours, its = (
            torch.autograd.grad(of, by, w.to(of), retain_graph=True)[0] for of, by in ((y, x), (exact, wide[0]))
        )
        assert (ours - its).abs().max() <= ROUNDING * its.abs().max()


@needs_kernels
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "length"), [(70, 37), (1100, 5), (1, 1)])
def test_the_gate_and_its_gradients(kind: torch.dtype, channels: int, length: int) -> None:
    y = draw(2, length, channels + 3)[:, :, 1 : 1 + channels].requires_grad_()
    z = draw(2, length, 2 * channels, seed=1).to(kind)[:, :, channels:].requires_grad_()
    given = draw(2, length, channels, seed=2).to(kind)
    found, wide = fused_parts.gated(y, z), (y.detach().double().requires_grad_(), z.detach().double().requires_grad_())
    assert found.dtype == kind
    exact = wide[0] * silu(wide[1])
    expected = torch.autograd.grad(exact, wide, given.double())
    for ours, its in zip((found, *torch.autograd.grad(found, (y, z), given)), (exact, *expected), strict=True):
        allowed = 5e-6 if ours.dtype == torch.float32 else ROUNDING
        assert ours.shape == its.shape and (ours - its).abs().max() <= allowed * its.abs().max()


@needs_kernels
@pytest.mark.parametrize(("channels", "length"), [(70, 37), (300, 37), (3, 1)])
def test_the_gated_norm_and_its_gradients(channels: int, length: int) -> None:
    y, weight = draw(2, length, channels).requires_grad_(), draw(channels, seed=1).requires_grad_()
    z = draw(2, length, channels + 5, seed=2)[:, :, 2 : 2 + channels].requires_grad_()

    def ours(y, z, weight):
        return fused_parts.gated_norm(y, z, weight, 1e-5)

    def exact(y, z, weight):
        opened = y * silu(z)
        return weight * opened * torch.rsqrt(opened.square().mean(-1, keepdim=True) + 1e-5)

    compare(ours, exact, (y, z, weight), draw(2, length, channels, seed=3))


@needs_kernels
@pytest.mark.parametrize(("channels", "length"), [(70, 37), (300, 37), (3, 1)])
def test_the_norm_and_its_gradients(channels: int, length: int) -> None:
    x = draw(2, length, channels + 5)[:, :, 2 : 2 + channels].requires_grad_()
    weight = draw(channels, seed=1).requires_grad_()

    def ours(x, weight):
        return fused_parts.rms_norm(x, weight, 1e-5)

    def exact(x, weight):
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    compare(ours, exact, (x, weight), draw(2, length, channels, seed=2))


@needs_kernels
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_mixers_with_gradients_go_through_the_kernels(kind: torch.dtype, monkeypatch) -> None:
    """As on a GPU, also where kernels are interpreted on a CPU: with the kernels what comes without them."""
    x, z = (draw(2, 37, 70, seed=seed).to(kind).requires_grad_() for seed in (0, 1))
    weight, bias = draw(70, 1, 4, seed=2).to(kind), draw(70, seed=3).to(kind)
    act, taken = torch.nn.SiLU(), list[str]()
    monkeypatch.setattr(passes, "applicable", lambda *_: False)
    monkeypatch.setattr(passes_native, "applicable", lambda *_: False)

    def noted(name: str, run):
        def noting(*args, **how):
            taken.append(name)
            return run(*args, **how)

        return noting

    for name in ("silu_convolution", "silu_convolution_and_wide", "gated"):
        monkeypatch.setattr(fused_parts, name, noted(name, getattr(fused_parts, name)))

    def gradients(with_kernels: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(fused_parts, "applicable", lambda *_, **how: with_kernels)
        own, wide = parts.convolved_and_wide(x, weight, bias, act)
        alone = [make(x, weight, bias, act) for make in (parts.convolved_wide, parts.activated_convolution)]
        outputs = [own * wide, *alone, parts.gated(act, x.float(), z)]
        return [t for y in outputs for t in (y, *torch.autograd.grad(y.float().sum(), (x, z), allow_unused=True))]

    plain = gradients(False)
    assert not taken
    for ours, its in zip(gradients(True), plain, strict=True):
        assert (ours is None) == (its is None)
        if ours is not None:
            assert ours.dtype == its.dtype and (ours - its).abs().max() <= ALLOWED[kind] * its.abs().max()
    wanted = ["silu_convolution_and_wide"] if kind == torch.bfloat16 else ["silu_convolution"]
    assert taken == [*wanted, "silu_convolution", "silu_convolution", "gated"]


def test_only_plain_tensors_on_a_gpu_are_taken() -> None:
    assert not fused_parts.applicable(torch.ones(2, 3, 4))
    if DEVICE == "cuda" and scalar_fused.why_not() is None:
        assert fused_parts.applicable(draw(2, 3, 4))
        assert not fused_parts.applicable(draw(2, 3, 4).double()) and not fused_parts.applicable(draw(2, 3, 4).mT)
        narrow = draw(2, 3, 4).bfloat16()
        assert not fused_parts.applicable(narrow) and fused_parts.applicable(narrow, None, dtypes=(narrow.dtype,))


@needs_kernels
@pytest.mark.parametrize("answers", [1, 70, 300])
def test_the_cross_entropy_and_its_gradient(answers: int) -> None:
    logits = 8 * draw(9, answers + 3)[:, 2 : 2 + answers]
    targets = (torch.arange(9) * 7 % answers).to(DEVICE)
    targets[[2, 5]] = -100
    logits.requires_grad_()
    ours = fused_parts.cross_entropy(logits, targets, -100)
    exact = torch.nn.functional.cross_entropy(logits.double(), targets, ignore_index=-100)
    assert (ours - exact).abs() <= 2e-6 * max(float(exact), 1)
    mine, its = (torch.autograd.grad(3 * loss, logits)[0] for loss in (ours, exact))
    assert (mine - its).abs().max() <= 2e-6


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("bias", [True, False])
def test_an_even_projection_has_zeros_behind_and_the_same_gradients(bias: bool) -> None:
    linear, u = torch.nn.Linear(24, 21, bias=bias).to(DEVICE), draw(2, 5, 24).requires_grad_()
    given = draw(2, 5, 21, seed=1)
    with compiled_pieces():
        ours = evenly_projected(linear, u)
    assert ours.shape[-1] == 32 and not ours[..., 21:].any()
    inputs = (u, *linear.parameters())
    mine = torch.autograd.grad((ours[..., :21] * given).sum(), inputs)
    its = torch.autograd.grad((linear(u) * given).sum(), inputs)
    for a, b in zip(mine, its, strict=True):
        near(a, b)
    linear.register_forward_hook(lambda part, args, output: 2 * output)
    with compiled_pieces():
        assert torch.equal(evenly_projected(linear, u), linear(u))
