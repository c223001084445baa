"""Bootstrap intervals against every possible resample, and how often they cover the truth."""

import itertools
import math

import numpy as np
import pytest
from ssmscope.core.bootstrap import (
    Estimate,
    estimate,
    estimates,
    interval_columns,
    lowest,
    ratio,
    resampled_means,
    resampled_sums,
    wilson_interval,
    with_intervals,
)

CLEAN = np.array([1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
ATTACKED = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])


def every_resample(clean, attacked):
    """The paired drop of all n^(n − 3) resamples, which are equally likely."""
    rows = np.array(list(itertools.product(range(len(clean)), repeat=len(clean) - 3)))
    above, below = attacked[rows].sum(1), clean[rows].sum(1)
    return (1 - above[below > 0] / below[below > 0]), (below == 0).mean()


def test_the_paired_drop_has_the_distribution_of_all_resamples():
    sums = resampled_sums(np.stack([CLEAN, ATTACKED], 1), resamples=40_000, seed=1)
    drops = 1 - ratio(sums[:, 1], sums[:, 0])
    exact, undefined = every_resample(CLEAN, ATTACKED)
    assert drops[0] == pytest.approx(0.6)
    ours = drops[1:]
    assert np.isnan(ours).mean() == pytest.approx(undefined, abs=1.2e-3)
    ours = ours[~np.isnan(ours)]
    assert ours.mean() == pytest.approx(exact.mean(), abs=5e-3) and ours.std() == pytest.approx(exact.std(), abs=5e-3)
    for drop in np.unique(exact):
        assert np.isclose(ours, drop).mean() == pytest.approx(np.isclose(exact, drop).mean(), abs=1e-2)
    low, high = np.quantile(exact, [0.025, 0.975])
    assert (estimate(drops).low, estimate(drops).high) == (pytest.approx(low), pytest.approx(high))


def test_what_is_equal_on_every_example_has_no_drop():
    sums = resampled_sums(np.stack([CLEAN, CLEAN], 1), resamples=500)
    assert estimate(1 - ratio(sums[:, 1], sums[:, 0])) == Estimate(0.0, 0.0, 0.0)


def test_sums_do_not_depend_on_how_many_are_drawn_at_once(monkeypatch):
    columns = np.random.default_rng(0).integers(0, 2, (7, 3)).astype(float)
    whole = resampled_sums(columns, resamples=50, seed=3)
    assert whole.shape == (51, 3) and (whole[0] == columns.sum(0)).all()
    monkeypatch.setattr("ssmscope.core.bootstrap.MAX_DRAWS_HELD", 20)
    assert (resampled_sums(columns, resamples=50, seed=3) == whole).all()
    assert (resampled_sums(columns, resamples=50, seed=4) != whole).any()
    assert (resampled_sums(np.ones((7, 1)), resamples=50) == 7).all()


def test_intervals_cover():
    draw, covered = np.random.default_rng(0), 0
    for seed in range(300):
        found = estimate(resampled_sums((draw.random((200, 1)) < 0.7) * 1.0, resamples=300, seed=seed)[:, 0] / 200)
        covered += found.low <= 0.7 <= found.high
    assert 0.91 <= covered / 300 <= 0.98


@pytest.mark.parametrize(("examples", "least", "without"), [(5, 0.92, 0.85), (10, 0.93, 0.915), (20, 0.93, 0.935)])
def test_intervals_of_few_examples_cover_too(examples, least, without):
    """Percentiles of resamples of all n would cover the mean of n = 10 normal numbers in 0.90."""
    draw, covered, narrow = np.random.default_rng(0), 0, 0
    for seed in range(1200):
        values = draw.normal(size=(examples, 1))
        found = estimate(resampled_sums(values, resamples=400, seed=seed)[:, 0])
        covered += found.low <= 0 <= found.high
        plain = values[draw.integers(0, examples, (400, examples)), 0].sum(1)
        low, high = np.quantile(plain, [0.025, 0.975])
        narrow += low <= 0 <= high
    assert least <= covered / 1200 <= 0.97 and narrow / 1200 < without


def test_few_draws_keep_totals_and_ranges():
    for examples, draws in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (10, 7), (29, 26), (30, 30), (31, 31)):
        rows = resampled_sums(np.eye(examples), resamples=300)[1:]
        assert (rows.sum(1) == pytest.approx(examples)) and rows.min() >= 0
        counts = rows * draws / examples
        np.testing.assert_allclose(counts, counts.round(), atol=1e-9)
        assert len(np.unique(rows, axis=0)) > 1 or examples == 1


def test_the_lowest_and_what_it_cannot_be_told_from():
    values = np.zeros((100, 5))
    values[:, 0] = np.arange(100) < 50
    values[:, 1] = np.arange(100) < 48  # the same examples but for two
    values[:, 2] = np.arange(100) < 70
    values[:, 3] = np.arange(100) >= 55  # others, so that the difference varies much
    values[:, 4] = np.nan
    assert lowest(resampled_means(values)) == (3, 1, 0)
    assert lowest(resampled_means(values[:, :3])) == (1, 0) and lowest(resampled_means(values[:, 2:3])) == (0,)
    assert lowest(resampled_means(values[:, 4:])) == () and lowest(resampled_means(values[:, [0, 2]])) == (0,)


def test_what_is_not_defined():
    assert math.isnan(ratio(np.array([1.0]), np.array([0.0]))[0])
    none = estimate(np.array([math.nan, 1.0, 2.0]))
    assert math.isnan(none.value) and math.isnan(none.low) and str(none) == "not defined"
    some = estimate(np.array([0.5, math.nan, 0.4, 0.6]))
    assert some.value == 0.5 and 0.4 < some.low < some.high < 0.6
    assert estimate(np.array([9.0, 0.0, 1.0])).high < 1  # the value is not a resample
    assert str(Estimate(0.0, 0.0, 0.0)) == "0.000" and str(Estimate(0.5, math.nan, math.nan)) == "0.500"
    assert str(Estimate(0.5, 0.25, 1.0)) == "0.500 [0.250, 1.000]" and Estimate(0.5, 0.25, 1.0).times(100).low == 25


def test_means_are_of_what_is_defined():
    columns = np.array([[1.0, 2.0], [3.0, math.nan], [8.0, 4.0], [0.0, math.nan]])
    means = resampled_means(columns, resamples=400, seed=2)
    assert means.shape == (401, 2) and means[0].tolist() == [3.0, 3.0]
    sums = resampled_sums(columns[:, :1], resamples=400, seed=2)
    assert (means[:, 0] == sums[:, 0] / 4).all()  # the resamples are those of the sums
    alone = means[1:, 1]
    assert set(alone[~np.isnan(alone)]) == {2, 4}  # of four examples one is drawn
    assert np.isnan(alone).mean() == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("examples", [2, 4, 29, 30])
def test_resamples_are_drawn_one_after_the_other(examples):
    """Whole, from the same generator: of few examples n − 3 are drawn, and the sums scaled."""
    columns = np.random.default_rng(1).normal(size=(examples, 3))
    random = np.random.default_rng(5)
    draws = {2: 1, 4: 1, 29: 26, 30: 30}[examples]
    rows = [columns.sum(0)]
    rows += [columns[random.integers(0, examples, draws)].sum(0) * examples / draws for _ in range(9)]
    found = resampled_sums(columns, resamples=9, seed=5)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, rows, rtol=1e-12, atol=1e-12)


def test_intervals_are_the_percentiles_of_the_resamples():
    rows = np.array([7.0, *np.random.default_rng(0).permutation(np.arange(1001.0)), math.nan])
    assert estimate(rows) == Estimate(7.0, 25.0, 975.0)
    table = np.stack([rows, 2 * rows, np.full_like(rows, math.nan), -rows, rows + 1, 0 * rows], axis=1).reshape(
        -1, 2, 3
    )
    expected = [
        [(7.0, 25.0, 975.0), (14.0, 50.0, 1950.0), (math.nan, math.nan, math.nan)],
        [(-7.0, -975.0, -25.0), (8.0, 26.0, 976.0), (0.0, 0.0, 0.0)],
    ]
    np.testing.assert_array_equal(estimates(table), expected)
    alone = estimate(np.array([3.0]))
    assert alone.value == 3.0 and math.isnan(alone.low) and math.isnan(alone.high)


def test_columns_of_numbers_with_intervals():
    some = Estimate(0.5, 0.25, 0.75)
    assert some.times(-100) == Estimate(-50.0, -25.0, -75.0) and some.has_interval
    assert not Estimate(0.5, 0.5, 0.5).has_interval and not Estimate(0.5, math.nan, 1.0).has_interval
    columns = with_intervals(one=some, none=None, two=Estimate(2.0, 1.0, 4.0))
    assert columns == {"one": 0.5, "one_low": 0.25, "one_high": 0.75, "two": 2.0, "two_low": 1.0, "two_high": 4.0}
    assert list(columns) == interval_columns(["one", "two"])


def test_a_ratio_is_defined_where_it_is_of_something():
    found = ratio(np.array([[6.0, 0.0, -3.0]]), np.array([[2.0], [0.0], [-4.0]]))
    expected = [[3.0, 0.0, -1.5], [math.nan] * 3, [-1.5, 0.0, 0.75]]
    np.testing.assert_array_equal(found, expected)


def test_a_score_interval_of_a_proportion():
    """Wilson's, from the roots of (p − q)² = z² q (1 − q) / n."""
    z = 1.959963984540054
    for correct, total in ((3, 4), (1, 7), (50, 263), (6, 7)):
        p = correct / total
        for end in wilson_interval(correct, total):
            assert (p - end) ** 2 == pytest.approx(z * z * end * (1 - end) / total, rel=1e-9)
        low, high = wilson_interval(correct, total)
        assert 0 < low < p < high < 1
        assert wilson_interval(total - correct, total) == pytest.approx((1 - high, 1 - low))
    assert wilson_interval(0, 5)[0] == 0 and wilson_interval(5, 5)[1] == 1
    assert wilson_interval(0, 5)[1] == pytest.approx(z * z / (5 + z * z)) == pytest.approx(1 - wilson_interval(5, 5)[0])
