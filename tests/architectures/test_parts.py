"""The pieces that families share."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, pad

from ssmscope.architectures.read.parts import causal_convolution, mask_padding


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
    assert mask_padding(torch.ones(2, 2, 3), mask).sum((1, 2)).tolist() == [3, 6]
