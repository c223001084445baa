"""Scores of results: the numbers that a scorecard, a gate or a model card reads, under one name for each quantity.

A name is dotted and has a bracket for a variant: "accuracy", "position.drop", "words.success[deepwordbug]". Values and
intervals are those that a verb has recorded; nothing is measured anew.

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        make = ScoreMaker(self, models)
        yield make("noise.drop", self.average_drop, LOWER, harm=True)

The analysis declares the names, and the rows that its scores have on a report's scorecard:

    @analysis("noise", scores=("noise.drop",),
              dimensions=(Dimension("Typing errors", r"noise\\.drop", "average drop of accuracy"),))
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ssmscope.core.bootstrap import Estimate

if TYPE_CHECKING:
    from ssmscope.api.results import Result

HIGHER, LOWER = "higher", "lower"
SHARE_UNIT = "share"


class Changed(NamedTuple):
    """A right answer that an attack changes."""

    text: str
    attacked: str | None
    """The changed text; None if the change is not one of text."""
    how: str
    """The attack in words, such as "2 of 14 words changed by deepwordbug"."""


@dataclass(frozen=True)
class Score:
    """One number of a model with its 95 % interval."""

    name: str
    model: str
    """Name that the report shows."""
    value: float
    low: float
    high: float
    """Ends of the interval; NaN if there is none."""
    count: int
    """Number of independent examples; 0 where the number is not a mean over examples."""
    better: str
    """ "higher" or "lower"; empty if neither is better."""
    unit: str
    """Unit of the value: "share" for a share of 1, which views show in percent; "nats", "tokens" and so on; empty for a
    plain number."""
    examples: np.ndarray | None = None
    """(examples, 2) in the order of the data: `value` is the sum of the first column divided by that of the second,
    which is 1 throughout for a mean. None if the number is no such ratio."""
    example_ids: str = ""
    """Fingerprint of the examples; scores with the same one are paired. Empty if unknown."""
    apart: str = ""
    """Reason why the scorecard compares it with no other model's; empty for others."""
    harm: bool = False
    """True for a loss of right answers, of which a report names the worst."""

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high)

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.low)


def is_paired(one: Score, other: Score) -> bool:
    """Return True if two scores have per-example values of the same examples."""
    return (
        one.examples is not None
        and other.examples is not None
        and len(one.examples) == len(other.examples)
        and one.example_ids == other.example_ids != ""
    )


# ---- making scores


def data_fingerprint(result: Result) -> str:
    """Return the fingerprint of a result's data; empty if it has none."""
    data = result.provenance.get("data")
    return str(data.get("fingerprint") or "") if isinstance(data, Mapping) else ""


def _count(result: Result) -> int:
    data = result.provenance.get("data")
    return int(data.get("examples") or data.get("windows") or 0) if isinstance(data, Mapping) else 0


class ScoreMaker:
    """Maker of a result's scores: its number of examples, and their fingerprint."""

    def __init__(self, result: Result, models: Sequence[str] = (), at: int = 0, *, rows: Sequence[int] = ()) -> None:
        """Make scores of model number `at`; `models` are the names shown, by default the result's own. `rows` are the
        examples that were measured, by default all."""
        self.model, self.count = (models or getattr(result, "models", ()) or [result.model_name])[at], _count(result)
        fingerprint = data_fingerprint(result)
        own = f"{fingerprint}-{zlib.crc32(repr(tuple(rows)).encode()):08x}" if rows else fingerprint
        self.ids = own if fingerprint else ""

    def __call__(
        self,
        name: str,
        found: Estimate,
        better: str,
        unit: str = SHARE_UNIT,
        *,
        above: np.ndarray | None = None,
        below: np.ndarray | None = None,
        count: int | None = None,
        paired: bool = True,
        apart: str = "",
        harm: bool = False,
    ) -> Score:
        """Make a score; `above` and `below` are the numerators and denominators (1 by default) of its examples, which
        are `paired` if they are in the order of the data."""
        examples = None
        if above is not None:
            ones = np.ones(len(above)) if below is None else below
            examples = np.stack([above, ones], axis=1).astype(np.float64)
        number = self.count if count is None else count
        ids = self.ids if examples is not None and paired else ""
        value = (found.value, found.low, found.high)
        return Score(name, self.model, *value, number, better, unit, examples, ids, apart, harm)


Lost = tuple[np.ndarray, np.ndarray]
"""Numerators and denominators of the examples of a relative drop 1 − accuracy / clean accuracy."""


def lost(clean: np.ndarray, attacked: np.ndarray) -> Lost:
    """Return the numerators and denominators of a drop; examples at which `attacked` is −1 are left out."""
    there = attacked >= 0
    return np.where(there, clean - 1.0 * attacked, 0.0), there * clean.astype(np.float64)


def average(every: Sequence[Lost | None]) -> dict[str, Any]:
    """Return the numerators and denominators of a mean of drops, as arguments; none if they are not known. Drops over
    fewer examples than the first has weigh more, which keeps the mean exact."""
    known = [one for one in every if one is not None]
    if not known or len(known) < len(every) or any(not below.sum() for _, below in known):
        return {}
    most = max(known, key=lambda one: float(one[1].sum()))[1]
    return {"above": np.mean([above * most.sum() / below.sum() for above, below in known], axis=0), "below": most}


def unordered(share: float, count: int) -> dict[str, Any]:
    """Return the numerators of a recorded share of so many examples, as arguments; none if it is no such share. They
    are not in the order of the data."""
    part = share * count
    if not count or math.isnan(part) or abs(part - round(part)) > 1e-6:
        return {}
    return {"above": np.arange(count) < round(part), "paired": False}


def named(name: str, *variant: str) -> str:
    """Return a name with its variant in brackets, parts joined by ", "; the bare name without one."""
    parts = ", ".join(filter(None, variant))
    return f"{name}[{parts}]" if parts else name


def first_wrong(right: np.ndarray | None, texts: Callable[[], Sequence[str]]) -> Iterator[tuple[str, int]]:
    """Yield the texts that are right when clean, `right[0]`, and wrong under an attack, each with the first one; none
    if that is not known, or if `texts` cannot be read."""
    if right is None or not (read := texts()):
        return
    wrong = (right[0] == 1) & (right[1:] == 0)
    for row in np.flatnonzero(wrong.any(0)).tolist():
        yield read[row], int(wrong[:, row].argmax())
