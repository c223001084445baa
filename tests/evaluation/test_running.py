"""Sizes of batches that run together, and of the states of a row."""

import numpy as np
import pytest
from examples import random_example
from loud import loud
from ssmscope.core.batching import LAYER_NUMBERS_PER_WIDTH
from ssmscope.core.model import Model
from ssmscope.core.trace import size
from ssmscope.evaluation import running
from ssmscope.evaluation.forking import Rows


@pytest.mark.parametrize("name", ["mamba", "gated-deltanet", "bamba"])
@pytest.mark.parametrize("lengths", [(9, 40, 12), (40, 9, 12), (9, 9, 9)])
def test_a_rows_states_are_as_large_as_those_of_the_longest(name, lengths):
    model = Model(loud(random_example(name)), name=name)
    ids = np.random.default_rng(0).integers(1, 60, sum(lengths))
    rows = Rows(ids, np.cumsum([0, *lengths]))
    continues, found = running.try_resuming(model, rows)
    longest = model.run(model.encode(ids=ids[: max(lengths)].tolist())).states
    assert continues and found == size(longest)
    shorter = model.run(model.encode(ids=ids[:5].tolist())).states
    assert (size(shorter) < found) == (name == "bamba")  # whose attention keeps every key


def test_what_runs_together(monkeypatch):
    model = Model(random_example("mamba"))
    monkeypatch.setattr(running, "MAX_CACHED_NUMBERS", 1000 * LAYER_NUMBERS_PER_WIDTH * model.width)
    assert running.max_batch_tokens(model) == 1000
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    monkeypatch.setattr(running, "BATCH_COST", {"cpu": (3, 10 * weights)})
    assert running.max_batch_padding(model) == 3 + 10 * len(model.mixers)
    monkeypatch.setattr(running, "MAX_STATE_BYTES", 1000)
    assert [running.max_held_states(model, each) for each in (0, 1, 300, 2000)] == [1000, 1000, 3, 1]
