"""What a direction does in every strength, beside random ones, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.bootstrap import Estimate, with_intervals
from ssmscope.interp.scoring import MEASURES
from ssmscope.results import Result
from ssmscope.show.numbers import counted, number
from ssmscope.show.table import Cell, Line, Table, table, written
from ssmscope.show.tokens import shorten, visible

if TYPE_CHECKING:
    from pandas import DataFrame

    from ssmscope.show.blocks import Block

SITES = {"residual": "the residual stream before", "state": "the state of"}
ROWS = ("direction", "random", "difference")
"""What has a mean: the direction, the random ones, and the first less the second."""


@dataclass(frozen=True)
class Steering(Result, kind="steer"):
    """The answer's probability and the cost on held-out data, by the strength of a direction."""

    site: str
    layer: int
    strengths: tuple[float, ...]
    answers: tuple[str, ...]
    """Per text."""
    norm: float
    """Of the direction."""
    direction: tuple[np.ndarray, ...]
    """(width,) of the residual stream; (heads, width, state) of every recurrence's state."""
    probability: np.ndarray
    """(3, strengths, 3): for every one of `ROWS` the mean over the texts and its interval."""
    by_direction: np.ndarray
    """(1 + random directions, strengths): the mean probability with each."""
    costs: np.ndarray
    """(3, strengths, measures, 3) on the held-out data; of no measure without any."""
    classifies: bool

    @property
    def metric(self) -> str:
        """What the cost is shown by."""
        return "accuracy" if self.classifies else "loss"

    @property
    def asked(self) -> str:
        names = list(dict.fromkeys(self.answers))
        return f"“{shorten(visible(names[0]), 20)}”" if len(names) == 1 else "the predicted answers"

    @property
    def has_costs(self) -> bool:
        return self.costs.shape[2] > 0

    def means(self, row: int = 0) -> list[Estimate]:
        """The answer's probability by strength, of one of `ROWS`."""
        return [Estimate(*ends) for ends in self.probability[row].tolist()]

    def held_out(self, row: int = 0, metric: str | None = None) -> list[Estimate]:
        """A measure on the held-out data by strength."""
        return [Estimate(*ends) for ends in self.costs[row, :, MEASURES.index(metric or self.metric)].tolist()]

    @property
    def headline(self) -> str:
        where = f"{SITES[self.site]} layer {self.layer}"
        return f"Steering on {self.model_name}: {self.asked}, by {where}"

    @property
    def strongest(self) -> int:
        """The number of the strength at which the probability is farthest from that of the random directions."""
        return int(np.nanargmax(np.abs(self.probability[2, :, 0])))

    def verdict(self, at: int = 0) -> str:
        most = self.strongest
        own, drawn = self.means()[most], self.means(1)[most]
        line = (
            f"at strength {self.strengths[most]:g} the probability of {self.asked} is {written(own)}, with random "
            f"directions {written(drawn)}"
        )
        if self.has_costs:
            line += f"; {self.metric} on other data {written(self.held_out()[most])}"
        return line

    def to_frame(self) -> DataFrame:
        """A row per strength and one of `ROWS`: the probability and every measure on held-out data, with intervals."""
        import pandas as pd

        rows = []
        for row, name in enumerate(ROWS):
            for place, strength in enumerate(self.strengths):
                found = {"probability": self.means(row)[place]}
                if self.has_costs:
                    found |= {f"held_out_{each}": self.held_out(row, each)[place] for each in MEASURES}
                rows.append({"which": name, "strength": strength, **with_intervals(**found)})
        return pd.DataFrame(rows)

    @classmethod
    def compare(cls, results: Sequence[Steering], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            most = result.strongest
            cells = {
                "strength": Cell(text=f"{result.strengths[most]:g}"),
                "probability": Cell(result.means()[most]),
                "random": Cell(result.means(1)[most]),
            }
            if result.has_costs:
                cells[f"held-out {result.metric}"] = Cell(result.held_out()[most])
            lines.append(Line((label, result.site), cells))
        return table(("model", "site"), lines)

    def blocks(self) -> Iterable[Block]:
        texts = "one text" if len(self.answers) == 1 else f"{len(self.answers):,} texts"
        said = f"The probability of {self.asked} on {texts}; a direction of norm {number(self.norm)}"
        if self.has_costs:
            data = self.provenance["data"]
            said += f", and its cost on {counted(data['examples'], 'example')} of {data['name']} ({data['split']})"
        yield from self.opening(f"{said}, beside {len(self.by_direction) - 1} random directions of that norm.")
        lines = []
        for place, strength in enumerate(self.strengths):
            cells = {"probability": self.means()[place], "random": self.means(1)[place]}
            cells["difference"] = self.means(2)[place]
            if self.has_costs:
                cells[f"held-out {self.metric}"] = self.held_out()[place]
                cells[f"{self.metric}, random"] = self.held_out(1)[place]
            lines.append(Line((f"{strength:g}".replace("-", "−"),), {name: Cell(e) for name, e in cells.items()}))
        yield table(("strength",), lines, note="Intervals: bootstrap over texts, and over held-out examples.")
