"""Colours around zero, for all views of signed scores."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ssmscope.render.tokens import ink, ramp

SIGNED = ("#6e2a03", "#b4500a", "#e8934a", "#f8d3b0", "#f7f7f7", "#c0dcf0", "#6aaed6", "#2065a8", "#08306b")
"""Colours on white from the most negative to the most positive: orange and blue, which every kind of colour vision
tells apart and which differ from white equally."""

SIGNED_ON_DARK = ("#ffd9b0", "#f09a48", "#a85512", "#56300f", "#1a2027", "#173a5c", "#2b6aa3", "#73b3e4", "#d6ebff")

STEPS = 16
"""Number of shades on either side of zero."""


def levels(weights: np.ndarray, end: float) -> np.ndarray:
    """Return the shade of each weight, from −STEPS to STEPS; weights beyond the end have the last shade."""
    if end <= 0:
        return np.zeros(weights.shape, dtype=np.int64)
    return np.rint(np.clip(weights / end, -1, 1) * STEPS).astype(np.int64)


def shades(stops: tuple[str, ...] = SIGNED) -> list[str]:
    """Return the colours of `levels`, with level i at index i + STEPS."""
    return ramp(stops, 2 * STEPS + 1)


@lru_cache(maxsize=1)
def signed_style() -> str:
    """Return CSS in light and dark for the levels of attribute data-l and for a legend's bar (`.scale.around i`)."""
    light, dark = (
        "".join(
            f'.ssmscope [data-l="{level}"] {{ background: {colour}; color: {ink(colour)} }}\n'
            for level, colour in enumerate(shades(stops), start=-STEPS)
        )
        + f".ssmscope .scale.around i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}\n"
        for stops in (SIGNED, SIGNED_ON_DARK)
    )
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
