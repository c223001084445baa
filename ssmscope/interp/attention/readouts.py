"""Single numbers read off an attention map: its mean distance, and the shares of its mass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Readouts:
    """Means over the queries of a map of where the mass |weight| of each row lies; NaN where undefined.

    p(t, s) = |w(t, s)| / Σ_s |w(t, s)|, where the sum has the state before the first token too. Rows without any mass
    are left out.
    """

    distance: float
    """Mean attention distance, Σ_s p(t, s) (t − s), in tokens, without the state before the first token."""
    recent: float
    """Share on the query itself and the k − 1 tokens before it."""
    sink: float
    """Share on the first k tokens and on the state before them."""
    outside: float
    """Share outside the marked span, over the queries after it: irrelevant context."""


def read(
    values: Float[np.ndarray, "queries keys"],
    sink: Float[np.ndarray, " queries"] | None,
    queries: Int[np.ndarray, " queries"],
    edges: Int[np.ndarray, " cells+1"] | None,
    span: tuple[int, int] | None,
    top: int,
) -> Readouts:
    """Compute the readouts of one map, whole or with chosen rows.

    A pooled map stands for the map of single tokens that has in every causal pair of a cell the cell's mean: its mass
    is |mean| × pairs, and where the window, the first tokens or the span cut a cell, its share is that of its pairs.
    This is exact where the weights within each cell are equal; where their signs differ within a cell, less mass is
    seen than there is. A row of cells is one distribution, and counts as often as it has queries.

    Args:
        values: the weights, zero where the key comes after the query; in a pooled map means over causal pairs.
        sink: weight of the state before the first token; in a pooled map the mean over the cell's queries.
        queries: the position of each row; in a pooled map any position in its cell.
        edges: first positions of the cells of a pooled map, and the length; None for a map of single tokens.
        span: the marked tokens, from the first to the one after the last. Without it `outside` is NaN.
        top: the k of `recent` and `sink`, from 1 on.
    """
    mass = np.abs(values.astype(np.float64))
    state = np.zeros(len(mass)) if sink is None else np.abs(sink.astype(np.float64))
    if edges is None:
        return _of_tokens(mass, state, queries.astype(np.int64), span, top)
    return _of_cells(mass, state, queries.astype(np.int64), edges.astype(np.int64), span, top)


def _of_tokens(
    mass: np.ndarray, state: np.ndarray, queries: np.ndarray, span: tuple[int, int] | None, top: int
) -> Readouts:
    """Compute the readouts of a map of single tokens by their definitions, row by row."""
    keys = np.arange(mass.shape[1])
    rows = np.arange(len(queries))
    ones = np.ones(len(queries))
    own = mass.sum(axis=1)
    total = own + state
    # Mass on the keys before each key.
    before = np.concatenate([np.zeros((len(mass), 1)), mass.cumsum(axis=1)], axis=1)
    recent = before[rows, queries + 1] - before[rows, np.maximum(queries + 1 - top, 0)]
    outside = math.nan
    if span is not None:
        after = (queries >= span[1]).astype(np.float64)
        outside = _mean(total - mass[:, span[0] : span[1]].sum(axis=1), total, after)
    return Readouts(
        distance=_mean(queries * own - mass @ keys, total, ones),
        recent=_mean(recent, total, ones),
        sink=_mean(mass[:, :top].sum(axis=1) + state, total, ones),
        outside=outside,
    )


def _of_cells(
    mass: np.ndarray, state: np.ndarray, queries: np.ndarray, edges: np.ndarray, span: tuple[int, int] | None, top: int
) -> Readouts:
    """Compute the readouts of a pooled map: `mass` is per causal pair of a cell, `state` per query of a cell."""
    cell = np.searchsorted(edges, queries, side="right") - 1
    first, last = edges[cell][:, None], edges[cell + 1][:, None]  # A column: the queries of each row.
    begin, end = edges[:-1][None], edges[1:][None]  # A row: the keys of each column.
    height = (last - first)[:, 0].astype(np.float64)
    pairs = _pairs(first, last, begin, end)
    # In a cell off the diagonal the mean of t − s is that of the means; in one on it, Σ d (h − d) / (h (h + 1) / 2).
    apart = (first + last - begin - end) / 2
    distance = np.where(begin == first, (last - first - 1) / 3, apart)
    total = (mass * pairs).sum(axis=1) + state * height
    late = pairs - _pairs(first, last, begin, end, lag=top)
    early = _pairs(first, last, begin, np.clip(top, begin, end))
    outside = math.nan
    if span is not None:
        start, stop = span
        rest = np.clip(stop, first, last)  # In a cell cut by the span's end only later queries count.
        after = (last - rest)[:, 0].astype(np.float64)
        inside = _pairs(rest, last, np.clip(start, begin, end), np.clip(stop, begin, end))
        whole = (mass * _pairs(rest, last, begin, end)).sum(axis=1) + state * after
        outside = _mean(whole - (mass * inside).sum(axis=1), whole, after)
    return Readouts(
        distance=_mean((mass * pairs * distance).sum(axis=1), total, height),
        recent=_mean((mass * late).sum(axis=1), total, height),
        sink=_mean((mass * early).sum(axis=1) + state * height, total, height),
        outside=outside,
    )


def _pairs(first: np.ndarray, last: np.ndarray, begin: np.ndarray, end: np.ndarray, lag: int = 0) -> np.ndarray:
    """Count the pairs with a query t in [first, last), a key s in [begin, end), and t − s ≥ lag.

    The query t has min(max(t − lag + 1 − begin, 0), end − begin) such keys.
    """
    width = end - begin

    def sum_below(count: np.ndarray) -> np.ndarray:  # Σ min(j, width) over j from 0 to count − 1
        small = np.clip(count, 0, width)
        return small * (small - 1) // 2 + width * np.maximum(count - width, 0)

    shift = 1 - lag - begin
    return sum_below(last + shift) - sum_below(first + shift)


def _mean(part: np.ndarray, total: np.ndarray, weight: np.ndarray) -> float:
    """Return the weighted mean of part / total over the rows that have a total; NaN if no such row has weight."""
    there = (total > 0) & (weight > 0)
    if not there.any():
        return math.nan
    # What a difference of equal sums leaves below zero is rounding.
    return float(np.average(np.maximum(part[there], 0.0) / total[there], weights=weight[there]))
