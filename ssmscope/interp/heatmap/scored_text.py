"""Text with the scores of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ssmscope.core.ties import descending
from ssmscope.interp.heatmap.words import UNKNOWN, is_punctuation, word_groups, word_text
from ssmscope.render.blocks import OfTokens
from ssmscope.render.tokens import visible

LIFT_WINDOW = 12
"""Number of tokens on either side that a token's share is compared with."""


def lifts(shares: np.ndarray, window: int = LIFT_WINDOW, least: float = 0.0) -> np.ndarray:
    """Return shares (rows, tokens) over the medians, at `least` so much, of those of the `window` tokens on either
    side; infinite, or NaN for 0, over a median of 0, and NaN for a single token."""
    shares = shares.astype(np.float64)
    found = np.full(shares.shape, np.nan)
    for at in range(shares.shape[1] if shares.shape[1] > 1 else 0):
        near = [place for place in range(max(at - window, 0), min(at + window + 1, shares.shape[1])) if place != at]
        with np.errstate(divide="ignore", invalid="ignore"):
            found[:, at] = shares[:, at] / np.maximum(np.median(shares[:, near], axis=1), least)
    return found


def times(lift: float) -> str:
    """Format a lift."""
    return f"{lift:,.{0 if lift >= 10 else 1}f} ×"


SHARES = ("survival", "readable")
"""Scores whose sum over a text is 1."""


@dataclass(frozen=True, eq=False)
class ScoredText(OfTokens):
    """One text and its scores. After merging, the tokens are words, and `rationale` counts in them."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    """Word index of each token; None for special tokens."""
    scores: np.ndarray
    """(layers, tokens) float32."""
    mean: np.ndarray
    """(tokens,) float32: the average over the layers."""
    rationale: tuple[int, ...]
    """Positions of the tokens of the words that stand out in the average, the highest word first."""
    answer: str
    probability: float
    pixels: np.ndarray | None = None
    """(height, width, channels) float32 for an image whose pixels are the tokens."""
    series: np.ndarray | None = None
    """(length, channels) float32, the numbers of a series whose steps are the tokens."""
    half_lives: np.ndarray | None = None
    """(layers, tokens) float32, with survival: tokens until half of a write is left; infinite beyond the text, NaN for
    the last token, which nothing follows."""
    flat: tuple[bool, ...] = ()
    """True where the spread of the average, and of each layer, is noise; empty if none is."""
    standing: tuple[tuple[int, ...], ...] = ()
    """Positions of the words that stand out, per layer."""
    heads: np.ndarray | None = None
    """(heads, tokens) float32 of the heads that are shown."""
    unknown: tuple[int, ...] = ()
    """Positions of the tokens that the tokenizer does not know."""

    def top(self, k: int, scores: np.ndarray | None = None) -> list[tuple[int, str, float]]:
        """Return (position, token, score) of the k highest tokens by the average, or by the given scores."""
        values = self.mean if scores is None else scores
        ordinary = np.flatnonzero(~self.special)
        places = ordinary[descending(values[ordinary])[:k]].tolist()
        return [(at, self.tokens[at], float(values[at])) for at in places]

    def lifted(self, layers: Sequence[int], most: int = 3) -> str:
        """Name the ordinary tokens of the highest lifts, which `scores` are, each in the layer where it is."""
        best, found = np.where(self.special, -np.inf, self.scores.astype(np.float64)).max(0), []
        for at in descending(best)[: min(most, int((~self.special).sum()))].tolist():
            layer = layers[int(self.scores[:, at].argmax())]
            name = f"“{visible(self.tokens[at]).strip() or '␣'}” (token {at})"
            found.append(f"{name} has {times(float(best[at]))} its neighbours' share in layer {layer}")
        return ", ".join(found) or "no token"

    def named(
        self, scores: np.ndarray, places: Sequence[int], *, summed: bool, quoted: bool = False
    ) -> list[tuple[str, float]]:
        """Return the words at some places, in their order, with their scores: the sum or the mean of their tokens'."""
        groups = {group[0]: group for group in word_groups(self.words)}
        found = []
        for group in (groups[at] for at in places if at in groups):
            values = scores[group].astype(np.float64)
            found.append((self._name(group, quoted), float(values.sum() if summed else values.mean())))
        return found

    def marks(self, scores: np.ndarray) -> list[tuple[str, float]]:
        """Return punctuation and special tokens, outside the rationale, with the sum of their shares, the highest
        first."""
        found: dict[str, float] = {}
        for group in word_groups(self.words):
            special = self.words[group[0]] is None
            if group[0] not in self.rationale and (special or is_punctuation(word_text(self.tokens, group))):
                name = self._name(group, not special)
                found[name] = found.get(name, 0.0) + float(scores[group].sum(dtype=np.float64))
        every = list(found.items())
        return [every[at] for at in descending(np.array([share for _, share in every]))]

    def _name(self, group: Sequence[int], quoted: bool) -> str:
        """Name a word, one of which the tokenizer knows no token as `UNKNOWN`, too."""
        name = visible(word_text(self.tokens, group)).strip() or "␣" * quoted
        return (f"“{name}”" if quoted else name) + f" {UNKNOWN}" * ({*group} <= {*self.unknown})
