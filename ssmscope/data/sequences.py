"""Labelled sequences of token ids: the majority task and ListOps, as the selective SSM's authors draw and encode them.

(Generalization bounds for selective SSMs, section 5.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssmscope.core.limits import refuse_above, refuse_held
from ssmscope.data.arrays import ArrayData
from ssmscope.errors import InputError

LISTOPS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]", "[PAD]")
"""The tokens of ListOps, a token's place being its id; the last one pads."""


@dataclass(frozen=True, eq=False)
class SequenceData(ArrayData):
    """Sequences with their classes.

    Attributes:
        ids: (examples, length) token ids.
        labels: (examples,) class ids.
        tokens: what the ids mean; their number is the vocabulary.
        label_names: what the classes mean.
    """

    ids: np.ndarray
    labels: np.ndarray
    tokens: tuple[str, ...]
    label_names: tuple[str, ...]


def majority(
    length: int, *, examples: int = 1000, flipped: float = 0.25, seed: int = 0
) -> tuple[SequenceData, SequenceData]:
    """Training and test set of the majority task: is there more than half of ones among `length` bits?

    The number of ones is uniform on 0…`length`. After the labels are set, every one of the training set becomes a zero
    with probability `flipped`: the authors' code takes .25, their paper says that a small percentage is flipped. The
    draws come in the order of their code, so a seed gives their sets.

    Raises:
        InputError: for a length or a number of examples below 1, or a probability outside 0…1.
    """
    if length < 1 or examples < 1:
        raise InputError(f"length {length} and examples {examples} must be whole numbers from 1 on")
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
    """ListOps expressions, e.g. `( ( ( [MAX 4 ) 7 ) ] )`, as ids, padded on the right to `width` or else the longest.

    Round brackets are left out; the padding is part of what the authors' models read. Random ones come from
    `listops_expressions`.

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
