"""Scores of a classifier on labelled data, or of a language model on benchmarks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from ssmscope.api.limits import SHARES
from ssmscope.api.results import Result
from ssmscope.api.scores import HIGHER, LOWER, SHARE_UNIT, Score, ScoreMaker, unordered
from ssmscope.core.bootstrap import INTERVALS, Estimate, share
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.table import Cell, Line, Table, short_cell, table


@dataclass(frozen=True)
class TaskScore:
    task: str
    measure: str
    estimate: Estimate
    """Value with its 95 % interval, of tasks ± 1.96 of the harness's standard errors; NaN ends if it gives none."""
    higher: bool
    shots: int | None
    """Worked examples before each question; None for labelled data."""
    examples: int
    """Number of examples; 0 for a group."""

    @property
    def cell(self) -> Cell:
        """Cell of the value: a share with three decimal places, other numbers with four significant digits."""
        return Cell(self.estimate, digits=3 if abs(self.estimate.value) <= 1 else None)

    @property
    def shots_cell(self) -> dict[str, Cell]:
        return {} if self.shots is None else {"shots": short_cell(self.shots)}


@dataclass(frozen=True)
class Benchmarks(Result, kind="evaluate"):
    """Scores of a model on labelled data or on tasks of lm-evaluation-harness. `len` and iteration are over scores."""

    scores: tuple[TaskScore, ...]
    values: np.ndarray | None = None
    """(examples, scores) on labelled data, in its order; None for tasks."""
    classes: np.ndarray | None = None
    """(examples,) index into `labels` of each example's class."""
    labels: tuple[str, ...] = ()
    worst: tuple[tuple[int, str], ...] = ()
    """Row (in the data, from 0) and text, of images an empty one, of the examples with the largest loss."""

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def intervals(self) -> str:
        """Sentence on the scores' intervals."""
        version = self.provenance["versions"].get("lm-eval")
        if version is None:
            return f"{INTERVALS}, over examples; cross-entropy is in nats."
        return f"Prompts, measures and standard errors of lm-eval {version}; 95 % intervals over examples."

    @property
    def headline(self) -> str:
        told = (f"{one.measure} {one.cell.value} on {one.task}" for one in self._firsts())
        return f"Evaluation of {self.model_name}: {', '.join(told)}"

    def verdict(self, at: int = 0) -> str:
        told = ((one.measure, one.cell.value, one.cell.interval, "on", one.task) for one in self._firsts())
        return ", ".join(" ".join(filter(None, words)) for words in told)

    def _firsts(self) -> list[TaskScore]:
        return list({score.task: score for score in reversed(self.scores)}.values())[::-1]

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make = ScoreMaker(self, models)
        for at, one in enumerate(self.scores):
            is_share = 0 <= one.estimate.value <= 1 and one.measure.startswith(SHARES)
            unit = SHARE_UNIT if is_share else "nats" if one.measure == "cross-entropy" else ""
            name = one.measure if one.shots is None else f"{one.measure}[{one.task}]"
            values = {} if self.values is None else {"above": self.values[:, at]}
            each = values or (unordered(one.estimate.value, one.examples) if is_share else {})
            yield make(name, one.estimate, HIGHER if one.higher else LOWER, unit, count=one.examples, **each)

    @classmethod
    def compare(cls, results: Sequence[Benchmarks], labels: Sequence[Sequence[str]]) -> Table:
        lines = [
            replace(line, labels=(label, *line.labels))
            for result, (label,) in zip(results, labels)
            for line in result._lines()
        ]
        return table(("model", "task", "measure"), lines)

    def _lines(self) -> list[Line]:
        return [
            Line(
                (one.task, one.measure),
                {"value": one.cell, **one.shots_cell, "examples": short_cell(one.examples or math.nan)},
            )
            for one in self.scores
        ]

    def _by_class(self) -> Iterator[Line]:
        assert self.values is not None
        for at, name in enumerate(self.labels):
            right = self.values[self.classes == at, 0]
            found = share(int(right.sum()), len(right)) if len(right) else None
            yield Line((name,), {"accuracy": Cell(found, digits=3), "examples": short_cell(len(right))})

    def _worst(self) -> Iterator[Line]:
        assert self.values is not None and self.classes is not None
        for row, text in self.worst:
            right, loss = self.values[row].tolist()
            cells = {
                "loss": Cell(Estimate(loss, math.nan, math.nan), digits=2),
                "answer": Cell(text="right" if right else "wrong"),
            }
            yield Line((str(row), self.labels[self.classes[row]]), cells | ({"text": Cell(text=text)} if text else {}))

    def to_frame(self) -> pd.DataFrame:
        """Return a row per score: columns task, measure, value, low, high (95 %), higher_is_better, shots, examples."""
        names = ["task", "measure", "value", "low", "high", "higher_is_better", "shots", "examples"]
        rows = [
            (s.task, s.measure, s.estimate.value, s.estimate.low, s.estimate.high, s.higher, s.shots, s.examples)
            for s in self.scores
        ]
        return pd.DataFrame(rows, columns=names)

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        yield table(("task", "measure"), self._lines())
        without = any(math.isnan(one.estimate.low) for one in self.scores)
        if self.values is not None and self.classes is not None:
            yield table(("class",), list(self._by_class()))
            yield Prose("The largest loss", "heading")
            yield table(("row", "class"), list(self._worst()))
        yield Prose(self.intervals + " A score without a standard error has no interval." * without, "definition")
