"""Scores that differ by no more than rounding are ties, in every order and rank."""

import numpy as np
import pytest
from ssmscope.core.bootstrap import Estimate, lowest
from ssmscope.core.ties import ROUNDING, descending, difference, highest, levels, nonzero, spearman


def by_hand(scores: np.ndarray, size: float) -> list[int]:
    """Levels by a loop over the sorted scores."""
    order = sorted(range(len(scores)), key=lambda at: -scores[at])
    groups: list[list[int]] = []
    for at in order:
        near = groups and scores[groups[-1][-1]] - scores[at] <= ROUNDING * size
        if near:
            groups[-1].append(at)
        else:
            groups.append([at])
    found = [0] * len(scores)
    for level, group in enumerate(reversed(groups)):
        for at in group:
            found[at] = level
    return found


def test_levels_are_those_of_a_loop() -> None:
    draw = np.random.default_rng(0)
    for n in (1, 2, 7, 60):
        scores = draw.integers(-4, 5, (3, n)) * 1.0
        noisy = scores * (1 + 1e-6 * draw.uniform(-1, 1, scores.shape))
        expected = [by_hand(row, np.abs(row).max()) for row in scores]
        assert levels(scores).tolist() == levels(noisy).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_orders_and_ranks_survive_rounding(seed: int) -> None:
    draw = np.random.default_rng(seed)
    scores = np.concatenate([draw.normal(size=12), np.repeat(draw.normal(size=4), 3)])
    draw.shuffle(scores)
    other = scores[::-1] + 1
    noisy = [each * (1 + 1e-6 * draw.uniform(-1, 1, each.shape)) for each in (scores, other)]
    assert descending(scores).tolist() == descending(noisy[0]).tolist() == np.argsort(-scores, kind="stable").tolist()
    assert spearman(*noisy) == spearman(scores, other)


def test_the_size_of_what_differences_are_of() -> None:
    changes = np.array([3e-7, -2e-7, 4e-2, 0.0])
    assert descending(changes, 1.0).tolist() == [2, 0, 1, 3] and descending(changes[[0, 1, 3]]).tolist() == [0, 2, 1]
    assert nonzero(changes, 1.0).tolist() == [False, False, True, False]
    assert highest(np.array([1.0, 1 + 1e-7, 0.5])).tolist() == [True, True, False]
    assert difference(np.array([1.0, 2.0, np.inf]), np.array([1 + 1e-7, 1.0, 0.0])).tolist() == [0, 1, np.inf]


def test_no_number_and_infinite_ones() -> None:
    scores = np.array([np.nan, 1.0, np.inf, -np.inf, np.inf])
    assert descending(scores).tolist() == [2, 4, 1, 0, 3] and levels(np.zeros((2, 0))).shape == (2, 0)
    assert not highest(np.full(3, np.nan)).any()
    assert nonzero(np.array([np.nan, 1.0, 0.0, np.inf])).tolist() == [False, True, False, True]
    counts = np.arange(100_000)  # Whole numbers are exact.
    assert levels(counts).tolist() == counts.tolist() and nonzero(counts).tolist() == [False] + [True] * 99_999


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("size", [None, 1.0])
def test_no_scores(shape: tuple[int, ...], size: float | None) -> None:
    none = np.zeros(shape)
    for function in (levels, descending, highest, nonzero):
        assert function(none, size).shape == shape
    assert difference(none, none).shape == shape


def test_a_rank_correlation_of_nothing() -> None:
    assert np.isnan(spearman(np.zeros(0), np.zeros(0)))


def test_dense_scores_stay_apart() -> None:
    scores = np.linspace(0, 1, 200_001)
    drawn = scores[descending(scores)]
    assert (drawn - np.minimum.accumulate(drawn)).max() < 1.01 * ROUNDING and drawn[0] > 1 - 1.01 * ROUNDING


class TestSpearman:
    def test_is_that_of_scipy(self) -> None:
        stats = pytest.importorskip("scipy.stats")
        draw = np.random.default_rng(0)
        for n in (2, 5, 40):
            for _ in range(20):
                a, b = draw.integers(0, 6, n).astype(float), draw.normal(size=n).round(3)
                if len(set(a)) > 1:
                    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)

    def test_by_hand(self) -> None:
        line = np.arange(4.0)
        assert spearman(line, line**3) == 1 and spearman(line, -line) == -1
        assert spearman(line, np.array([0.0, 2.0, 1.0, 3.0])) == pytest.approx(1 - 6 * 2 / (4 * 15))
        for other in (np.ones(4), np.array([0, 1, 2, np.nan]), np.array([0, 1, 2, np.inf]), 1 + 1e-7 * line):
            assert np.isnan(spearman(line, other))
        assert np.isnan(spearman(np.ones(1), np.ones(1)))


def test_differences_of_rounding_decide_nothing() -> None:
    rows = np.tile([0.5, 0.5 + 1e-7, 0.7], (40, 1))
    assert lowest(rows) == (0, 1)
    assert not Estimate(0.5, 0.5, 0.5 + 1e-7).has_interval and Estimate(32.0, 32.0, np.inf).has_interval
