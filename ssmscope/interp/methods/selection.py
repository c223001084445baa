"""Methods that read the memory itself: what is left of every token, and what is kept or written at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ssmscope.interp.explain.result import Scores

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.trace import LayerTrace
    from ssmscope.interp.objective import Objective


def check_survival(model: Model) -> None:
    """Raise InputError if a model has no memory in which something could be left."""
    model.check_recurrent_state("the method survival")


def survival(objective: Objective) -> Scores:
    """Share of token t in the states after the text's last token, averaged over layers: see
    `ssmscope.ops.survival.shares`.

    It is of the text alone, whatever the target: what the model still has of a token, and not what it makes of it.
    """
    mask, model = objective.batch.mask, objective.model
    check_survival(model)
    total = torch.zeros(mask.shape, dtype=torch.float64)

    def add(_: int, rows: Sequence[int], layer: LayerTrace) -> None:
        left = layer.survival().double().cpu()
        total[list(rows), : left.shape[1]] += left / model.num_layers

    model.trace(objective.batch, keep_inputs=False, visit=add)
    return Scores(total.masked_fill(~mask.cpu(), 0).float())


def self_retention(objective: Objective) -> Scores:
    """E[A_t], the mean of the retention gate over layers, channels (or heads) and states (Baleen, Eq. 10).

    It is of the text alone, whatever the target: the average of `selection_heatmap`.
    """
    objective.model.check_recurrent_state("the method self-retention, or self-write,")
    retention = objective.model.trace(objective.batch, keep_inputs=False).retention.cpu().double().mean(0)
    return Scores(retention.masked_fill(~objective.batch.mask.cpu(), 0).float())


def self_write(objective: Objective) -> Scores:
    """1 − E[A_t]: the share of the memory that is overwritten."""
    kept = self_retention(objective).scores
    return Scores((1 - kept).masked_fill(~objective.batch.mask.cpu(), 0))
