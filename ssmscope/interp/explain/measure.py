"""What a method of explanation says of one text."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ssmscope.errors import InputError
from ssmscope.interp.explain.result import Attribution, Scores


def attribution(name: str, found: Scores, row: int, length: int) -> Attribution:
    """The scores that a method gives the tokens of one text of a batch, and how far they can be relied on.

    Args:
        length: of the text, in tokens.

    Raises:
        InputError: a score that is not finite.
    """
    scores = found.scores[row, :length].detach().float().cpu().numpy()
    if not np.isfinite(scores).all():
        raise InputError(f"the scores of {name} for text {row} are not finite: the model is damaged")

    def at(values: Tensor | None) -> Any:
        return None if values is None else values[row].item()

    return Attribution(
        name,
        scores,
        delta=at(found.delta),
        steps=at(found.steps),
        converged=at(found.converged),
        error=at(found.error),
        rounding=found.rounding[row] if found.rounding else "",
        baseline=found.baseline,
        note=found.note,
    )
