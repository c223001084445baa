"""Words, groups of texts and layers of a heatmap over a data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssmscope.core.bootstrap import Estimate


@dataclass(frozen=True)
class KeptWord:
    """Word of a data set, lower case, and its mean score over its occurrences."""

    word: str
    texts: int
    """Number of texts in which it occurs."""
    count: int
    kept: Estimate
    """Score; with survival in units of an even share, a word's share times the number of words in its text."""


@dataclass(frozen=True)
class KeptGroup:
    """Scores of a group of texts: shares of the states, summed over words; with other scores means over words."""

    name: str
    """"all", "class NAME", "answered right" or "answered wrong"."""
    texts: int
    strongest: Estimate
    """Score of the highest word of a text that is no punctuation."""
    punctuation: Estimate
    end: Estimate
    """Score of the last quarter of the words."""
    spread: Estimate
    """Coefficient of variation over the words of a text."""
    words: tuple[str, ...]
    """Highest words."""


@dataclass(frozen=True)
class KeptLayer:
    """Scores and half-lives of a layer."""

    number: int
    half_life: float
    """Half-life in tokens, see `HalfLives`; NaN where it was not measured, infinite beyond the horizon."""
    heads: np.ndarray
    """(heads,) float64: half-lives of each head, or channel."""
    words: tuple[str, ...]
    tenths: tuple[Estimate, ...]
    """Mean score of the words in each tenth of a text; with survival in units of an even share."""
