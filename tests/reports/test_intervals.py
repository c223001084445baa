"""Intervals of scores at any level: closed forms, and how often they leave out the truth."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import binom
from ssmscope.api.scores import Score
from ssmscope.core.bootstrap import Estimate, resampled_sums, wilson_interval
from ssmscope.reports.intervals import Counts, chance_beyond, difference, interval, paired_shares

NAN = math.nan


def score(values, among=None, *, ids="same", unit="share") -> Score:
    values = np.asarray(values, dtype=float)
    examples = np.stack([values, np.ones(len(values)) if among is None else np.asarray(among, dtype=float)], axis=1)
    value = float(examples[:, 0].sum() / max(examples[:, 1].sum(), 1))
    return Score("accuracy", "m", value, NAN, NAN, len(values), "higher", unit, examples, ids)


def recorded(value, low, high, *, count=0, unit="nats") -> Score:
    return Score("loss", "m", value, low, high, count, "lower", unit)


class TestOfOneScore:
    def test_a_share_has_wilsons(self):
        z = NormalDist().inv_cdf(0.99)
        found = interval(score([1, 0, 1, 1, 0], among=[1, 1, 1, 1, 0]), 0.01)
        assert (found.value, found.low, found.high) == (0.75, *wilson_interval(3, 4, z))
        # (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)
        centre, half = 0.75 + z**2 / 8, z * math.sqrt(0.75 * 0.25 / 4 + z**2 / 64)
        assert (found.low, found.high) == pytest.approx(
            ((centre - half) / (1 + z**2 / 4), (centre + half) / (1 + z**2 / 4))
        )
        nothing = interval(replace(score([0, 0], among=[0, 0]), value=NAN), 0.01)
        assert math.isnan(nothing.value) and math.isnan(nothing.low)

    @pytest.mark.parametrize("tail", [0.05, 0.025, 0.0125, 0.005])
    def test_a_share_has_wilsons_whatever_is_recorded(self, tail):
        """Also at 95 %, where a verb has recorded percentiles of resamples."""
        found = interval(replace(score([1] + [0] * 24), low=0.0, high=0.1363), tail)
        assert (found.low, found.high) == pytest.approx(wilson_interval(1, 25, NormalDist().inv_cdf(1 - tail)))

    def test_wilsons_interval_covers_nearly_what_it_says(self):
        """By sums of the binomial distribution: .05 on average over p, and at most .17 anywhere."""
        p = np.linspace(0.005, 0.995, 199)
        for n in (10, 25, 100, 400):
            out = np.zeros(len(p))
            for k in range(n + 1):
                found = interval(score([1] * k + [0] * (n - k)))
                out += binom.pmf(k, n, p) * ((p < found.low) | (p > found.high))
            assert out.mean() == pytest.approx(0.05, abs=0.006) and out.max() < 0.17

    def test_a_mean_is_resampled(self):
        values = np.random.default_rng(0).normal(size=400)
        found = interval(score(values, unit="nats"), 0.005)
        half = NormalDist().inv_cdf(0.995) * values.std() / 20
        assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)
        assert math.isnan(interval(score([0.5], unit="nats"), 0.005).low)

    def test_without_examples_the_ends_move_with_the_quantile(self):
        found = interval(recorded(2.0, 1.0, 4.0), 0.005)
        scale = NormalDist().inv_cdf(0.995) / NormalDist().inv_cdf(0.975)
        assert (found.low, found.high) == pytest.approx((2 - scale, 2 + 2 * scale))
        assert interval(recorded(2.0, 1.0, 4.0)) == Estimate(2.0, 1.0, 4.0)
        assert math.isnan(interval(recorded(2.0, NAN, NAN), 0.005).high)

    def test_resamples_that_are_all_the_same_say_nothing(self):
        assert math.isnan(interval(recorded(0.0, 0.0, 0.0)).low)
        assert math.isnan(interval(recorded(0.5, 0.5, 0.5, count=50, unit="share")).low)
        z = NormalDist().inv_cdf(0.95)
        for value, whole in ((0.0, 0), (1.0, 50)):
            found = interval(recorded(value, value, value, count=50, unit="share"), 0.05)
            assert (found.low, found.high) == wilson_interval(whole, 50, z) and found.low < found.high


def test_binomial_tails():
    for n, k, p in [(25, 1, 0.15), (7, 7, 0.3), (7, 0, 0.3), (400, 371, 0.9), (100_000, 52_000, 0.515)]:
        assert chance_beyond(Counts(k, n), p, above=False) == pytest.approx(binom.cdf(k, n, p), rel=1e-8)
        assert chance_beyond(Counts(k, n), p, above=True) == pytest.approx(binom.sf(k - 1, n, p), rel=1e-8)
    assert chance_beyond(Counts(25, 25), 1.0, above=False) == chance_beyond(Counts(0, 25), 0.0, above=True) == 0


class TestOfADifference:
    def test_bonett_and_price(self):
        # 10 pairs: 2 right in the first only, 1 in the second only.
        one, other = score([1, 1, 1, 0, 1, 1, 1, 1, 0, 0]), score([0, 0, 1, 1, 1, 1, 1, 1, 0, 0])
        found = difference(one, other, 0.05)
        more, less = 3 / 12, 2 / 12
        half = NormalDist().inv_cdf(0.95) * math.sqrt((more + less - (more - less) ** 2) / 12)
        assert found.value == pytest.approx(0.1)
        assert (found.low, found.high) == pytest.approx((more - less - half, more - less + half))
        turned = difference(other, one, 0.05)
        assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))

    def test_equal_answers_have_an_interval(self):
        same = score([1] * 150 + [0] * 50)
        half = NormalDist().inv_cdf(0.95) * math.sqrt(2) / 202
        assert difference(same, same, 0.05) == Estimate(0.0, pytest.approx(-half), pytest.approx(half))
        assert difference(score([0.25, 0.5, 1.5]), score([0.25, 0.5, 1.5]), 0.01) == Estimate(0.0, 0.0, 0.0)

    def test_shares_of_other_examples_are_linearized(self):
        """Against the bootstrap, for success rates among the examples that either model answers when clean."""
        random = np.random.default_rng(1)
        right, right2 = random.random((2, 800)) < 0.8
        won = random.random(800) < 0.4
        won2 = np.where(random.random(800) < 0.8, won, random.random(800) < 0.4)
        both = np.stack([won & right, right, won2 & right2, right2], axis=1).astype(float)
        found = paired_shares(both, 0.025)
        drawn = resampled_sums(both, seed=1)[1:]
        spread = drawn[:, 0] / drawn[:, 1] - drawn[:, 2] / drawn[:, 3]
        assert (found.low, found.high) == pytest.approx(tuple(np.quantile(spread, [0.025, 0.975])), abs=3e-3)

    def test_other_examples_and_recorded_numbers_are_independent(self):
        one, other = score([1, 0, 1, 1], ids="a"), score([0, 0, 1, 0, 0], ids="b")
        found, z = difference(one, other, 0.05), NormalDist().inv_cdf(0.95)
        (low, high), (low2, high2) = wilson_interval(3, 4, z), wilson_interval(1, 5, z)
        assert found.value == pytest.approx(0.55)
        assert found.low == pytest.approx(0.55 - math.hypot(0.75 - low, high2 - 0.2))
        assert found.high == pytest.approx(0.55 + math.hypot(high - 0.75, 0.2 - low2))
        plain = difference(recorded(2.0, 1.0, 4.0), recorded(1.0, 0.0, 3.0))
        assert (plain.low, plain.high) == pytest.approx((1 - math.hypot(1, 2), 1 + math.hypot(2, 1)))
        assert math.isnan(difference(recorded(2.0, NAN, NAN), recorded(1.0, 0.0, 3.0)).low)

    def test_means_are_drawn_together(self):
        base = np.random.default_rng(2).normal(size=300)
        shift = np.random.default_rng(3).normal(0.1, 0.02, size=300)
        found = difference(score(base + shift, unit="nats"), score(base, unit="nats"), 0.025)
        half = 1.96 * shift.std() / math.sqrt(300)
        assert (found.low, found.high) == pytest.approx((shift.mean() - half, shift.mean() + half), abs=0.2 * half)

    def test_a_share_and_another_mean_are_drawn_together_too(self):
        right = np.random.default_rng(4).random(40) < 0.7
        half = np.where(right, 0.9, 0.2)
        for one, other in ((right, half), (half, right)):
            found, pairs = difference(score(one), score(other), 0.025), np.stack([one, other], axis=1).astype(float)
            sums = resampled_sums(pairs)
            drawn = np.quantile((sums[1:, 0] - sums[1:, 1]) / 40, [0.025, 0.975])
            assert (found.low, found.high) == pytest.approx(tuple(drawn)) and found.low < found.value < found.high

    def test_no_difference_of_shares_is_beyond_1(self):
        found = difference(score([1] * 4), score([0] * 4), 1e-6)
        assert (found.value, found.high) == (1.0, 1.0) and difference(score([0] * 4), score([1] * 4), 1e-6).low == -1.0
