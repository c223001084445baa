"""Places where runs fork, on trees made by hand; and pieces of random trees, which are their rows."""

import numpy as np
import pytest
from ssmscope.evaluation import forking
from ssmscope.evaluation.forking import Pieces, Rows, as_bytes, ways_to_fork, whole_rows

P, Q = list(range(100, 110)), list(range(200, 208))  # 10 and 8 tokens


def rows_of(*rows: list[int]) -> Rows:
    return Rows.of(sorted(as_bytes(rows)))


def forked(rows: Rows, *, fewer: float = 1) -> Pieces:
    return next(ways_to_fork(rows, (fewer,)))


def test_rows_are_what_they_were():
    given = [[5, 1, 70000], [2], [5, 1]]
    rows = Rows.of(as_bytes(given))
    assert rows.ids.tolist() == [5, 1, 70000, 2, 5, 1] and rows.lengths.tolist() == [3, 1, 2] and len(rows) == 3
    ids, real = rows.padded(np.array([2, 0, 1]), np.array([0, 1, 0]), np.array([2, 3, 1]))
    assert ids.tolist() == [[5, 1], [1, 70000], [2, 0]] and real.tolist() == [[True, True], [True, True], [True, False]]
    assert sorted(as_bytes(given)) == as_bytes(sorted(given))


@pytest.mark.parametrize("at_once", [1, 7, 2**22])
def test_what_neighbours_share(monkeypatch, at_once):
    monkeypatch.setattr(forking, "MAX_TOKENS_COMPARED", at_once)
    rows = rows_of([1, 2, 3], [1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 0], [2], [2, 0, 0, 0, 0])
    assert rows.shared().tolist() == [0, 3, 2, 3, 0, 1]
    assert rows_of([1, 2], [1, 2], [1, 2, 3]).shared().tolist() == [0, 2, 2]
    assert Rows.of([]).shared().tolist() == [] and rows_of([3]).shared().tolist() == [0]


@pytest.mark.parametrize("rows, tokens", [
    ([P + [1] * 5, P + [2] * 5, P + [3] * 5], 10 + 3 * 5),
    ([P[:8] + [1], P[:8] + [2]], 8 + 2),
    ([P[:7] + [1], P[:7] + [2]], 2 * 8),  # too short to fork for
    ([P + Q + [1], P + Q + [2], P + [3], P + [4]], 10 + 8 + 4),
    ([P + Q[:7] + [1], P + Q[:7] + [2], P + [3]], 10 + 2 * 8 + 1),  # the second fork would be too near
    ([P[:7] + [1], P[:7] + [2], P[:5] + [3] * 4 + [1], P[:5] + [3] * 4 + [2]], 2 * 8 + 9 + 2),  # counted from 0
    ([P, P + [1, 2]], 10 + 2),  # a row that another one goes on from
    ([[1], [1, 2], [1, 2, 3]], 3),
    ([P, P + [1, 2], P + Q + [3], P + Q + [4]], 10 + 2 + 8 + 2),
    ([[1, 2], [3, 4]], 4),
    ([[*P[:5], i] for i in range(87)], 5 + 87),  # short, and shared by many: 86 · 5 − 87 · 2 = 256
    ([[*P[:5], i] for i in range(86)], 86 * 6),
])  # fmt: skip
def test_trees_made_by_hand(rows, tokens):
    assert forked(rows_of(*rows)).tokens == tokens
    assert whole_rows(rows_of(*rows)).tokens == sum(map(len, rows))


def test_levels_and_what_is_kept():
    pieces = forked(rows_of(P + Q + [1], P + Q + [2], P + [3], [9]))
    found = {
        (int(start), int(stop), int(level), bool(kept), bool(ends), int(pieces.stop[above]) if above >= 0 else None)
        for start, stop, level, kept, ends, above in zip(
            pieces.start, pieces.stop, pieces.level, pieces.kept, pieces.ends, pieces.above
        )
    }
    assert found == {
        (0, 10, 0, True, False, None), (0, 1, 0, False, True, None), (10, 18, 1, True, False, 10),
        (10, 11, 1, False, True, 10), (18, 19, 2, False, True, 18),
    }  # fmt: skip


@pytest.mark.parametrize("apart, saved", [(1, 0), (3, 10), (8, 256)])
def test_the_pieces_of_every_row_are_the_row(monkeypatch, apart, saved):
    monkeypatch.setattr(forking, "MIN_FORK_DISTANCE", apart)
    monkeypatch.setattr(forking, "MIN_TOKENS_SAVED", saved)
    draw = np.random.default_rng(3)
    for _ in range(60):
        alphabet = int(draw.integers(1, 4))
        given = {tuple(draw.integers(0, alphabet, draw.integers(1, 24)).tolist()) for _ in range(draw.integers(1, 40))}
        rows = rows_of(*map(list, given))
        written = [rows.ids[start:stop].tolist() for start, stop in zip(rows.starts, rows.starts[1:])]
        pieces = forked(rows)
        text = [
            written[row][start:stop] for row, start, stop in zip(pieces.row, pieces.start, pieces.stop, strict=True)
        ]
        ends = np.flatnonzero(pieces.ends)
        assert sorted(pieces.row[ends]) == list(range(len(rows)))  # every row ends once
        for piece in range(len(text)):
            assert text[piece]  # nothing is run on no token
            above = int(pieces.above[piece])
            assert pieces.level[piece] == (0 if above < 0 else pieces.level[above] + 1)
            assert above < 0 or (pieces.kept[above] and pieces.stop[above] == pieces.start[piece])
        assert set(np.flatnonzero(pieces.kept)) == set(pieces.above.tolist()) - {-1}
        for piece in ends:
            read, at = list(text[piece]), int(pieces.above[piece])
            while at >= 0:
                read, at = [*text[at], *read], int(pieces.above[at])
            assert read == written[pieces.row[piece]]
        assert pieces.tokens <= whole_rows(rows).tokens
        if apart == 1:  # every beginning once: as many tokens as the tree has edges
            assert pieces.tokens == len({row[:stop] for row in given for stop in range(1, len(row) + 1)})
