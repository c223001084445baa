"""Spans of a text as somebody names them: its words, positions, or the last token."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ssmscope.encoding import Batch
from ssmscope.errors import InputError
from ssmscope.show.tokens import visible, written

POSITIONS = re.compile(r"(-?\d{1,9})(?::(-?\d{1,9}))?", re.ASCII)


def positions_of(span: str, batch: Batch, row: int = 0) -> tuple[int, ...]:
    """The positions of a span's tokens in one text of a batch.

    Args:
        span: "last"; a position, "3", or from one to before another, "3:5", which count from the end where they are
            negative; or words that stand in the text once, whole, whichever their case.

    Raises:
        InputError: there is no such position, or the words stand in the text never or several times.
    """
    tokens = batch.tokens[row]
    which = f"text {row + 1}" if len(batch.tokens) > 1 else "the text"
    if span.strip() == "last":
        return (len(tokens) - 1,)
    numbers = POSITIONS.fullmatch(span.strip())
    if numbers:
        first, stop = (int(n) + len(tokens) if n and n[0] == "-" else int(n or 0) for n in numbers.groups())
        stop = first + 1 if numbers[2] is None else stop
        if not 0 <= first < stop <= len(tokens):
            raise InputError(f"{which} has no positions {span}; it has the tokens 0 to {len(tokens) - 1}")
        return tuple(range(first, stop))
    return _of_words(span, tokens, batch.words[row], which)


def _of_words(span: str, tokens: Sequence[str], words: Sequence[int | None], which: str) -> tuple[int, ...]:
    text, begins = "", []
    for gap, token in written(tokens, words):
        text += " " * gap
        begins.append(len(text))
        text += token
    ends = [*begins[1:], len(text)]
    wanted = " ".join(visible(word) for word in span.split())
    if not wanted:
        raise InputError("a span is empty; give words of the text, positions such as 3 or 3:5, or last")
    found = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(wanted)}(?!\w)", text, re.IGNORECASE)]
    places = [
        tuple(at for at, (begin, end) in enumerate(zip(begins, ends)) if begin < stop and end > start)
        for start, stop in found
    ]
    if not places:
        raise InputError(f"{which} has no words {span!r:.80}; give words of it, positions such as 3 or 3:5, or last")
    if len(places) > 1:
        at = ", ".join(f"{place[0]}:{place[-1] + 1}" for place in places[:5])
        raise InputError(f"{span!r:.80} stands in {which} {len(places)} times; give positions: it is at {at}")
    return places[0]


def named(positions: Sequence[int], batch: Batch, row: int = 0) -> str:
    """The words at neighbouring positions, as the text has them."""
    shown = written(batch.tokens[row], batch.words[row])
    return "".join(" " * shown[at][0] + shown[at][1] for at in positions).strip() or "␣"
