"""Scores of results: values as recorded, pairing of the same examples, and the file of a report's scores."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ssmscope.errors import InputError
from ssmscope.reports.scores import Score, difference, is_paired, read_scores, resampled, write_scores


def score(model: str, values: list[float], *, among: list[float] | None = None, ids: str = "abc") -> Score:
    below = np.ones(len(values)) if among is None else np.array(among)
    examples = np.stack([np.array(values), below], axis=1)
    value = float(examples[:, 0].sum() / examples[:, 1].sum())
    return Score("words.success", model, value, value - 0.1, value + 0.2, len(values), "lower", "%", examples, ids)


def test_a_difference_of_the_same_examples_is_paired():
    random = np.random.default_rng(0)
    base = random.random(200)
    one, other = score("a", list(base + 0.01)), score("b", list(base))
    found = difference(one, other)
    # Apart, the two means vary by ± 0.04; their difference is the same on every example.
    assert (found.value, found.low, found.high) == pytest.approx((0.01, 0.01, 0.01))
    assert is_paired(one, other) and not is_paired(one, replace(other, example_ids="other"))
    assert not is_paired(replace(one, example_ids=""), replace(other, example_ids=""))


def test_a_ratio_is_resampled_above_and_below_the_line():
    one = score("a", [1, 0, 1, 0], among=[1, 1, 1, 0])
    rows = resampled([one, replace(one, model="b")])
    assert one.value == rows[0, 0] == 2 / 3
    assert len(rows) == 2001 and np.array_equal(rows[:, 0], rows[:, 1], equal_nan=True)


def test_unpaired_differences_have_the_interval_of_independent_numbers():
    one = Score("loss", "a", 2.0, 1.7, 2.4, 9, "lower", "nats")
    other = Score("loss", "b", 1.0, 0.6, 1.3, 9, "lower", "nats")
    found = difference(one, other)
    assert (found.value, found.low, found.high) == pytest.approx(
        (1.0, 1 - math.hypot(0.3, 0.3), 1 + math.hypot(0.4, 0.4))
    )
    unknown = difference(one, replace(other, low=math.nan, high=math.nan))
    assert unknown.value == 1.0 and math.isnan(unknown.low) and math.isnan(unknown.high)


def test_written_scores_are_read_back(tmp_path):
    every = [score("a", [0.1, 0.2, 1 / 3]), Score("loss", "b", 1.5, math.nan, math.nan, 0, "", "nats")]
    write_scores(every, tmp_path)
    for where in (tmp_path, tmp_path / "scores.json"):
        first, second = read_scores(where)
        assert np.array_equal(first.examples, every[0].examples) and first.estimate == every[0].estimate
        assert replace(first, examples=None) == replace(every[0], examples=None)
        assert second.name == "loss" and math.isnan(second.low) and not second.has_interval


@pytest.mark.parametrize("text", ["[]", "{}", '{"scores": [{"name": "a"}]}', "\udcff"])
def test_a_file_without_scores_is_refused(tmp_path, text):
    (tmp_path / "scores.json").write_text(text, errors="surrogateescape")
    with pytest.raises(InputError, match="does not hold a report's scores"):
        read_scores(tmp_path)
    with pytest.raises(InputError, match="there are no scores at"):
        read_scores(tmp_path / "elsewhere.json")
