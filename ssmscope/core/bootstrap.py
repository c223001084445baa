"""Intervals over examples: Wilson's of shares, bootstrap of other numbers, all from one set of resamples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from ssmscope.core.ties import descending, difference

INTERVALS = "95 % intervals, Wilson's of shares, else bootstrap"
RESAMPLES = 2000
MIN_EXAMPLES_FOR_FULL_DRAWS, FEWER_DRAWS = 30, 3
"""Number of examples from which a resample draws as many, and the number by which it draws fewer below that."""
MAX_DRAWS_HELD = 2_000_000
TAIL = 0.025
"""Probability beyond each end of a 95 % interval."""
Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """Number with the ends of its 95 % interval; NaN where it is not defined."""

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """True if there is an interval to show: a bootstrap has none for examples that are all alike."""
        return bool(difference(self.high, self.low) > 0)

    def __str__(self) -> str:
        ends = f" [{self.low:.3f}, {self.high:.3f}]" if self.has_interval else ""
        return "not defined" if math.isnan(self.value) else f"{self.value:.3f}{ends}"

    def times(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def with_intervals(**found: Estimate | None) -> dict[str, float]:
    """Return columns of a table: each number under its name, the ends of its interval under NAME_low and NAME_high."""
    known = {name: (one.value, one.low, one.high) for name, one in found.items() if one is not None}
    return {name + end: number for name, one in known.items() for end, number in zip(("", "_low", "_high"), one)}


def interval_columns(names: Iterable[str]) -> list[str]:
    """Return the names of the columns of `with_intervals`."""
    return [name + end for name in names for end in ("", "_low", "_high")]


def resampled_sums(
    columns: Float[np.ndarray, "examples columns"], *, resamples: int = RESAMPLES, seed: int = 0
) -> Float[np.ndarray, "rows columns"]:
    """Return the sums of the columns over the examples, and below them those over every resample: 1 + `resamples` rows.

    A resample draws as many examples as there are, with replacement; a row has one draw for all columns, which keeps
    measurements on the same examples paired. Percentiles of such resamples are too narrow for few examples: they lack
    the factor n / (n − 1) of a variance and the tails of Student's t. Below 30 examples a resample draws n − 3 of them,
    and its sums are scaled to n. Means then have, to within half a draw, the variance s² t² / (z² n), t and z being the
    97.5 % quantiles of Student's t and of the normal distribution, and no resample leaves the range of what is
    measured.
    """
    examples = len(columns)
    draws = examples if examples >= MIN_EXAMPLES_FOR_FULL_DRAWS else max(1, examples - FEWER_DRAWS)
    few = resamples * examples <= MAX_DRAWS_HELD
    counts = (_counts_held if few else _counts)(examples, draws, resamples, seed)
    sums = [columns.sum(0, keepdims=True), *(each @ columns * examples / draws for each in counts)]
    return np.concatenate(sums).astype(np.float64)


def _counts(examples: int, draws: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield how often each resample draws each example, (resamples, examples), some resamples at a time."""
    random = np.random.default_rng(seed)
    step = max(1, MAX_DRAWS_HELD // examples)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        drawn = random.integers(0, examples, (rows, draws)) + np.arange(rows)[:, None] * examples
        yield np.bincount(drawn.ravel(), minlength=rows * examples).reshape(rows, examples)


@lru_cache(maxsize=1)
def _counts_held(*sizes: int) -> tuple[np.ndarray, ...]:
    """Return `_counts`, the same for all measurements on as many examples."""
    return tuple(each.astype(np.float64) for each in _counts(*sizes))


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return above / below, NaN where `below` is 0."""
    return np.divide(above, below, out=np.full(np.broadcast(above, below).shape, np.nan), where=below != 0)


def estimate(rows: Float[np.ndarray, " rows"], tail: float = TAIL, *, of: float | None = None) -> Estimate:
    """Return the first row as the value, and as its interval the quantiles `tail` and 1 − `tail` of the others, by
    default the 2.5 and 97.5 percentiles; if the value is a share `of` so many independent examples, Wilson's. Resamples
    in which the number is not defined are left out; a value that is not defined has no interval."""
    if of and not math.isnan(rows[0]):
        return share(round(float(rows[0]) * of), round(of))
    spread = rows[1:][~np.isnan(rows[1:])]
    if math.isnan(rows[0]) or not len(spread):
        return Estimate(float(rows[0]), math.nan, math.nan)
    low, high = np.quantile(spread, [tail, 1 - tail])
    return Estimate(float(rows[0]), float(low), float(high))


def estimates(rows: Float[np.ndarray, "rows ..."]) -> Float[np.ndarray, "... three"]:
    """Return `estimate` of every column: the value and the two ends of its interval."""
    found = [estimate(column) for column in rows.reshape(len(rows), -1).T]
    return np.array([(e.value, e.low, e.high) for e in found]).reshape(*rows.shape[1:], 3)


def lowest(rows: Float[np.ndarray, "rows columns"]) -> tuple[int, ...]:
    """Return the columns of the lowest values, from the lowest on: the lowest one, and those whose paired difference
    from it has an interval that reaches 0. Columns that are not defined are left out."""
    known = [at for at in descending(-rows[0]).tolist() if not math.isnan(rows[0, at])]
    return tuple(at for at in known if not estimate(difference(rows[:, at], rows[:, known[0]])).low > 0)


def resampled_means(
    columns: Float[np.ndarray, "examples columns"], *, resamples: int = RESAMPLES, seed: int = 0
) -> Float[np.ndarray, "rows columns"]:
    """Return `resampled_sums` as means over the examples at which a column is not NaN."""
    defined = ~np.isnan(columns)
    both = np.concatenate([np.where(defined, columns, 0.0), defined], axis=1)
    sums = resampled_sums(both, resamples=resamples, seed=seed)
    return ratio(*np.split(sums, 2, axis=1))


def share(part: int, whole: int) -> Estimate:
    """Return a share of independent examples with Wilson's 95 % interval."""
    return Estimate(part / whole, *wilson_interval(part, whole))


def shares(parts: np.ndarray, whole: int) -> Float[np.ndarray, "... three"]:
    """Return `share` of every number of examples, the value and the two ends of its interval."""
    return np.array([astuple(share(int(part), whole)) for part in parts.flat]).reshape(*parts.shape, 3)


def wilson_interval(correct: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Compute the score interval of a proportion, by default at 95 %,
    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n) (Wilson 1927), which stays within [0, 1]."""
    p = correct / total
    centre, scale = p + z * z / (2 * total), 1 + z * z / total
    spread = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    # At the ends the two terms cancel up to rounding.
    return (centre - spread) / scale if correct > 0 else 0.0, (centre + spread) / scale if correct < total else 1.0
