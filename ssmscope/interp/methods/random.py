"""Random scores: what any method has to be better than."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ssmscope.interp.explain.result import Scores
from ssmscope.interp.methods.checks import drawn_from

if TYPE_CHECKING:
    from ssmscope.interp.objective import Objective


def random(objective: Objective, *, seed: int = 0) -> Scores:
    """Uniform scores from 0 to 1; of a text and a seed always the same, whatever the batch.

    Raises:
        InputError: for a negative seed.
    """
    scores = torch.zeros(objective.batch.mask.shape, dtype=torch.float32)
    for text, length in enumerate(objective.lengths):
        scores[text, :length] = torch.from_numpy(drawn_from(objective, text, seed).random(length, dtype="float32"))
    return Scores(scores)
