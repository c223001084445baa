"""Tasks of compiled models: their inputs with the one right next token, and the memories that compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ssmscope.zoo.mad import named

Drawn = tuple[np.ndarray, np.ndarray]
"""Ids (examples, length), and the right next token of each (examples,)."""


@dataclass(frozen=True)
class Memory:
    """Layer that writes tokens into its state under keys and reads what a query asks for.

    Attributes:
        values: tokens that are written.
        keys: tokens under which the token after them is written; without any, all are under one key.
        query: slot of the residual stream that is looked up, "token", or "found" by an earlier memory.
        into: slot that what is read is added to: "found", "answer", or "decoy", which no layer reads.
        writes: tokens that are written, each in place of what is there, while the others leave the state as it is; by
            default every token is written, and nothing is forgotten. The delta rule writes values alone, as it erases
            what is under a key.
    """

    values: tuple[int, ...]
    keys: tuple[int, ...] = ()
    query: str = "token"
    into: str = "answer"
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Task:
    """Task of next-token prediction: its tokens, the function (examples, random) that draws inputs, the memories that
    solve it, first layer first, and the token that each is written as, by default itself; `moving` is True if values
    stand in other places from input to input."""

    name: str
    tokens: tuple[str, ...]
    draw: Callable[[int, np.random.Generator], Drawn]
    memories: tuple[Memory, ...]
    written_as: tuple[int, ...] | None = None
    moving: bool = False


SYMBOLS = 6
"""Number of keys, and of values, in each task but the flip-flop."""
PAIRS = 4
LENGTH = 8
"""Tokens before the last one in induction and the flip-flop."""
STORED = 4
"""Values of the flip-flop."""


def _orders(examples: int, count: int, random: np.random.Generator) -> np.ndarray:
    return random.random((examples, count)).argsort(1)


def _induction(examples: int, random: np.random.Generator) -> Drawn:
    """Different tokens, then one of them but the last again: the answer is the token after it."""
    ids = _orders(examples, 2 * SYMBOLS, random)[:, :LENGTH]
    rows, place = np.arange(examples), random.integers(0, LENGTH - 1, examples)
    return np.column_stack([ids, ids[rows, place]]), ids[rows, place + 1]


def _recall(examples: int, random: np.random.Generator) -> Drawn:
    """Pairs of a key and a value, then one of the keys: the answer is its value."""
    rows, place = np.arange(examples), random.integers(0, PAIRS, examples)
    keys = _orders(examples, SYMBOLS, random)[:, :PAIRS]
    values = SYMBOLS + random.integers(0, SYMBOLS, keys.shape)
    pairs = np.stack([keys, values], axis=2).reshape(examples, -1)
    return np.column_stack([pairs, keys[rows, place]]), values[rows, place]


def _flip_flop(examples: int, random: np.random.Generator) -> Drawn:
    """Values to write and to ignore, the first to write, then a read: the answer is the value written last (Liu et al.
    2023, Exposing Attention Glitches with Flip-Flop Language Modeling), an instruction and its value as one token."""
    value, ignored = random.integers(0, STORED, (examples, LENGTH)), random.random((examples, LENGTH)) < 0.5
    ignored[:, 0] = False
    last = LENGTH - 1 - (~ignored[:, ::-1]).argmax(1)
    read = np.full(examples, 2 * STORED)
    return np.column_stack([value + STORED * ignored, read]), value[np.arange(examples), last]


def _two_hop(examples: int, random: np.random.Generator) -> Drawn:
    """Pairs a b and b c in any order, each with a stop after it, then an a: the answer is the c that its b leads to."""
    half = PAIRS // 2 + 1
    first, middle, last = (_orders(examples, SYMBOLS, random)[:, :half] + SYMBOLS * n for n in range(3))
    pairs = np.concatenate([np.stack([first, middle], 2), np.stack([middle, last], 2)], axis=1)
    pairs = np.take_along_axis(pairs, _orders(examples, 2 * half, random)[..., None], axis=1)
    stops = np.full((*pairs.shape[:2], 1), 3 * SYMBOLS)
    rows, place = np.arange(examples), random.integers(0, half, examples)
    ids = np.concatenate([pairs, stops], axis=2).reshape(examples, -1)
    return np.column_stack([ids, first[rows, place]]), last[rows, place]


_ALL = tuple(range(2 * SYMBOLS))
_A, _B, _C = (tuple(range(SYMBOLS * n, SYMBOLS * (n + 1))) for n in range(3))

INDUCTION = Task("induction", named("t", 2 * SYMBOLS), _induction, (Memory(_ALL, _ALL),))
RECALL = Task("recall", (*named("k", SYMBOLS), *named("v", SYMBOLS)), _recall, (Memory(_B, _A),))
FLIP_FLOP = Task(
    "flip-flop",
    (*named("write", STORED), *named("ignore", STORED), "read"),
    _flip_flop,
    (Memory(tuple(range(2 * STORED)), writes=tuple(range(STORED))),),
    written_as=(*range(STORED), *range(STORED), 2 * STORED),
)
TWO_HOP = Task(
    "two-hop",
    (*named("a", SYMBOLS), *named("b", SYMBOLS), *named("c", SYMBOLS), "."),
    _two_hop,
    (Memory(_B, _A, into="found"), Memory(_C, _B, query="found")),
    moving=True,
)
