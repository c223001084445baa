"""What a Mamba-2's mixer does at once in C, against its terms, scan and output one after the other in float64."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from at_once import answers, counted
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from ssmscope.mixers import fast_scan, mixers
from ssmscope.models import mamba2
from ssmscope.scans import mamba2_native, passes_native, scalar_native

pytestmark = pytest.mark.skipif(
    not (scalar_native.available() and passes_native.available()), reason=f"no C kernels: {scalar_native.why_not()}"
)


@pytest.fixture
def calls(monkeypatch):
    return counted(monkeypatch, mamba2_native)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return mamba2.examples()[name].eval()


def wide() -> nn.Module:
    """Heads of more than a slab, wider than a panel and no multiple of it, and no bias in the convolution."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=11, hidden_size=140, state_size=19, num_hidden_layers=1, chunk_size=8, use_conv_bias=False)
    return Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=7, head_dim=40, n_groups=1)).eval()


def separately(model: nn.Module, *args, **kwargs) -> list[torch.Tensor]:
    """`answers` by the terms, the scan and the output one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba2_native, "applicable", lambda *terms: False)
        return answers(model, *args, **kwargs)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("name", "length"), [("mamba2", 1), ("mamba2", 70), ("mamba2-one-group", 64), ("wide", 129)])
def test_values_and_gradients(calls, name, length, constant):
    model = wide() if name == "wide" else model_of(name)
    found = answers(model, length, constant)
    assert len(calls) == len(mixers(model))
    exact = answers(deepcopy(model).double(), length, constant)
    former = separately(model, length, constant)
    assert len(calls) == len(mixers(model))
    alone = answers(model, length, constant, sensitive=False)[0]
    assert torch.equal(found[0], former[0]) and torch.equal(alone, found[0])
    for ours, before, theirs in zip(found, former, exact, strict=True):
        close = 3 * (before.double() - theirs).abs().max() + 1e-6 * theirs.abs().max()
        assert (ours.double() - theirs).abs().max() <= close


def test_a_gradient_of_some_weights_alone():
    model = model_of("mamba2-one-group")
    for name in ("dt_bias", "A_log", "D", "norm.weight", "conv1d.bias"):
        part = next(p for n, p in model.named_parameters() if n.endswith(name))
        found = []
        for wanted in (False, True):
            model.requires_grad_(wanted)
            part.requires_grad_(True)
            with fast_scan(model):
                logits = model(inputs_embeds=torch.linspace(-1, 1, 24 * 9).view(1, 9, 24).sin()).logits
            found.append(torch.autograd.grad(logits.square().sum(), part)[0])
        assert torch.equal(*found) and found[0].abs().sum() > 0


def test_threads_change_nothing():
    model, before = wide(), torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs.append(answers(model, 70))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*runs, strict=True):
        assert (one - two).abs().max() <= 1e-5 * two.abs().max()


def test_who_asks_for_terms_gets_them(calls):
    model, seen = model_of("mamba2"), []
    with torch.no_grad(), fast_scan(model, visit=lambda index, layer, scans: seen.append(index)):
        model(inputs_embeds=torch.randn(1, 4, 24))
    with torch.no_grad(), fast_scan(model, mask=torch.tensor([[False, True, True, True]])):
        model(inputs_embeds=torch.randn(1, 4, 24))
    assert seen == [0, 1] and not calls


@pytest.mark.parametrize("part", ["norm", "act"])
def test_hooks_and_other_parts_stay_with_their_own(calls, part):
    model, seen = model_of("mamba2"), []
    for mixer in mixers(model):
        if part == "act":
            mixer.act = nn.GELU()
        getattr(mixer, part).register_forward_hook(lambda *_: seen.append(part))
    answers(model, 5, sensitive=False)
    assert len(seen) >= 2 and not calls


def test_float64_and_autocasting_stay_with_torch(calls):
    model = model_of("mamba2")
    answers(deepcopy(model).double(), 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = answers(model, 9, sensitive=False)[0]
    assert not calls
    exact = answers(model, 9, sensitive=False)[0]
    assert (found - exact).abs().max() <= 0.05 * exact.abs().max()
