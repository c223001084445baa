"""Cases that are all tried with SSMSCOPE_EXHAUSTIVE=all, and otherwise represented by a few."""

import itertools
import os
from collections.abc import Iterable
from typing import TypeVar

ASKED = os.environ.get("SSMSCOPE_EXHAUSTIVE")
ALL = ASKED in ("all", "1")
CONTRACTS = ALL or ASKED == "contracts"
"""Whether contracts are tried on variants of architectures too, as the run on transformers 5 does."""

A, B = TypeVar("A"), TypeVar("B")


def few(everything: Iterable[str], *chosen: str) -> list[str]:
    """The chosen ones of everything, or all of it."""
    names = list(everything)
    assert set(chosen) <= set(names)
    return names if ALL else list(chosen)


def in_turns(first: Iterable[A], second: Iterable[B], of: int = 2) -> list[tuple[A, B]]:
    """Every pair; or of each of the first every so many-th of the second, beginning one later for each."""
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [(a, b) for (i, a), (j, b) in pairs if ALL or (i + j) % of == 0]


def half(everything: Iterable[A], name: str, of: int = 2) -> list[A]:
    """Every second or so many-th one, from one on that the name of what they are tried on decides; or all of it."""
    return [each for at, each in enumerate(everything) if ALL or (at + sum(name.encode())) % of == 0]
