"""Likelihoods of label words from next-token logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssmscope.evaluation.verbalizer import LabelWords


class LabelTree(NamedTuple):
    """Prefix tree of the tokens of every class's label word.

    Attributes:
        prefixes: the prefixes after which a next token is read, the empty one first.
        next_tokens: per prefix, the tokens that may come next.
        steps: per class, the (prefix, index in `next_tokens`) of each of its tokens.
    """

    prefixes: tuple[tuple[int, ...], ...]
    next_tokens: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, words: LabelWords) -> LabelTree:
        tree: dict[tuple[int, ...], list[int]] = {}
        for ids in words.ids:
            for at, token in enumerate(ids):
                next_tokens = tree.setdefault(ids[:at], [])
                if token not in next_tokens:
                    next_tokens.append(token)
        prefixes = list(tree)
        steps = tuple(
            tuple((prefixes.index(ids[:at]), tree[ids[:at]].index(token)) for at, token in enumerate(ids))
            for ids in words.ids
        )
        return cls(tuple(prefixes), tuple(map(tuple, tree.values())), steps)

    def scores(
        self, found: Float[np.ndarray, "rows prefixes next"], *, normalise: bool
    ) -> Float[np.ndarray, "rows classes"]:
        """Return Σ_j log P(token_j | text, earlier tokens) of every class, divided by their number with `normalise`."""
        columns = []
        for steps in self.steps:
            total = sum(found[:, prefix, place] for prefix, place in steps)
            columns.append(total / len(steps) if normalise else total)
        return np.stack(columns, axis=1)


def log_probabilities(logits: Float[Tensor, "rows vocabulary"], tokens: Int[Tensor, "rows next"]) -> Tensor:
    """Return log P of these next tokens, (rows, next) float64, natural, normalised over the vocabulary in at least
    float32."""
    precise = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return precise.gather(1, tokens).double() - precise.logsumexp(1, keepdim=True).double()


def padded_tokens(next_tokens: Sequence[Sequence[int]]) -> Int[np.ndarray, "prefixes next"]:
    """Return tokens as rows of equal length, filled up with the last token of each."""
    longest = max(map(len, next_tokens))
    return np.array([[*each, *[each[-1]] * (longest - len(each))] for each in next_tokens], dtype=np.int64)
