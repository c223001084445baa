"""Labelled sequences of token ids: the majority task and ListOps as in Generalization Error Analysis for Selective
State-Space Models (Honarpisheh et al.), section 5."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from ssmscope.core.batching import refuse_above, refuse_held
from ssmscope.data.tokens import SequenceData
from ssmscope.errors import InputError, check_whole

OPERATORS: Mapping[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda ordered: (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2,
    "[SM": lambda ordered: sum(ordered) % 10,
}
"""Operators with the value of ordered digits."""
LISTOPS = (*"0123456789", *OPERATORS, "]", "[PAD]")
"""Tokens of ListOps in the order of their ids; the last is padding."""

MAX_DEPTH, MAX_VALUES, NESTING_PROBABILITY = 10, 10, 0.25
"""Number of levels, of which the last has digits only; maximum number of values of an expression; probability that a
value is an expression."""
LENGTH_TOLERANCE, MIN_LENGTH, MAX_LENGTH = 4, 8, 2000
"""Maximum difference between an expression's length and the requested one, and the range of these, in tokens."""


def majority(
    length: int, *, examples: int = 1000, flipped: float = 0.25, seed: int = 0
) -> tuple[SequenceData, SequenceData]:
    """Draw a training and a test set of the majority task: are more than half of `length` bits ones?

    The number of ones is uniform on 0…`length`. After the labels are set, every one of the training set becomes a zero
    with probability `flipped`: .25 in the authors' code, "a small percentage" in their paper. The order of the draws is
    that of their code, so a seed gives their sets.
    """
    check_whole(1, length=length, examples=examples)
    check_whole(0, seed=seed)
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

    train, test = draw(), draw()
    train[0][(random.rand(examples, length) < flipped) & (train[0] == 1)] = 0
    named = ("0", "1"), ("more zeros", "more ones")
    return SequenceData("majority", "train", *train, *named), SequenceData("majority", "test", *test, *named)


def listops(
    texts: Sequence[str], labels: Sequence[int], *, split: str = "all", width: int | None = None
) -> SequenceData:
    """Encode ListOps expressions, e.g. `( ( ( [MAX 4 ) 7 ) ] )`, as ids padded on the right to `width` or the longest.
    Round brackets are left out; the authors' models read the padding too. `listops_expressions` draws random ones."""
    if not texts or len(texts) != len(labels):
        raise InputError(f"{len(texts)} expressions and {len(labels)} labels: as many of each are needed, at least one")
    ids = {token: i for i, token in enumerate(LISTOPS)}
    rows = [re.sub(r"[()]", " ", text).split() for text in texts]
    unknown = sorted({token for row in rows for token in row if token not in ids})
    if unknown:
        raise InputError(f"{unknown[0]!r} is not a token of ListOps; these are: {' '.join(LISTOPS)}")
    longest = max(map(len, rows))
    if width is not None and width < longest:
        raise InputError(f"width is {width}, and an expression has {longest} tokens; give at least that")
    table = np.full((len(rows), width or longest), ids["[PAD]"], dtype=np.int64)
    for line, row in zip(table, rows):
        line[: len(row)] = [ids[token] for token in row]
    digits = tuple("0123456789")
    return SequenceData("listops", split, table, np.asarray(labels, dtype=np.int64), LISTOPS, digits)


def listops_expressions(length: int, *, examples: int = 1000, seed: int = 0) -> tuple[SequenceData, SequenceData]:
    """Draw a training and a test set of random ListOps expressions of about `length` tokens.

    Lengths are from `length` − 4 to `length` + 4, as in the authors' files (T = 100: 96 to 104), and every row of `ids`
    is padded on the right to `length` + 4. Each set has its own random stream, and no expression occurs twice, within a
    set or across them. A length outside 8 to 2,000, no example, or a seed below 0 raises InputError.

    ListOps (Nangia and Bowman 2018) nests lists of digits under an operator: `[MAX 4 7 [MIN 2 9 ] ]` is 7. `[SM` is the
    sum modulo 10; `[MED` of an even number of values is the mean of the middle two, rounded down. The expressions have
    the distribution of the files used by the authors of the selective SSM (Honarpisheh et al., B.3),
    which is that of Long Range Arena (Tay et al. 2020): a value is an expression with probability 1/4, else a
    digit; an expression has 2 to 10 values, uniformly; the tenth level has digits only; digits and operators are
    uniform; and only expressions within 4 tokens of the requested length are kept.

    Rejection sampling would keep one in a thousand expressions at 96 to 104 tokens. Instead, the length of an
    expression is drawn and, from the outside in, its number of values and the length of each, given what remains.
    """
    check_whole(MIN_LENGTH, length=length)
    refuse_above(MAX_LENGTH, length=length)
    check_whole(1, examples=examples)
    check_whole(0, seed=seed)
    refuse_held(length * examples, f"{examples:,} expressions of {length:,} tokens", "ask for fewer or shorter ones")
    drawn: set[str] = set()
    trees = _Trees(length)

    def draw(split: str, stream: np.random.SeedSequence) -> SequenceData:
        random = np.random.default_rng(stream)
        texts: list[str] = []
        while len(texts) < examples:
            text = " ".join(trees.expression(random))
            if text not in drawn:
                drawn.add(text)
                texts.append(text)
        return listops(texts, [evaluate(text) for text in texts], split=split, width=length + LENGTH_TOLERANCE)

    first, second = np.random.SeedSequence(seed).spawn(2)
    return draw("train", first), draw("test", second)


def evaluate(text: str) -> int:
    """Return the value of a ListOps expression or digit, 0 to 9; round brackets are ignored."""
    outer: list[tuple[str, list[int]]] = []
    values: list[int] = []  # They belong to the innermost open expression, or at the end to the whole.
    shown = text if len(text) <= 40 else text[:39] + "…"
    for token in text.replace("(", " ").replace(")", " ").split():
        if token in OPERATORS:
            outer.append((token, values))
            values = []
        elif token == "]" and outer and values:
            operator, around = outer.pop()
            around.append(OPERATORS[operator](sorted(values)))
            values = around
        elif len(token) == 1 and token in "0123456789":
            values.append(int(token))
        else:
            raise InputError(f"{token!r} has no place in the expression '{shown}'")
    if outer or len(values) != 1:
        what = f"{len(outer)} unclosed brackets" if outer else f"{len(values)} values"
        raise InputError(f"'{shown}' has {what}; give one expression, e.g. [MAX 4 7 ]")
    return values[0]


class _Trees:
    """Sampler of expressions of about `length` tokens. `rows[level][k, n]` is the probability that k consecutive values
    at that level have n tokens together; a value has 1 token, or 2 more than the values that it holds."""

    def __init__(self, length: int) -> None:
        longest = length + LENGTH_TOLERANCE
        digit = np.zeros(longest + 1)
        digit[1] = 1.0
        self.rows = {MAX_DEPTH: _consecutive(digit)}
        for level in reversed(range(1, MAX_DEPTH)):
            held = self.rows[level + 1][2:].mean(0)
            one = (1 - NESTING_PROBABILITY) * digit
            one[2:] += NESTING_PROBABILITY * held[:-2]
            self.rows[level] = _consecutive(one)
        self.shortest = length - LENGTH_TOLERANCE
        self.lengths = self.rows[1][1, self.shortest :]

    def expression(self, random: np.random.Generator) -> list[str]:
        size = self.shortest + _drawn(self.lengths, random)
        digits = iter(random.integers(0, 10, size).tolist())
        operators = iter(random.integers(0, len(OPERATORS), size).tolist())
        tokens, names = list[str](), list(OPERATORS)

        def nested(level: int, size: int) -> None:
            tokens.append(names[next(operators)])
            held = self.rows[level + 1]
            rest = size - 2
            number = 2 + _drawn(held[2:, rest], random)
            for one in self._sizes(held, number, rest, random):
                if one == 1:
                    tokens.append(str(next(digits)))
                else:
                    nested(level + 1, one)
            tokens.append("]")

        nested(1, size)
        return tokens

    @staticmethod
    def _sizes(held: np.ndarray, number: int, rest: int, random: np.random.Generator) -> Iterator[int]:
        """Draw the lengths of `number` values that have `rest` tokens together."""
        for others in reversed(range(1, number)):
            size = 1  # Digits come first because most values are digits.
            digit = held[1, 1] * held[others, rest - 1]
            if digit <= random.random() * held[others + 1, rest]:
                size = 2 + _drawn(held[1, 2 : rest + 1] * held[others, rest - 2 :: -1], random)
            yield size
            rest -= size
        yield rest


def _consecutive(one: np.ndarray) -> np.ndarray:
    """Compute the probability (k, n) that k values have n tokens together; one has n with probability `one[n]`."""
    rows = np.zeros((MAX_VALUES + 1, len(one)))
    rows[0, 0] = 1.0
    for k in range(1, MAX_VALUES + 1):
        rows[k] = np.convolve(rows[k - 1], one)[: len(one)]
    return rows


def _drawn(weights: np.ndarray, random: np.random.Generator) -> int:
    """Draw an index with probability proportional to its weight."""
    up_to = weights.cumsum()
    return int(up_to.searchsorted(random.random() * up_to[-1], side="right"))
