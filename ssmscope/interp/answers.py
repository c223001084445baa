"""The answer that interventions are measured by: a class or a next token, its probability and its logit."""

from __future__ import annotations

from torch import Tensor

from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.objective import objective


def answers(model: Model, batch: Batch, answer: int | str | None) -> tuple[list[int], list[str]]:
    """For every text the id of the class or token that is asked after, and its name; by default what is predicted.

    Raises:
        InputError: there is no such class or token, or the text has several tokens.
    """
    goal = objective(model, batch, target=answer)
    if goal.continues:
        raise InputError(
            f"the answer {answer!r} has several tokens; give one, with the space before it where it has one"
        )
    return [ids[0] for ids in goal.targets], list(goal.names)


def measured(model: Model, logits: Tensor, answer: int) -> tuple[Tensor, Tensor]:
    """The answer's probability and logit in every row of logits (rows, classes), float64.

    Raises:
        InputError: for a model that gives no probabilities.
    """
    precise = logits.double()
    return model.probabilities(precise)[:, answer], precise[:, answer]
