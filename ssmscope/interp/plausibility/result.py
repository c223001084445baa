"""Agreement of explanations with human rationales: every text's measures, their means, and their views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.interp.plausibility.measures import MEASURES
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, Table, table, with_interval


@dataclass(frozen=True)
class Plausibility(Result, kind="plausibility"):
    """Agreement of methods' scores with human rationales."""

    methods: tuple[str, ...]
    values: np.ndarray
    """(methods, texts, measures): the measures of every text, in the order of `MEASURES`."""
    estimates: tuple[Estimate, ...]
    """Means over texts, method by method, measure by measure."""
    texts: tuple[int, ...]
    """Numbers of the texts with a rationale."""
    share: float
    """Mean share of tokens that is marked."""
    chance: float
    """Expected AUPRC of random scores on these texts."""
    top: int | float
    """Number of tokens, or share of them, in a rationale."""
    left_out: int
    """Number of texts without a rationale."""
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        model = self.model_name
        return f"Plausibility on {model}: {self.verdict()}, {counted(len(self.texts), 'rationale')}"

    def verdict(self, at: int = 0) -> str:
        numbers = iter(self.estimates)
        auprc = {name: (next(numbers), next(numbers), next(numbers))[2] for name in self.methods}
        best = self.methods[descending(np.array([each.value for each in auprc.values()]))[0]]
        return f"AUPRC {with_interval(auprc[best])} of {best}, the best of {len(auprc)}; chance {self.chance:.3f}"

    @classmethod
    def compare(cls, results: Sequence[Plausibility], labels: Sequence[Sequence[str]]) -> Table:
        lines = [
            replace(line, labels=(label, *line.labels))
            for result, (label,) in zip(results, labels)
            for line in result._lines()
        ]
        return table(("model", "method"), lines, more=MEASURES.values())

    def _lines(self) -> list[Line]:
        numbers, peers = iter(self.estimates), object()
        return [
            Line((method,), {name: Cell(next(numbers)) for name in MEASURES.values()}, peers) for method in self.methods
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return a row per method and measure: columns method, measure, value, low, high (its 95 % interval), texts."""
        names = [(method, measure) for method in self.methods for measure in MEASURES]
        rows = [(*name, e.value, e.low, e.high, len(self.texts)) for name, e in zip(names, self.estimates)]
        return pd.DataFrame(rows, columns=["method", "measure", "value", "low", "high", "texts"])

    def blocks(self) -> Iterable[Block]:
        size = f"{100 * self.top:.1f} % of the" if isinstance(self.top, float) else f"{self.top}"
        yield from self.opening()
        yield table(("method",), self._lines(), more=MEASURES.values())
        yield Prose(
            f"Rationales of {size} tokens, where people marked {100 * self.share:.1f} %. The AUPRC of random scores is "
            f"{self.chance:.3f}."
        )
        if self.left_out:
            yield Prose(f"Note: {self.left_out:,} texts have no rationale and are left out.")
        yield from (Prose(f"Note: {note}.") for note in self.notes)
