"""Tokens put together as words, and the words that stand out."""

from __future__ import annotations

import math
import string
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["share", "mean", "z"]
NOISE = 0.1
"""The coefficient of variation over tokens below which a row is noise."""
EVEN = 1.5
"""How many times its even share a word holds at least that stands out; of other scores, how many standard deviations
above the mean it lies is `APART`."""
APART = 1.0
HORIZON = 256
"""Up to how many tokens half-lives over a data set are looked for."""
HIGH, LOW = 10, 5
"""Number of words that views of a data set show from both ends."""
SHARE = 3
"""At most one in so many words is named."""


def grouped(words: Sequence[int | None]) -> list[list[int]]:
    """The positions of each word, of neighbouring tokens alone; a special token stands for itself."""
    groups: list[list[int]] = []
    before = None
    for position, word in enumerate(words):
        if word is None or word != before:
            groups.append([position])
        else:
            groups[-1].append(position)
        before = word
    return groups


def joined(tokens: Sequence[str], group: Sequence[int]) -> str:
    """A word as one token."""
    return "".join(tokens[at] for at in group)


def together(scores: np.ndarray, groups: Sequence[Sequence[int]], *, summed: bool) -> np.ndarray:
    """Scores (…, tokens) of words, (…, groups): the sum of their tokens' where scores are shares, else the mean."""
    return _put_together(scores, *_places(groups), summed) if groups else scores


def _places(groups: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The positions of all words, one word after the other, and how many each has."""
    return np.array([at for group in groups for at in group]), np.array([len(group) for group in groups])


def _put_together(scores: np.ndarray, positions: np.ndarray, sizes: np.ndarray, summed: bool) -> np.ndarray:
    if len(sizes) == scores.shape[-1]:  # every token is a word
        return scores
    found = np.add.reduceat(scores[..., positions], np.cumsum(sizes) - sizes, axis=-1)
    return found if summed else found / sizes.astype(found.dtype)


def is_punctuation(word: str) -> bool:
    """Whether a word has nothing but punctuation, symbols of the keyboard and white space."""
    return not word.isalnum() and all(
        c.isspace() or c in string.punctuation or unicodedata.category(c)[0] == "P" for c in word
    )


def varies(quantity: np.ndarray) -> bool:
    """Whether the spread of a row is more than noise: whether the coefficient of variation of what is written,
    or left, is at least 0.1 over the ordinary tokens (tokens,).

    A layer whose steps Δ hardly vary does not select, and its retention 1 − Δ|A| varies less still: the test is on
    what is replaced, which is proportional to Δ where steps are small.
    """
    mean = float(np.abs(quantity).mean()) if quantity.size else 0.0
    return mean > 0 and float(quantity.std()) >= NOISE * mean


class Words(NamedTuple):
    """The positions of each word's tokens, these as `_places`, and which words may be named."""

    groups: list[list[int]]
    positions: np.ndarray
    sizes: np.ndarray
    allowed: np.ndarray


@lru_cache(maxsize=4)
def words_of(tokens: tuple[str, ...], words: tuple[int | None, ...], *, punctuation: bool) -> Words:
    """The words of a text, special tokens apart; with `punctuation` it may be named too."""
    groups = [group for group in grouped(words) if words[group[0]] is not None]
    allowed = [at for at, group in enumerate(groups) if punctuation or not is_punctuation(joined(tokens, group))]
    return Words(groups, *_places(groups), np.array(allowed, dtype=np.int64))


def standing_out(words: Words, scores: np.ndarray, kind: Kind, top: int) -> tuple[tuple[int, ...], ...]:
    """The words that stand out, as the positions of their tokens, the highest first, ties by position: at most `top`,
    and at most a third of the text's words.

    A word stands out whose share of the state is at least 1.5 times that of an even spread over the words; whose score
    is a standard deviation above the mean of the words; or, of scores that are z-scores, that is at least 1.

    Args:
        scores: (tokens,).
        kind: whether scores add up over the tokens of a word ("share"), or are averaged ("mean"; "z" of z-scores).
    """
    groups, positions, sizes, allowed = words
    if not len(allowed):
        return ()
    found = _put_together(scores.astype(np.float64, copy=False), positions, sizes, kind == "share")
    of_allowed = found if len(allowed) == len(found) else found[allowed]
    limit = APART
    if kind == "share":
        limit = EVEN * float(found.sum()) / len(groups)
    elif kind == "mean":
        limit = float(of_allowed.mean() + APART * of_allowed.std())
    high = allowed[(of_allowed > 0) & (of_allowed >= limit)]
    most = max(min(top, len(allowed) // SHARE), 1)
    if len(high) > most:  # the others need not be put in order
        high = high[found[high] >= np.partition(found[high], -most)[-most]]
    high = high[np.argsort(-found[high], kind="stable")]
    return tuple(tuple(groups[at]) for at in high[:most])


def half_life(found: np.ndarray, length: int) -> str:
    """The median of half-lives in tokens; where most of what is written outlives the text, that it does."""
    if not found.size:
        return "–"
    middle = float(np.median(found))
    return f"{middle:.0f}" if math.isfinite(middle) else f"more than {length}"


def tokens_of(found: float) -> str:
    """A half-life over a data set in figures."""
    return f"{found:.0f}" if math.isfinite(found) else f"> {HORIZON}"
