"""Reach of an output: influence by distance, its decay, and the context that holds most of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from ssmscope.core.bootstrap import Estimate, estimates, ratio, resampled_sums
from ssmscope.errors import InputError

SHARES = (0.5, 0.9, 0.95)
"""Shares of the influence for which the effective context is measured."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles of the norms at a distance."""
MAX_NOISY_SHARE = 0.05
"""Share of norms below the noise above which a distance, and all after it, are left out of the fit."""
MIN_FIT_DISTANCES = 3
MIN_R2 = 0.9
"""R² from which on the fitted line describes the decay."""
RESAMPLED_COLUMNS = 512
"""Columns that are resampled together."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Norms ‖∂y_t/∂x_s‖_F for positions t of one text and all its tokens s."""

    positions: Int[np.ndarray, " positions"]
    norm: Float[np.ndarray, "positions length"]
    error: Float[np.ndarray, "positions length"]
    """Standard error of an estimated norm; 0 if exact."""


@dataclass(frozen=True)
class Decay:
    """Fit ln‖J‖ = intercept − λ · distance over the distances `first` to `last`; NaN with fewer than three."""

    rate: Estimate
    """λ per token, with its bootstrap interval over texts."""
    length: Estimate
    """1 / λ in tokens; infinite if λ is not positive."""
    intercept: float
    r2: float
    """R² of the mean ln‖J‖ by distance, weighted as the fit is."""
    first: int
    last: int
    ended: str
    """Reason for the end of the range: "text", the beginning of the texts; "noise", of floats; "asked", the option."""

    @property
    def defined(self) -> bool:
        return not math.isnan(self.rate.value)

    @property
    def straight(self) -> bool:
        """Return True if the influence falls at one rate: R² is 0.9 or more."""
        return self.defined and self.r2 >= MIN_R2


@dataclass(frozen=True)
class Reach:
    """Dependence of one output on its input by distance t − s, over all measured (text, t)."""

    place: str
    """"output", or a layer's number."""
    exact: bool
    pairs: np.ndarray
    """(distances,) int64: number of (text, t) with this distance."""
    log_norm: np.ndarray
    """(distances, 3): the mean of ln‖J‖ with its interval; a norm below the noise counts as the noise."""
    norm: np.ndarray
    """(distances, 3): the mean of ‖J‖."""
    share: np.ndarray
    """(distances, 3): the mean of ‖J‖ / Σ_s ‖J‖."""
    quantiles: np.ndarray
    """(distances, 5): the 5, 25, 50, 75 and 95 % quantiles of ‖J‖."""
    error: np.ndarray
    """(distances,): the relative standard error of a norm, as root mean square; 0 if exact."""
    noisy: np.ndarray
    """(distances,): the share of norms below the noise."""
    within: np.ndarray
    """(distances, 3): the mean share of the last 1 + distance tokens at each text's last measured position."""
    decay: Decay
    context: np.ndarray
    """(texts, 3): number of last tokens that hold 50, 90 and 95 % of the influence on each text's last measured
    position, including what tokens before the text would add; infinite if the text does not reach it, NaN if the
    fit is too poor to tell, or there is no influence."""
    held: np.ndarray
    """(texts, 3): the same for the influence of the text's own tokens alone, which a text always reaches."""

    @property
    def of_own_tokens(self) -> bool:
        """Return True if only shares of the texts' own tokens are known, because no single rate fits."""
        some = ~np.isnan(self.held[:, 0])
        return bool(some.any() and np.isnan(self.context[some, 0]).all())

    def recent(self, tokens: int) -> Estimate:
        """Return the mean share of the influence on the last position that comes from the last `tokens` tokens."""
        if isinstance(tokens, bool) or not isinstance(tokens, int | np.integer) or tokens < 1:
            raise InputError(f"tokens is {tokens!r}; allowed is a whole number from 1 on")
        return Estimate(*self.within[min(tokens, len(self.within)) - 1].tolist())

    def effective_context(self, share: float = 0.9, quantile: float = 0.5, *, within: bool = False) -> float:
        """Return a quantile over texts of the effective context in tokens, by default the median, not interpolated;
        infinite if that text does not reach it. `share` is one of `SHARES`; with `within` only the influence of the
        texts' own tokens counts."""
        if share not in SHARES or not 0 <= quantile <= 1:
            known = ", ".join(map(str, SHARES))
            raise InputError(f"share {share!r}, quantile {quantile!r}; allowed are {known}, and quantiles from 0 to 1")
        own = (self.held if within else self.context)[:, SHARES.index(share)]
        own = own[~np.isnan(own)]
        return float(np.quantile(own, quantile, method="inverted_cdf")) if len(own) else math.nan

    def not_reached(self, share: float = 0.9) -> int:
        """Count the texts that do not reach this share; raise InputError for a share that is not measured."""
        self.effective_context(share)
        return int(np.isinf(self.context[:, SHARES.index(share)]).sum())


def reach_of(
    place: str,
    blocks: Sequence[Blocks],
    *,
    exact: bool,
    noise: float,
    fit_from: int = 1,
    fit_to: int | None = None,
    seed: int = 0,
) -> Reach:
    """Compute all numbers from the block norms of every text, `noise` being the level below which norms are rounding,
    next to norms up to 1; it scales with larger ones."""
    table = _Table(blocks, noise)
    decay = _decay(table, fit_from, fit_to, seed)
    return Reach(
        place=place,
        exact=exact,
        pairs=table.there.sum(0),
        log_norm=table.means(table.log, seed),
        norm=table.means(table.norm, seed),
        share=table.means(table.share, seed),
        quantiles=np.nanquantile(table.norm, QUANTILES, axis=0).T,
        error=table.relative_error(),
        noisy=table.noisy(),
        within=table.means(table.within(), seed),
        decay=decay,
        context=np.array([_context(table, row, _influence_before_text(table, row, decay)) for row in table.last_rows]),
        held=np.array([_context(table, row, 0.0) for row in table.last_rows]),
    )


def noise_of(dtype: torch.dtype) -> float:
    """Return the level at which norms of gradients lose precision, next to norms of 1. A backward pass multiplies by
    decays, so that small gradients are as precise as large ones until they underflow: on random models of every
    architecture, float32 agrees with float64 within 1e-4 down to this level, 1e-31."""
    return torch.finfo(dtype).tiny / torch.finfo(dtype).eps


class _Table:
    """Norms of all (text, t), a row each, by distance; NaN beyond a row's first token."""

    def __init__(self, blocks: Sequence[Blocks], noise: float) -> None:
        self.texts = len(blocks)
        self.text = np.concatenate([np.full(len(each.positions), text) for text, each in enumerate(blocks)])
        self.t = np.concatenate([each.positions for each in blocks])
        shape = (len(self.t), 1 + int(self.t.max()))
        self.norm, self.error = np.full(shape, np.nan), np.full(shape, np.nan)
        places = [(each, place) for each in blocks for place in range(len(each.positions))]
        for row, (t, (each, place)) in enumerate(zip(self.t, places)):
            self.norm[row, : t + 1] = each.norm[place, t::-1]
            self.error[row, : t + 1] = each.error[place, t::-1]
        self.there = ~np.isnan(self.norm)
        top = np.nanmax(self.norm, axis=1, keepdims=True)
        self.alive = top > 0
        floor = noise * np.maximum(top, 1)
        self.low = self.alive & (self.norm < floor)
        self.log = np.log(np.where(self.alive, np.where(self.low, floor, self.norm), np.nan))
        self.share = ratio(self.norm, np.nansum(self.norm, axis=1, keepdims=True))

    @property
    def last_rows(self) -> Int[np.ndarray, " texts"]:
        rows = (np.flatnonzero(self.text == text) for text in range(self.texts))
        return np.array([own[self.t[own].argmax()] for own in rows])

    def by_text(self, values: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "texts columns"]:
        found = np.zeros((self.texts, values.shape[1]))
        np.add.at(found, self.text, values)
        return found

    def means(self, values: Float[np.ndarray, "rows distances"], seed: int) -> Float[np.ndarray, "distances 3"]:
        """Return the mean by distance, over the rows that have one, with its interval over texts."""
        parts = []
        for start in range(0, values.shape[1], RESAMPLED_COLUMNS):
            own = values[:, start : start + RESAMPLED_COLUMNS]
            both = self.by_text(np.concatenate([np.nan_to_num(own, nan=0.0), ~np.isnan(own)], axis=1))
            parts.append(intervals(ratio(*np.split(resampled_sums(both, seed=seed), 2, axis=1)), self.texts))
        return np.concatenate(parts)

    def within(self) -> Float[np.ndarray, "rows distances"]:
        """Return, in each text's last row, the share of the last 1 + distance tokens (1 beyond its first); else NaN."""
        found = np.full_like(self.norm, np.nan)
        rows = self.last_rows
        found[rows] = np.where(self.alive[rows], np.minimum(np.nancumsum(self.share[rows], axis=1), 1.0), np.nan)
        return found

    def noisy(self) -> Float[np.ndarray, " distances"]:
        return ratio(self.low.sum(0), (self.there & self.alive).sum(0))

    def relative_error(self) -> Float[np.ndarray, " distances"]:
        square = ratio(self.error, self.norm) ** 2  # A norm that is 0 or missing gives NaN.
        return np.sqrt(ratio(np.nansum(square, axis=0), (~np.isnan(square)).sum(0)))


def intervals(rows: Float[np.ndarray, "rows columns"], examples: int) -> Float[np.ndarray, "columns 3"]:
    """Return `estimate` of every column; a single example has no intervals."""
    return estimates(rows if examples > 1 else rows[:1])


def _decay(table: _Table, fit_from: int, fit_to: int | None, seed: int) -> Decay:
    """Fit the line through the means of ln‖J‖ by distance, weighted by their number of (text, t)."""
    usable = (table.there & table.alive).any(0)
    distances = np.arange(len(usable))
    asked = distances[(distances >= fit_from) & (distances <= (fit_to if fit_to is not None else len(usable)))]
    bad = [d for d in asked if not usable[d] or table.noisy()[d] > MAX_NOISY_SHARE]
    last = (bad[0] if bad else (asked[-1] + 1 if len(asked) else fit_from)) - 1
    ended = "noise" if bad else "asked" if fit_to is not None and fit_to < len(usable) - 1 else "text"
    chosen = distances[fit_from : last + 1]
    if len(chosen) < MIN_FIT_DISTANCES:
        nothing = Estimate(math.nan, math.nan, math.nan)
        return Decay(nothing, nothing, math.nan, math.nan, fit_from, int(last), ended)

    logs = table.log[:, chosen]
    known = ~np.isnan(logs)
    middle = float(chosen.mean())
    d, logs = np.where(known, chosen - middle, 0.0), np.where(known, logs, 0.0)
    sums = table.by_text(np.stack([known.sum(1), d.sum(1), (d * d).sum(1), logs.sum(1), (d * logs).sum(1)], axis=1))
    n, x, xx, y, xy = resampled_sums(sums, seed=seed).T
    slopes = ratio(n * xy - x * y, n * xx - x * x)
    low, high = intervals(-slopes[:, None], table.texts)[0, 1:].tolist()
    rate = Estimate(float(-slopes[0]), low, high)

    level = (y[0] - slopes[0] * x[0]) / n[0]
    counts = known.sum(0)
    means = logs.sum(0) / counts
    rest = counts @ (means - level - slopes[0] * (chosen - middle)) ** 2
    spread = counts @ (means - counts @ means / counts.sum()) ** 2
    r2 = float(1 - rest / spread) if spread > 0 else math.nan
    length = Estimate(_inverse(rate.value), _inverse(rate.high), _inverse(rate.low))
    return Decay(rate, length, float(level - slopes[0] * middle), r2, fit_from, int(last), ended)


def _inverse(rate: float) -> float:
    return math.nan if math.isnan(rate) else 1 / rate if rate > 0 else math.inf


def _context(table: _Table, row: int, beyond: float) -> list[float]:
    """Return the smallest k whose last k tokens hold each of `SHARES` of the influence on a row's position, with
    `beyond` of it before the text; infinite if the whole text does not hold the share, NaN if `beyond` is unknown."""
    if not table.alive[row, 0] or math.isnan(beyond):
        return [math.nan] * len(SHARES)
    held = np.cumsum(table.norm[row, : table.t[row] + 1])
    wanted = [share * (held[-1] + beyond) * (1 - 1e-12) for share in SHARES]
    return [float(1 + np.searchsorted(held, each)) if each <= held[-1] else math.inf for each in wanted]


def _influence_before_text(table: _Table, row: int, decay: Decay) -> float:
    """Return the influence that tokens before the text would have if the row continued at the fitted rate from its own
    level: Σ_{d > t} e^{a − λ d}. NaN if the fit is too poor to tell; infinite without a decay."""
    if not decay.defined:  # Influence below the noise adds nothing; for a short text it is unknown.
        return 0.0 if decay.ended == "noise" else math.nan
    rate, t = decay.rate.value, int(table.t[row])
    chosen = np.arange(decay.first, min(decay.last, t) + 1)
    if not decay.straight or not len(chosen):
        return math.nan
    if rate <= 0:
        return math.inf
    level = float((table.log[row, chosen] + rate * chosen).mean())
    return math.exp(level - rate * (t + 1)) / -math.expm1(-rate)
