"""Attention whose indexer chooses the keys: what it is given of earlier tokens, and what a changed choice leaves."""

from __future__ import annotations

import pytest
import torch
from examples import EXAMPLES, random_example
from loud import loud
from torch import nn

from ssmscope.core.attention_layers import attending
from ssmscope.core.chosen_keys import additive, columns, in_one_piece, with_changed_choice
from ssmscope.core.edits import Edit, edited
from ssmscope.core.model import Model

FAMILIES = [name for name in ("glm5_next", "qwen4_exp") if name in EXAMPLES]
IDS = [5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5]


def test_an_order_puts_a_states_real_keys_last_and_is_undone():
    real = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1]]).bool()
    order = in_one_piece(real, 4)
    assert order.tolist() == [[2, 3, 0, 1, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert in_one_piece(real[1:], 4) is None and in_one_piece(real, 0) is None
    t = torch.arange(12.0).view(2, 1, 6, 1).expand(2, 3, 6, 2)
    found = columns(t, order, 2)
    assert found[0, 2, :, 1].tolist() == [2, 3, 0, 1, 4, 5] and torch.equal(found[1], t[1])
    assert torch.equal(columns(found, order.argsort(1), 2), t) and columns(t, None, 2) is t


def test_a_choice_is_changed_after_it_is_made():
    """What an indexer sees is not cut, only what is then read."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.indexer = lambda hidden, positions, mask, cache: torch.ones(1, 1, 2, 3, dtype=torch.bool)

    part, asked = Part(), []
    cut = with_changed_choice(part, lambda reads: asked.append(reads) or ~reads)
    visible = torch.tensor([[[[True, False, False], [True, True, False]]]])
    for mask in (visible, additive(visible, torch.float32)):
        assert torch.equal(cut.indexer(None, None, mask, None), ~visible) and torch.equal(asked.pop(), visible)
    assert part.indexer(None, None, visible, None).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_the_chosen_keys(name):
    """A query reads at most the budget of four tokens and the last, incomplete group of two; without the oldest of
    these its other weights grow by one factor."""
    model = Model(loud(random_example(name)))
    batch, found = model.encode(ids=[IDS]), []
    for edits in ([], [Edit("cut", "attention", lambda reads, site: reads & (torch.arange(11) != 0))]):
        weights: dict[int, torch.Tensor] = {}
        with edited(model, edits), attending(model.module, see=weights.setdefault), torch.no_grad():
            model.module(batch.input_ids, use_cache=False)
        found.append(weights[0])
    plain, cut = found
    counts = (plain > 0).sum(-1)
    assert (counts == torch.tensor([1, 2, 3, 4, 5, *[4, 5] * 3])).all()
    torch.testing.assert_close(plain.sum(-1), torch.ones_like(plain.sum(-1)))
    assert (cut[..., 1:, 0] == 0).all() and plain[..., 1:, 0].any()
    rest = (plain[..., 1:, 1:] / plain[..., 1:, 1:].sum(-1, keepdim=True)).nan_to_num()
    torch.testing.assert_close(cut[..., 1:, 1:], rest, rtol=1e-4, atol=1e-6)
