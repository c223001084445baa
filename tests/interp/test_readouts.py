"""The readouts of attention maps: against plain loops over pairs, and against closed forms."""

from __future__ import annotations

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


def test_cells_of_one_token_are_the_map_itself():
    weight, state = causal(30), causal(30, seed=5)[:, 0]
    positions = np.arange(30)
    one = read(weight, state, positions, None, (3, 8), 4)
    same(one, read(weight, state, positions, np.arange(31), (3, 8), 4))


@pytest.mark.parametrize("length", [1, 2, 50])
@pytest.mark.parametrize("top", [1, 5])
def test_uniform_attention_has_a_mean_distance_of_a_quarter_of_the_length(length, top):
    """Query t is t / 2 from its keys in the mean, and the mean of t / 2 over the queries is (T − 1) / 4."""
    weight = np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]
    found = read(weight, None, np.arange(length), None, None, top)
    share = np.mean([min(top, t + 1) / (t + 1) for t in range(length)])
    same(found, Readouts((length - 1) / 4, share, share, math.nan))


def test_the_identity_attends_to_itself_alone():
    found = read(-np.eye(20, dtype=np.float32), None, np.arange(20), None, (2, 5), 4)
    same(found, Readouts(0, 1, 4 / 20, 1))


def test_one_key_back_and_the_first_key():
    found = read(np.eye(20, k=-1), None, np.arange(20), None, (18, 19), 2)
    same(found, Readouts(1, 1, 2 / 19, 0))  # the first row has no mass; the last one looks at the span alone
    first = np.zeros((20, 20))
    first[:, 0] = 3
    same(read(first, None, np.arange(20), None, (5, 6), 1), Readouts(19 / 2, 1 / 20, 1, 1))


def test_the_state_alone_is_all_sink():
    found = read(np.zeros((6, 6)), np.full(6, -2.0), np.arange(6), None, (1, 2), 1)
    same(found, Readouts(0, 0, 1, 1))


def test_the_state_takes_its_share_of_every_row():
    weight, positions = causal(12), np.arange(12)
    half = np.abs(weight).sum(axis=1)  # as much mass as all the keys together
    alone, shared = (read(weight, sink, positions, None, None, 3) for sink in (None, half))
    assert shared.distance == pytest.approx(alone.distance / 2, rel=1e-5)
    assert shared.recent == pytest.approx(alone.recent / 2, rel=1e-5)
    assert shared.sink == pytest.approx((alone.sink + 1) / 2, rel=1e-5)


def test_sign_and_scale_of_a_row_do_not_matter():
    weight, positions = causal(12), np.arange(12)
    scaled = weight * np.array([-1.0, 1e-20, 3, 1e20] * 3)[:, None]
    same(read(weight, None, positions, None, (1, 4), 2), read(scaled, None, positions, None, (1, 4), 2))


def test_what_is_not_defined_is_nan():
    empty = read(np.zeros((4, 4)), None, np.arange(4), None, (0, 2), 1)
    assert all(math.isnan(getattr(empty, name)) for name in FIELDS)
    assert math.isnan(read(np.eye(4), None, np.arange(4), None, None, 1).outside)
    assert math.isnan(read(np.eye(4), None, np.arange(4), None, (1, 4), 1).outside)  # no query comes after it


def test_uniform_blocks_of_equal_size():
    """One cell of T tokens with equal weights: the mean over pairs of t − s is (T − 1) / 3."""
    found = read(np.full((1, 1), 0.5), None, np.array([29]), np.array([0, 30]), None, 30)
    same(found, Readouts(29 / 3, 1, 1, math.nan))
