"""Layers of softmax attention in hybrids: the keys that are read and kept, and the models that can continue."""

from types import SimpleNamespace

import pytest
import torch
from examples import random_example
from loud import loud
from torch import nn
from ssmscope.core import attention_layers
from ssmscope.core.attention_layers import AttentionState, keeps_caches, runs_in_two_pieces
from ssmscope.core.generation import Continuation, Written
from ssmscope.core.mixers import mixers
from ssmscope.core.model import Model
from ssmscope.core.trace import gathered, mapped, tensors


def test_which_keys_a_query_reads():
    """It reads real keys of its row that are neither after it nor outside the window."""
    places = torch.tensor([[1, 2, 3, 4, 5], [0, 1, 2, 0, 3]])
    found = attention_layers._causal(nn.Identity(), places, 3)
    assert found[0, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert found[1, 0].int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 0, 1]]
    part = nn.Identity()
    part.sliding_window = 2
    found = attention_layers._causal(part, places, 3)
    assert found[0, 0].int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert found[1, 0, [0, 2]].int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 0, 1]]
    own = torch.tensor([[1, 2, 3], [1, 2, 3]])
    assert attention_layers._read(None, own).int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]] * 2
    given = torch.tensor([[[[True, False, True, True]] * 3]])
    assert torch.equal(attention_layers._read(given, own), given[..., :3].expand(2, 1, 3, 3))
    added = torch.zeros(2, 1, 3, 4).masked_fill(~given, -1e30)
    assert torch.equal(attention_layers._read(added, own), given[..., :3].expand(2, 1, 3, 3))


def test_a_cache_puts_earlier_keys_first_and_forgets_padding():
    before = AttentionState(
        None, (), *(torch.arange(12.0).view(2, 2, 3, 1) + at for at in (0, 100)), torch.tensor([[1, 2]] * 2)
    )
    new = torch.arange(12.0).view(2, 3, 2, 1) + 50
    cache = attention_layers._Cache(before)
    keys, values = cache.update(new, -new)
    assert torch.equal(keys, torch.cat([before.keys.transpose(1, 2), new], dim=2))
    assert torch.equal(values, torch.cat([before.values.transpose(1, 2), -new], dim=2))
    places = torch.tensor([[1, 2, 3, 0], [1, 2, 0, 0]])
    after = cache.state(places)
    assert torch.equal(after.places, places[:, :3]) and torch.equal(after.keys, keys[:, :, :3].transpose(1, 2))
    assert torch.equal(after.values, values[:, :, :3].transpose(1, 2)) and after.conv is None
    fresh = attention_layers._Cache(None)
    assert fresh.update(new, -new)[0] is new and fresh.tail is None


def test_states_of_a_text_that_is_written_share_their_keys():
    model = Model(loud(random_example("bamba")))
    steps = model.generate_stream(ids=[[5, 17, 3], [9, 2]], max_new_tokens=40, keep_states=True)
    states, kept = [], []
    for step in steps:
        states.append(step.states)
        kept.append(mapped(step.states, torch.clone))
    keys = [state[-1].keys for state in states]
    assert [t.shape[1] for t in keys] == list(range(3, 43))
    places = [t.data_ptr() for t in keys]
    assert len(set(places)) == 5 and places == sorted(places, key=places.index)  # Room for 8, 18, 38 and 78.
    pairs = list(zip(tensors(sum(states, ())), tensors(sum(kept, ()))))
    assert pairs and all(torch.equal(one, other) for one, other in pairs)


def test_who_continues_second_from_a_state_copies_its_keys():
    model = Model(loud(random_example("bamba")))
    prompt, said = model.encode(ids=[[5, 17, 3]]), [[7, 9], [8, 1]]
    following = Continuation(model, model.run(prompt, last_only=True))
    following.read([Written(0, 0, 4, "", 0.0, 0.0)])
    first, found = (following.logits, following.states), []
    for text in said:
        branch = Continuation(model, first)
        for number, token in enumerate(text):
            branch.read([Written(0, number, token, "", 0.0, 0.0)])
        found.append(branch)
    for text, branch in zip(said, found):
        alone = model.run(model.encode(ids=[[5, 17, 3, 4, *text]]), last_only=True)
        torch.testing.assert_close(branch.logits, alone.logits, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(branch.states[-1].keys, alone.states[-1].keys, atol=1e-5, rtol=1e-4)
    rooms = [branch.states[-1].room for branch in found]
    assert rooms[0] is first[1][-1].room is not rooms[1] and gathered(first[1], torch.tensor([0]))[-1].room is None
    with torch.inference_mode():
        found[0].read([Written(0, 0, 4, "", 0.0, 0.0)])
    found[0].read([Written(0, 0, 4, "", 0.0, 0.0)])
    for each in (following, *found):
        each.close()


def test_numbers_of_the_layers_of_attention():
    module = random_example("bamba")
    assert attention_layers.attention_numbers(module) == (1,)
    assert attention_layers.attention_layers(random_example("mamba")) == {}
    assert isinstance(next(iter(attention_layers.attention_layers(module).values())), nn.Module)


class Module(nn.Module):
    """Layers, and a configuration with an implementation of attention."""

    def __init__(self, *parts: nn.Module, **config: str) -> None:
        super().__init__()
        self.layers, self.config = nn.ModuleList(parts), SimpleNamespace(**config)


class OwnAttention(nn.Module):
    def forward(self, hidden_states, past_key_values=None):
        return hidden_states


class BareAttention(nn.Module):
    def forward(self, hidden_states):
        return hidden_states


def test_which_models_keep_what_they_attend_to():
    """Models whose attention has a cache and a mask that can be added to, or without attention; none both ways."""
    mamba, vim = (mixers(random_example(name))[0] for name in ("mamba", "vim"))
    kept, bare = OwnAttention(), BareAttention()
    for parts, config, expected in (
        ([mamba], {}, True), ([mamba], {"_attn_implementation": "flash_attention_2"}, True), ([mamba, kept], {}, True),
        ([mamba, kept], {"_attn_implementation": "sdpa"}, True),
        ([mamba, kept], {"_attn_implementation": "flash_attention_2"}, False),
        ([mamba, kept, bare], {"_attn_implementation": "sdpa"}, False), ([mamba, bare], {}, False), ([vim], {}, False),
    ):  # fmt: skip
        module = Module(*parts, **config)
        assert keeps_caches(module) is expected
        assert [*attention_layers.attention_layers(module)] == ["layers.1"] * (kept in parts)
        assert len(attention_layers.attention_modules(module)) == len(parts) - 1
    twice = Module(kept, mamba, kept)
    assert attention_layers.attention_numbers(twice) == (0, 2)


class Pieces:
    """Model whose second piece of a text is off by some amounts."""

    def __init__(self, expected: list[float], off: list[float], dtype: torch.dtype = torch.float32) -> None:
        self.expected, self.off = torch.tensor([expected]), torch.tensor([off])
        self.vocabulary, self.module, self.runs, self.channels = 11, nn.Linear(1, 1).to(dtype), [], None

    def encode(self, ids: list[int]) -> list[int]:
        assert max(ids) < self.vocabulary
        return ids

    def run(self, ids, states=None, last_only=False):
        assert vars(self)["_continues"]
        self.runs.append((ids, states, last_only))
        if self.off.isnan().any():
            raise RuntimeError("in the middle")
        return SimpleNamespace(logits=self.expected + (0 if states is None else self.off), states=ids)


@pytest.mark.parametrize(("expected", "allowed", "dtype"), [
    ([99.0, 100.0, 102.0, 99.0], 2e-3, torch.float32),  # of the largest distance from the mean
    ([99.0, 100.0, 98.0, 103.0], 3e-3, torch.float64),
    ([-50.0], 5e-2, torch.float32),  # of a single number, which is its own mean
    ([0.0, 4.0, -4.0, 0.0], 4 * 16 * torch.finfo(torch.bfloat16).eps, torch.bfloat16),
])  # fmt: skip
def test_a_text_in_two_pieces_may_be_off_by_rounding(expected, allowed, dtype):
    for at in range(len(expected)):
        for share in (0.9, -0.9, 1.1, -1.1):
            off = [share * allowed if place == at else 0.0 for place in range(len(expected))]
            model = Pieces(expected, off, dtype)
            assert runs_in_two_pieces(model) is (abs(share) < 1)
            (whole, *_), (first, _, _), (second, states, _) = model.runs
            assert whole == first + second and states == first and min(len(first), len(second)) > 1
            assert len(set(whole)) > 1 and "_continues" not in vars(model)
    failing = Pieces(expected, [torch.nan] * len(expected))
    with pytest.raises(RuntimeError, match="in the middle"):
        runs_in_two_pieces(failing)
    assert "_continues" not in vars(failing)
