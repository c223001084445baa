"""Estimates from the answers to texts with typing errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ssmscope.attacks.noise.result import Mistyped, NoiseLevel
from ssmscope.core.bootstrap import Estimate, estimate, ratio, resampled_sums

MAX_EXAMPLES = 20
"""Maximum number of texts that a result keeps of those whose answer changes."""


def measure(
    labels: Int[np.ndarray, " examples"],
    answers: Int[np.ndarray, "levels+1 examples"],
    odds: Float[np.ndarray, "levels+1 examples"],
    rates: Sequence[float],
    errors: Sequence[float],
    contents: Sequence[str],
    typed: Sequence[Sequence[str]],
    seed: int,
) -> dict[str, Any]:
    """Compute the estimates by the fields of `NoiseCurve`, from class ids and log-odds, those of the clean texts first,
    and keep the first texts whose right answer changes, each at its lowest rate."""
    right = answers == labels
    flipped = right[0] & (answers[1:] != answers[0])
    columns = np.concatenate([right, flipped, odds[1:] - odds[0]]).T.astype(np.float64)
    sums = resampled_sums(columns, seed=seed)
    clean, hits, changed, moved = np.split(sums, [1, 1 + len(rates), 1 + 2 * len(rates)], axis=1)
    drops = 1 - ratio(hits, clean)
    parts = {"accuracy": hits / len(labels), "drop": drops, "flipped": ratio(changed, clean)}
    parts |= {"log_odds_change": moved / len(labels)}
    levels = tuple(
        NoiseLevel(rate, **{name: estimate(part[:, at]) for name, part in parts.items()}, errors=share)
        for at, (rate, share) in enumerate(zip(rates, errors))
    )
    return {
        "clean": estimate(clean[:, 0] / len(labels)),
        "levels": levels,
        "average_drop": estimate(drops.mean(1)),
        "right": right,
        "mistyped": tuple(
            Mistyped(row, rates[at], contents[row], typed[at][row], int(labels[row]), int(answers[1 + at, row]))
            for row in np.flatnonzero(flipped.any(0))[:MAX_EXAMPLES].tolist()
            for at in [int(flipped[:, row].argmax())]
        ),
    }


def notes_on(clean: Estimate) -> Iterable[str]:
    if clean.value == 0:
        yield "the clean accuracy is 0: there is no drop to measure"
