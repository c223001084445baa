"""The readouts of attention maps: against plain loops over pairs, and against closed forms."""

import math

import numpy as np
import pytest
from ssmscope.interp.attention.maps import Readouts
from ssmscope.interp.attention.measure import Reader


def read(values, sink, queries, edges, span, top):
    edges = np.arange(values.shape[1] + 1) if edges is None else edges
    marked = None if span is None else np.isin(np.arange(edges[-1]), range(*span))
    return Reader(queries, edges, marked, top).read(values, sink)


FIELDS = ("distance", "recent", "sink", "outside")


def causal(length, seed=0, decay=0.9):
    """A random lower triangle whose entries have both signs and fall off with distance."""
    lag = np.subtract.outer(np.arange(length), np.arange(length))
    noise = np.random.default_rng(seed).normal(size=(length, length))
    return np.where(lag >= 0, noise * decay ** np.maximum(lag, 0), 0).astype(np.float32)


def slow(weight, state, rows, span, top):
    """The definitions, pair by pair. `weight` and `state` give w(t, s) and w(t, state); a row of the map is the list of
    its queries, which count together as one distribution."""
    found = {name: [] for name in FIELDS}
    for row in rows:
        total = distance = recent = sink = 0.0
        for t in row:
            total += abs(state[t])
            sink += abs(state[t])
            for s in range(t + 1):
                mass = abs(float(weight[t, s]))
                total += mass
                distance += mass * (t - s)
                recent += mass if t - s < top else 0
                sink += mass if s < top else 0
        if total > 0:
            for name, part in zip(FIELDS, (distance, recent, sink)):
                found[name] += [part / total] * len(row)
        after = [t for t in row if span is not None and t >= span[1]]
        total = outside = 0.0
        for t in after:
            total += abs(state[t])
            outside += abs(state[t])
            for s in range(t + 1):
                mass = abs(float(weight[t, s]))
                total += mass
                outside += 0 if span[0] <= s < span[1] else mass
        if total > 0:
            found["outside"] += [outside / total] * len(after)
    return Readouts(*(sum(found[name]) / len(found[name]) if found[name] else math.nan for name in FIELDS))


def same(one, other):
    for name in FIELDS:
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5, abs=1e-7, nan_ok=True), name


SPANS = [None, (0, 3), (4, 9), (6, 7), (0, 23), (22, 23)]


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("top", [1, 3, 40])
@pytest.mark.parametrize("rows", [range(23), [22], [9, 0, 8, 17]])
def test_maps_of_tokens_are_the_definitions(span, top, rows):
    weight = causal(23)
    weight[5] = 0
    state = np.random.default_rng(1).normal(size=23).astype(np.float32)
    state[5] = 0
    rows = list(rows)
    for sink in (np.zeros(23, np.float32), state):
        given = None if not sink.any() else sink[rows]
        fast = read(weight[rows], given, np.array(rows), None, span, top)
        same(fast, slow(weight, sink, [[t] for t in rows], span, top))


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("top", [1, 3, 7, 40])
@pytest.mark.parametrize("edges", [[0, 23], [0, 5, 10, 15, 20, 23], [0, 1, 4, 5, 12, 22, 23], list(range(24))])
def test_pooled_maps_are_the_map_of_equal_weights_in_every_cell(span, top, edges):
    cells = len(edges) - 1
    pooled, sink = causal(cells, seed=2), np.random.default_rng(3).normal(size=cells).astype(np.float32)
    pooled[0, 0] = sink[0] = 0
    cell = np.searchsorted(edges, np.arange(23), side="right") - 1
    rows = [list(range(first, last)) for first, last in zip(edges, edges[1:])]
    last = np.array(edges[1:]) - 1
    weight, state = pooled[np.ix_(cell, cell)], sink[cell]
    fast = read(pooled, sink, last, np.array(edges), span, top)
    same(fast, slow(weight, state, rows, span, top))
    some = list(range(cells))[1::2] or [0]
    fast = read(pooled[some], sink[some], last[some], np.array(edges), span, top)
    same(fast, slow(weight, state, [rows[i] for i in some], span, top))


def test_what_is_not_defined_is_nan():
    empty = read(np.zeros((4, 4)), None, np.arange(4), None, (0, 2), 1)
    assert all(math.isnan(getattr(empty, name)) for name in FIELDS)
    assert math.isnan(read(np.eye(4), None, np.arange(4), None, None, 1).outside)
    assert math.isnan(read(np.eye(4), None, np.arange(4), None, (1, 4), 1).outside)  # no query comes after it
