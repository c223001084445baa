"""The search for a trigger: a beam over replacements of its tokens, one place after the other, on the exact goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ssmscope.attacks.poisoning.triggers import Trigger

Value = Callable[[Sequence[Trigger]], Float[np.ndarray, " triggers"]]
"""The goal of triggers, the larger the better."""
Proposals = Callable[[Sequence[Trigger], int], Sequence[Sequence[int]]]
"""For every trigger the words to be tried at a place."""


@dataclass(frozen=True)
class Found:
    """Where a search ended: the best trigger that it asked about, its value, and how many it asked about."""

    trigger: Trigger
    value: float
    asked: int


def search(
    value: Value,
    proposals: Proposals,
    starts: Sequence[Trigger],
    *,
    beam: int,
    sweeps: int,
    known: dict[Trigger, float] | None = None,
) -> Found:
    """Replace one token after the other, and keep the `beam` best triggers of all that were met; a sweep is over all
    places, and one that finds nothing better ends the search. What it gives is never worse than the best start.

    Args:
        known: values that are there already; those that are asked for are added.
    """
    values = {} if known is None else known
    _ask(value, starts, values)
    met = set(starts)
    kept = _best(met, values, beam)
    for _ in range(sweeps):
        best = values[kept[0]]
        for place in range(len(kept[0])):
            offered = [
                (*trigger[:place], word, *trigger[place + 1 :])
                for trigger, words in zip(kept, proposals(kept, place))
                for word in words
            ]
            _ask(value, offered, values)
            met.update(offered)
            kept = _best({*kept, *offered}, values, beam)
        if values[kept[0]] <= best:
            break
    return Found(kept[0], values[kept[0]], len(met))


def random_search(value: Value, drawn: Sequence[Trigger], known: dict[Trigger, float] | None = None) -> Found:
    """The best of random triggers."""
    values = {} if known is None else known
    _ask(value, drawn, values)
    best = _best(set(drawn), values, 1)[0]
    return Found(best, values[best], len(set(drawn)))


def _ask(value: Value, triggers: Sequence[Trigger], values: dict[Trigger, float]) -> None:
    new = [trigger for trigger in dict.fromkeys(triggers) if trigger not in values]
    if new:
        values.update(zip(new, map(float, value(new))))


def _best(triggers: set[Trigger], values: dict[Trigger, float], number: int) -> list[Trigger]:
    """The best first; of equal ones the smaller numbers."""
    return sorted(triggers, key=lambda trigger: (-values[trigger], trigger))[:number]
