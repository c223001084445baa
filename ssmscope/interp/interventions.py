"""Parts that the interventions share: the answer that is measured, its probability and logit, the check of heads."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ssmscope.core.bootstrap import estimates, resampled_means
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.objective import objective

MAX_HEADS = 256
"""Largest number of heads of a layer; with more, heads are single channels."""


def check_heads(model: Model, heads: int, instead: str) -> None:
    """Raise InputError if the heads of a layer are single channels; `instead` says what to do."""
    if heads > MAX_HEADS:
        raise InputError(f"the {heads:,} heads of {model.name} are single channels; {instead}")


def means_with_intervals(columns: Float[np.ndarray, "examples ..."], seed: int) -> Float[np.ndarray, "... three"]:
    """Return the mean over examples and its interval, all from one set of resamples; one example has no interval."""
    rows = resampled_means(columns.reshape(len(columns), -1), seed=seed)
    rows = rows if len(columns) > 1 else rows[:1]
    return estimates(rows.reshape(len(rows), *columns.shape[1:]))


def answer_ids(model: Model, batch: Batch, answer: int | str | None) -> tuple[list[int], list[str]]:
    """Return for every text the id and the name of the class or token in question; by default the predicted one."""
    goal = objective(model, batch, target=answer)
    if goal.continues:
        raise InputError(
            f"the answer {answer!r} has several tokens; give one, with the space before it where it has one"
        )
    return [ids[0] for ids in goal.targets], list(goal.names)


def probability_and_logit(model: Model, logits: Tensor, answer: int) -> tuple[Tensor, Tensor]:
    """Return the answer's probability and logit in every row of logits (rows, classes), float64."""
    precise = logits.double()
    return model.probabilities(precise)[:, answer], precise[:, answer]
