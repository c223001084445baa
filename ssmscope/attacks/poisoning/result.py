"""Result of hidden-state poisoning: survival, answers and detectors under each trigger, on each model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from pandas import DataFrame
from ssmscope.api.results import Result
from ssmscope.api.scores import HIGHER, LOWER, Changed, Score, ScoreMaker, average, lost, named
from ssmscope.attacks.closing import closing, tidy
from ssmscope.core.bootstrap import Estimate
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.numbers import counted
from ssmscope.render.table import Cell, Line, Table, in_percent, table, value_cell, with_interval
from ssmscope.render.tokens import visible

FOUND, ADAPTIVE, SHUFFLED, MATCHED = "found", "adaptive", "shuffled", "log-odds"
NAMES: Mapping[str, str] = {
    "random": "random triggers",
    "random search": "random search",
    "hotflip": "HotFlip",
    FOUND: "the search",
    ADAPTIVE: "adaptive search",
    SHUFFLED: "its words in other orders",
    MATCHED: "words of equal log-odds",
}
"""Names of the attacks in views."""
TIED = 1e-6
"""Difference up to which two AUROCs are equal."""

ONE_SEARCH = "one search and its seed, which differs from another by more than texts do"
"""Reason why a scorecard compares no scores of a trigger."""


@dataclass(frozen=True)
class Alarm:
    """Performance of one detector on a trigger."""

    auroc: Estimate
    """Area under its ROC curve, texts with the trigger against the same clean ones; 0.5 is chance."""
    caught: Estimate
    """Share of the texts with the trigger that are above its threshold."""


@dataclass(frozen=True)
class Poisoned(Outlined):
    """A trigger, or the mean over random ones, on held-out texts."""

    name: str
    trigger: str | None
    """Text of the trigger; None for a mean over several."""
    triggers: int
    value: float
    """Objective on the texts of the search, without a penalty."""
    asked: int
    """Number of triggers that the search evaluated."""
    survival: Estimate
    """Share of the final states that was written at the span's tokens."""
    kept: Estimate
    """That survival / the survival on the clean texts."""
    accuracy: Estimate
    flipped: Estimate
    """Share of the texts answered correctly when clean whose answer changes."""
    planted: Estimate | None
    """Share of the texts of other classes that are answered with the planted one; None if none is planted."""
    alarms: tuple[Alarm, ...]
    right: np.ndarray | None = None
    """(texts,) share of its triggers under which the answer is right."""
    survived: np.ndarray | None = None
    """(texts,) survival, mean over its triggers."""


@dataclass(frozen=True)
class Victim(Outlined):
    """One model under all triggers."""

    model: str
    survival: Estimate
    """Survival on the clean texts, like the next two."""
    accuracy: Estimate
    planted: Estimate | None
    thresholds: tuple[float, ...]
    """Thresholds by detector, set on other clean texts."""
    false_alarms: tuple[Estimate, ...]
    """Share of the clean texts above the threshold, by detector."""
    attacks: tuple[Poisoned, ...]
    right: np.ndarray | None = None
    """(texts,) bool: right answers on the clean texts."""
    beyond: Estimate | None = None
    """Share `flipped` of the trigger found minus that of other words of equal log-odds, which forget less; None if
    there are no such words."""

    def attack(self, name: str) -> Poisoned:
        return next(each for each in self.attacks if each.name == name)

    @property
    def changes(self) -> str:
        """Share of right answers that the trigger found changes, next to that of words of equal log-odds."""
        told = f"it changes {in_percent(self.attack(FOUND).flipped, interval=False)} of the right answers"
        if self.beyond is None:
            return f"{told}, and there are no other words of its log-odds"
        same = in_percent(self.attack(MATCHED).flipped, interval=False)
        return f"{told}, other words of equal log-odds {same}: a difference of {in_percent(self.beyond)}"


@dataclass(frozen=True)
class Cost:
    """Cost of the searches: texts run, gradients, and seconds."""

    runs: int
    gradients: int
    seconds: float


@dataclass(frozen=True)
class StatePoisoning(Result, kind="poison"):
    """Memory, answers and detectors of models under triggers."""

    detectors: tuple[str, ...]
    texts: tuple[int, int, int]
    """Numbers of texts for the search, for the thresholds, and held out."""
    vocabulary: int
    """Number of words that a trigger could have."""
    victims: tuple[Victim, ...]
    """The attacked model, and those to which the triggers were transferred."""
    cost: Cost
    notes: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Place of each held-out text among the examples."""

    @property
    def objective(self) -> str:
        return str(self.provenance["options"]["objective"])

    @property
    def _own(self) -> tuple[Victim, Poisoned, Poisoned]:
        """Estimates for the attacked model, under the trigger found and under random ones."""
        own = self.victims[0]
        return own, own.attack(FOUND), own.attack("random")

    def verdict(self, at: int = 0) -> str:
        own, found, random = self._own
        return (
            f"survival {own.survival.value:.3f}, {with_interval(found.survival)} after "
            f"“{visible(found.trigger or '')}”, {random.survival.value:.3f} after random triggers; {own.changes}"
        )

    @property
    def headline(self) -> str:
        own, found, random = self._own
        return (
            f"Hidden-state poisoning of {self.model_name}: survival {own.survival.value:.3f} clean, "
            f"{random.survival.value:.3f} after random triggers, {found.survival.value:.3f} after the one found "
            f"({self.objective}); {own.changes}"
        )

    @classmethod
    def compare(cls, results: Sequence[StatePoisoning], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            detector = result.provenance["options"]["detector"]
            for attack in result.victims[0].attacks:
                cells = {"survival": Cell(attack.survival), "accuracy": Cell(attack.accuracy)}
                alarm = attack.alarms[result.detectors.index(detector)]
                cells |= {"flipped": Cell(attack.flipped), f"AUROC, {detector}": Cell(alarm.auroc)}
                lines.append(Line((label, NAMES[attack.name]), cells, attack.name))
        return table(("model", "trigger"), lines, more=("survival", "accuracy"), less=("flipped",))

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make, goal = ScoreMaker(self, models, rows=self.rows), self.objective
        victim: Any = self.victims[0]
        found: Any = victim.attack("found")
        others: list[Any] = [each for each in victim.attacks if each.name == "log-odds"]
        apart: dict[str, Any] = dict(count=self.texts[2], apart=ONE_SEARCH)
        answered = victim.right is not None and found.right is not None
        gone = lost(victim.right, victim.right * found.right) if answered else None
        yield make(named("poison.survival", goal), found.survival, HIGHER, above=found.survived, **apart)
        yield make(named("poison.flipped", goal), found.flipped, LOWER, **apart, **average([gone]))
        if victim.beyond is not None:
            right = victim.right.astype(np.float64) if answered else None
            more = {"above": right * (others[0].right - found.right), "below": right} if answered else {}
            yield make(named("poison.beyond", goal), victim.beyond, LOWER, harm=True, **apart, **more)
        for name, alarm in zip(self.detectors, found.alarms):
            yield make(named("poison.auroc", goal, name), alarm.auroc, HIGHER, "", **apart)

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        read, own = texts(), self.victims[0]
        found, same = own.attack("found"), [each.right for each in own.attacks if each.name == "log-odds"]
        if not read or own.right is None or found.right is None:
            return
        broken = own.right & ~found.right.astype(bool)
        if same and same[0] is not None:  # Else its words say the answer.
            broken &= same[0] > 0.5
        for row, changed in zip(self.rows, broken):
            if changed:
                yield Changed(read[row], f"{read[row]} {found.trigger}", f"the trigger “{found.trigger}”")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import bars

        return bars("survival under each trigger", [one.survival.value for one in self.victims[0].attacks])

    def to_frame(self) -> DataFrame:
        """A row per model and attack, "clean" first. Columns: model, attack, trigger, value (on the texts of the
        search), asked, survival, kept, accuracy, flipped, planted, and for each detector "auroc NAME" and "caught NAME"
        (of clean texts the false positives); the 95 % interval of each is in columns ending in _low and _high."""
        rows: list[dict[str, Any]] = []
        for one in self.victims:
            row = {"attack": "clean", "survival": one.survival, "accuracy": one.accuracy, "planted": one.planted}
            caught = {f"caught {name}": each for name, each in zip(self.detectors, one.false_alarms)}
            rows.append({"model": one.model, **row, **caught})
            for each in one.attacks:
                row = {"attack": each.name, "trigger": each.trigger, "value": each.value, "asked": each.asked}
                row |= {name: getattr(each, name) for name in ("survival", "kept", "accuracy", "flipped", "planted")}
                for name, alarm in zip(self.detectors, each.alarms):
                    row |= {f"auroc {name}": alarm.auroc, f"caught {name}": alarm.caught}
                rows.append({"model": one.model, **row})
        if all(row["planted"] is None for row in rows):
            rows = [{name: value for name, value in row.items() if name != "planted"} for row in rows]
        return tidy(rows)

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        for number, one in enumerate(self.victims):
            yield replace(_answers(one), title=f"{'transferred to ' if number else ''}{one.model}")
            yield replace(self._seen(one), title=f"detectors on {one.model}")
        if raised := list(self._raised()):
            yield Prose(" ".join(raised))
        found = [(NAMES[each.name], each.trigger) for each in self.victims[0].attacks if each.trigger is not None]
        yield Prose("; ".join(f"{name}: “{visible(trigger)}”" for name, trigger in found) + ".")
        train, threshold, held_out = self.texts
        yield Prose(
            f"Searched on {counted(train, 'text')} among {self.vocabulary:,} words: "
            f"{counted(self.cost.runs, 'run')} of a text and "
            f"{self.cost.gradients:,} gradients in {self.cost.seconds:.1f} s; the search evaluated "
            f"{self.victims[0].attack(FOUND).asked:,} triggers. Thresholds are from {threshold:,} other clean texts, "
            f"results from {held_out:,} further ones.",
            "definition",
        )
        yield from closing(self, self.notes)

    def _raised(self) -> Iterator[str]:
        """Yield a sentence for each model on which the adaptive trigger is detected more than the one it improves."""
        detector = self.provenance["options"]["detector"]
        at = self.detectors.index(detector)
        for one in self.victims:
            for each in one.attacks:
                own, plain = each.alarms[at].auroc.value, one.attack(FOUND).alarms[at].auroc.value
                if each.name == ADAPTIVE and own - plain > TIED:
                    yield (
                        f"The adaptive search raises detection on {one.model} instead of avoiding it: {detector} has "
                        f"an AUROC of {own:.3f} on its trigger and of {plain:.3f} on the search's."
                    )

    def _seen(self, one: Victim) -> Table:
        lines = []
        for each in one.attacks:
            seen = [(f"{name}: ", alarm) for name, alarm in zip(self.detectors, each.alarms)]
            pairs = [{n + "AUROC": Cell(alarm.auroc), n + "caught": value_cell(alarm.caught)} for n, alarm in seen]
            lines.append(Line((NAMES[each.name],), {name: cell for pair in pairs for name, cell in pair.items()}))
        lines.append(
            Line(("clean",), {f"{n}: caught": value_cell(e) for n, e in zip(self.detectors, one.false_alarms)})
        )
        note = (
            "AUROC: how well a detector separates the texts with the trigger from the same clean ones, 0.5 is chance; "
            "caught: share above its threshold."
        )
        return table(("texts",), lines, note=note)


def _answers(one: Victim) -> Table:
    lines = []
    rows: list[tuple[str, Victim | Poisoned]] = [("clean", one), *((NAMES[each.name], each) for each in one.attacks)]
    for name, each in rows:
        found = {"survival": each.survival, "accuracy": each.accuracy}
        found |= {"flipped": each.flipped} if isinstance(each, Poisoned) else {}
        found |= {"planted": each.planted} if each.planted is not None else {}
        lines.append(Line((name,), {column: Cell(number) for column, number in found.items()}))
    note = (
        "survival: share of the final states that was written at the attacked span; flipped: share of the texts "
        "answered correctly when clean whose answer changes. Its words in other orders, and other words that have "
        "the same log-odds alone, show what the words say, rather than what they make forget."
    )
    return table(("trigger",), lines, note=note)
