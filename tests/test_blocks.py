"""A block's sum and the next one's norm in one pass: what it computes, and who still sees the norm. The kernel of a GPU
is replaced by its definition; that of a CPU is tested as it is."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

import ssmscope
from ssmscope import mixers
from ssmscope.models import mamba, mamba2
from ssmscope.scans import passes, passes_native


def rms_norm(x, weight, eps):
    return weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.fixture
def sums(monkeypatch) -> list[torch.Tensor]:
    """Every sum that was found together with its norm."""
    found: list[torch.Tensor] = []

    def add_and_rms_norm(x, added, weight, eps):
        found.append(x + added)
        return found[-1], rms_norm(found[-1].to(weight.dtype), weight, eps)

    stub = SimpleNamespace(rms_norm=rms_norm, add_and_rms_norm=add_and_rms_norm, NORMS=passes.NORMS, MOST=passes.MOST)
    stub.applicable = lambda *tensors: not torch.is_grad_enabled()
    monkeypatch.setattr(mixers, "passes", stub)
    return found


FAMILIES = {name: family for family in (mamba, mamba2) for name in family.examples() if name != "mamba2attn"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_the_librarys(name, dtype, sums):
    torch.manual_seed(0)
    module = FAMILIES[name].examples()[name].to(dtype).eval()
    model = ssmscope.load(module)
    batch = model.encode(ids=list(range(5, 25)))
    with torch.no_grad():
        theirs = module(batch.input_ids, use_cache=False).logits
    ours = model.logits(batch)
    assert len(sums) == model.num_layers - 1
    assert (ours - theirs).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-5) * theirs.abs().max()
    model.logits(batch).sum()
    assert len(sums) == 2 * (model.num_layers - 1)


def test_hooks_see_norms_and_change_sums(sums):
    torch.manual_seed(0)
    module = mamba.examples()["mamba"].eval()
    model = ssmscope.load(module)
    batch = model.encode(ids=list(range(5, 25)))
    first, second = module.backbone.layers
    doubled = second.norm.register_forward_hook(lambda norm, args, output: 2 * output)
    with torch.no_grad():
        theirs = module(batch.input_ids, use_cache=False).logits
    assert torch.allclose(model.logits(batch), theirs, atol=1e-5) and not sums
    doubled.remove()
    halved = first.register_forward_hook(lambda block, args, output: output.mul_(0.5))
    with torch.no_grad():
        theirs = module(batch.input_ids, use_cache=False).logits
    assert torch.allclose(model.logits(batch), theirs, atol=1e-5) and len(sums) == 1
    halved.remove()
    with torch.no_grad():
        assert not torch.allclose(module(batch.input_ids, use_cache=False).logits, theirs, atol=1e-3)


@pytest.mark.skipif(not passes_native.available(), reason=f"no C kernel here: {passes_native.why_not()}")
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_kernels_of_a_cpu(name, monkeypatch):
    made, inner = [], passes_native.add_and_rms_norm
    monkeypatch.setattr(passes_native, "add_and_rms_norm", lambda *terms: made.append(1) or inner(*terms))
    torch.manual_seed(0)
    module = FAMILIES[name].examples()[name].eval()
    model = ssmscope.load(module)
    batch = model.encode(ids=list(range(5, 25)))
    ours = model.logits(batch)
    assert len(made) == model.num_layers - 1
    exact = ssmscope.load(deepcopy(module).double()).logits(batch)
    assert (ours.double() - exact).abs().max() <= 1e-5 * exact.abs().max() and len(made) == model.num_layers - 1
