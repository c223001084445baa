"""What the selection mechanism itself says: retention, or writing, at every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssmscope.interp.explain.result import Scores

if TYPE_CHECKING:
    from ssmscope.interp.objective import Objective


def self_retention(objective: Objective) -> Scores:
    """score_t = E[A_t], the mean of the retention gate over layers, channels (or heads) and states (Baleen, Eq. 10).

    It is of the text alone, whatever the target: the average of `selection_heatmap`.
    """
    retention = objective.model.trace(objective.batch, keep_inputs=False).retention.cpu().double().mean(0)
    return Scores(retention.masked_fill(~objective.batch.mask.cpu(), 0).float())


def self_write(objective: Objective) -> Scores:
    """score_t = 1 − E[A_t]: how much of the memory is written anew."""
    kept = self_retention(objective).scores
    return Scores((1 - kept).masked_fill(~objective.batch.mask.cpu(), 0))
