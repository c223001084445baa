"""Accuracy and cross-entropy of a classifier on labelled data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.bootstrap import Estimate, wilson_interval
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.interp.labelled import class_ids
from ssmscope.interp.scoring import MEASURES, means_with_intervals, scored_examples
from ssmscope.probes.evaluate.result import TaskScore

MAX_WORST = 10
"""Examples with the largest loss that a result shows."""


class LabelledScores(NamedTuple):
    """Fields of `Benchmarks` on labelled data, in their order."""

    scores: tuple[TaskScore, ...]
    values: Float[np.ndarray, "examples 2"]
    classes: Int[np.ndarray, " examples"]
    labels: tuple[str, ...]
    worst: tuple[tuple[int, str], ...]


def labelled_scores(
    model: Model, data: TextData | PixelData, batch_size: int, *, seed: int, progress: bool
) -> LabelledScores:
    """Return accuracy with Wilson's interval and cross-entropy in nats with a bootstrap interval over examples, both of
    every example, its class, and the examples with the largest loss."""
    if not model.is_classifier:
        raise InputError(f"{model.name} is a language model; give tasks=… in place of data")
    classes = class_ids(model, data)  # Classes that do not match are refused, or noted, before anything runs.
    order = sorted(range(len(data)), key=lambda row: len(data.texts[row]) if isinstance(data, TextData) else 0)

    def measure(rows: Sequence[int]) -> Columns:
        examples = scored_examples(model, data.take(rows))
        return {"values": examples.measured(model.logits(examples.batch), range(len(rows)))}

    batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    found = over(model, batches, measure, what="examples" if progress else None)
    values = np.concatenate([part["values"] for _, part in found])
    right = int(values[:, MEASURES.index("accuracy")].sum())
    accuracy = Estimate(right / len(data), *wilson_interval(right, len(data)))
    loss = Estimate(*means_with_intervals(values[:, [MEASURES.index("loss")]], seed)[0].tolist())
    name = f"{data.name} ({data.split})"
    scores = (
        TaskScore(name, "accuracy", accuracy, True, None, len(data)),
        TaskScore(name, "cross-entropy", loss, False, None, len(data)),
    )
    both = [MEASURES.index("accuracy"), MEASURES.index("loss")]
    values = values[np.argsort(order)][:, both]
    rows = np.argsort(-values[:, 1], kind="stable")[:MAX_WORST].tolist()
    worst = tuple((row, data.texts[row] if isinstance(data, TextData) else "") for row in rows)
    return LabelledScores(scores, values, classes, tuple(model.labels or ()), worst)
