"""From logits to scores: a classifier's own, the likelihood of label words, or the word that an answer names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssmscope.evaluation.verbalizer import LabelWords


class Paths(NamedTuple):
    """The label words of every class as a tree of tokens.

    Attributes:
        beginnings: the tokens before which there is something to read: none, and what several tokens begin with.
        following: per beginning the tokens that may come next there.
        steps: per class the (beginning, place among what follows it) of each of its tokens.
    """

    beginnings: tuple[tuple[int, ...], ...]
    following: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, words: LabelWords) -> Paths:
        tree: dict[tuple[int, ...], list[int]] = {}
        for ids in words.ids:
            for at, token in enumerate(ids):
                following = tree.setdefault(ids[:at], [])
                if token not in following:
                    following.append(token)
        beginnings = list(tree)
        steps = tuple(
            tuple((beginnings.index(ids[:at]), tree[ids[:at]].index(token)) for at, token in enumerate(ids))
            for ids in words.ids
        )
        return cls(tuple(beginnings), tuple(map(tuple, tree.values())), steps)

    def scores(
        self, found: Float[np.ndarray, "rows beginnings next"], *, normalise: bool
    ) -> Float[np.ndarray, "rows classes"]:
        """Σ_j log P(token_j | text, earlier tokens) of every class; divided by their number with `normalise`."""
        columns = []
        for steps in self.steps:
            total = sum(found[:, beginning, place] for beginning, place in steps)
            columns.append(total / len(steps) if normalise else total)
        return np.stack(columns, axis=1)


def log_probabilities(logits: Float[Tensor, "rows vocabulary"], tokens: Int[Tensor, "rows next"]) -> Tensor:
    """log P of these next tokens, (rows, next) float64, natural; normalised over the vocabulary in at least float32."""
    precise = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return precise.gather(1, tokens).double() - precise.logsumexp(1, keepdim=True).double()


def table(following: Sequence[Sequence[int]]) -> Int[np.ndarray, "beginnings next"]:
    """Tokens as rows of one length; the last of each stands for what is missing."""
    longest = max(map(len, following))
    return np.array([[*each, *[each[-1]] * (longest - len(each))] for each in following], dtype=np.int64)
