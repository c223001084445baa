"""Estimates from the answers to texts with typing errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from ssmscope.attacks.curves import at_step, shifts
from ssmscope.attacks.noise.result import Mistyped, NoiseLevel
from ssmscope.core.bootstrap import estimate, share

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
    """Compute the estimates by the fields of `NoiseCurve`, from class ids and log-odds, those of the clean examples
    first, and keep the first of the `contents`, if there are any, whose right answer changes, each at its lowest rate.
    """
    right = answers == labels
    flipped = right[0] & (answers[1:] != answers[0])
    clean, parts, _ = shifts(answers, labels, odds, seed)
    shares = {"accuracy": len(labels), "flipped": clean[0, 0]}
    levels = tuple(NoiseLevel(*each, **at_step(parts, at, **shares)) for at, each in enumerate(zip(rates, errors)))
    return {
        "clean": share(int(clean[0, 0]), len(labels)),
        "levels": levels,
        "average_drop": estimate(parts["drop"].mean(1)),
        "right": right,
        "mistyped": tuple(
            Mistyped(row, rates[at], contents[row], typed[at][row], int(labels[row]), int(answers[1 + at, row]))
            for row in np.flatnonzero(flipped.any(0))[: MAX_EXAMPLES * bool(contents)].tolist()
            for at in [int(flipped[:, row].argmax())]
        ),
    }
