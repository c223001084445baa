"""Scorecard of a report: a row a dimension of robustness, a column a model, each score compared with a reference.

A difference holds if its interval excludes 0 after Holm's correction for all differences of the card: with m of them,
taken from the surest, the k-th is read with an interval that leaves out 0.05 / (m − k + 1), and the first that contains
0 ends the reading. So with 95 % confidence no difference is marked by chance. Nothing is compared in rows that are not
over the examples of the data, or whose numbers have another scale in each model (`Score.apart`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from ssmscope.api.dimensions import Dimension, dimensions
from ssmscope.api.scores import HIGHER, LOWER, SHARE_UNIT, Score
from ssmscope.core.bootstrap import TAIL, Estimate
from ssmscope.core.ties import descending
from ssmscope.reports.intervals import difference, interval


@dataclass(frozen=True)
class Entry:
    """A score of the card, and its difference from the reference's."""

    score: Score
    difference: Estimate | None = None
    """`score` − reference's; None for the reference itself, or without one."""
    holds: bool = False
    """True if the difference excludes 0 after the correction."""

    @property
    def state(self) -> str:
        """ "better", "worse", or "differs" where neither side is better; empty if no difference holds."""
        if not self.holds or self.difference is None:
            return ""
        if self.score.better not in (HIGHER, LOWER):
            return "differs"
        return "better" if (self.difference.value > 0) == (self.score.better == HIGHER) else "worse"


@dataclass(frozen=True)
class Row:
    """A dimension: its score of every model, None where a model has none, and the reference's."""

    heading: str
    measure: str
    name: str
    entries: tuple[Entry | None, ...]
    references: tuple[Score | None, ...]
    """Score with which each entry is compared; None for the reference itself."""

    @property
    def apart(self) -> str:
        """Reason why nothing is compared in the row; empty for others."""
        return next((entry.score.apart for entry in self.entries if entry is not None and entry.score.apart), "")

    @property
    def better(self) -> str:
        return next(entry.score.better for entry in self.entries if entry is not None)

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the row's axis: 0 and 1 for shares within them, else the range of all intervals with some room."""
        found = [entry.score for entry in self.entries if entry is not None]
        found += [score for score in self.references if score is not None]
        numbers = [n for one in map(interval, found) for n in (one.value, one.low, one.high) if math.isfinite(n)]
        numbers = numbers or [0.0, 1.0]
        low, high = min(numbers), max(numbers)
        if found[0].unit == SHARE_UNIT and low >= 0:
            return 0.0, max(1.0, high)
        room = 0.08 * (high - low) or max(abs(high), 1e-3)
        return low - room, high + room


@dataclass(frozen=True)
class Scorecard:
    """Rows of all models; `reference` names what they are compared with, `compared` counts the differences."""

    models: tuple[str, ...]
    rows: tuple[Row, ...]
    reference: str
    compared: int


def scorecard(scores: Sequence[Score], baseline: Sequence[Score] = ()) -> Scorecard | None:
    """Make the card of a report's scores, compared with the baseline's scores of the same or of its only model, or else
    with the first model's; None if fewer than three dimensions have a score."""
    models = tuple(dict.fromkeys(each.model for each in scores))
    declared = dimensions([each.name for each in scores])
    rows = [row for dimension in declared if (row := _row(dimension, scores, models, baseline)) is not None]
    if len(rows) < 3:
        return None
    reference = "the earlier report" if baseline else models[0]
    marked, compared = _corrected(rows)
    return Scorecard(models, tuple(marked), reference, compared)


def _row(dimension: Dimension, scores: Sequence[Score], models: Sequence[str], baseline: Sequence[Score]) -> Row | None:
    named = [one for one in scores if re.fullmatch(dimension.pattern, one.name)]
    if not named:
        return None
    name = named[0].name
    own = [next((one for one in named if one.name == name and one.model == model), None) for model in models]
    earlier = [one for one in baseline if one.name == name]
    only = len({one.model for one in baseline}) == 1
    references: list[Score | None] = []
    for model in models:
        found = next((one for one in earlier if one.model == model or only), None)
        found = found if baseline else None if model == models[0] else own[0]
        references.append(None if any(one is not None and one.apart for one in own) else found)
    entries = tuple(
        None if one is None else Entry(one, None if other is None else difference(one, other))
        for one, other in zip(own, references)
    )
    return Row(dimension.heading, dimension.measure, name, entries, tuple(references))


def _corrected(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Mark the differences that hold after Holm's correction; also return how many were read."""
    places = [
        (at, model)
        for at, row in enumerate(rows)
        for model, entry in enumerate(row.entries)
        if entry is not None and entry.difference is not None and not math.isnan(entry.difference.low)
    ]
    held = set()
    sureness = np.array([_sureness(rows[at].entries[model]) for at, model in places])
    order = [places[at] for at in descending(sureness)]
    for read, (at, model) in enumerate(order):
        entry, reference = rows[at].entries[model], rows[at].references[model]
        assert entry is not None and reference is not None
        found = difference(entry.score, reference, TAIL / (len(places) - read))
        if not (found.low > 0 or found.high < 0):
            break
        held.add((at, model))
    marked = [
        replace(
            row,
            entries=tuple(
                replace(entry, holds=True) if entry is not None and (at, model) in held else entry
                for model, entry in enumerate(row.entries)
            ),
        )
        for at, row in enumerate(rows)
    ]
    return marked, len(places)


def _sureness(entry: Entry | None) -> float:
    """Return |difference| / width of its interval towards 0."""
    assert entry is not None and entry.difference is not None
    found = entry.difference
    width = found.value - found.low if found.value > 0 else found.high - found.value
    return abs(found.value) / width if width > 0 else math.inf if found.value else 0.0
