"""Beam search for a trigger: its tokens are replaced one place after the other, by the exact goal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ssmscope.attacks.poisoning.triggers import Trigger

Value = Callable[[Sequence[Trigger]], Float[np.ndarray, " triggers"]]
"""Goal of triggers, the larger the better."""
Proposals = Callable[[Sequence[Trigger], int], Sequence[Sequence[int]]]
"""Words to try at a place of every trigger."""


@dataclass(frozen=True)
class Found:
    """End of a search: the best trigger, its value, and the number of evaluated triggers."""

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
    """Replace one token after the other, and keep the `beam` best of all evaluated triggers.

    A sweep is over all places; one that finds nothing better ends the search. The result is never worse than the best
    start.

    Args:
        known: values computed earlier; new ones are added.
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
    """Return the best of random triggers."""
    values = {} if known is None else known
    _ask(value, drawn, values)
    best = _best(set(drawn), values, 1)[0]
    return Found(best, values[best], len(set(drawn)))


def _ask(value: Value, triggers: Sequence[Trigger], values: dict[Trigger, float]) -> None:
    new = [trigger for trigger in dict.fromkeys(triggers) if trigger not in values]
    if new:
        values.update(zip(new, map(float, value(new))))


def _best(triggers: set[Trigger], values: dict[Trigger, float], number: int) -> list[Trigger]:
    """Return the best triggers in order; ties by their numbers."""
    return sorted(triggers, key=lambda trigger: (-values[trigger], trigger))[:number]
