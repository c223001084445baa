"""Labelled sequences of token ids: the majority task and ListOps as in Generalization bounds for selective SSMs,
section 5."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssmscope.core.limits import refuse_above, refuse_held
from ssmscope.data.tokens import ArrayData
from ssmscope.errors import InputError

LISTOPS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]", "[PAD]")
"""Tokens of ListOps in the order of their ids; the last is padding."""


@dataclass(frozen=True, eq=False)
class SequenceData(ArrayData):
    """Sequences with their classes.

    Attributes:
        ids: (examples, length) token ids.
        labels: (examples,) class ids.
        tokens: token of each id; their number is the vocabulary size.
        label_names: names of the classes.
    """

    ids: np.ndarray
    labels: np.ndarray
    tokens: tuple[str, ...]
    label_names: tuple[str, ...]


def majority(
    length: int, *, examples: int = 1000, flipped: float = 0.25, seed: int = 0
) -> tuple[SequenceData, SequenceData]:
    """Draw a training and a test set of the majority task: are more than half of `length` bits ones?

    The number of ones is uniform on 0…`length`. After the labels are set, every one of the training set becomes a zero
    with probability `flipped`: .25 in the authors' code, "a small percentage" in their paper. The order of the draws is
    that of their code, so a seed gives their sets.

    Raises:
        InputError: for a length or number of examples below 1, or a probability outside 0…1.
    """
    if length < 1 or examples < 1:
        raise InputError(f"length {length} and examples {examples} must be at least 1")
    refuse_held(length * examples, f"{examples:,} sequences of {length:,} bits", "ask for fewer or shorter ones")
    if not 0 <= flipped <= 1:
        raise InputError(f"flipped is {flipped}; a probability from 0 to 1 is allowed")
    refuse_above(2**32 - 1, seed=seed)
    random = np.random.RandomState(seed)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        ones = random.randint(0, length + 1, examples)
        rows = np.zeros((examples, length), dtype=np.int64)
        for row, number in zip(rows, ones):
            row[:number] = 1
            random.shuffle(row)
        return rows, (ones > length / 2).astype(np.int64)

    (train, train_labels), (test, test_labels) = draw(), draw()
    train[(random.rand(examples, length) < flipped) & (train == 1)] = 0
    tokens, names = ("0", "1"), ("more zeros", "more ones")
    return (
        SequenceData("majority", "train", train, train_labels, tokens, names),
        SequenceData("majority", "test", test, test_labels, tokens, names),
    )


def listops(
    texts: Sequence[str], labels: Sequence[int], *, split: str = "all", width: int | None = None
) -> SequenceData:
    """Encode ListOps expressions, e.g. `( ( ( [MAX 4 ) 7 ) ] )`, as ids padded on the right to `width` or the longest.

    Round brackets are left out; the authors' models read the padding too. `listops_expressions` draws random ones.

    Raises:
        InputError: for no expression, a token that ListOps does not have, or an expression longer than `width`.
    """
    if not texts or len(texts) != len(labels):
        raise InputError(f"{len(texts)} expressions and {len(labels)} labels: as many of each are needed, at least one")
    ids = {token: i for i, token in enumerate(LISTOPS)}
    rows = [re.sub(r"[()]", " ", text).split() for text in texts]
    unknown = sorted({token for row in rows for token in row if token not in ids})
    if unknown:
        raise InputError(f"{unknown[0]!r} is no token of ListOps; these are: {' '.join(LISTOPS)}")
    longest = max(map(len, rows))
    if width is not None and width < longest:
        raise InputError(f"width is {width}, and an expression has {longest} tokens; give at least that")
    table = np.full((len(rows), width or longest), ids["[PAD]"], dtype=np.int64)
    for line, row in zip(table, rows):
        line[: len(row)] = [ids[token] for token in row]
    digits = tuple("0123456789")
    return SequenceData("listops", split, table, np.asarray(labels, dtype=np.int64), LISTOPS, digits)
