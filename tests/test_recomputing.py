"""Gradients and relevance are the same where blocks are run again, and the backward pass keeps less."""

import pytest
import torch
from examples import FEW, TEXTS, random_example
from loud import loud
from ssmscope.core.mixers import mixers
from ssmscope.core.model import Model
from ssmscope.core.recomputing import _checkpointed, stacked
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import Objective, objective


def kept(found: Objective) -> tuple[torch.Tensor, int]:
    """Return the gradient, and how many numbers the backward pass keeps in addition to weights."""
    numbers = 0

    def pack(t: torch.Tensor) -> torch.Tensor:
        nonlocal numbers
        numbers += 0 if isinstance(t, torch.nn.Parameter) else t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return found.gradient(found.embeddings(), range(len(found))), numbers


def made(name: str) -> Objective:
    model = Model(loud(random_example(name)))
    return objective(model, model.encode(ids=TEXTS), target=1)


@pytest.mark.parametrize("name", FEW)
def test_the_same_numbers(name, monkeypatch):
    found = made(name)
    (gradient, numbers), relevance = kept(found), lrp(found).scores
    monkeypatch.setattr("ssmscope.interp.objective.backward_bytes", lambda model: 0)
    monkeypatch.setattr("ssmscope.interp.methods.lrp.backward_bytes", lambda model: 0)
    (again, fewer), as_relevant = kept(found), lrp(found).scores
    assert torch.equal(gradient, again) and torch.equal(relevance, as_relevant)
    blocks = list(stacked(found.model.module))
    if blocks and not any(getattr(mixer, "before", ()) for mixer in found.model.mixers):
        assert fewer < numbers / 2
    assert all("forward" not in block.__dict__ for block in blocks)


def test_a_block_runs_again_only_where_one_of_its_tensors_asks_for_a_gradient():
    """Whatever else it is given; a handler of an outer context is run with it."""
    calls = []

    def block(x, scale, *, more=None, name="b"):
        calls.append(name)
        return x * x * scale if more is None else x * x * scale * more

    plain, leaf = torch.ones(3), torch.arange(3.0).requires_grad_()
    for given, named in (((leaf, 2.0), {}), ((plain, 2.0), {"more": leaf, "name": "c"}), ((plain, leaf), {})):
        calls.clear()
        found = _checkpointed(None, block, *given, **named)
        assert len(calls) == 1 and torch.equal(found, block(*given, **named))
        calls.clear()
        (gradient,) = torch.autograd.grad(found.square().sum(), leaf)
        assert calls == [named.get("name", "b")]
        assert torch.equal(gradient, torch.autograd.grad(block(*given, **named).square().sum(), leaf)[0])
    calls.clear()
    with torch.no_grad():
        _checkpointed(None, block, leaf, 2.0)
    assert not _checkpointed(None, block, plain, 2.0, more=plain).requires_grad and len(calls) == 2
    found = _checkpointed(lambda below, *args, **kwargs: 10 * below(*args, **kwargs), block, leaf, 2.0)
    assert torch.equal(found, 20 * leaf * leaf)


@pytest.mark.parametrize("name", ["mamba", "bamba", "falcon_h1", "rwkv"])
def test_blocks_are_the_members_of_the_outermost_lists(name):
    """Blocks without a mixer count too, lists within a block do not."""
    module = random_example(name)
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
    assert list(stacked(module)) == list(lists[0]) and len(lists[0]) == module.config.num_hidden_layers
    mixer = mixers(module)[0]
    assert list(stacked(torch.nn.Sequential(mixer))) == []
    two = torch.nn.ModuleList(
        [torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Sequential(mixer)]), torch.nn.Identity()]
    )
    assert list(stacked(torch.nn.Sequential(torch.nn.Identity(), two))) == list(two)
