"""Token sequences with targets at some positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssmscope.data.arrays import ArrayData

IGNORED = -100
"""Target of positions without a target; torch's cross-entropy ignores it."""


@dataclass(frozen=True, eq=False)
class TokenData(ArrayData):
    """Sequences of token ids and the target at each position.

    Attributes:
        ids: (examples, length) token ids.
        targets: (examples, length) token to predict after reading that position, `IGNORED` where there is none.
        tokens: token of each id; their number is the vocabulary size.
    """

    ids: np.ndarray
    targets: np.ndarray
    tokens: tuple[str, ...]
