"""Result of retrieval: accuracy by task and context length, and ratios between models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.render.blocks import Block
from ssmscope.render.html import folded_away
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell as Number
from ssmscope.render.table import Line, Table, frame_table, number_cell, shown_names, table

SIGNIFICANCE = 0.05
"""Two models differ in a cell if the interval of their ratio excludes 1 and the sign test's p is below this."""


@dataclass(frozen=True)
class Cell:
    """Accuracy of one model at one task and length."""

    tokens: float
    """Mean tokens of a prompt with its question, by the model's own tokenizer."""
    accuracy: Estimate
    """Wilson's interval."""
    constrained: Estimate
    """Accuracy among the candidates; Wilson's interval."""
    log_probability: Estimate
    """The mean log-probability of the answer's first token, in nats; bootstrap interval."""


@dataclass(frozen=True)
class Ratio:
    """Accuracy of the first model / accuracy of another on the same questions."""

    value: Estimate
    """Ratio with a paired bootstrap interval, whose end can be infinite; not defined if the other is never right."""
    p: float
    """p of the exact sign test on the questions that only one of the two gets right."""

    @property
    def written(self) -> str:
        """Ratio with two decimal places while it is small, and * if it differs from 1."""
        value = self.value.value
        return number(value, 2 if value < 100 else 0) + "*" * self.differs

    @property
    def differs(self) -> bool:
        """Return True if the interval excludes 1 and the sign test agrees; a few questions show no difference even if
        all their resamples do."""
        return (self.value.low > 1 or self.value.high < 1) and self.p < SIGNIFICANCE


NO_RATIO = Ratio(Estimate(math.nan, math.nan, math.nan), math.nan)


@dataclass(frozen=True)
class Retrieval(Result, kind="retrieval"):
    """Accuracy by task and context length, of one or several models on the same questions."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    chance: tuple[float, ...]
    """1 / candidates of every task."""
    cells: tuple[tuple[tuple[Cell, ...], ...], ...]
    """[model][task][length]."""
    ratios: tuple[tuple[tuple[Ratio, ...], ...], ...]
    """[other model][task][length]: ratio of the first model to each of the others."""
    right: np.ndarray
    """(models, tasks, lengths, examples) bool: True where the answer is right."""
    log_probability: np.ndarray
    """(models, tasks, lengths, examples) float32: log-probability of the answer's first token, in nats."""
    notes: tuple[str, ...]

    @property
    def examples(self) -> int:
        return self.right.shape[-1]

    @property
    def counted(self) -> str:
        split, filler = self.provenance["data"]["split"], self.provenance["options"]["filler"]
        return f"{counted(self.examples, 'question')} per cell, {split}; filler {filler}"

    def mean(self, model: int, length: int) -> float:
        """Return the mean accuracy over the tasks at one of the lengths."""
        return float(self.right[model, :, self.lengths.index(length)].mean())

    def verdict(self, at: int = 0) -> str:
        ends = list(dict.fromkeys((self.lengths[0], self.lengths[-1])))
        means = " and ".join(f"{self.mean(at, length):.3f} at {length:,} tokens" for length in ends)
        number = len(self.tasks)
        return f"accuracy {means}, {'mean of ' if number > 1 else ''}{counted(number, 'task')}"

    @classmethod
    def compare(cls, results: Sequence[Retrieval], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        more: list[str] = []
        for result, label in zip(results, labels):
            for name, rows in zip(shown_names(label, result.models), result.cells):
                for task, row in zip(result.tasks, rows):
                    cells = {f"accuracy at {n:,}": Number(cell.accuracy) for n, cell in zip(result.lengths, row)}
                    more += cells
                    lines.append(Line((name, task), cells, task))
        return table(("model", "task"), lines, more=more, note="Lengths are in tokens of context.")

    @property
    def headline(self) -> str:
        ends = self.lengths if len(self.lengths) == 1 else (self.lengths[0], self.lengths[-1])
        found = [
            f"{name} " + " and ".join(f"{self.mean(number, n):.3f} at {n:,}" for n in ends)
            for number, name in enumerate(self.models)
        ]
        tasks = self.tasks[0] if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        return f"Retrieval, accuracy on {tasks} by context tokens: {'; '.join(found)}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per model, task and length. Columns: model, task, length, tokens, examples, accuracy,
        constrained, log_probability, chance, and in the rows of the other models ratio (the first model's accuracy /
        theirs), p (of the sign test) and differs; the 95 % interval of each is in columns ending in _low and _high."""
        rows = []
        for model, name in enumerate(self.models):
            for row, task in enumerate(self.tasks):
                for column, length in enumerate(self.lengths):
                    cell = self.cells[model][row][column]
                    ratio = self.ratios[model - 1][row][column] if model else NO_RATIO
                    line: dict[str, Any] = {"model": name, "task": task, "length": length}
                    line |= {"tokens": cell.tokens, "examples": self.examples}
                    shown = {"accuracy": cell.accuracy, "constrained": cell.constrained}
                    line |= with_intervals(**shown, log_probability=cell.log_probability)
                    if self.ratios:
                        line |= {**with_intervals(ratio=ratio.value), "p": ratio.p, "differs": ratio.differs}
                    rows.append({**line, "chance": self.chance[row]})
        return pd.DataFrame(rows)

    def blocks(self) -> Iterable[Block]:
        yield from self.opening(f"{self.counted}; context tokens of the first model's tokenizer.", notes=self.notes)
        for name, rows in zip(self.models, self.cells):
            lines = []
            for task, row, chance in zip(self.tasks, rows, self.chance):
                cells = {f"{n:,}": Number(cell.accuracy, digits=2) for n, cell in zip(self.lengths, row)}
                lines.append(Line((task,), {**cells, "chance": number_cell(chance)}))
            yield self._grid(f"accuracy of {name}", lines, "Intervals are Wilson's.")
        note = "* the interval excludes 1, and the sign test has p < 0.05. Intervals: paired bootstrap over questions."
        for name, ratios in zip(self.models[1:], self.ratios):
            lines = []
            for task, each in zip(self.tasks, ratios):
                cells = {f"{n:,}": Number(one.value, one.written, 2) for n, one in zip(self.lengths, each)}
                lines.append(Line((task,), cells))
            yield self._grid(f"accuracy of {self.models[0]} / accuracy of {name} (* differs)", lines, note)
        frame, above = self.to_frame(), ("accuracy", "ratio", "differs", "chance", "examples")
        rest = [name for name in map(str, frame) if not name.startswith(above)]
        yield folded_away("All numbers", lambda: frame_table(frame[rest], limit=TABLE_ROWS))

    def _grid(self, title: str, lines: Sequence[Line], note: str) -> Table:
        return replace(table(("task",), lines, note=note), title=title)
