"""Common parts of all views of scored tokens: spelling of tokens, colours of scores, formatting of ranges."""

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
"""Number of shades for the range of a row's scores."""

BLUES = ("#e9f0f7", "#c9dff0", "#8fc0e0", "#4f97cb", "#2065a8", "#08306b")
"""Colours on white from lowest to highest: one hue, which looks alike in print and to every kind of colour vision."""

BLUES_ON_DARK = ("#1c2c3e", "#1d4064", "#2b6aa3", "#539bd3", "#9ccbf0", "#eef7ff")

CIVIDIS = ("#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78", "#9b9476", "#bcae6c", "#dec958", "#fee838")
"""Colours for terminals of unknown background: both ends stand out from black and from white."""

REST = "⋯"
"""Sign for a token whose character is shown with the token that begins it."""

_VISIBLE = {"\n": "↵", "\r": "␍", "\t": "⇥", "\x7f": "␡", "\u2028": "↵", "\u2029": "↵"}
_JOINERS = "\u200c\u200d"  # They belong to the glyph within emoji and in several scripts.


def visible(token: str) -> str:
    """Replace every character of a token that would not show, or would act on the display, by a visible symbol.

    One leading space is kept, because it begins a word; other spaces at an end or in a run become "␣". A combining
    mark without its letter is put on a dotted circle.
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
    """Return, for every token, True if a gap precedes it, and its spelling without that gap.

    If any token carries its space (" movie"), spaces mark the gaps; otherwise (word pieces, bare numbers) a gap
    precedes every new word.
    """
    carries = any(token[:1] == " " and token.strip(" ") for token in tokens)
    begins = [True] + [word is None or word != before for before, word in pairwise(words)]
    shown = [visible(token) or REST for token in tokens]
    return [
        (index > 0 and (text[:1] == " " if carries else begins[index]), text.removeprefix(" "))
        for index, text in enumerate(shown)
    ]


def chance(probability: float) -> str:
    """Format the probability of an answer; empty for answers without one."""
    return "" if math.isnan(probability) else f"p = {probability:.3f}"


def shorten(text: str, width: int) -> str:
    """Replace the middle of a text by an ellipsis if it is longer than `width` characters."""
    head = (width - 1) // 2
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def short_token(token: str, width: int) -> str:
    """Shorten a token to `width` characters, without its leading space; "␣" if blank, "⋯" for part of a character."""
    return shorten((visible(token).strip(" ") or "␣") if token else REST, width)


def bounds(scores: np.ndarray, special: np.ndarray) -> str:
    """Format the lowest and highest score of the ordinary tokens, with enough digits to tell them apart."""
    plain = scores[~special]
    return span_of(float(plain.min()), float(plain.max())) if plain.size else "no scores"


def span_of(low: float, high: float) -> str:
    """Format two ends of a range, with enough digits to tell them apart."""
    digits = 3 if high == low else int(np.clip(np.ceil(-np.log10(high - low)) + 2, 3, 8))
    return f"{low:.{digits}f}–{high:.{digits}f}".replace("-", "−")


def numbers(indices: Sequence[int]) -> str:
    """Abbreviate layer numbers: (0, 1, 2, 5) is "0–2, 5"."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def evenly_apart(layers: int, most: int) -> list[int]:
    """Return at most `most` of the layers 0 to `layers` − 1, evenly spaced, with the first and the last."""
    return np.unique(np.rint(np.linspace(0, layers - 1, min(layers, most))).astype(int)).tolist()


def ramp(stops: Sequence[str], count: int = SHADES) -> list[str]:
    """Return `count` colours (#rrggbb) evenly spaced along the stops."""
    channels = np.array([[int(stop[i : i + 2], 16) for i in (1, 3, 5)] for stop in stops])
    at = np.linspace(0, len(stops) - 1, count)
    mixed = np.stack([np.interp(at, np.arange(len(stops)), channel) for channel in channels.T], axis=1)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.rint(mixed).astype(int).tolist()]


def named(tokens: Sequence[str], scores: np.ndarray, places: Sequence[int], width: int = 24) -> str:
    """List the tokens at the given positions with their scores."""
    return " · ".join(f"{short_token(tokens[at], width)} {number(float(scores[at]))}" for at in places)


@lru_cache(maxsize=1)
def shade_style() -> str:
    """Return CSS in light and dark for the shades, classes v0 to v31, and for a legend's bar (`.scale i`)."""
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
    """Return black or white, whichever has more contrast with the background (WCAG: at least 4.5 on any colour)."""
    channels = np.array([int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"
