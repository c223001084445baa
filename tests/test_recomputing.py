"""Gradients and relevance are the same where blocks are run again, and the backward pass keeps less."""

from __future__ import annotations

import pytest
import torch
from examples import FEW, TEXTS, random_example
from loud import loud

from ssmscope.core.model import Model
from ssmscope.core.recomputing import stacked
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import Objective, objective


def kept(found: Objective) -> tuple[torch.Tensor, int]:
    """The gradient, and how many numbers the backward pass keeps beside weights."""
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
