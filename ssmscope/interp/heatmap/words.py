"""The tokens of a word put together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np


def merged(
    tokens: Sequence[str], words: Sequence[int | None], scores: np.ndarray
) -> tuple[list[str], list[int | None], np.ndarray]:
    """Neighbouring tokens of the same word as one, its score the mean of theirs. `scores` is (layers,
    tokens)."""
    groups = [
        [position for _, position in group]
        for _, group in groupby(
            ((word, position) for position, word in enumerate(words)),
            key=lambda pair: (pair[0], pair[1] if pair[0] is None else None),
        )
    ]
    joined = [tokens[group[0]] + "".join(tokens[i].removeprefix("##") for i in group[1:]) for group in groups]
    means = np.stack([scores[:, group].mean(axis=1) for group in groups], axis=1) if groups else scores
    return joined, [words[group[0]] for group in groups], means
