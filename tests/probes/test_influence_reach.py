"""The reach of an output where its numbers are at a limit: on norms by distance that are made by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from handmade import NOISE, halving, reach
from refusals import refuses
from ssmscope.probes.influence import reach as reaching
from ssmscope.probes.influence.reach import SHARES, noise_of


class TestRangeOfTheFit:
    @pytest.mark.parametrize(("fit", "last", "ended", "defined"), [
        (dict(), 6, "text", True), (dict(fit_to=6), 6, "text", True), (dict(fit_to=5), 5, "asked", True),
        (dict(fit_to=3), 3, "asked", True), (dict(fit_to=2), 2, "asked", False), (dict(fit_from=4), 6, "text", True),
        (dict(fit_from=5), 6, "text", False), (dict(fit_from=9), 8, "text", False),
        (dict(fit_from=9, fit_to=20), 8, "text", False), (dict(fit_from=0, fit_to=2), 2, "asked", True),
    ])  # fmt: skip
    def test_is_what_is_asked_and_there(self, fit, last, ended, defined):
        decay = reach(halving(7)[:1] + [0.7 * norm for norm in halving(7)[1:]], halving(5), **fit).decay
        assert (decay.first, decay.last, decay.ended, decay.defined) == (fit.get("fit_from", 1), last, ended, defined)

    @pytest.mark.parametrize("first", [1, 4, 6])
    def test_ends_before_the_first_distance_that_is_noise(self, first):
        """Only distances of the range count, its first one among them."""
        norms = halving(9)
        norms[6] = NOISE / 2
        decay = reach(norms, fit_from=first).decay
        assert (decay.last, decay.ended, decay.defined) == (5, "noise", first == 1)
        assert (reach(norms, fit_from=7, fit_to=8).decay.last, reach(norms, fit_to=5).decay.ended) == (8, "asked")

    def test_a_norm_at_the_noise_is_none(self):
        found = reach([1, 0.5, NOISE, NOISE * 0.99])
        assert found.noisy.tolist() == [0, 0, 0, 1] and found.log_norm[2:, 0].tolist() == [math.log(NOISE)] * 2
        assert reach([8, 4, 2, 8 * NOISE, 7 * NOISE]).noisy.tolist() == [0, 0, 0, 0, 1]

    def test_ends_where_no_text_with_influence_goes_on(self):
        found = reach(halving(5), halving(6), [0.0] * 9)
        assert (found.decay.last, found.decay.ended) == (5, "noise")
        assert found.noisy[:6].tolist() == [0] * 6 and np.isnan(found.noisy[6:]).all()
        assert found.pairs.tolist() == [3] * 5 + [2] + [1] * 3

    def test_norms_that_do_not_change_have_no_line_to_explain(self):
        decay = reach([1.0] * 6, [1.0] * 9).decay
        assert decay.rate.value == 0 and decay.length.value == math.inf and math.isnan(decay.r2)
        assert not decay.straight and decay.defined

    def test_is_straight_from_nine_tenths_on(self):
        decay = reach(halving(9)).decay
        for r2, straight in ((0.9, True), (0.8999, False), (1.0, True), (math.nan, False)):
            assert dataclasses.replace(decay, r2=r2).straight == straight
        undefined = dataclasses.replace(decay, rate=reach(halving(2)).decay.rate, r2=1.0)
        assert not undefined.straight and not undefined.defined


class TestContext:
    def test_a_text_shorter_than_the_fit_is_unknown(self):
        """The second text has no distance of the fit: nothing says how its influence goes on."""
        found = reach(halving(9), halving(1), halving(2, 3.0))
        assert found.context[0].tolist() == [1, 4, 5] and np.isnan(found.context[1]).all()
        assert found.held[1].tolist() == [1, 1, 1]
        assert found.context[2].tolist() == [1, math.inf, math.inf]  # of 6 it holds 4.5

    def test_goes_on_from_a_texts_own_level(self):
        """The text's own tokens are those within reach, out of 1 / (1 − e^−λ) in all; a level is over its own
        distances."""
        norms = [math.exp(-0.3 * d + 0.05 * (-1) ** d) for d in range(8)]
        shorter = [1.1 * norm for norm in norms[:5]]
        found = reach(norms, shorter)
        decay = found.decay
        assert decay.straight
        for row, own in enumerate((norms, shorter)):
            chosen = range(1, len(own))
            level = np.mean([math.log(own[d]) + decay.rate.value * d for d in chosen])
            beyond = sum(math.exp(level - decay.rate.value * d) for d in range(len(own), 400))
            total, held = sum(own) + beyond, np.cumsum(own)
            for share, k in zip(SHARES, found.context[row]):
                assert k == (math.inf if share * total > held[-1] else 1 + (held < share * total).sum())

    def test_shares_are_never_above_one(self):
        for count in range(2, 60):
            assert reach([1 / count] * count).within[:, 0].max() <= 1

    def test_whose_tokens_count(self):
        found = reach(halving(9), halving(8))
        nan = math.nan
        for context, held, own in (
            ([[nan, 3.0, nan], [nan, nan, nan]], [[4.0, nan, nan], [nan, 5.0, 5.0]], True),
            ([[nan, 3.0, nan], [2.0, nan, nan]], [[4.0, nan, nan], [5.0, nan, nan]], False),
            ([[nan, 3.0, nan], [2.0, nan, nan]], [[4.0, nan, nan], [nan, 5.0, 5.0]], True),
            ([[nan, 3.0, 3.0], [nan, 2.0, 2.0]], [[nan, 4.0, 4.0], [nan, 5.0, 5.0]], False),
        ):
            changed = dataclasses.replace(found, context=np.array(context), held=np.array(held))
            assert changed.of_own_tokens is own

    def test_what_is_not_measured_is_refused(self):
        found = reach(halving(9))
        assert found.recent(np.int64(1)).value == 256 / 511 and found.recent(9).value == found.recent(90).value == 1
        for quantile in (-0.01, 1.01, math.nan):
            refuses("allowed are 0.5, 0.9, 0.95, and quantiles from 0 to 1", found.effective_context, 0.9, quantile)
        refuses("share 0.8, quantile 0.5", found.not_reached, 0.8)
        for tokens in (True, 1.5, "two", 0):
            refuses(f"tokens is {tokens!r}; allowed is a whole number from 1 on", found.recent, tokens)


def test_noise_is_where_a_float_loses_digits():
    assert noise_of(torch.float32) == 2.0**-103 and noise_of(torch.float64) == 2.0**-970


def test_distances_are_resampled_in_pieces(monkeypatch):
    random = np.random.default_rng(1)
    texts = [random.exponential(size=count) for count in (11, 7, 9, 14)]
    whole = reach(*texts, seed=3)
    for columns in (1, 4, 13, 14):
        monkeypatch.setattr(reaching, "RESAMPLED_COLUMNS", columns)
        pieces = reach(*texts, seed=3)
        for name in ("log_norm", "norm", "share", "within"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))
