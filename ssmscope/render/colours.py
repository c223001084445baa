"""Colours of scores in all views: one hue for shares, and two around zero for signed scores."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np

SHADES = 32

BLUES = ("#e9f0f7", "#c9dff0", "#8fc0e0", "#4f97cb", "#2065a8", "#08306b")
"""Colours on white from lowest to highest: one hue, which looks alike in print and to every kind of colour vision."""

BLUES_ON_DARK = ("#1c2c3e", "#1d4064", "#2b6aa3", "#539bd3", "#9ccbf0", "#eef7ff")

CIVIDIS = ("#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78", "#9b9476", "#bcae6c", "#dec958", "#fee838")
"""Colours for terminals of unknown background: both ends stand out from black and from white."""

SIGNED = ("#6e2a03", "#b4500a", "#e8934a", "#f8d3b0", "#f7f7f7", "#c0dcf0", "#6aaed6", "#2065a8", "#08306b")
"""Colours on white from the most negative to the most positive: orange and blue, which every kind of colour vision
tells apart and which differ from white equally."""

SIGNED_ON_DARK = ("#ffd9b0", "#f09a48", "#a85512", "#56300f", "#1a2027", "#173a5c", "#2b6aa3", "#73b3e4", "#d6ebff")

STEPS = 16


def ramp(stops: Sequence[str], count: int = SHADES) -> list[str]:
    """Return `count` colours (#rrggbb) evenly spaced along the stops."""
    channels = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops])
    at = np.linspace(0, len(stops) - 1, count)
    mixed = np.stack([np.interp(at, np.arange(len(stops)), channel) for channel in channels.T], axis=1)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.rint(mixed).astype(int).tolist()]


def ink(background: str) -> str:
    """Return black or white, whichever has more contrast with the background (WCAG: at least 4.5 on any colour)."""
    channels = np.array([int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def signed_shades(stops: tuple[str, ...] = SIGNED) -> list[str]:
    """Return the colours of the levels −STEPS to STEPS, with level i at index i + STEPS."""
    return ramp(stops, 2 * STEPS + 1)


def shade_style() -> str:
    """Return CSS in light and dark for the shades, classes v0 to v31, and for a legend's bar (`.scale i`)."""
    return _style((BLUES, BLUES_ON_DARK), [f".v{shade}" for shade in range(SHADES)], ".scale")


def template_text(name: str) -> str:
    """Return a stylesheet or a script of the package."""
    return resources.files("ssmscope.render").joinpath("templates", name).read_text(encoding="utf-8")


def signed_style() -> str:
    """Return CSS in light and dark for the levels of attribute data-l and for a legend's bar (`.scale.around i`)."""
    levels = [f'[data-l="{level}"]' for level in range(-STEPS, STEPS + 1)]
    return _style((SIGNED, SIGNED_ON_DARK), levels, ".scale.around")


def _style(palettes: Sequence[Sequence[str]], selectors: Sequence[str], bar: str) -> str:
    light, dark = (
        "".join(
            f".ssmscope {selector} {{ background: {colour}; color: {ink(colour)} }}\n"
            for selector, colour in zip(selectors, ramp(stops, len(selectors)))
        )
        + f".ssmscope {bar} i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}\n"
        for stops in palettes
    )
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
