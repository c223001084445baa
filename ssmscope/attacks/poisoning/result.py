"""What hidden-state poisoning gives: survival, answers and detectors under each trigger, on each model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, Table, bare, table, written
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from pandas import DataFrame

    from ssmscope.render.blocks import Block

FOUND = "found"
NAMES: Mapping[str, str] = {
    "random": "random triggers",
    "random search": "random search",
    "hotflip": "HotFlip",
    FOUND: "the search",
    "adaptive": "adaptive search",
}
"""How the views call the attacks."""


@dataclass(frozen=True)
class Alarm:
    """What one detector sees of a trigger."""

    auroc: Estimate
    """The area under its ROC curve, texts with the trigger against the same clean ones; 0.5 is chance."""
    caught: Estimate
    """The share of the texts with the trigger that are above its threshold."""


@dataclass(frozen=True)
class Poisoned:
    """A trigger, or the mean over random ones, on held-out texts."""

    name: str
    trigger: str | None
    """None for a mean over several."""
    triggers: int
    value: float
    """The objective on the texts that the search was made on, without a penalty."""
    asked: int
    """How many triggers were asked about for it."""
    survival: Estimate
    """The share of the final states that was written at the span's tokens."""
    kept: Estimate
    """That survival / the survival on the clean texts."""
    accuracy: Estimate
    flipped: Estimate
    """Of the texts that are right when clean, the share whose answer changes."""
    planted: Estimate | None
    """Of the texts of other classes, the share answered with the planted one; None where none is planted."""
    alarms: tuple[Alarm, ...]
    """By detector."""


@dataclass(frozen=True)
class Victim:
    """One model under all triggers."""

    model: str
    survival: Estimate
    """On the clean texts, and so the next two."""
    accuracy: Estimate
    planted: Estimate | None
    thresholds: tuple[float, ...]
    """By detector: chosen on other clean texts than are reported on."""
    false_alarms: tuple[Estimate, ...]
    """By detector: the share of the clean texts above the threshold."""
    attacks: tuple[Poisoned, ...]

    def attack(self, name: str) -> Poisoned:
        return next(each for each in self.attacks if each.name == name)


@dataclass(frozen=True)
class Cost:
    """What the searches took: texts that were run, gradients, and seconds."""

    runs: int
    gradients: int
    seconds: float


@dataclass(frozen=True)
class StatePoisoning(Result, kind="poison"):
    """What triggers do to a model's memory and answers, and what detectors see of it."""

    detectors: tuple[str, ...]
    texts: tuple[int, int, int]
    """How many the search was made on, set the thresholds, and are reported on."""
    vocabulary: int
    """How many words a trigger could have."""
    victims: tuple[Victim, ...]
    """The model that was searched on, and those that the triggers were taken to."""
    cost: Cost
    notes: tuple[str, ...]

    @property
    def objective(self) -> str:
        return str(self.provenance["options"]["objective"])

    def verdict(self, at: int = 0) -> str:
        own = self.victims[0]
        found, random = own.attack(FOUND), own.attack("random")
        return (
            f"survival {own.survival.value:.3f}, {written(found.survival)} behind “{visible(found.trigger or '')}”, "
            f"{random.survival.value:.3f} behind random triggers; accuracy {own.accuracy.value:.3f}, "
            f"{found.accuracy.value:.3f} and {random.accuracy.value:.3f}"
        )

    @property
    def headline(self) -> str:
        own = self.victims[0]
        found, random = own.attack(FOUND), own.attack("random")
        return (
            f"Hidden-state poisoning of {self.model_name}: survival {own.survival.value:.3f} clean, "
            f"{random.survival.value:.3f} behind random triggers, {found.survival.value:.3f} behind the one found "
            f"({self.objective}); accuracy {own.accuracy.value:.3f}, {random.accuracy.value:.3f}, "
            f"{found.accuracy.value:.3f}"
        )

    @classmethod
    def compare(cls, results: Sequence[StatePoisoning], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            own = result.victims[0]
            for attack in own.attacks:
                cells = {"survival": Cell(attack.survival), "accuracy": Cell(attack.accuracy)}
                cells |= {"flipped": Cell(attack.flipped)}
                detector = result.provenance["options"]["detector"]
                alarm = attack.alarms[result.detectors.index(detector)]
                cells[f"AUROC, {detector}"] = Cell(alarm.auroc)
                lines.append(Line((label, NAMES[attack.name]), cells, attack.name))
        return table(("model", "trigger"), lines, more=("survival", "accuracy"), less=("flipped",))

    def to_frame(self) -> DataFrame:
        """A row per model and attack, "clean" first.

        Columns: model, attack, trigger, value (on the texts of the search), asked, survival, kept, accuracy, flipped,
        planted, and for each detector "auroc NAME" and "caught NAME" (of clean texts the false positives); the 95 %
        interval of each is in columns ending in _low and _high.
        """
        import pandas as pd

        rows = []
        for one in self.victims:
            clean = {"survival": one.survival, "accuracy": one.accuracy, "planted": one.planted}
            clean |= {f"caught {name}": each for name, each in zip(self.detectors, one.false_alarms)}
            rows.append({"model": one.model, "attack": "clean", **with_intervals(**clean)})
            for each in one.attacks:
                found = {name: getattr(each, name) for name in ("survival", "kept", "accuracy", "flipped", "planted")}
                for name, alarm in zip(self.detectors, each.alarms):
                    found |= {f"auroc {name}": alarm.auroc, f"caught {name}": alarm.caught}
                about = {"attack": each.name, "trigger": each.trigger, "value": each.value, "asked": each.asked}
                rows.append({"model": one.model, **about, **with_intervals(**found)})
        return pd.DataFrame(rows)

    def blocks(self) -> Iterable[Block]:
        from ssmscope.attacks.closing import closing
        from ssmscope.render.blocks import Prose

        yield from self.opening()
        for number, one in enumerate(self.victims):
            yield replace(_answers(one), title=f"{'transferred to ' if number else ''}{one.model}")
            yield replace(self._seen(one), title=f"detectors on {one.model}")
        found = [each for each in self.victims[0].attacks if each.trigger is not None]
        yield Prose("; ".join(f"{NAMES[each.name]}: “{visible(each.trigger or '')}”" for each in found) + ".")
        train, threshold, held_out = self.texts
        yield Prose(
            f"Searched on {counted(train, 'text')} among {self.vocabulary:,} words: "
            f"{counted(self.cost.runs, 'run')} of a text and "
            f"{self.cost.gradients:,} gradients in {self.cost.seconds:.1f} s; the search asked about "
            f"{self.victims[0].attack(FOUND).asked:,} triggers. Thresholds from {threshold:,} other clean texts, "
            f"numbers from {held_out:,} further ones."
        )
        yield from closing(self, self.notes)

    def _seen(self, one: Victim) -> Table:
        """A row for each attack: by detector its AUROC and what it catches at its threshold."""
        lines = [Line(("clean",), {f"{n}: caught": bare(e) for n, e in zip(self.detectors, one.false_alarms)})]
        for each in one.attacks:
            cells: dict[str, Cell] = {}
            for name, alarm in zip(self.detectors, each.alarms):
                cells |= {f"{name}: AUROC": Cell(alarm.auroc), f"{name}: caught": bare(alarm.caught)}
            lines.append(Line((NAMES[each.name],), cells))
        first, *others = lines
        note = (
            "AUROC: how well a detector tells the texts with the trigger from the same clean ones, 0.5 is chance; "
            "caught: the share above its threshold."
        )
        return table(("texts",), [*others, first], note=note)


def _answers(one: Victim) -> Table:
    """A row for the clean texts and for each attack."""
    clean = {"survival": Cell(one.survival), "accuracy": Cell(one.accuracy)}
    lines = [Line(("clean",), clean | ({} if one.planted is None else {"planted": Cell(one.planted)}))]
    for each in one.attacks:
        cells = {"survival": Cell(each.survival), "accuracy": Cell(each.accuracy), "flipped": Cell(each.flipped)}
        cells |= {} if each.planted is None else {"planted": Cell(each.planted)}
        lines.append(Line((NAMES[each.name],), cells))
    note = (
        "survival: the share of the final states that was written where it is to be forgotten; flipped: of the texts "
        "that are right when clean, the share whose answer changes."
    )
    return table(("trigger",), lines, note=note)
