"""Accuracy and cross-entropy on labelled data, of a language model of the labels as continuations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.bootstrap import Estimate, share
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.evaluation.evaluator import Evaluator
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
    every example, its class, and the examples with the largest loss. A language model's answer is the likeliest of the
    data's labels after the text, and its cross-entropy that of the text's label."""
    if not model.is_classifier:
        if not isinstance(data, TextData):
            raise InputError(f"{model.name} is a language model; give labelled texts, or tasks=…")
        return _summary(data, _continued(model, data), np.array(data.labels), data.label_names, seed)
    classes = class_ids(model, data)  # Classes that do not match are refused, or noted, before anything runs.
    order = sorted(range(len(data)), key=lambda row: len(data.texts[row]) if isinstance(data, TextData) else 0)

    def measure(rows: Sequence[int]) -> Columns:
        examples = scored_examples(model, data.take(rows))
        return {"values": examples.measured(model.logits(examples.batch), range(len(rows)))}

    batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]
    found = over(model, batches, measure, what="examples" if progress else None)
    values = np.concatenate([part["values"] for _, part in found])
    both = [MEASURES.index("accuracy"), MEASURES.index("loss")]
    return _summary(data, values[np.argsort(order)][:, both], classes, model.labels or (), seed)


def _continued(model: Model, data: TextData) -> Float[np.ndarray, "examples 2"]:
    """Return 1 where the text's label is the likeliest of all, else 0, and −ln p of that label."""
    found = Evaluator(model, words=data.label_names).scores(data.texts)
    own = found[np.arange(len(data)), list(data.labels)]
    return np.stack([found.argmax(1) == data.labels, -own], axis=1).astype(np.float64)


def _summary(
    data: TextData | PixelData,
    values: Float[np.ndarray, "examples 2"],
    classes: Int[np.ndarray, " examples"],
    labels: Sequence[str],
    seed: int,
) -> LabelledScores:
    right = int(values[:, 0].sum())
    accuracy = share(right, len(data))
    loss = Estimate(*means_with_intervals(values[:, [1]], seed)[0].tolist())
    name = f"{data.name} ({data.split})"
    scores = (
        TaskScore(name, "accuracy", accuracy, True, None, len(data)),
        TaskScore(name, "cross-entropy", loss, False, None, len(data)),
    )
    rows = np.argsort(-values[:, 1], kind="stable")[:MAX_WORST].tolist()
    worst = tuple((row, data.texts[row] if isinstance(data, TextData) else "") for row in rows)
    return LabelledScores(scores, values, classes, tuple(labels), worst)
