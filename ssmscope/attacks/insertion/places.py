"""Texts with a phrase at one of their places."""

from __future__ import annotations

import re


def inserted(text: str, phrase: str, words: int) -> str:
    """Insert the phrase after the first `words` words of the text, with single spaces around it."""
    found = list(re.finditer(r"\S+", text))
    if not words:
        start = found[0].start() if found else 0
        return f"{text[:start]}{phrase} {text[start:]}"
    at = found[words - 1].end()
    return f"{text[:at]} {phrase}{text[at:]}"
