"""Random ListOps expressions and their values.

ListOps (Nangia and Bowman 2018) nests lists of digits under an operator: `[MAX 4 7 [MIN 2 9 ] ]` is 7. `[SM` is the
sum modulo 10; `[MED` of an even number of values is the mean of the middle two, rounded down. The expressions have the
distribution of the files used by the authors of the selective SSM (Generalization bounds for selective SSMs, B.3),
which is that of Long Range Arena (Tay et al. 2020): a value is an expression with probability 1/4, else a digit; an
expression has 2 to 10 values, uniformly; the tenth level has digits only; digits and operators are uniform; and only
expressions within 4 tokens of the requested length are kept. The round brackets of their files are left out.

Rejection sampling would keep one in a thousand expressions at 96 to 104 tokens. Instead, the probability that a value
at a level has n tokens is computed for every n; then the length of an expression is drawn and, from the outside in, its
number of values and the length of each, given the length that remains.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ssmscope.core.limits import refuse_held
from ssmscope.data.sequences import SequenceData, listops
from ssmscope.errors import InputError

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
MAX_DEPTH = 10
"""Number of levels; the outermost expression is at the first, and the last has digits only."""
MAX_VALUES = 10
"""Maximum number of values of an expression."""
NESTING_PROBABILITY = 0.25
"""Probability that a value is an expression."""
LENGTH_TOLERANCE = 4
"""Maximum difference in tokens between an expression's length and the requested one."""
MIN_LENGTH, MAX_LENGTH = 8, 2000
"""Range of requested lengths, in tokens."""


def listops_expressions(length: int, *, examples: int = 1000, seed: int = 0) -> tuple[SequenceData, SequenceData]:
    """Draw a training and a test set of random ListOps expressions of about `length` tokens.

    Lengths are from `length` − 4 to `length` + 4, as in the authors' files (T = 100: 96 to 104), and every row of `ids`
    is padded on the right to `length` + 4. Each set has its own random stream, and no expression occurs twice, within a
    set or across them.

    Args:
        length: tokens of an expression, 8 to 2,000
        examples: number of expressions of each set
        seed: number that decides the draws

    Raises:
        InputError: for another length, no example, or a seed below 0.
    """
    if not MIN_LENGTH <= length <= MAX_LENGTH:
        raise InputError(f"length is {length}; give {MIN_LENGTH} to {MAX_LENGTH}, the tokens of an expression")
    if examples < 1 or seed < 0:
        raise InputError(f"examples is {examples} and seed {seed}; give at least 1 example and a seed of at least 0")
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
    """Return the value of a ListOps expression, 0 to 9; round brackets are ignored.

    Raises:
        InputError: if the text is not a single expression or digit.
    """
    outer: list[tuple[str, list[int]]] = []
    values: list[int] = []  # They belong to the innermost open expression, or at the end to the whole.
    for token in text.replace("(", " ").replace(")", " ").split():
        if token in OPERATORS:
            outer.append((token, values))
            values = []
        elif token == "]" and outer and values:
            operator, around = outer.pop()
            around.append(_value(operator, sorted(values)))
            values = around
        elif len(token) == 1 and token in "0123456789":
            values.append(int(token))
        else:
            raise InputError(f"{token!r} has no place in the expression '{_shortened(text)}'")
    if outer or len(values) != 1:
        what = f"{len(outer)} unclosed brackets" if outer else f"{len(values)} values"
        raise InputError(f"'{_shortened(text)}' has {what}; give one expression, e.g. [MAX 4 7 ]")
    return values[0]


def _value(operator: str, ordered: list[int]) -> int:
    if operator == "[MIN":
        return ordered[0]
    if operator == "[MAX":
        return ordered[-1]
    if operator == "[SM":
        return sum(ordered) % 10
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


class _Trees:
    """Sampler of expressions of about `length` tokens.

    `rows[level][k, n]` is the probability that k consecutive values at that level have n tokens together; a value has
    1 token, or 2 more than the values that it holds.
    """

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
        tokens: list[str] = []

        def nested(level: int, size: int) -> None:
            tokens.append(OPERATORS[next(operators)])
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
