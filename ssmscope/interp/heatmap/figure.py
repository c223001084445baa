"""A text in boxes, wrapped as text is; in inches, a box as wide as its token in a monospaced font."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssmscope.show.token_figure import drawable, letters
from ssmscope.show.tokens import shorten, written

if TYPE_CHECKING:
    from ssmscope.interp.heatmap.result import ScoredText

# All in inches; a monospaced character is 0.602 of the font size wide.
FONT_SIZE = 8.5
CHARACTER = FONT_SIZE / 72 * 0.602
PADDING, GAP = 0.035, 0.075
LINE = 9.0
BOX = 0.21


@dataclass(frozen=True)
class _Box:
    position: int
    left: float
    width: float
    token: str


def _wrap(text: ScoredText, limit: int) -> list[list[_Box]]:
    """The first `limit` tokens as boxes, in lines of at most LINE inches."""
    lines: list[list[_Box]] = []
    end = LINE
    for position, (gap, token) in enumerate(written(text.tokens, text.words)[:limit]):
        token = drawable(shorten(token, 48))
        width = max(letters(token), 1) * CHARACTER + 2 * PADDING
        left = end + (GAP if gap else 0.012)
        if not lines or left + width > LINE:
            lines.append([])
            left = 0.0
        lines[-1].append(_Box(position, left, width, token))
        end = left + width
    return lines
