"""The two Mamba-2 mixers of a differential layer, computed as one, against each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from loud import TrueFloat64, doubled
from torch import Tensor, nn

from ssmscope import ops
from ssmscope.architectures.own import diff_mamba
from ssmscope.architectures.read import mamba2
from ssmscope.architectures.read.parts import BY_WEIGHT
from ssmscope.core.mixers import computed_by, mixers
from ssmscope.core.trace import LayerState

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, expand=2, conv_kernel=3, state_size=4)
SIZES |= dict(num_heads=4, head_dim=8, n_groups=2, chunk_size=8)
MASK = torch.tensor([[True] * 9, [False] * 2 + [True] * 5 + [False] * 2])
PARTS = ("in_proj", "norm", "out_proj", *(() if BY_WEIGHT else ("conv1d",)))


def differential_mixer(**options) -> nn.Module:
    torch.manual_seed(0)
    config = diff_mamba.DiffMambaConfig(**{**SIZES, "num_hidden_layers": 2, **options})
    mixer = doubled(mixers(diff_mamba.DiffMambaForCausalLM(config))[1])
    for parameter in mixer.parameters():
        parameter.data.normal_(std=0.4)
    return mixer


def state() -> LayerState:
    torch.manual_seed(3)
    return LayerState(torch.randn(2, 2, 64).double(), tuple(torch.randn(2, 4, 4, 4).double() for _ in range(2)))


def run(mixer: nn.Module, u: Tensor, before: LayerState | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The layer's output and the states after it."""
    layer = diff_mamba.compute_terms(mixer, u, MASK, before)
    scans = layer.scan(before)
    return diff_mamba.output(mixer, layer, scans), tuple(scan.state for scan in scans)


def run_separately(mixer: nn.Module, u: Tensor, before: LayerState | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(1 − λ_i) N(m₁ − λ m₂), each mixer with its own terms, scan and output."""
    outputs, states = [], []
    for number, m in enumerate((mixer.m1, mixer.m2)):
        own = None if before is None else LayerState(before.conv.chunk(2, dim=-1)[number], (before.ssm[number],))
        layer = mamba2.compute_terms(m, u, MASK, own)
        scanned = ops.scan(layer.recurrence, None if own is None else own.ssm[0])
        outputs.append(mamba2.output(m, layer, (scanned,)))
        states.append(scanned.state)
    y = mixer.difference(*outputs, mixer.current_lambda())
    return (1 - mixer.lambda_init) * y, tuple(states)


@contextmanager
def hooked(module: nn.Module) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, args, y: 1.5 * y)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("part", [None, *(f"m{i}.{part}" for i in (1, 2) for part in PARTS)])
@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"use_conv_bias": False}], ids=str)
@pytest.mark.parametrize("continued", [False, True])
def test_both_together_are_each_by_itself(part, options, continued):
    """Outputs, states and all gradients, with padding; and with a hook on a part of one of the two."""
    mixer, before = differential_mixer(**options), state() if continued else None
    u = torch.randn(2, 9, 16).double().requires_grad_()
    inputs = [u, *(p for name, p in mixer.named_parameters() if p.requires_grad)]
    plain, _ = run(mixer, u, before)
    with TrueFloat64():
        found, expected = [], []
        for compute, into in ((run, found), (run_separately, expected)):
            if part is None:
                y, states = compute(mixer, u, before)
            else:
                with hooked(mixer.get_submodule(part)):
                    y, states = compute(mixer, u, before)
            gradients = torch.autograd.grad(y.sin().sum() + sum(s.square().sum() for s in states), inputs)
            into += [y, *states, *gradients]
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-11)
    if part is not None:
        assert (found[0] - plain).norm() > 1e-3 * plain.norm()


def test_edits_reach_the_convolution_of_the_mixer_that_they_name():
    mixer, before = differential_mixer(), state()
    u = torch.randn(2, 9, 16).double()
    read = {mixer.m1: [True, False, True], mixer.m2: [True, True, False]}
    taps = {id(m): partial(torch.logical_and, torch.tensor(own)) for m, own in read.items()}
    with TrueFloat64(), torch.no_grad():
        plain = run(mixer, u, before)[0]
        for edit_conv_input, reads in (({id(mixer.m2): torch.neg}, {}), ({}, taps)):
            with computed_by({}, edit_conv_input, reads):
                found, expected = run(mixer, u, before)[0], run_separately(mixer, u, before)[0]
                layer = diff_mamba.compute_terms(mixer, u, MASK, before)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
            assert (found - plain).norm() > 1e-3 * plain.norm()
            inputs = diff_mamba.compute_terms(mixer, u, MASK, before).conv_input.chunk(2, dim=-1)
            edited = (inputs[0], -inputs[1]) if edit_conv_input else inputs
            torch.testing.assert_close(layer.conv_input, torch.cat(edited, dim=-1))
            assert (layer.taps is None) if edit_conv_input else layer.taps[1, 4].tolist() == sum(read.values(), [])
