"""What a Mamba's mixer does at once in C, against its terms, scan and output one after the other in float64."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from at_once import answers, counted
from torch import nn

from ssmscope.mixers import fast_scan, mixers
from ssmscope.models import mamba
from ssmscope.scans import mamba_native, native, passes_native
from ssmscope.scans.native import Tree

pytestmark = pytest.mark.skipif(
    not (native.available() and passes_native.available()), reason=f"no C kernels here: {native.why_not()}"
)


@pytest.fixture
def calls(monkeypatch):
    return counted(monkeypatch, mamba_native)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return mamba.examples()[name].eval()


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("name", "length"), [("mamba", 1), ("mamba", 70), ("mamba-with-biases", 33)])
def test_values_and_gradients(calls, name, length, constant):
    model = model_of(name)
    found = answers(model, length, constant)
    assert len(calls) == 2
    exact = answers(deepcopy(model).double(), length, constant)
    assert len(calls) == 2
    alone = answers(model, length, constant, sensitive=False)[0]
    assert (alone - found[0]).abs().max() <= 1e-6 * alone.abs().max()
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.double() - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_several_slabs_and_threads():
    """Channels of more than a slab, over parts of a chunk, by one thread as by two."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=11, hidden_size=72, state_size=3, num_hidden_layers=1, time_step_rank=2)
    model = MambaForCausalLM(MambaConfig(**sizes)).eval()
    exact = answers(deepcopy(model).double(), 45, False)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runs.append(answers(model, 45, False))
    finally:
        torch.set_num_threads(before)
    for one, two, theirs in zip(*runs, exact, strict=True):
        assert (one - two).abs().max() <= 1e-6 * theirs.abs().max()
        assert (one.double() - theirs).abs().max() <= 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_of_a_tree_are_the_rows_that_they_make(threads):
    """Every path from a beginning to an end, at once and alone: pieces of one token, of several chunks, with several
    that continue from one, and from the end of which none does."""
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    mixer = MambaMixer(MambaConfig(hidden_size=72, state_size=3, time_step_rank=2, conv_kernel=4), 0).eval()
    lengths, above = np.array([1, 70, 2, 1, 33, 5, 64, 1]), np.array([-1, 0, -1, 0, 1, 1, 3, 6])
    tree = Tree(lengths, above)
    u = torch.randn(1, int(lengths.sum()), 72)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with torch.no_grad():
            found = mamba.over_tree(mixer, u, tree)
            bounds = tree.bounds.tolist()
            for piece in range(len(lengths)):
                path = [piece]
                while above[path[0]] >= 0:
                    path.insert(0, int(above[path[0]]))
                tokens = torch.cat([torch.arange(bounds[p], bounds[p + 1]) for p in path])
                expected = mamba.at_once(mixer, u[:, tokens])
                ours = found[:, bounds[piece] : bounds[piece + 1]]
                assert (ours - expected[:, -ours.shape[1] :]).abs().max() <= 1e-6 * expected.abs().max()
    finally:
        torch.set_num_threads(before)
    assert tree.places == 4 and tree.inputs(4)[-1].tolist() == [176, 175, 174, 173]
    assert tree.inputs(4)[bounds[3]].tolist() == [73, 0, -1, -1]


def test_who_asks_for_terms_gets_them(calls):
    model, seen = model_of("mamba"), []
    with torch.no_grad(), fast_scan(model, visit=lambda index, layer, scans: seen.append(index)):
        model(inputs_embeds=torch.randn(1, 4, 24))
    with torch.no_grad(), fast_scan(model, mask=torch.tensor([[False, True, True, True]])):
        model(inputs_embeds=torch.randn(1, 4, 24))
    assert seen == [0, 1] and not calls


def test_falcon_and_float64_stay_with_their_own(calls):
    answers(model_of("falcon-mamba"), 5, True)
    answers(model_of("mamba").double(), 5, True)
    assert not calls


@pytest.mark.parametrize("part", ["x_proj", "dt_proj"])
def test_hooks_of_the_inner_projections_run(calls, part):
    model, seen = model_of("mamba"), []
    for mixer in mixers(model):
        getattr(mixer, part).register_forward_hook(lambda *_: seen.append(part))
    answers(model, 5, True, sensitive=False)
    assert len(seen) >= 2 and not calls


def test_autocasting_stays_with_torch(calls):
    model = model_of("mamba")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = answers(model, 9, True, sensitive=False)[0]
    exact = answers(model, 9, True, sensitive=False)[0]
    assert len(calls) == 2
    assert (found - exact).abs().max() <= 0.05 * exact.abs().max()
