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


class Reader:
    """Readouts of the maps of a text, whole, pooled or with chosen rows.

    A pooled map stands for the map of single tokens that has in every causal pair of a cell the cell's mean: its mass
    is |mean| × pairs, and where the window, the first tokens or the span cut a cell, its share is that of its pairs.
    This is exact where the weights within each cell are equal; where their signs differ within a cell, less mass is
    seen than there is. A row of cells is one distribution, and counts as often as it has queries.

    Args:
        queries: the position of each row; in a pooled map any position in its cell.
        edges: first positions of the cells of a map, and the length; single tokens are cells too.
        span: the marked tokens, from the first to the one after the last. Without it `outside` is NaN.
        top: the k of `recent` and `sink`, from 1 on.
    """

    def __init__(
        self,
        queries: Int[np.ndarray, " queries"],
        edges: Int[np.ndarray, " cells+1"],
        span: tuple[int, int] | None,
        top: int,
    ) -> None:
        cell = np.searchsorted(edges, queries, side="right") - 1
        first, last = edges[cell][:, None], edges[cell + 1][:, None]  # A column: the queries of each row.
        begin, end = edges[:-1][None], edges[1:][None]  # A row: the keys of each column.
        self.queries = (last - first)[:, 0].astype(np.float64)
        self.pairs = _pairs(first, last, begin, end)
        # Off the diagonal the mean of t − s is that of the means; in a cell on it, Σ d (h − d) / (h (h + 1) / 2).
        apart = (first + last - begin - end) / 2
        self.distance = self.pairs * np.where(begin == first, (last - first - 1) / 3, apart)
        self.late = self.pairs - _pairs(first, last, begin, end, lag=top)
        self.early = _pairs(first, last, begin, np.clip(top, begin, end))
        start, stop = span or (0, edges[-1])
        rest = np.clip(stop, first, last)  # In a cell cut by the span's end only later queries count.
        self.after = (last - rest)[:, 0].astype(np.float64)
        self.whole = _pairs(rest, last, begin, end)
        self.beside = self.whole - _pairs(rest, last, np.clip(start, begin, end), np.clip(stop, begin, end))

    def read(self, values: Float[np.ndarray, "queries keys"], sink: Float[np.ndarray, " queries"] | None) -> Readouts:
        """Compute the readouts of one map.

        Args:
            values: the weights, zero where the key comes after the query; in a pooled map means over causal pairs.
            sink: weight of the state before the first token; in a pooled map the mean over the cell's queries.
        """
        mass = np.abs(values.astype(np.float64))
        state = np.zeros(len(mass)) if sink is None else np.abs(sink.astype(np.float64))

        def over(pairs: np.ndarray) -> np.ndarray:
            return np.einsum("qk,qk->q", mass, pairs)

        total = over(self.pairs) + state * self.queries
        before = state * self.after
        return Readouts(
            distance=_mean(over(self.distance), total, self.queries),
            recent=_mean(over(self.late), total, self.queries),
            sink=_mean(over(self.early) + state * self.queries, total, self.queries),
            outside=_mean(over(self.beside) + before, over(self.whole) + before, self.after),
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
