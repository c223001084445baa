"""Intervals of scores and of differences between them, with any probability beyond their ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from ssmscope.api.scores import SHARE_UNIT, Score, is_paired
from ssmscope.core import ties
from ssmscope.core.bootstrap import RESAMPLES, TAIL, Z_95, Estimate, estimate, ratio, resampled_sums, wilson_interval

MAX_RESAMPLES = 20_000
"""Maximum number of resamples for ends farther out than those of a 95 % interval."""
PAIRS_ADDED = np.array([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]])
"""Bonett & Price's added pairs, one for either side, as the columns of two scores."""


def interval(score: Score, tail: float = TAIL) -> Estimate:
    """Return a score with the interval that leaves out `tail` at either end; the ends are NaN without an interval.

    A share of examples has Wilson's interval at every level. Other numbers have the recorded one at 95 %; otherwise a
    ratio over examples has a bootstrap's, and without examples the recorded ends are moved in proportion to the normal
    quantiles.
    """
    z, value, low, high = quantile(tail), score.value, score.low, score.high
    if (counts := counts_of(score)) is not None:
        return Estimate(value, *(wilson_interval(*counts, z) if counts.whole else (math.nan, math.nan)))
    if tail == TAIL and low < high:
        return score.estimate
    if score.examples is not None and len(score.examples):
        return _bootstrapped(score.examples, lambda sums: ratio(sums[:, 0], sums[:, 1]), tail)
    if low < high:
        return Estimate(value, value - (value - low) * z / Z_95, value + (high - value) * z / Z_95)
    return Estimate(value, math.nan, math.nan)


class Counts(NamedTuple):
    """Numerator and denominator of a share of examples."""

    part: int
    whole: int


def counts_of(score: Score) -> Counts | None:
    """Return the counts of a share of examples, and of a recorded share of 0 or 1, of which resamples are all the same;
    None for other numbers."""
    if score.examples is not None and len(score.examples):
        return Counts(*score.examples.sum(0).astype(int).tolist()) if is_share(score.examples) else None
    if score.low == score.high and score.value in (0, 1) and score.unit == SHARE_UNIT and score.count > 1:
        return Counts(round(score.value * score.count), score.count)
    return None


def chance_beyond(counts: Counts, limit: float, *, above: bool) -> float:
    """Return the probability with which a share that is `limit` is seen as far above it as this one, or as far below:
    P(X ≥ part) or P(X ≤ part) of the binomial distribution; 0 for a limit that a share reaches only for certain."""
    if not 0 < limit < 1:
        return 0.0
    part, whole = counts
    if above:
        part, limit = whole - part, 1 - limit
    number = np.arange(1, part + 1)
    steps = np.log((whole + 1 - number) / number) + math.log(limit) - math.log1p(-limit)
    return float(np.exp(whole * math.log1p(-limit) + np.concatenate([[0.0], steps.cumsum()])).sum())


def difference(one: Score, other: Score, tail: float = TAIL) -> Estimate:
    """Return `one` − `other` with the interval that leaves out `tail` at either end.

    Over the same examples it is paired: by `paired_shares` for shares, which has an interval where all pairs agree too,
    else by a bootstrap that draws both together. Otherwise both are independent, and the ends of their own intervals
    are combined as √(Δ₁² + Δ₂²) in each direction (Newcombe 1998, method 10).
    """
    if is_paired(one, other):
        assert one.examples is not None and other.examples is not None
        both = np.concatenate([one.examples, other.examples], axis=1)
        if is_share(one.examples) and is_share(other.examples):
            return paired_shares(both, tail)
        if not ties.difference(both[:, :2], both[:, 2:]).any():
            return Estimate(0.0, 0.0, 0.0)
        return _bootstrapped(
            both, lambda sums: ties.difference(*(ratio(sums[:, at], sums[:, at + 1]) for at in (0, 2))), tail
        )
    own, theirs = interval(one, tail), interval(other, tail)
    value = one.value - other.value
    below = math.hypot(own.value - own.low, theirs.high - theirs.value)
    above = math.hypot(own.high - own.value, theirs.value - theirs.low)
    return Estimate(value, value - below, value + above)


def paired_shares(both: Float[np.ndarray, "examples 4"], tail: float = TAIL) -> Estimate:
    """Return the difference of two shares of the same examples, with the interval of Bonett & Price (2012, J. Educ.
    Behav. Stat. 37): the difference over n + 2 pairs, of which one is added for either side, ± z standard errors.

    Columns are numerator and denominator of either share, 0 or 1. Where a share is of some of the examples only, the
    standard error is that of the linearized ratio, which for denominators of 1 is the one of the paper.
    """
    value = _share(both, 0) - _share(both, 2)
    if math.isnan(value):
        return Estimate(value, math.nan, math.nan)
    more = np.concatenate([both, PAIRS_ADDED])
    shares = _share(more, 0), _share(more, 2)
    linear = [(more[:, at] - share * more[:, at + 1]) / more[:, at + 1].mean() for at, share in zip((0, 2), shares)]
    centre, half = shares[0] - shares[1], quantile(tail) * float((linear[0] - linear[1]).std()) / math.sqrt(len(more))
    return Estimate(value, max(centre - half, -1.0), min(centre + half, 1.0))


def is_share(examples: Float[np.ndarray, "examples 2"]) -> bool:
    """Return True for numerators and denominators of a share: 0 or 1 each, the first at most the second."""
    return bool(np.isin(examples, (0.0, 1.0)).all() and (examples[:, 0] <= examples[:, 1]).all())


def quantile(tail: float) -> float:
    """Return the normal quantile beyond which `tail` lies."""
    return Z_95 if tail == TAIL else NormalDist().inv_cdf(1 - tail)


def _share(columns: np.ndarray, at: int) -> float:
    return float(ratio(columns[:, at].sum(), columns[:, at + 1].sum()))


def _bootstrapped(columns: np.ndarray, number: Callable[[np.ndarray], np.ndarray], tail: float) -> Estimate:
    """Return a number of the columns' sums over examples; the ends are NaN if all resamples give the same."""
    resamples = int(min(max(RESAMPLES, RESAMPLES * TAIL / tail), MAX_RESAMPLES))
    found = estimate(number(resampled_sums(columns, resamples=resamples)), tail)
    return found if found.has_interval else Estimate(found.value, math.nan, math.nan)
