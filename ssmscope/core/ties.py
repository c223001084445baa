"""Order of scores, in which those that differ by no more than rounding are ties.

The last digits of a float32 score depend on the processor, the number of threads and the size of a batch. Whatever is
ordered, ranked or named as the largest goes through `levels`, and ties are broken by position.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped

ROUNDING = 1e-4
"""Difference of two scores that may be rounding, as a share of the largest |score|: a gradient's parts cancel."""
OUTPUT_ROUNDING = 1e-5
"""The same of two outputs of a float32 model, or of means of them, as a share of their size."""

Scores = Shaped[np.ndarray, "*shape n"]


def levels(scores: Scores, size: float | None = None) -> Int[np.ndarray, "*shape n"]:
    """Return the level of every score along the last axis: 0 for the lowest, equal for ties.

    In the order of their values, a score begins a new level if it is more than rounding away from its neighbour; a run
    of closer ones is cut where it is wider than that. Rounding is `ROUNDING` of the largest |score|, or
    `OUTPUT_ROUNDING` of a given `size`, that of the outputs whose differences the scores are; whole numbers are exact.
    NaN is below all numbers.
    """
    scores = np.asarray(scores)
    values = scores.astype(np.float64)
    values = np.where(np.isnan(values), -np.inf, values)
    if not values.size:
        return np.zeros(values.shape, dtype=np.int64)
    step = _rounding(scores, size)
    order = np.argsort(-values, axis=-1, kind="stable")
    falling = np.take_along_axis(values, order, axis=-1)
    with np.errstate(invalid="ignore"):  # Infinities of one sign are equal.
        begins = falling[..., :-1] - falling[..., 1:] > step
    begins = np.concatenate([np.zeros_like(begins[..., :0], shape=(*begins.shape[:-1], 1)), begins], axis=-1)
    first = np.maximum.accumulate(np.where(begins, np.arange(values.shape[-1]), 0), axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        below = (np.take_along_axis(falling, first, axis=-1) - falling) / step
    cut = np.floor(np.nan_to_num(below, nan=0.0, posinf=0.0))
    begins[..., 1:] |= cut[..., 1:] != cut[..., :-1]
    depth = begins.cumsum(-1)
    found = np.empty_like(order)
    np.put_along_axis(found, order, depth[..., -1:] - depth, axis=-1)
    return found


def descending(scores: Scores, size: float | None = None) -> Int[np.ndarray, "*shape n"]:
    """Return the positions of scores along the last axis, the highest first, ties by position."""
    return np.argsort(-levels(scores, size), axis=-1, kind="stable")


def highest(scores: Scores, size: float | None = None) -> Bool[np.ndarray, "*shape n"]:
    """Return a mask of the highest score along the last axis and of those that tie with it; none where all are NaN."""
    found = levels(scores, size)
    return (found == found.max(-1, keepdims=True, initial=0)) & ~np.isnan(scores)


def nonzero(scores: Scores, size: float | None = None) -> Bool[np.ndarray, "*shape n"]:
    """Return a mask of the scores that differ from 0 by more than rounding."""
    return np.abs(scores) > _rounding(np.asarray(scores), size)


def _rounding(scores: Scores, size: float | None) -> Float[np.ndarray, "*shape 1"]:
    """Return the difference of two scores along the last axis that may be rounding."""
    sizes = np.abs(scores.astype(np.float64))
    largest = np.where(np.isfinite(sizes), sizes, 0.0).max(-1, keepdims=True, initial=0)
    if scores.dtype.kind in "iub":
        return np.zeros_like(largest)
    return ROUNDING * largest if size is None else np.full_like(largest, OUTPUT_ROUNDING * size)


def difference(a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    """Return a − b, 0 where the two differ by no more than rounding."""
    with np.errstate(invalid="ignore"):
        found = np.subtract(a, b, dtype=np.float64)
        small = np.isfinite(found) & (np.abs(found) <= OUTPUT_ROUNDING * np.maximum(np.abs(a), np.abs(b)))
    return np.where(small, 0.0, found)


def spearman(a: Float[np.ndarray, " n"], b: Shaped[np.ndarray, " n"]) -> float:
    """Return Spearman's rank correlation, ties sharing their mean rank; NaN for constant or infinite numbers."""
    if len(a) < 2 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    ranks = [_mean_ranks(numbers) - (len(numbers) + 1) / 2 for numbers in (a, b)]
    size = math.sqrt(float(ranks[0] @ ranks[0]) * float(ranks[1] @ ranks[1]))
    return float(ranks[0] @ ranks[1]) / size if size else math.nan


def _mean_ranks(scores: Shaped[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return ranks from 1 on, ties sharing their mean."""
    found = levels(scores)
    counts = np.bincount(found)
    return (counts.cumsum() - (counts - 1) / 2)[found]
