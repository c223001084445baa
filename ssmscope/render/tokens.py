"""What every view of scored tokens shares: how tokens are written, scores coloured and ranges printed."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise

import numpy as np

from ssmscope.render.numbers import number

SHADES = 32
"""Into how many shades a view divides the range of a row's scores."""

BLUES = ("#e9f0f7", "#c9dff0", "#8fc0e0", "#4f97cb", "#2065a8", "#08306b")
"""From lowest to highest on white: one hue, so that it reads the same to every kind of colour vision and in
print."""

BLUES_ON_DARK = ("#1c2c3e", "#1d4064", "#2b6aa3", "#539bd3", "#9ccbf0", "#eef7ff")

CIVIDIS = ("#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78", "#9b9476", "#bcae6c", "#dec958", "#fee838")
"""For terminals, whose background nobody knows: both ends stand out from black and from white."""

REST = "⋯"
"""Sign for a token whose character is shown with the token that begins it."""

_VISIBLE = {"\n": "↵", "\r": "␍", "\t": "⇥", "\x7f": "␡", "\u2028": "↵", "\u2029": "↵"}
_JOINERS = "\u200c\u200d"  # inside emoji and in several scripts they belong to the glyph


def visible(token: str) -> str:
    """The token with every character that would not show, or would act on the display, as a visible symbol.

    One space in front is kept (it is where a word begins); other spaces at an end or in a run become "␣". A mark
    without its letter stands on a dotted circle.
    """
    if token and not token.strip(_JOINERS):
        return "".join(f"⟨{ord(character):04X}⟩" for character in token)
    if token[:1] >= "\u0300" and unicodedata.category(token[0])[0] == "M":
        token = f"◌{token}"
    start = 1 if token.startswith(" ") and token.strip(" ") else 0
    body = re.sub(r"^ +| +$| {2,}", lambda run: "␣" * len(run[0]), token[start:])
    return token[:start] + "".join(map(_visible_character, body))


def _visible_character(character: str) -> str:
    category = unicodedata.category(character)
    if character in _VISIBLE:
        return _VISIBLE[character]
    if category == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 32 else f"⟨{ord(character):04X}⟩"
    if category == "Cf" and character not in _JOINERS:
        return f"⟨{ord(character):04X}⟩"
    if category == "Cs":
        return "\N{REPLACEMENT CHARACTER}"
    return "␣" if category == "Zs" and character != " " else character


def written(tokens: Sequence[str], words: Sequence[int | None]) -> list[tuple[bool, str]]:
    """For every token whether a gap stands before it, and how it is written, without that gap.

    Tokens that carry their spaces (" movie") say so themselves; where none does (word pieces, bare numbers),
    a gap stands wherever a new word begins.
    """
    carries = any(token[:1] == " " and token.strip(" ") for token in tokens)
    begins = [True] + [word is None or word != before for before, word in pairwise(words)]
    shown = [visible(token) or REST for token in tokens]
    return [
        (index > 0 and (text[:1] == " " if carries else begins[index]), text.removeprefix(" "))
        for index, text in enumerate(shown)
    ]


def chance(probability: float) -> str:
    """The probability of an answer as it is written behind it; empty for answers that have none."""
    return "" if math.isnan(probability) else f"p = {probability:.3f}"


def shorten(text: str, width: int) -> str:
    """The text with its middle replaced by an ellipsis if it is longer than `width` characters."""
    head = (width - 1) // 2
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def short_token(token: str, width: int) -> str:
    """A token where there is little room: without the space in front, at most `width` characters, "␣" if blank, and
    "⋯" for the rest of a character."""
    return shorten((visible(token).strip(" ") or "␣") if token else REST, width)


def bounds(scores: np.ndarray, special: np.ndarray) -> str:
    """The lowest and highest score of the ordinary tokens, with the digits that tell the two apart."""
    plain = scores[~special]
    return span_of(float(plain.min()), float(plain.max())) if plain.size else "no scores"


def span_of(low: float, high: float) -> str:
    """Two ends with the digits that tell them apart."""
    digits = 3 if high == low else int(np.clip(np.ceil(-np.log10(high - low)) + 2, 3, 8))
    return f"{low:.{digits}f}–{high:.{digits}f}".replace("-", "−")


def numbers(indices: Sequence[int]) -> str:
    """Layer numbers in short: (0, 1, 2, 5) is "0–2, 5"."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def evenly_apart(layers: int, most: int) -> list[int]:
    """At most so many of the layers 0 to `layers` − 1, evenly apart, the first and the last among them."""
    return np.unique(np.rint(np.linspace(0, layers - 1, min(layers, most))).astype(int)).tolist()


def ramp(stops: Sequence[str], count: int = SHADES) -> list[str]:
    """`count` colours (#rrggbb) evenly along the stops."""
    channels = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops])
    at = np.linspace(0, len(stops) - 1, count)
    mixed = np.stack([np.interp(at, np.arange(len(stops)), channel) for channel in channels.T], axis=1)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.rint(mixed).astype(int).tolist()]


def named(tokens: Sequence[str], scores: np.ndarray, places: Sequence[int], width: int = 24) -> str:
    """The tokens at some places with their scores."""
    return " · ".join(f"{short_token(tokens[at], width)} {number(float(scores[at]))}" for at in places)


@lru_cache(maxsize=1)
def shade_style() -> str:
    """Rules for the classes v0 to v31, a shade each in light and dark, and for the bar of a legend (`.scale i`)."""
    light, dark = (
        "".join(
            f".ssmscope .v{i} {{ background: {colour}; color: {ink(colour)} }}\n"
            for i, colour in enumerate(ramp(stops))
        )
        + f".ssmscope .scale i {{ background: linear-gradient(90deg, {', '.join(stops)}) }}\n"
        for stops in (BLUES, BLUES_ON_DARK)
    )
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def ink(background: str) -> str:
    """Black or white, whichever reads better on the background (WCAG contrast: at least 4.5 on any
    colour)."""
    channels = np.array([int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"
