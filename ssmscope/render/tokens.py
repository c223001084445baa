"""Common parts of all views of scored tokens: spelling of tokens, colours of scores, formatting of ranges."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from ssmscope.render.numbers import number

REST = "⋯"
"""Sign for a token whose character is shown with the token that begins it."""

NO_BREAK = "\u00a0"
MAX_TIED = 30
"""Maximum characters of an item of a list that is kept on one line."""

_VISIBLE = {"\n": "↵", "\r": "␍", "\t": "⇥", "\x7f": "␡", "\u2028": "↵", "\u2029": "↵"}
_JOINERS = "\u200c\u200d"  # They belong to the glyph within emoji and in several scripts.


def visible(token: str) -> str:
    """Replace every character of a token that would not show, or would act on the display, by a visible symbol.

    One leading space is kept, because it begins a word; other spaces at an end or in a run become "␣". A combining
    mark without its letter is put on a dotted circle.
    """
    if not token.strip(_JOINERS):
        return "".join(f"⟨{ord(character):04X}⟩" for character in token)
    if token >= "\u0300" and unicodedata.category(token[0])[0] == "M":
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


def spell_tokens(tokens: Sequence[str], words: Sequence[int | None]) -> list[tuple[bool, str]]:
    """Return, for every token, True if a gap precedes it, and its spelling without that gap.

    If any token carries its space (" movie"), spaces mark the gaps; otherwise (word pieces, bare numbers) a gap
    precedes every new word.
    """
    shown = [visible(token) or REST for token in tokens]
    if any(token[:1] == " " and token.strip(" ") for token in tokens):
        begins = [text[:1] == " " for text in shown[1:]]
    else:
        begins = [word is None or word != before for before, word in pairwise(words)]
    gaps = [False, *begins]
    return [(gap, text.removeprefix(" ")) for gap, text in zip(gaps, shown)]


def shorten(text: str, width: int) -> str:
    """Replace the middle of a text, between words if they are short, by an ellipsis if it is longer than `width`
    characters."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    start, end, part = text[:head], text[len(text) - (width - 1 - head) :], rf"\S{{1,{max(width // 6, 1)}}}"
    return f"{re.sub(f' {part}$', ' ', start)}…{re.sub(f'^{part} ', ' ', end)}"


def unbroken(text: str) -> str:
    """Allow no line break before a unit, at an equals sign, within an interval, or within a short item of a list."""
    tied = re.sub(r"(?<=\d) (?=%|s\b)|(?<=\w) (?== )|(?<= =) |(?<=\d,) (?=[−\d.]+\])", NO_BREAK, text)
    first, *others = tied.split(" · ")
    items = [each.replace(" ", NO_BREAK) if len(each) <= MAX_TIED else each for each in (first, *others)]
    return f"{NO_BREAK}· ".join(items) if others else tied


def short_token(token: str, width: int) -> str:
    """Shorten a token to `width` characters, without its leading space; "␣" if blank, "⋯" for part of a character."""
    return shorten((visible(token).strip(" ") or "␣") if token else REST, width)


def name_scores(tokens: Sequence[str], scores: np.ndarray, places: Sequence[int], width: int = 24) -> str:
    """List the tokens at the given positions with their scores."""
    return " · ".join(f"{short_token(tokens[at], width)} {number(float(scores[at]))}" for at in places)
