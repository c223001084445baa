"""A differential layer of two Mamba-2 mixers against each mixer by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from loud import TrueFloat64, doubled
from torch import Tensor, nn
from transformers.activations import ACT2FN
from ssmscope import ops
from ssmscope.core.mixers import Edits, computed_by, mixers
from ssmscope.core.trace import LayerState
from ssmscope.layers import mamba, mamba2
from ssmscope.layers.parts import BY_WEIGHT
from ssmscope.zoo import diff_mamba

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
        outputs.append(mamba2.FORM.output(m, layer, (scanned,)))
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
    """Outputs, states and all gradients agree, with padding and with a hook on a part of one mixer."""
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
            with computed_by(Edits({}, edit_conv_input, reads)):
                found, expected = run(mixer, u, before)[0], run_separately(mixer, u, before)[0]
                layer = diff_mamba.compute_terms(mixer, u, MASK, before)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
            assert (found - plain).norm() > 1e-3 * plain.norm()
            inputs = diff_mamba.compute_terms(mixer, u, MASK, before).conv_input.chunk(2, dim=-1)
            edited = (inputs[0], -inputs[1]) if edit_conv_input else inputs
            torch.testing.assert_close(layer.conv_input, torch.cat(edited, dim=-1))
            assert (layer.taps is None) if edit_conv_input else layer.taps[1, 4].tolist() == sum(read.values(), [])


@pytest.mark.parametrize("names", [("silu", "tanh"), ("tanh", "silu"), ("leaky", "leakier"), ("leaky", "leaky")])
def test_each_convolution_has_its_own_mixers_activation(names, monkeypatch):
    """Activations are other functions, or one function with another slope."""
    for name, slope in (("leaky", 0.1), ("leakier", 0.7)):
        monkeypatch.setitem(ACT2FN, name, (nn.LeakyReLU, {"negative_slope": slope}))
    mixer, u = differential_mixer(), torch.randn(2, 9, 16).double()
    for m, name in zip((mixer.m1, mixer.m2), names):
        m.act, m.activation = ACT2FN[name], name
    with TrueFloat64(), torch.no_grad():
        torch.testing.assert_close(run(mixer, u, None), run_separately(mixer, u, None), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("edited", [False, True])
def test_terms_of_two_mamba1_mixers_stand_side_by_side(edited):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, expand=2, conv_kernel=3, state_size=4)
    config = diff_mamba.DiffMamba1Config(**sizes, time_step_rank=3)
    mixer = doubled(mixers(diff_mamba.DiffMamba1ForCausalLM(config))[0])
    both = (mixer.m1, mixer.m2)
    u = torch.randn(2, 9, 16).double()
    first = diff_mamba.compute_terms(mixer, u, MASK)
    before = first.state_after(first.scan())
    own = [LayerState(conv, (ssm,)) for conv, ssm in zip(before.conv.chunk(2, dim=-1), before.ssm)]
    read = {mixer.m1: [True, False, True], mixer.m2: [True, True, False]}
    taps = {id(m): partial(torch.logical_and, torch.tensor(each)) for m, each in read.items()} if edited else {}
    with computed_by(Edits({}, {}, taps)), torch.no_grad():
        found = diff_mamba.compute_terms(mixer, u, MASK, before)
        each = [mamba.compute_terms(m, u, MASK, state) for m, state in zip(both, own)]
    for name in ("conv_input", "conv_tail", "z", *(["taps"] if edited else [])):
        expected = torch.cat([getattr(layer, name) for layer in each], dim=-1)
        torch.testing.assert_close(getattr(found, name), expected, rtol=0, atol=0)
    assert (found.taps is not None) == edited
    for ours, layer in zip(found.recurrences, each, strict=True):
        torch.testing.assert_close(ours.x, layer.recurrence.x, rtol=0, atol=0)
        torch.testing.assert_close(ours.delta, layer.recurrence.delta, rtol=0, atol=0)
