"""Effects of a direction in every strength, compared with random ones, and their views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.core.ties import descending
from ssmscope.interp.edited_texts import EditedText, text_blocks
from ssmscope.interp.scoring import MEASURES
from ssmscope.interp.steer.measure import layers_of
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, Table, as_share, digits_of, table, with_interval
from ssmscope.render.tokens import shorten, visible

SITES = {"residual": "the residual stream before", "state": "the state of"}
ROWS = ("direction", "random", "difference")
"""Rows with a mean: the direction, the random ones, and the first minus the second."""


@dataclass(frozen=True)
class Steering(Result, kind="steer"):
    """Answer's probability and cost on held-out data, by the strength of a direction."""

    site: str
    layer: int | tuple[int, ...]
    strengths: tuple[float, ...]
    answers: tuple[str, ...]
    norm: float
    direction: tuple[np.ndarray, ...]
    """(width,) for the residual stream of each layer; (heads, width, state) for every recurrence's state."""
    probability: np.ndarray
    """(3, strengths, 3): the mean over the texts and its interval for each of `ROWS`."""
    by_direction: np.ndarray
    """(1 + random directions, strengths): the mean probability with each."""
    costs: np.ndarray
    """(3, strengths, measures, 3) on the held-out data; without held-out data no measure."""
    classifies: bool
    written: tuple[EditedText, ...] = ()
    """Continuations of the texts, unedited and with each strength, where they were asked for."""
    measure: str = "probability"
    """The answer's probability, or with pairs the "share" of the way to the clean run, in the fields named so too."""

    @property
    def metric(self) -> str:
        """Measure that the cost is shown by."""
        return "accuracy" if self.classifies else "loss"

    @property
    def asked(self) -> str:
        if self.measure == "share":
            return "share of the way to the clean run"
        names = list(dict.fromkeys(self.answers))
        name = f"“{shorten(visible(names[0]), 20)}”" if len(names) == 1 else "the predicted answers"
        return f"probability of {name}"

    @property
    def has_costs(self) -> bool:
        return self.costs.shape[2] > 0

    def means(self, row: int = 0) -> list[Estimate]:
        """Return the answer's probability by strength, for one of `ROWS`."""
        return [Estimate(*ends) for ends in self.probability[row].tolist()]

    def held_out(self, row: int = 0, metric: str | None = None) -> list[Estimate]:
        return [Estimate(*ends) for ends in self.costs[row, :, MEASURES.index(metric or self.metric)].tolist()]

    @property
    def where(self) -> str:
        several = not isinstance(self.layer, int)
        return f"{SITES[self.site]} layer{'s' * several} {', '.join(map(str, layers_of(self.layer)))}"

    @property
    def headline(self) -> str:
        most = self.strongest
        steered, drawn = (as_share(self.means(row)[most].value) for row in (0, 1))
        own = as_share(self.means()[self.strengths.index(0)].value) + ", " if 0 in self.strengths else ""
        told = (
            f"Steering on {self.model_name}: {self.asked} {own}{steered} at strength "
            f"{self.strengths[most]:g} of a direction in {self.where}, {drawn} with random ones".replace(" -", " −")
        )
        return told + (f"; {self.metric} {self.held_out()[most].value:.3f} on other data" if self.has_costs else "")

    @property
    def strongest(self) -> int:
        """Number of the strength at which the probability is farthest from that of the random directions."""
        return int(descending(np.abs(self.probability[2, :, 0]), 1.0)[0])

    def verdict(self, at: int = 0) -> str:
        most = self.strongest
        own, drawn = self.means()[most], self.means(1)[most]
        told = f"{self.asked} is {with_interval(own)}, with random directions {with_interval(drawn)}"
        costs = f"; {self.metric} on other data {with_interval(self.held_out()[most])}" if self.has_costs else ""
        return f"at strength {self.strengths[most]:g} the {told}{costs}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per strength and one of `ROWS`: the probability and every measure on held-out data."""
        rows = []
        for row, name in enumerate(ROWS):
            for place, strength in enumerate(self.strengths):
                found = {self.measure: self.means(row)[place]}
                if self.has_costs:
                    found |= {f"held_out_{each}": self.held_out(row, each)[place] for each in MEASURES}
                rows.append({"which": name, "strength": strength, **with_intervals(**found)})
        return pd.DataFrame(rows)

    @classmethod
    def compare(cls, results: Sequence[Steering], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            most = result.strongest
            cells = {"strength": Cell(text=f"{result.strengths[most]:g}"), result.measure: Cell(result.means()[most])}
            cells["random"] = Cell(result.means(1)[most])
            if result.has_costs:
                cells[f"held-out {result.metric}"] = Cell(result.held_out()[most])
            lines.append(Line((label, result.site), cells))
        return table(("model", "site"), lines)

    def blocks(self) -> Iterable[Block]:
        texts = counted(len(self.answers), "text" if self.measure == "probability" else "pair")
        said = f"The {self.asked} on {texts}; a direction of norm {number(self.norm)}"
        if self.has_costs:
            data = self.provenance["data"]
            said += f", and its cost on {counted(data['examples'], 'example')} of {data['name']} ({data['split']})"
        random = counted(len(self.by_direction) - 1, "random direction")
        yield from self.opening(f"{said}, compared with {random} of that norm.")
        digits = digits_of(self.means() + self.means(1))
        lines = []
        for place, strength in enumerate(self.strengths):
            rows = {self.measure: 0, "random": 1, "difference": 2}
            cells = {name: Cell(self.means(row)[place], digits=digits) for name, row in rows.items()}
            if self.has_costs:
                cells[f"held-out {self.metric}"] = Cell(self.held_out()[place])
                cells[f"{self.metric}, random"] = Cell(self.held_out(1)[place])
            lines.append(Line((f"{strength:g}".replace("-", "−"),), cells))
        over = ["texts" if self.measure == "probability" else "pairs"] * (len(self.answers) > 1) + [
            "held-out examples"
        ] * self.has_costs
        wilson = ", Wilson's of the accuracy" * (self.has_costs and self.classifies)
        note = f"Intervals: bootstrap over {' and over '.join(over)}{wilson}." if over else ""
        yield table(("strength",), lines, note=note)
        yield from text_blocks(self.written)
