"""Attention whose indexer chooses the keys: what it is given of earlier tokens, and what a changed choice leaves."""

from dataclasses import replace

import pytest
import torch
from examples import EXAMPLES, random_example, relative
from loud import TrueFloat64, doubled, loud
from small_models import QWEN_SIZES, language_model, with_smaller_decays
from torch import nn
from ssmscope.core.attention_layers import attending
from ssmscope.core.chosen_keys import additive, columns, in_one_piece, is_read, with_changed_choice
from ssmscope.core.edits import Edit, edited
from ssmscope.core.model import Model
from ssmscope.core.ngrams import NGramState
from ssmscope.errors import InputError
from ssmscope.interp.explain import explain

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


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_an_indexer_answers_in_booleans_or_numbers(dtype: torch.dtype) -> None:
    """Before 5.23 Qwen4-Exp's adds numbers to the mask where this is of numbers."""
    chosen, seen = torch.tensor([[1, 1, 0, 1]]).bool(), torch.tensor([[1, 0, 1, 1]]).bool()
    part = torch.nn.Module()
    vars(part)["indexer"] = lambda *given: chosen if dtype == torch.bool else additive(chosen, dtype)
    mask = seen if dtype == torch.bool else additive(seen, dtype)
    found = with_changed_choice(part, lambda reads: reads & torch.tensor([[1, 1, 1, 0]]).bool())
    answer = found.indexer(None, None, mask, None)
    assert answer.dtype == dtype and is_read(answer).tolist() == [[True, False, False, False]]


@pytest.mark.skipif("qwen4_exp" not in EXAMPLES, reason="this release of transformers has no Qwen4-Exp")
def test_ngram_embeddings_continue_and_refuse_embeddings():
    """Each row continues from its own last real ids and inputs of the convolution, at every token that is written."""
    sizes = dict(ple_layer_ids=[1, 3], ple_embed_dim=16, heads_per_ngram=4, ngram_vocab_size_base=100, eos_token_id=0)
    torch.manual_seed(0)
    made = language_model("qwen4_exp_text", **QWEN_SIZES, **sizes, split_ngram_parts=2)
    model = Model(doubled(with_smaller_decays(loud(made))))
    texts, cuts = [IDS, [7, 8, 9], [90, 1, 2, 3, 4, 5]], (7, 2, 1)
    with TrueFloat64():
        whole = model.run(model.encode(ids=texts))
        first = model.run(model.encode(ids=[text[:cut] for text, cut in zip(texts, cuts)]))
        assert [type(state).__name__ for state in first.states[2:]] == ["NGramState", "AttentionState", "NGramState"]
        second = model.run(model.encode(ids=[text[cut:] for text, cut in zip(texts, cuts)]), first.states)
        for row, (text, cut) in enumerate(zip(texts, cuts)):
            assert relative(second.logits[row, : len(text) - cut], whole.logits[row, cut : len(text)]) < 1e-10
        other = tuple(replace(s, ids=s.ids.flip(1)) if isinstance(s, NGramState) else s for s in first.states)
        changed = model.run(model.encode(ids=[text[cut:] for text, cut in zip(texts, cuts)]), other)
        assert relative(changed.logits[0, 0], second.logits[0, 0]) > 1e-3
        said = model.generate(ids=texts, max_new_tokens=5).ids
    for text, found in zip(texts, said):
        ids = torch.tensor([text])
        theirs = model.module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        assert theirs[0, len(text) :].tolist() == list(found)
    with pytest.raises(InputError, match="reads its tokens' ids besides their embeddings"):
        explain(model, model.encode(ids=[IDS]), methods=["gradxinput"])
