"""Result of an insertion sweep: accuracy and log-odds with each phrase at every place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from pandas import DataFrame
from ssmscope.api.scores import LOWER, Changed, Score, ScoreMaker, average, first_wrong, lost
from ssmscope.attacks.closing import AccuracyCurve, Flips, closing, percent, tidy
from ssmscope.attacks.insertion.places import inserted
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.render.blocks import Block, Prose
from ssmscope.render.numbers import with_ties
from ssmscope.render.table import Cell, Line, Table, table, with_interval
from ssmscope.render.tokens import shorten, visible

FIRST, LAST = "before the template", "after the template"
"""Places outside the content, if there is a template."""
MAX_SHOWN_PHRASES = 6
"""Phrases that figure and terminal show."""


def place_name(place: float) -> str:
    """Format a share of a text's words."""
    return f"{100 * place:.4g} %"


@dataclass(frozen=True)
class Place(Flips):
    """Estimates with the phrase at one place."""

    name: str
    share: float | None
    """Share of the content's words before the phrase; None outside the content."""
    worst_here: Estimate | None = None
    """Share of the examples whose log-odds are lowest at this place; ties are divided equally."""


@dataclass(frozen=True)
class InsertionCurve:
    """One phrase along the text."""

    phrase: str
    places: tuple[Place, ...]
    hardest_places: tuple[int, ...]
    """Place of the lowest accuracy, and those indistinguishable from it (`bootstrap.lowest`)."""
    lowest_odds: tuple[int, ...]
    """The same for the place where most texts have their lowest log-odds; empty for generated answers."""
    worst: Estimate
    """Accuracy if the attacker chooses the place for each example: the share that is right at every place."""
    worst_drop: Estimate

    @property
    def hardest(self) -> Place:
        """Place of the lowest accuracy, the first where several are equal."""
        return self.places[self.hardest_places[0]]

    def named(self, places: Sequence[int]) -> str:
        """Name the first of some places and how many are indistinguishable from it; "" if none stands out."""
        return with_ties([self.places[at].name for at in places], len(self.places))


@dataclass(frozen=True)
class InsertionSweep(AccuracyCurve, kind="insertion"):
    """Accuracy and log-odds with a phrase at every place of the texts."""

    clean_log_odds: Estimate | None
    curves: tuple[InsertionCurve, ...]
    worst: Estimate
    """Accuracy if the attacker chooses phrase and place for each example."""
    worst_drop: Estimate

    @property
    def shown(self) -> tuple[InsertionCurve, ...]:
        """Phrases that figure and terminal show: if there are more than 6, those of lowest accuracy, in their order."""
        order = descending(np.array([-curve.worst.value for curve in self.curves]))
        return tuple(self.curves[at] for at in sorted(order[:MAX_SHOWN_PHRASES].tolist()))

    def verdict(self, at: int = 0) -> str:
        worst = with_interval(self.worst)
        return f"accuracy {self.clean.value:.3f}, {worst} with a phrase at each example’s worst place"

    @classmethod
    def compare(cls, results: Sequence[InsertionSweep], labels: Sequence[Sequence[str]]) -> Table:
        names = ("clean accuracy", "at the hardest place", "worst of each example")
        lines = []
        for result, (label,) in zip(results, labels):
            for curve in result.curves:
                numbers = (result.clean, curve.hardest.accuracy, curve.worst)
                lines.append(Line((label, curve.phrase), dict(zip(names, map(Cell, numbers))), curve.phrase))
        return table(("model", "phrase"), lines, more=names)

    @property
    def headline(self) -> str:
        model = self.model_name
        accuracies = np.array([curve.hardest.accuracy.value for curve in self.curves])
        curve = self.curves[descending(-accuracies)[0]]
        choice = "the place" if len(self.curves) == 1 else "phrase and place"
        return (
            f"Insertion sweep of {model}: accuracy {self.clean.value:.3f} clean, {_where(curve)}, "
            f"{self.worst.value:.3f} where {choice} may differ by example"
        )

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        found = None if self.right is None else lost(self.right[0], np.all(self.right[1:], axis=0))
        yield ScoreMaker(self, models)("insertion.drop", self.worst_drop, LOWER, harm=True, **average([found]))

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        spots = [(curve.phrase, place) for curve in self.curves for place in curve.places]
        for text, at in first_wrong(self.right, texts):
            phrase, place = spots[at]
            words = None if place.share is None else math.floor(place.share * len(text.split()) + 0.5)
            changed = None if words is None else inserted(text, phrase, words)
            yield Changed(text, changed, f"“{phrase}” inserted at {place.name}")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        lines = [[place.accuracy.value for place in one.places] for one in self.shown[:2]]
        return curve("accuracy with the phrase at each place", *lines)

    def to_frame(self) -> DataFrame:
        """A row for the clean texts, and per phrase one for every place and one for the worst of each example. Columns:
        part ("clean", "place", "worst"), phrase, place, share, accuracy, drop (relative, in percent), flipped (of the
        examples right when clean), log_odds (the mean change; for clean texts the mean itself) and worst_here; the 95 %
        interval of each is in columns ending in _low and _high. With several phrases the last row is the worst phrase
        and place of each example."""

        def worst(phrase: str, one: InsertionCurve | InsertionSweep) -> dict[str, Any]:
            numbers = {"accuracy": one.worst, "drop": one.worst_drop.times(100)}
            return {"part": "worst", "phrase": phrase, "place": "any place", **numbers}

        rows: list[dict[str, Any]] = [{"part": "clean", "accuracy": self.clean, "log_odds": self.clean_log_odds}]
        for curve in self.curves:
            for one in curve.places:
                rows.append(one.row(part="place", phrase=curve.phrase, place=one.name, log_odds=one.log_odds_change))
            rows.append(worst(curve.phrase, curve))
        rows += [worst("any phrase", self)] if len(self.curves) > 1 else []
        names = ["part", "phrase", "place", "share", "accuracy", "drop", "flipped"]
        return tidy(rows, [*names, *(["log_odds", "worst_here"] if self.clean_log_odds is not None else [])])

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        yield from (curve_table(curve, self.clean) for curve in self.shown)
        yield Prose(
            "place: share of a text's words before the phrase; drop: 1 − accuracy / clean accuracy; flipped: share of "
            "the texts answered correctly when clean whose answer changes; worst of each text: a text counts as right "
            "only if it is right at every place.",
            "definition",
        )
        if len(self.curves) > MAX_SHOWN_PHRASES:
            shown, count = MAX_SHOWN_PHRASES, len(self.curves)
            yield Prose(f"These are the {shown} of {count} phrases with the lowest accuracy; the table has all.")
        if len(self.curves) > 1:
            yield Prose(f"The worst phrase and place of each example: accuracy {self.worst}.")
        yield from closing(self, self.notes)


def curve_table(curve: InsertionCurve, clean: Estimate) -> Table:
    lines = [Line(("clean",), {"accuracy": Cell(clean)})]
    lines += [Line((one.name,), one.cells()) for one in curve.places]
    lines.append(Line(("worst of each text",), {"accuracy": Cell(curve.worst), "drop in %": percent(curve.worst_drop)}))
    note = ""
    if curve.lowest_odds:
        here = curve.places[curve.lowest_odds[0]].worst_here
        where = curve.named(curve.lowest_odds)
        note = f"The log-odds of the true class are most often lowest at {where}, for {here} of the texts."
        if not where:
            note = "No place has the lowest log-odds of the true class clearly more often than the others."
    return replace(table(("place",), lines), title=f"“{visible(curve.phrase)}”", note=note)


def _where(curve: InsertionCurve) -> str:
    """Describe the accuracy with a phrase, and where it is lowest if a place stands out."""
    accuracies, phrase = [one.accuracy.value for one in curve.places], shorten(visible(curve.phrase), 32)
    if where := curve.named(curve.hardest_places):
        return f"{min(accuracies):.3f} with “{phrase}” at its hardest place ({where})"
    ends = dict.fromkeys(f"{end:.3f}" for end in (min(accuracies), max(accuracies)))
    return f"{' to '.join(ends)} with “{phrase}”, at no place clearly lowest"
