"""Harm of ablating parts of a model, the parts that can go, and their views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.core.ties import OUTPUT_ROUNDING, descending
from ssmscope.interp.edited_texts import EditedText, text_blocks
from ssmscope.interp.scoring import MEASURES
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, Table, table, with_interval

NAMED_PARTS = 12
NEGLIGIBLE_HARM = 0.02
"""Harm that does not matter: nats of loss, or probability or accuracy."""
BY = {"zero": "zero", "mean": "its mean over the data", "resample": "its value in another example"}


@dataclass(frozen=True)
class Unit:
    """Ablated unit: a whole layer, one recurrence (with its name, where there are several), one head, or a part outside
    the state-space layers, named by its block."""

    layer: int
    part: int | None = None
    called: str = ""
    head: int | None = None

    @property
    def name(self) -> str:
        if self.called and self.part is None:
            return self.called
        of = f", head {self.head}" if self.head is not None else f", {self.called}" * bool(self.called)
        return f"layer {self.layer}{of}"


@dataclass(frozen=True)
class Ablation(Result, kind="ablate"):
    """Harm that each part's ablation does, over examples, and that of many together."""

    what: str
    by: str
    metric: str
    units: tuple[Unit, ...]
    plain: np.ndarray
    """(measures, 3): the mean of each of `measures` with nothing ablated, and its interval."""
    harms: np.ndarray
    """(units, measures, 3): the harm to each measure with one unit ablated, and its interval."""
    order: tuple[int, ...]
    """Units from the least important to the most, on one half of the examples."""
    counts: tuple[int, ...]
    """Numbers of units ablated together, along the curves."""
    curves: np.ndarray
    """(2, counts, measures, 3): on the other half the mean with the first units of `order` ablated, and with as many in
    an order drawn at random."""
    notes: tuple[str, ...] = ()
    written: tuple[EditedText, ...] = ()
    """Continuations of prompts, without and with parts ablated, where they were asked for."""
    measures: tuple[str, ...] = MEASURES

    @property
    def measure(self) -> int:
        """Index of the metric in `measures`."""
        return self.measures.index(self.metric)

    @property
    def many(self) -> str:
        irregular = {"skip": "skips D x", "attention": "attention layers", "feed-forward": "feed-forward parts"}
        return irregular.get(self.what, f"{self.what}s")

    def harm(self, unit: int, metric: str | None = None) -> Estimate:
        """Return the harm to the metric: the loss's rise, accuracy's or probability's fall."""
        return Estimate(*self.harms[unit, self.measures.index(metric or self.metric)].tolist())

    def mean(self, metric: str | None = None) -> Estimate:
        return Estimate(*self.plain[self.measures.index(metric or self.metric)].tolist())

    def curve(self, which: int = 0) -> list[Estimate]:
        return [Estimate(*ends) for ends in self.curves[which, :, self.measure].tolist()]

    @property
    def can_go(self) -> tuple[int, ...]:
        """Units whose whole interval of harm lies below `NEGLIGIBLE_HARM`."""
        return tuple(np.flatnonzero(self.harms[:, self.measure, 2] <= NEGLIGIBLE_HARM).tolist())

    @property
    def ranked(self) -> list[int]:
        """Units, the most important one first."""
        return descending(self.harms[:, self.measure, 0], abs(self.mean().value)).tolist()

    @property
    def headline(self) -> str:
        return f"Ablation on {self.model_name}: {self._said(self._together())}"

    def _together(self) -> str:
        """Say how many units, the least important first, can go together: those whose mean harm is negligible, or what
        the fewest that were tried cost."""
        means = np.array([each.value for each in self.curve()])
        harms = (means - means[0]) * (1 if self.metric == "loss" else -1)
        first = int(np.append(np.flatnonzero(harms > NEGLIGIBLE_HARM), len(harms))[0])
        if (most := self.counts[first - 1]) > 1:
            return f", {most} together"
        beyond = first < len(self.counts) and self.counts[first] > 1
        return f"; {self.counts[first]} together cost {harms[first]:.3f}" if beyond else ""

    def _harms(self, unit: int) -> bool:
        """Return True unless the interval of the harm ends at 0, up to rounding, or below."""
        return not self.harm(unit).low <= OUTPUT_ROUNDING * abs(self.mean().value)

    def verdict(self, at: int = 0) -> str:
        return self._said("")

    def _said(self, together: str) -> str:
        most = self.ranked[0]
        start = f"{len(self.can_go)} of {len(self.units)} {self.many} can go alone{together}"
        if not self._harms(most):
            return f"{start}; none clearly does harm"
        return f"{start}; most harm: {self.units[most].name}, {self.metric} worse by {with_interval(self.harm(most))}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per unit: layer, recurrence, head, the harm to each measure, and whether it can go."""
        rows = []
        for number, unit in enumerate(self.units):
            harms = {name: self.harm(number, name) for name in self.measures}
            named = {"layer": unit.layer, "recurrence": unit.part, "head": unit.head}
            rows.append({**named, **with_intervals(**harms), "can_go": number in self.can_go})
        return pd.DataFrame(rows).astype({"layer": "Int64", "recurrence": "Int64", "head": "Int64"})

    def together(self) -> pd.DataFrame:
        """Return every measure's mean per curve ("least important first", "random") and number of ablated units."""
        rows = []
        for which, name in enumerate(("least important first", "random")):
            for count, ends in zip(self.counts, self.curves[which]):
                means = {measure: Estimate(*own) for measure, own in zip(self.measures, ends.tolist())}
                rows.append({"order": name, "ablated": count, **with_intervals(**means)})
        return pd.DataFrame(rows)

    @classmethod
    def compare(cls, results: Sequence[Ablation], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            most = result.ranked[0]
            cells = {
                result.metric: Cell(result.mean()),
                "can go": Cell(text=f"{len(result.can_go)} of {len(result.units)}"),
                "most harm": Cell(text=result.units[most].name if result._harms(most) else "none clearly"),
                "worse by": Cell(result.harm(most)),
            }
            lines.append(Line((label, result.many), cells))
        return table(("model", "ablated"), lines)

    def blocks(self) -> Iterable[Block]:
        data = self.provenance["data"]
        means = ", ".join(f"{name} {with_interval(self.mean(name))}" for name in self.measures)
        name, by, kind = f"{data['name']} ({data['split']})", BY[self.by], "example"
        ends = f"With nothing ablated: {means}."
        if self.metric == "share":
            name, by, kind = data["name"], by.replace("another example", "the corrupted text"), "pair"
            ends = "Share: of the difference of logits between the clean and the corrupted run."
        said = f"{counted(data['examples'], kind)} of {name}; each of the {self.many} by itself is replaced by {by}."
        yield from self.opening(f"{said} {ends}", notes=self.notes)
        lines = []
        for number in self.ranked:
            cells = {name: Cell(self.harm(number, name)) for name in self.measures}
            cells["can go"] = Cell(text="yes" * (number in self.can_go))
            lines.append(Line((self.units[number].name,), cells))
        note = (
            "Harm to each measure, 95 % bootstrap intervals over examples; a part can go if its whole interval of the "
            f"{self.metric} lies below {NEGLIGIBLE_HARM}. Where another part's contains 0, more examples would decide."
        )
        yield table(("ablated",), lines, most=NAMED_PARTS, note=note)
        yield from text_blocks(self.written)
