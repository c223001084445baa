"""Rows that share beginnings as a tree, and where a run forks: what is run once, and what continues from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

APART = 8
"""How many tokens lie between two forks at least, as every further one makes batches smaller, …"""
SAVED = 256
"""… unless so many tokens are saved; …"""
CONTINUING = 2
"""… to continue from a state costs a row about as much as so many tokens."""
FEWER = 0.5, 1, 2, 4, 16, 64
"""How many times as many tokens that are, of several ways to fork."""
AT_ONCE = 2**22
"""How many tokens are compared at a time."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of token ids, one after the other.

    Attributes:
        ids: (tokens,) int64.
        starts: (rows + 1,), where each row begins in `ids`, and where the last one ends.
    """

    ids: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " bounds"]

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> Rows:
        """Of rows written by `as_bytes`."""
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows)) // 4
        starts = np.concatenate([[0], lengths.cumsum()])
        return cls(np.frombuffer(b"".join(rows), dtype=">u4").astype(np.int64), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return np.diff(self.starts)

    def between(self, start: int, stop: int) -> Rows:
        """The rows start ≤ i < stop."""
        bounds = self.starts[start : stop + 1]
        return Rows(self.ids[bounds[0] : bounds[-1]], bounds - bounds[0])

    def shared(self) -> Int[np.ndarray, " rows"]:
        """How many tokens each row begins with as the row before it does; 0 for the first."""
        lengths = self.lengths
        found = np.zeros(len(self), dtype=np.int64)
        step = max(2, AT_ONCE // max(1, int(lengths.max(initial=1))))
        for first in range(0, len(self) - 1, step - 1):
            rows = np.arange(first, min(first + step, len(self)))
            ids, real = self.padded(rows, np.zeros_like(rows), lengths[rows])
            differ = (ids[1:] != ids[:-1]) | ~real[1:] | ~real[:-1]
            found[rows[1:]] = np.where(differ.any(1), differ.argmax(1), lengths[rows[1:]])
        return found

    def padded(
        self, rows: Int[np.ndarray, " chosen"], start: Int[np.ndarray, " chosen"], stop: Int[np.ndarray, " chosen"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens start ≤ t < stop of rows, padded on the right with 0, and True where there is a token."""
        lengths = stop - start
        real = np.arange(lengths.max(initial=0)) < lengths[:, None]
        ids = np.zeros(real.shape, dtype=np.int64)
        ends = lengths.cumsum()
        ids[real] = self.ids[
            np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.starts[rows] + start - (ends - lengths), lengths)
        ]
        return ids, real


def as_bytes(rows: Sequence[Sequence[int]]) -> list[bytes]:
    """Rows of token ids as bytes that sort as the rows do."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = np.fromiter((i for row in rows for i in row), dtype=">u4", count=int(lengths.sum())).tobytes()
    ends = (4 * lengths.cumsum()).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends)]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of rows, each run as a whole, those of one level after those of the level before.

    Attributes, one entry a piece:
        row: whose tokens it has; other rows may begin with the same.
        start, stop: which tokens of that row, start ≤ t < stop.
        above: the piece from whose end it continues; −1 at the beginning of a row.
        level: how many pieces are above it.
        kept: whether others continue from its end.
        ends: whether the row ends with it.
    """

    row: Int[np.ndarray, " pieces"]
    start: Int[np.ndarray, " pieces"]
    stop: Int[np.ndarray, " pieces"]
    above: Int[np.ndarray, " pieces"]
    level: Int[np.ndarray, " pieces"]
    kept: np.ndarray
    ends: np.ndarray

    @property
    def tokens(self) -> int:
        """How many tokens are run."""
        return int((self.stop - self.start).sum())


def whole(rows: Rows) -> Pieces:
    """Every row by itself."""
    zero, no = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    return Pieces(np.arange(len(rows)), zero, rows.lengths, zero - 1, zero, no, ~no)


def ways_to_fork(rows: Rows, fewer: Sequence[float] = FEWER) -> Iterator[Pieces]:
    """Sorted, distinct rows with shared beginnings run once, where that saves enough; by the tree of the beginnings.

    A run forks where rows part, at least `APART` tokens after the fork before, and where a row ends that others go on
    from, which is run to there anyway.

    Args:
        fewer: of each way, how many times as many tokens lie between two forks at least, and are saved where fewer do.
    """
    lengths = rows.lengths.tolist()
    n = len(lengths)
    # the tree of beginnings: node i < n is the end of row i, the others are where rows part, −1 is the root
    depth, parent, row = list(lengths), [-1] * n, list(range(n))
    path: list[int] = []  # from the root to the end of the row before
    for current, common in enumerate(rows.shared().tolist()):
        last = -1
        while path and depth[path[-1]] > common:
            if last >= 0:
                parent[last] = path[-1]
            last = path.pop()
        if last >= 0 and path and depth[path[-1]] == common:
            parent[last] = path[-1]
        elif last >= 0 and common:
            parent[last] = len(depth)
            path.append(len(depth))
            depth.append(common)
            parent.append(-1)
            row.append(row[last])
        path.append(current)
    for upper, lower in zip(path, path[1:]):
        parent[lower] = upper

    order = np.argsort(depth, kind="stable").tolist()
    below = [1] * n + [0] * (len(depth) - n)
    for node in reversed(order):
        if parent[node] >= 0:
            below[parent[node]] += below[node]
    inner = [False] * len(depth)
    for upper in parent:
        if upper >= 0:
            inner[upper] = True
    for times in fewer:
        yield _chosen(depth, parent, row, below, inner, order, n, times)


def _chosen(
    depth: Sequence[int],
    parent: Sequence[int],
    row: Sequence[int],
    below: Sequence[int],
    inner: Sequence[bool],
    order: Sequence[int],
    n: int,
    times: float,
) -> Pieces:
    """The pieces between the nodes of a tree at which a run forks, and its rows' ends, the first `n`."""
    nearest, above, level = list(range(len(depth))), [-1] * len(depth), [0] * len(depth)
    chosen = []
    for node in order:
        fork = nearest[parent[node]] if parent[node] >= 0 else -1
        length = depth[node] - (depth[fork] if fork >= 0 else 0)
        if node < n or (inner[node] and _worth(below[node], length, times)):
            above[node], level[node] = fork, level[fork] + 1 if fork >= 0 else 0
            chosen.append(node)
        if not (inner[node] and chosen and chosen[-1] == node):
            nearest[node] = fork
    chosen.sort(key=lambda node: (level[node], row[node]))
    place = {node: index for index, node in enumerate(chosen)}
    return Pieces(
        row=np.array([row[node] for node in chosen], dtype=np.int64),
        start=np.array([depth[above[node]] if above[node] >= 0 else 0 for node in chosen], dtype=np.int64),
        stop=np.array([depth[node] for node in chosen], dtype=np.int64),
        above=np.array([place.get(above[node], -1) for node in chosen], dtype=np.int64),
        level=np.array([level[node] for node in chosen], dtype=np.int64),
        kept=np.array([inner[node] for node in chosen], dtype=bool),
        ends=np.array([node < n for node in chosen], dtype=bool),
    )


def _worth(rows: int, length: int, times: float) -> bool:
    """Whether so many rows save enough by sharing so many tokens."""
    return length >= APART * times or (rows - 1) * length - rows * CONTINUING >= SAVED * times
