"""Rows of token ids of texts, their tree of shared prefixes, and the positions at which a run forks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from jaxtyping import Int
from ssmscope.core.model import Model
from ssmscope.core.text_files import SURROGATE
from ssmscope.core.tokenizing import tokenize
from ssmscope.errors import InputError

MIN_FORK_DISTANCE, MIN_TOKENS_SAVED = 8, 256
"""Minimum distance between two forks, because every further fork makes batches smaller, unless it saves so many tokens.
"""
RESUME_COST_TOKENS = 2
"""Cost of resuming a row from a state, in tokens."""
THRESHOLD_FACTORS = 0.5, 1, 2, 4, 16, 64
"""Factors on these thresholds, one for each candidate plan of forks."""
MAX_TOKENS_COMPARED = 2**22
"""Tokens that are compared at a time."""


def token_rows(model: Model, texts: Sequence[str], *, blank: bool = False) -> list[list[int]]:
    """Return the token ids of every text as the model reads them, with the tokenizer's special tokens. A language
    model's rows drop those at the end, which would come between the text and its continuation. Unless `blank`, a text
    without a token of its own raises InputError."""
    model.check_tokenizer()
    if not texts:
        return []
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {number} is {text!r:.40} ({type(text).__name__}), not a text; give a list of texts")
        half = SURROGATE.search(text)
        if half is not None:
            raise InputError(f"text {number} has U+{ord(half.group()):04X}, which is not a character: remove it")
    found = tokenize(model.tokenizer, list(texts), return_attention_mask=False, return_token_type_ids=False)
    rows: list[list[int]] = found["input_ids"]
    longest = max(zip(map(len, rows), texts))[1]
    # The tokenizer puts as many special tokens around every text.
    special = tokenize(model.tokenizer, longest, return_special_tokens_mask=True)["special_tokens_mask"]
    start = sum(1 for _ in takewhile(bool, special))
    end = sum(1 for _ in takewhile(bool, reversed(special[start:])))
    for number, row in enumerate(rows):
        if len(row) <= start + end and not blank:
            which = f"text {number}" if len(rows) > 1 else "the text"
            raise InputError(
                f"{which} ({texts[number][:40]!r}) has no token that the tokenizer of {model.name} knows: give at "
                "least one word"
            )
    if end and not model.is_classifier:
        rows = [row[:-end] for row in rows]
    check_vocabulary(model, max((max(row) for row in rows if row), default=0))
    return rows


def check_vocabulary(model: Model, highest: int) -> None:
    """Raise InputError if the highest of some token ids is outside the model's vocabulary."""
    if highest >= model.vocabulary:
        raise InputError(
            f"the tokenizer gives id {highest}, outside the vocabulary 0…{model.vocabulary - 1} of {model.name}"
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of token ids int64, concatenated, and the offsets at which each begins, and the last one ends."""

    ids: Int[np.ndarray, " tokens"]
    starts: Int[np.ndarray, " bounds"]

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> Rows:
        """Return the rows that `as_bytes` wrote."""
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows)) // 4
        starts = np.concatenate([[0], lengths.cumsum()])
        return cls(np.frombuffer(b"".join(rows), dtype=">u4").astype(np.int64), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return np.diff(self.starts)

    def shared(self) -> Int[np.ndarray, " rows"]:
        """Return the length of the prefix that each row shares with the row before it; 0 for the first."""
        lengths = self.lengths
        found = np.zeros(len(self), dtype=np.int64)
        step = max(2, MAX_TOKENS_COMPARED // max(1, int(lengths.max(initial=1))))
        for first in range(0, len(self) - 1, step - 1):
            rows = np.arange(first, min(first + step, len(self)))
            ids, real = self.padded(rows, np.zeros_like(rows), lengths[rows])
            differ = (ids[1:] != ids[:-1]) | ~real[1:] | ~real[:-1]
            found[rows[1:]] = np.where(differ.any(1), differ.argmax(1), lengths[rows[1:]])
        return found

    def padded(
        self, rows: Int[np.ndarray, " chosen"], start: Int[np.ndarray, " chosen"], stop: Int[np.ndarray, " chosen"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens start ≤ t < stop of rows, padded on the right with 0, and their mask (True at tokens)."""
        lengths = stop - start
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(real.shape, dtype=np.int64)
        ends = lengths.cumsum()
        ids[real] = self.ids[np.arange(ends[-1]) + np.repeat(self.starts[rows] + start - (ends - lengths), lengths)]
        return ids, real


def as_bytes(rows: Sequence[Sequence[int]]) -> list[bytes]:
    """Return rows of token ids as bytes that sort as the rows do."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = np.fromiter((i for row in rows for i in row), dtype=">u4", count=int(lengths.sum())).tobytes()
    ends = (4 * lengths.cumsum()).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends)]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of rows, each of which runs as a whole, level after level.

    A piece is the tokens start ≤ t < stop of a row, which other rows may share. It continues from the end of the piece
    `above` (−1 at the beginning of a row), of which there are `level`. Other pieces continue from its end if it is
    `kept`, and the row ends with it if it `ends`.
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
        """Number of tokens that run."""
        return int((self.stop - self.start).sum())


def whole_rows(rows: Rows) -> Pieces:
    """Return one piece per row."""
    zero, no = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    return Pieces(np.arange(len(rows)), zero, rows.lengths, zero - 1, zero, no, ~no)


def ways_to_fork(rows: Rows, factors: Sequence[float] = THRESHOLD_FACTORS) -> Iterator[Pieces]:
    """Yield plans that run shared prefixes of sorted, distinct rows once where that saves enough, by their prefix tree.
    A run forks where rows diverge, at least `MIN_FORK_DISTANCE` tokens after the fork before, and where a row ends that
    is a prefix of others. Each plan has one of the factors on these thresholds."""
    lengths = rows.lengths.tolist()
    n = len(lengths)
    # In the prefix tree node i < n is the end of row i, later nodes are where rows diverge, and −1 is the root.
    depth, parent, row = list(lengths), [-1] * n, list(range(n))
    path: list[int] = []  # The nodes from the root to the end of the previous row.
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
    below = [int(node < n) for node in range(len(depth))]  # Number of rows that a node is a prefix of.
    for node in reversed(order):
        if parent[node] >= 0:
            below[parent[node]] += below[node]
    depth.append(0)  # The root is the last node, −1.
    for times in factors:
        above: dict[int, int] = {}
        level, nearest = {-1: -1}, {-1: -1}
        chosen = []
        for node in order:
            fork = nearest[parent[node]]
            length = depth[node] - depth[fork]
            saved = (below[node] - 1) * length - below[node] * RESUME_COST_TOKENS
            worth = length >= MIN_FORK_DISTANCE * times or saved >= MIN_TOKENS_SAVED * times
            nearest[node] = node if below[node] > 1 and (node < n or worth) else fork
            if node < n or nearest[node] == node:
                above[node], level[node] = fork, level[fork] + 1
                chosen.append(node)
        chosen.sort(key=lambda node: (level[node], row[node]))
        place = {node: index for index, node in enumerate(chosen)} | {-1: -1}
        table = [
            (row[node], depth[above[node]], depth[node], place[above[node]], level[node], below[node] > 1, node < n)
            for node in chosen
        ]
        rows_of, starts, stops, above_of, levels, kept, ends = np.array(table, dtype=np.int64).reshape(-1, 7).T
        yield Pieces(rows_of, starts, stops, above_of, levels, kept.astype(bool), ends.astype(bool))
