"""Half-lives, growth and stability of a layer from the log-gains of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.core.bootstrap import RESAMPLES, Estimate, estimate, resampled_means
from ssmscope.errors import InputError
from ssmscope.probes.stability.result import QUANTILES, LayerStability

if TYPE_CHECKING:
    from ssmscope.probes.stability.layers import Recorded


def layer_stability(
    layer: int, part: int, parts: int, found: Recorded, longest: int, tolerance: float, seed: int, overflows: bool
) -> LayerStability:
    """Return the report on a recurrence of a layer.

    Args:
        found: its log-gains, summed over the inputs.
        overflows: True if the layer's states overflow on the inputs.
    """
    assert found.sums is not None and found.largest is not None
    mean = found.sums.cpu().numpy() / found.steps
    half = half_lives(mean)
    largest = found.largest.cpu().numpy()
    possible = None if found.possible is None else found.possible.cpu().numpy()
    growth = _mean(np.array(found.growth)[:, None], seed)[0]
    never = int((half > longest).sum())
    behaviour, why = behaviour_of(largest, possible, growth.value, never, half.size, longest, tolerance, overflows)
    return LayerStability(
        layer=layer,
        part=part,
        parts=parts,
        states=mean.shape[1],
        behaviour=behaviour,
        why=why,
        abscissa=None if found.abscissa is None else found.abscissa.cpu().numpy(),
        largest=largest,
        possible=possible,
        bounded_by=found.bounded_by,
        mean=mean.max(1),
        half_life=np.array([_quantile(row, 0.5) for row in half]),
        quantiles=tuple(_quantile(half.ravel(), q) for q in QUANTILES),
        never=never,
        growth=growth,
    )


def notes_on(found: Sequence[Recorded]) -> tuple[str, ...]:
    """Return notes on delta rules and RWKVs."""
    notes = []
    if any(one.mixes for one in found):
        notes.append("a delta rule's half-lives are means over the directions of its memory")
    bare = [one.bare.log().cpu().numpy() for one in found if one.bare is not None]
    if bare:
        low, median, high = (_quantile(half_lives(np.concatenate(bare)), q) for q in (0.05, 0.5, 0.95))
        notes.append(
            "an RWKV's memory is a weighted mean, which fades as values are added; its weights alone fade equally at "
            f"every token, with half-lives of {median:.3g} tokens (median; 5 % to 95 %: {low:.3g} to {high:.3g})"
        )
    return tuple(notes)


def half_lives(mean: np.ndarray) -> np.ndarray:
    """Return ln 2 / −E[log a] in tokens, any shape; infinite where the mean log-gain is not negative."""
    fading = mean < 0
    return np.where(fading, math.log(2) / -np.where(fading, mean, -1.0), math.inf)


def _quantile(values: np.ndarray, q: float) -> float:
    """Return the quantile q without interpolation, so that infinite values are allowed."""
    return float(np.sort(values)[max(math.ceil(q * len(values)) - 1, 0)])


def behaviour_of(
    largest: np.ndarray,
    possible: np.ndarray | None,
    growth: float,
    never: int,
    states: int,
    longest: int,
    tolerance: float,
    overflows: bool,
) -> tuple[str, str]:
    """Return one of `BEHAVIOURS` and its reason in words; see `stability`."""
    if largest.max() > tolerance:
        return "unstable", f"a step multiplies a state by {_gain(largest.max())} on the inputs"
    if possible is not None and possible.max() > tolerance:
        return "unstable", f"a step may multiply a state by {_gain(possible.max())}"
    if overflows:
        return "unstable", "its states overflow on the inputs"
    if never:
        several = f"{never:,} of {states:,} states keep half of what they hold"
        kept = several if states > 1 else "its one state keeps half of what it holds"
        return "marginal", f"{kept} beyond the {longest:,} tokens of the longest text"
    if growth >= -tolerance:
        return "marginal", f"its slowest state changes by e^{growth:.2g} a token"
    can = "and none can grow" if possible is not None else "and none grows on the inputs"
    return "stable", f"every state forgets half within the {longest:,} tokens of the longest text, {can}"


def _gain(log_gain: float) -> str:
    if math.isinf(log_gain):
        return "any number"
    factor = math.exp(min(log_gain, 700.0))
    return f"{factor:.4g}" if factor > 1.0005 and log_gain < 20 else f"e^{log_gain:.3g}"


def norm_positions(positions: int | Sequence[int], longest: int) -> list[int]:
    """Return the positions of the norms: a number of evenly spaced ones from 0 to `longest` − 1, or those given.

    Raises:
        InputError: no position, or one beyond the longest text.
    """
    if isinstance(positions, int):
        if positions < 1:
            raise InputError(f"positions is {positions}; allowed is a number of positions from 1 on, or a list of them")
        if positions == 1:
            return [longest - 1]
        return sorted(set(np.linspace(0, longest - 1, positions).round().astype(int).tolist()))
    if any(at >= longest for at in positions):
        raise InputError(f"positions is {list(positions)}; allowed are 0 to {longest - 1}, or a number of positions")
    return sorted(set(positions))


def mean_norms(norms: np.ndarray, seed: int) -> np.ndarray:
    """Return mean norms with intervals, (positions, 3), from those of every text, (texts, positions)."""
    return np.array([(e.value, e.low, e.high) for e in _mean(norms, seed)])


def _mean(columns: np.ndarray, seed: int) -> list[Estimate]:
    """Return the mean of each column (texts, columns) over the texts that have one, with an interval from two on."""
    finite = np.where(np.isinf(columns), math.nan, columns)
    texts = (~np.isnan(finite)).sum(0)
    rows = resampled_means(finite, resamples=RESAMPLES if texts.max(initial=0) > 1 else 0, seed=seed)
    means = []
    for row, number, beyond in zip(rows.T, texts, np.isinf(columns).any(0)):
        one = Estimate(float(row[0]), math.nan, math.nan)
        means.append(Estimate(math.inf, math.inf, math.inf) if beyond else estimate(row) if number > 1 else one)
    return means
