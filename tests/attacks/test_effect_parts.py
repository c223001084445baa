"""Steps of the effect of a change: aligned tokens of long texts, shares of a row, and the tolerance of equality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from examples import random_example

from ssmscope.attacks.effect import measure as module
from ssmscope.attacks.effect.measure import SAME, _shares, aligned, effect_of, relative
from ssmscope.core.model import Model


def test_tokens_that_are_frequent_in_long_texts_are_aligned_too() -> None:
    often = [1, 2] * 150
    assert aligned([9, *often], often).tolist() == [[at + 1, at] for at in range(300)]
    assert aligned([1, 2, 3], [3, 1, 2]).tolist() == [[0, 1], [1, 2]] and aligned([1], [2]).shape == (0, 2)


@pytest.mark.parametrize(
    ("weights", "sink", "shares", "state"),
    [
        ([1.0, -2.0, 0.0], None, [1 / 3, 2 / 3, 0], 0.0),
        ([1.0, -2.0, 0.0], -5.0, [1 / 8, 2 / 8, 0], 5 / 8),
        ([0.0, 0.0], -5.0, [0, 0], 1.0),
        ([0.0, 0.0], None, [0, 0], 0.0),
        ([0.0, 0.0], 0.0, [0, 0], 0.0),
    ],
)
def test_shares_of_the_last_row(weights: list[float], sink: float | None, shares: list[float], state: float) -> None:
    own = None if sink is None else np.array([sink], np.float32)
    found, before = _shares(np.array([weights], np.float32), own)
    assert found.tolist() == pytest.approx(shares) and found.dtype == np.float32 and before == pytest.approx(state)


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, SAME), (torch.bfloat16, 0.125), (torch.float64, SAME)])
def test_what_counts_as_the_same_depends_on_the_dtype(monkeypatch: pytest.MonkeyPatch, dtype: Any, same: float) -> None:
    seen: list[float] = []
    monkeypatch.setattr(
        module, "relative", lambda before, after, same: seen.append(same) or relative(before, after, same)
    )
    model = Model(random_example("mamba2").to(dtype).eval(), None, "m")
    batch = model.encode(ids=[[5, 17, 3, 9], [5, 17, 4, 9, 8]])
    found = effect_of(model, batch, layers="all")
    assert seen == [same] * model.num_layers + [SAME]  # the head's input is in float32 at least
    assert found.pairs.tolist() == [[0, 0], [1, 1], [3, 3]] and found.clean.changed.tolist() == [
        False,
        False,
        True,
        False,
    ]
    assert found.corrupted.changed.tolist() == [False, False, True, False, True]
    answers = [
        model.logits(model.encode(ids=[ids]))[0, -1].double().softmax(-1) for ids in ([5, 17, 3, 9], [5, 17, 4, 9, 8])
    ]
    assert found.kept == pytest.approx(float(answers[1][answers[0].argmax()]), rel=0.05)


def test_padding_is_no_token_of_a_text() -> None:
    model = Model(random_example("mamba2").eval(), None, "m")
    found = effect_of(model, model.encode(ids=[[5, 17, 3], [5, 17, 4, 0]]))
    assert found.pairs.tolist() == [[0, 0], [1, 1]] and found.corrupted.changed.tolist() == [False, False, True, True]
