"""Random scores, the baseline that any method has to beat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ssmscope.interp.explain.result import Scores
from ssmscope.interp.methods.checks import text_generator

if TYPE_CHECKING:
    from ssmscope.interp.objective import Objective


def random(objective: Objective, *, seed: int = 0) -> Scores:
    """Uniform scores from 0 to 1, the same for a text and a seed in any batch.

    Raises:
        InputError: for a negative seed.
    """
    scores = torch.zeros(objective.batch.mask.shape, dtype=torch.float32)
    for text, length in enumerate(objective.lengths):
        scores[text, :length] = torch.from_numpy(text_generator(objective, text, seed).random(length, dtype="float32"))
    return Scores(scores)
