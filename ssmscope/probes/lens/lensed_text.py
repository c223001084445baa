"""Readings of a lens in one text, and the columns that views make of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ssmscope.render.colours import SHADES

STATISTICS = {
    "answer_probability": "probability of the final answer",
    "top_probability": "probability of the layer's own answer",
    "entropy": "entropy, nats",
    "cross_entropy": "cross-entropy to the next token, nats",
    "kl": "KL(model ‖ lens), nats",
}
"""Statistics of every layer and position, with their names in the views."""


@dataclass(frozen=True)
class LensedText:
    """Readings of one text; arrays are (layers + 1, positions), the last row being the model itself."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    positions: np.ndarray
    """Positions that were read, (positions,)."""
    answer_probability: np.ndarray
    """q_i of the final answer."""
    top_probability: np.ndarray
    """q_i of the layer's own answer."""
    entropy: np.ndarray
    cross_entropy: np.ndarray
    """Cross-entropy to the next token; NaN at the last one, and everywhere for a classifier."""
    kl: np.ndarray
    """KL(p ‖ q_i)."""
    top: np.ndarray
    """The layer's own answer, the id of a token or class."""
    answers: tuple[tuple[str, ...], ...]
    """Names of these answers."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def final(self) -> tuple[str, ...]:
        """Names of the model's own answers."""
        return self.answers[-1]

    @cached_property
    def agrees(self) -> np.ndarray:
        """True where a layer's answer is the final one, (layers + 1, positions)."""
        return self.top == self.top[-1]

    @cached_property
    def settled(self) -> np.ndarray:
        """The first layer from which on the final answer leads, (positions,)."""
        stays = np.logical_and.accumulate(self.agrees[::-1])[::-1]
        return stays.argmax(0)


@dataclass(frozen=True)
class Column:
    """One position of a text: a column of the views, or a line in a terminal."""

    text: LensedText
    number: int
    """Index of the text."""
    at: int
    """Index of the position in the text's arrays."""

    @property
    def position(self) -> int:
        return int(self.text.positions[self.at])

    @property
    def token(self) -> str:
        return self.text.tokens[self.position]

    @property
    def settled(self) -> int:
        return int(self.text.settled[self.at])

    def answer(self, layer: int) -> str:
        return self.text.answers[layer][self.at]

    def agrees(self, layer: int) -> bool:
        return bool(self.text.agrees[layer, self.at])

    def value(self, statistic: str, layer: int) -> float:
        return float(getattr(self.text, statistic)[layer, self.at])


def highest(columns: Iterable[Column], statistic: str) -> float:
    """Return the end of a statistic's colour scale: 1 for probabilities, else the highest value of the columns."""
    if statistic.endswith("probability"):
        return 1.0
    values = np.array([getattr(column.text, statistic)[:, column.at] for column in columns])
    return 1.0 if np.isnan(values).all() else max(float(np.nanmax(values)), 1e-9)


def shade(value: float, high: float) -> int | None:
    """Return the index of a value's shade on a scale from 0 to `high`; None for NaN."""
    return None if math.isnan(value) else round(min(max(value / high, 0.0), 1.0) * (SHADES - 1))
