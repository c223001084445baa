"""Words as groups of tokens, and the words that stand out."""

from __future__ import annotations

import math
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending

Kind = Literal["share", "mean", "z"]
NOISE_VARIATION = 0.1
"""Coefficient of variation over tokens below which a row is noise."""
MIN_EVEN_MULTIPLE = 1.5
"""Smallest multiple of its even share of a word that stands out."""
MIN_DEVIATIONS = 1.0
MAX_HALF_LIFE = 256
"""Largest half-life, in tokens, that is measured over a data set."""
SHOWN_HIGHEST, SHOWN_LOWEST = 10, 5
"""Number of words that views of a data set show from each end."""
WORDS_PER_NAMED_WORD = 3
"""Number of words of a text per word that may be named."""


@dataclass(frozen=True)
class KeptWord:
    """Word of a data set, lower case, and its mean score over its occurrences."""

    word: str
    texts: int
    """Number of texts in which it occurs."""
    count: int
    kept: Estimate
    """Score; with survival in units of an even share, a word's share times the number of words in its text."""


def word_groups(words: Sequence[int | None]) -> list[list[int]]:
    """Return the positions of each word, of neighbouring tokens only; a special token is its own word."""
    groups: list[list[int]] = []
    before = None
    for position, word in enumerate(words):
        if word is None or word != before:
            groups.append([position])
        else:
            groups[-1].append(position)
        before = word
    return groups


def word_text(tokens: Sequence[str], group: Sequence[int]) -> str:
    """Return a word as one token."""
    return "".join(tokens[at] for at in group)


def word_scores(scores: np.ndarray, groups: Sequence[Sequence[int]], *, summed: bool) -> np.ndarray:
    """Combine scores (…, tokens) into those of words, (…, groups): sums where scores are shares, else means."""
    if len(groups) in (0, scores.shape[-1]):
        return scores
    sizes, places = np.array(list(map(len, groups))), np.fromiter(chain.from_iterable(groups), dtype=np.int64)
    found = np.add.reduceat(scores[..., places], np.cumsum(sizes) - sizes, axis=-1)
    return found if summed else found / sizes.astype(found.dtype)


def is_punctuation(word: str) -> bool:
    """Return True if a word has only punctuation, symbols of the keyboard and white space."""
    return all(c.isspace() or c in string.punctuation or unicodedata.category(c)[0] == "P" for c in word)


UNKNOWN = "[UNK]"
"""Name of words of which the tokenizer knows no token."""


def is_selective(quantity: np.ndarray) -> bool:
    """Return True if the coefficient of variation over ordinary tokens of what is written, or left, is at least 0.1.

    Retention 1 − Δ|A| varies little even in a layer that selects: the test is on what is replaced.
    """
    if not quantity.size:
        return False
    mean = float(np.abs(quantity).mean())
    return mean > 0 and float(quantity.std()) >= NOISE_VARIATION * mean


Words = tuple[list[list[int]], np.ndarray]
"""Words of a text: the positions of each word's tokens, and the numbers of the words that may be named."""


def words_of(tokens: Sequence[str], words: Sequence[int | None], *, punctuation: bool) -> Words:
    """Return the words of a text without special tokens; punctuation may be named only with `punctuation`."""
    groups = [group for group in word_groups(words) if words[group[0]] is not None]
    allowed = [at for at, group in enumerate(groups) if punctuation or not is_punctuation(word_text(tokens, group))]
    return groups, np.array(allowed, dtype=np.int64)


def standing_out(words: Words, scores: np.ndarray, kind: Kind, top: int) -> tuple[tuple[int, ...], ...]:
    """Return the words that stand out, as the positions of their tokens, the highest first, ties by position: at most
    `top`, and at most a third of the text's words.

    A word stands out if its share of the state is at least 1.5 times that of an even spread over the words; if its
    "mean" score is a standard deviation above the mean of the words; or if its z-score is at least 1.
    """
    groups, allowed = words
    if not len(allowed):
        return ()
    found = word_scores(scores.astype(np.float64), groups, summed=kind == "share")
    limit = MIN_DEVIATIONS
    if kind == "share":
        limit = MIN_EVEN_MULTIPLE * float(found.sum()) / len(groups)
    elif kind == "mean":
        limit = float(found[allowed].mean() + MIN_DEVIATIONS * found[allowed].std())
    high = allowed[(found[allowed] > 0) & (found[allowed] >= limit)]
    most = max(min(top, len(allowed) // WORDS_PER_NAMED_WORD), 1)
    return tuple(tuple(groups[at]) for at in high[descending(found[high])][:most])


BEYOND = "beyond the text"


def median_half_life(found: np.ndarray) -> str:
    """Format the median of half-lives in tokens, without those of last tokens (NaN); `BEYOND` where it is infinite."""
    known = found[~np.isnan(found)]
    if not known.size:
        return "–"
    middle = float(np.median(known))
    return f"{middle:.0f}" if math.isfinite(middle) else BEYOND


def format_half_life(found: float, longest: int = MAX_HALF_LIFE) -> str:
    """Format a half-life over a data set, in which none of more than `longest` tokens can be seen."""
    return f"{found:.0f}" if math.isfinite(found) else f"> {longest}"


def shown_words(words: Sequence[KeptWord]) -> tuple[KeptWord, ...]:
    """Return the words that views show, in their order: those whose intervals begin highest or end lowest."""
    upper = descending(np.array([each.kept.low for each in words]))[:SHOWN_HIGHEST].tolist()
    order = descending(np.array([-each.kept.high for each in words])).tolist()
    lower = [at for at in order if at not in upper][:SHOWN_LOWEST]
    return tuple(words[at] for at in sorted({*upper, *lower}))
