"""Result of the position-bias attack: accuracy with the tokens of each region replaced, and along the sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from pandas import DataFrame
from ssmscope.api.scores import LOWER, Changed, Lost, Score, ScoreMaker, average, first_wrong, lost, named, unordered
from ssmscope.attacks.closing import Accuracy, AccuracyCurve, closing, percent, tidy
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.numbers import counted, with_ties
from ssmscope.render.table import Cell, Line, Table, as_share, in_percent, table, value_cell, with_interval

REPLACEMENTS = {"noise": "noise", "zeros": "zeros", "mean": "the mean", "other": "those of another class"}
"""Names of the replacements in views."""


@dataclass(frozen=True)
class Attacked(Accuracy):
    """Estimates with one region replaced."""

    region: str
    start: float
    stop: float
    percent: bool
    """True if `start` and `stop` are in percent of each example's tokens."""
    examples: int
    left_out: int
    """Examples that are too short for the region, or whose donor is; no estimate includes them."""
    clean: Estimate
    """Clean accuracy of the same examples."""
    flipped: Estimate
    """Share of the examples answered correctly when clean whose answer changes."""
    success: Estimate | None = None
    """Share of them that are answered with the class of the inserted tokens; only with "other"."""


@dataclass(frozen=True)
class PositionBias(AccuracyCurve, kind="position"):
    """Accuracy with the tokens of each region replaced, and the drop along the sequence. The steps of `right` are the
    regions and then the windows."""

    replacement: str
    unit: str
    """ "pixels" or "tokens"."""
    length: int
    """Tokens of the longest example."""
    width: int | None
    """Pixels per row of an image; None for texts."""
    regions: tuple[Attacked, ...]
    windows: tuple[Attacked, ...]
    average: Estimate
    """Mean accuracy over the regions."""
    average_drop: Estimate
    average_with_clean: Estimate
    """Mean accuracy over the regions and the clean inputs: the "Avg." of Baleen's Table 3."""
    spread: float
    """Sample standard deviation of these, given after ± in that table."""
    worst_regions: tuple[int, ...]
    """Region of the largest drop, and those indistinguishable from it (`bootstrap.lowest`); empty if no drop is
    defined."""
    worst_windows: tuple[int, ...]

    def verdict(self, at: int = 0) -> str:
        if not self.worst_regions:
            return f"accuracy {with_interval(self.clean)}, no drop defined"
        average = f"average drop {in_percent(self.average_drop)}"
        return average + _worst(self, lambda one: in_percent(one.drop, interval=False))

    @classmethod
    def compare(cls, results: Sequence[PositionBias], labels: Sequence[Sequence[str]]) -> Table:
        lines, less = [], ["average drop, %"]
        for result, (label,) in zip(results, labels):
            cells = {"clean accuracy": Cell(result.clean)}
            for region in result.regions:
                name = f"drop at {region.region}, %"
                less.append(name)
                cells[name] = percent(region.drop)
            cells["average drop, %"] = percent(result.average_drop)
            lines.append(Line((label,), cells, "all"))
        note = "Drop: 1 − accuracy with the region replaced / clean accuracy."
        return table(("model",), lines, more=["clean accuracy"], less=less, note=note)

    @property
    def replaced_by(self) -> str:
        """Name of the replacement."""
        return REPLACEMENTS[self.replacement]

    @property
    def headline(self) -> str:
        model = self.model_name
        number = f"{len(self.regions)} regions" if len(self.regions) > 1 else "one region"
        average = as_share(self.average.value)
        told = (
            f"Position bias of {model}: accuracy {self.clean.value:.3f} clean, {average} on average with "
            f"{self.unit} of {number} replaced by {self.replaced_by}"
        )
        return told + _worst(self, lambda one: as_share(one.accuracy.value))

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make = ScoreMaker(self, models)
        kind = "" if self.replacement == "noise" else self.replacement
        every: list[Lost | None] = [None] * len(self.regions)
        if self.right is not None:
            every = [lost(self.right[0], one) for one in self.right[1 : 1 + len(self.regions)]]
        yield make(named("position.drop", kind), self.average_drop, LOWER, harm=True, **average(every))
        for region, one in zip(self.regions, every):
            found = {"count": region.examples, **average([one])}
            yield make(named("position.drop", kind, region.region), region.drop, LOWER, **found)
            if region.success is not None:
                right = 0 if one is None else int(one[1].sum())
                name = named("position.success", kind, region.region)
                yield make(name, region.success, LOWER, count=region.examples, **unordered(region.success.value, right))

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        for text, at in first_wrong(None if self.right is None else self.right[: 1 + len(self.regions)], texts):
            yield Changed(text, None, f"tokens at {self.regions[at].region} replaced by {self.replaced_by}")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import bars

        return bars("drop by region", [one.drop.value for one in self.regions])

    def to_frame(self) -> DataFrame:
        """A row for the clean inputs, each region, their averages, and each window. Columns: part, region, start, stop,
        unit ("pixels", "tokens" or "percent"), examples, left_out, accuracy, drop (relative, in percent), flipped and,
        with "other", success (shares of the examples right when clean); the 95 % interval of each is in columns ending
        in _low and _high."""
        examples = self.provenance["data"]["examples"]
        rows: list[dict[str, Any]] = [dict(part="clean", region="clean", examples=examples, accuracy=self.clean)]
        for part, attacked in (("region", self.regions), ("window", self.windows)):
            for one in attacked:
                unit = "percent" if one.percent else self.unit
                rows.append(one.row(part=part, unit=unit))
            if part == "region":
                mean = dict(accuracy=self.average, drop=self.average_drop.times(100))
                rows.append(dict(part="average", region="average of the regions", **mean))
                rows.append(dict(part="average", region="average with clean", accuracy=self.average_with_clean))
        columns = ["part", "region", "start", "stop", "unit", "examples", "left_out", "accuracy", "drop", "flipped"]
        frame = tidy(rows, [*columns, *(["success"] if self.replacement == "other" else [])])
        return frame.astype({"examples": "Int64", "left_out": "Int64"})

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        yield self._regions_table()
        if self.worst_windows:
            drops = [one.drop for one in self.windows]
            most, mean = drops[self.worst_windows[0]], 100 * np.nanmean([drop.value for drop in drops])
            every = sum(not math.isnan(drop.value) for drop in drops)
            where = with_ties([self.windows[at].region for at in self.worst_windows], every)
            yield Prose(
                f"{counted(len(drops), 'window')}: the mean drop is {mean:.1f} %, the largest {in_percent(most)}"
                f"{f' at {where}' if where else '; no window stands out'}."
            )
        yield from closing(self, self.notes)

    def _regions_table(self) -> Table:
        names = ["accuracy", "drop in %", "flipped", *(["success"] if self.replacement == "other" else [])]
        names += ["examples"] if any(one.left_out for one in self.regions) else []
        examples = self.provenance["data"]["examples"]
        rows = [("clean", {"accuracy": Cell(self.clean), "examples": Cell(text=f"{examples:,}")})]
        for one in self.regions:
            cells = one.cells() | {"flipped": value_cell(one.flipped)}
            cells |= {"success": value_cell(one.success)} if one.success is not None else {}
            rows.append((one.region, cells | {"examples": Cell(text=f"{one.examples:,}")}))
        rows.append(("average", {"accuracy": Cell(self.average), "drop in %": percent(self.average_drop)}))
        spread = "" if math.isnan(self.spread) else f" ± {self.spread:.3f}"
        rows.append(("average with clean", {"accuracy": Cell(text=as_share(self.average_with_clean.value) + spread)}))
        lines = [Line((name,), {column: cells.get(column, Cell()) for column in names}) for name, cells in rows]
        note = (
            "drop: 1 − accuracy / clean accuracy; flipped: share of the examples right when clean whose answer changes"
        )
        if self.replacement == "other":
            note += "; success: share of them answered with the inserted class"
        if spread:
            note += "; ±: the standard deviation over the regions and the clean examples"
        return replace(table(("region",), lines), note=f"{note}.")


def _worst(result: PositionBias, shown: Callable[[Attacked], str]) -> str:
    """Name the region with the largest drop and its number, if it stands out from the others."""
    every = sum(not math.isnan(one.drop.value) for one in result.regions)
    where = with_ties([result.regions[at].region for at in result.worst_regions], every)
    if not where or every == 1:
        return ""
    return f", at worst {shown(result.regions[result.worst_regions[0]])} at {where}"
