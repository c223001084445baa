"""Differences between two texts, word by word, for terminals and pages."""

from __future__ import annotations

import difflib
import html
import re
from dataclasses import dataclass

from rich.text import Text

MARKS = {"removed": ("[-", "-]"), "added": ("{+", "+}")}
"""Brackets around changed words, so that they can be read without colour."""


@dataclass(frozen=True)
class Piece:
    """Part of one text or of both: `kind` is same, removed (only in the first text) or added (only in the second)."""

    kind: str
    text: str


def word_diff(before: str, after: str) -> tuple[Piece, ...]:
    """Return the differences between two texts in whole words, a removal before the addition in its place.

    The pieces that are the same or removed, joined, are exactly `before`; those that are the same or added, `after`.
    """
    old, new = _parts(before), _parts(after)
    pieces: list[Piece] = []
    for operation, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if operation == "equal":
            pieces.append(Piece("same", "".join(old[i:j])))
            continue
        pieces += [Piece("removed", "".join(old[i:j]))] if i < j else []
        pieces += [Piece("added", "".join(new[k:m]))] if k < m else []
    return tuple(pieces)


def _parts(text: str) -> list[str]:
    return re.findall(r"\s+|\w+(?:['’-]\w+)*|[^\w\s]", text)


def rich_diff(before: str, after: str) -> Text:
    """Return both texts in one line of a terminal, with ⏎ for line breaks: removals struck through and additions
    underlined, in brackets."""
    line = Text()
    styles = {"same": "", "removed": "red strike", "added": "green underline"}
    for piece in word_diff(before, after):
        left, right = MARKS.get(piece.kind, ("", ""))
        line.append(left + piece.text.replace("\n", "⏎") + right, style=styles[piece.kind])
    return line


def html_diff(before: str, after: str) -> str:
    """Return both texts as escaped HTML with <del> and <ins>."""
    tags = {"same": ("", ""), "removed": ("<del>", "</del>"), "added": ("<ins>", "</ins>")}
    return "".join(tags[p.kind][0] + html.escape(p.text) + tags[p.kind][1] for p in word_diff(before, after))
