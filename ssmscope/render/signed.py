"""Colours around zero: what every view of signed scores shares."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ssmscope.render.tokens import ink, ramp

SIGNED = ("#6e2a03", "#b4500a", "#e8934a", "#f8d3b0", "#f7f7f7", "#c0dcf0", "#6aaed6", "#2065a8", "#08306b")
"""From the most negative to the most positive on white: orange and blue, which every kind of colour vision tells
apart, and which differ from white alike."""

SIGNED_ON_DARK = ("#ffd9b0", "#f09a48", "#a85512", "#56300f", "#1a2027", "#173a5c", "#2b6aa3", "#73b3e4", "#d6ebff")

STEPS = 16
"""How many shades either side of zero has."""


def levels(weights: np.ndarray, end: float) -> np.ndarray:
    """The shade of each weight, from −STEPS to STEPS; 0 is zero, and what is beyond the end has the last one."""
    if end <= 0:
        return np.zeros(weights.shape, dtype=np.int64)
    return np.rint(np.clip(weights / end, -1, 1) * STEPS).astype(np.int64)


def shades(stops: tuple[str, ...] = SIGNED) -> list[str]:
    """The colours of `levels`, the one of level i at index i + STEPS."""
    return ramp(stops, 2 * STEPS + 1)


@lru_cache(maxsize=1)
def signed_style() -> str:
    """Rules for the attribute data-l, a level from −STEPS to STEPS in light and dark, and for the bar of a legend
    (`.scale.around i`)."""
    light, dark = (
        "".join(
            f'.ssmscope [data-l="{level}"] {{ background: {colour}; color: {ink(colour)} }}\n'
            for level, colour in enumerate(shades(stops), start=-STEPS)
        )
        + f".ssmscope .scale.around i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}\n"
        for stops in (SIGNED, SIGNED_ON_DARK)
    )
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
