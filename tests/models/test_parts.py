"""The pieces that families share."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, pad

from ssmscope.models import parts
from ssmscope.models.parts import causal_convolution, hide_padding


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_causal_convolution_and_its_gradients(taps, with_tail, with_bias):
    g = torch.Generator().manual_seed(taps)
    x, weight, bias, tail = (
        torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()
        for shape in ((2, 7, 5), (5, 1, taps), (5,), (2, taps - 1, 5))
    )
    inputs = [x, weight, *([bias] if with_bias else []), *([tail] if with_tail and taps > 1 else [])]
    before = tail if with_tail else torch.zeros_like(tail)
    expected = conv1d(torch.cat([before, x], 1).mT, weight, bias if with_bias else None, groups=5).mT
    found = causal_convolution(x, weight, bias if with_bias else None, tail if with_tail else None)
    torch.testing.assert_close(found, expected)
    scale = torch.randn(found.shape, generator=g, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * scale).sum(), inputs), torch.autograd.grad((expected * scale).sum(), inputs)
    ):
        torch.testing.assert_close(a, b)


def test_the_convolution_is_causal():
    x = torch.randn(1, 9, 3)
    changed = x.clone()
    changed[:, 5:] += 1
    weight = torch.randn(3, 1, 4)
    same = causal_convolution(x, weight, None)[:, :5] == causal_convolution(changed, weight, None)[:, :5]
    assert same.all()
    assert torch.equal(
        causal_convolution(x, weight, None), causal_convolution(pad(x, (0, 0, 3, 0)), weight, None)[:, 3:]
    )


def test_hidden_padding_is_zero():
    mask = torch.tensor([[True, False], [True, True]])
    assert hide_padding(torch.ones(2, 2, 3), mask).sum((1, 2)).tolist() == [3, 6]


def test_what_is_fused_where_pieces_are_compiled_is_the_same(monkeypatch):
    """The formulas that torch.compile is given; that it compiles them soundly is checked when a run begins."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    torch.manual_seed(0)
    sizes = dict(hidden_size=12, state_size=4, num_heads=3, head_dim=8, n_groups=1, expand=2, chunk_size=4)
    mixer = Mamba2Mixer(Mamba2Config(**sizes), 0).double()
    torch.nn.init.normal_(mixer.norm.weight)
    torch.nn.init.normal_(mixer.conv1d.bias)
    x = torch.randn(2, 7, mixer.conv_dim, dtype=torch.float64)
    y, z = (torch.randn(2, 7, mixer.intermediate_size, dtype=torch.float64) for _ in range(2))
    conv = mixer.conv1d.weight, mixer.conv1d.bias
    plain = parts.activated_convolution(x, *conv, mixer.act), parts.gated_norm(mixer.norm, y, z)
    monkeypatch.setattr(parts, "compiling", lambda: True)
    monkeypatch.setattr(type(mixer.norm), "forward", lambda *_: pytest.fail("not fused"))
    monkeypatch.setattr(mixer, "act", torch.nn.SiLU())
    fused = parts.activated_convolution(x, *conv, mixer.act), parts.gated_norm(mixer.norm, y, z)
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # the library's norm is in float32
    tail = torch.randn(2, mixer.conv_kernel_size - 1, mixer.conv_dim, dtype=torch.float64)
    joined = parts.activated_convolution(torch.cat([tail, x], 1), *conv, mixer.act)[:, tail.shape[1] :]
    torch.testing.assert_close(parts.activated_convolution(x, *conv, mixer.act, tail), joined)
