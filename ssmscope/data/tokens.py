"""Sequences in which a language model is asked for certain tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssmscope.data.arrays import ArrayData

IGNORED = -100
"""The target where nothing is asked; torch's cross-entropy leaves it out."""


@dataclass(frozen=True, eq=False)
class TokenData(ArrayData):
    """Sequences of token ids and what should be said at each of their positions.

    Attributes:
        ids: (examples, length) token ids.
        targets: (examples, length), the token that the model should name after reading that position, `IGNORED` where
            nothing is asked.
        tokens: what the ids mean; their number is the vocabulary.
    """

    ids: np.ndarray
    targets: np.ndarray
    tokens: tuple[str, ...]
