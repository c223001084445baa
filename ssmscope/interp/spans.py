"""Spans of a text as a user names them: words, positions, or the last token."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from ssmscope.core.encoding import Batch
from ssmscope.core.tokenizing import Spelled, is_glue, is_within_word
from ssmscope.core.trace import Trace
from ssmscope.errors import InputError
from ssmscope.render.tokens import spell_tokens

POSITIONS = re.compile(r"(-?\d{1,9})(?::(-?\d{1,9}))?", re.ASCII)
LIST = re.compile(rf"\s*{POSITIONS.pattern}\s*(,\s*{POSITIONS.pattern}\s*)*", re.ASCII)
EXAMPLES = "positions such as 3, 3:5 or 3,7, or last"

Span = str | int | slice | Sequence[int]
"""Name of a span; in Python positions may be numbers too."""


def positions_of(span: Span, batch: Batch, row: int = 0) -> tuple[int, ...]:
    """Return the positions of a span's tokens in one text of a batch: "last"; a position, "3", from one to before
    another, "3:5", or several of these, "3,7:9", counted from the end where negative (also as a number, a slice or a
    list of numbers); or words that occur once in the text, whole, whichever their case: all tokens that have a part of
    a character of them."""
    length = len(batch.tokens[row])
    which = f"text {row + 1}" if len(batch.tokens) > 1 else "the text"
    if not isinstance(span, str):
        return _numbered(span, length, which)
    if span.strip() == "last":
        return (length - 1,)
    if LIST.fullmatch(span):
        return tuple(sorted({place for part in span.split(",") for place in _range(part.strip(), length, which)}))
    return _of_words(span, spelling(batch, row), which)


def _range(span: str, length: int, which: str) -> range:
    numbers = POSITIONS.fullmatch(span)
    assert numbers is not None
    first, stop = (int(n) + length if n[0] == "-" else int(n) for n in numbers.groups("0"))
    stop = first + 1 if numbers[2] is None else stop
    if not 0 <= first < stop <= length:
        raise InputError(f"{which} has no positions {span}; it has the tokens 0 to {length - 1}")
    return range(first, stop)


def _numbered(span: int | slice | Sequence[int], length: int, which: str) -> tuple[int, ...]:
    if isinstance(span, slice):
        given: Sequence[int] = range(*span.indices(length))
    else:
        given = list(span) if isinstance(span, Sequence) else [span]
    wrong = next((at for at in given if isinstance(at, bool | str) or not hasattr(at, "__index__")), None)
    if wrong is not None or not len(given):
        raise InputError(f"the span {span!r:.80} names no tokens; give words of the text, positions or last")
    places = [int(at) + length if at < 0 else int(at) for at in given]
    outside = next((at for at, place in zip(given, places) if not 0 <= place < length), None)
    if outside is not None:
        raise InputError(f"{which} has no position {outside}; it has the tokens 0 to {length - 1}")
    return tuple(sorted(set(places)))


def span_name(span: Span) -> str:
    """Format a span as it is typed."""
    if isinstance(span, slice):
        return ":".join("" if end is None else str(end) for end in (span.start, span.stop))
    return ", ".join(map(str, span)) if isinstance(span, list | tuple) else str(span)


def spelling(batch: Batch | Trace, row: int) -> Spelled:
    """Return a text of a batch and the characters of each token; for ids, their names with gaps where words begin."""
    if batch.spelled:
        return batch.spelled[row]
    text, offsets = "", []
    for gap, token in spell_tokens(batch.tokens[row], batch.words[row]):
        text += " " * gap
        offsets.append((len(text), len(text) + len(token)))
        text += token
    return Spelled(text, tuple(offsets))


def fold_text(text: str, space: str = " ") -> tuple[str, list[int]]:
    """Fold a text's case and runs of white space, split off accents, and return it with each character's place."""
    found, places = "", []
    for at, character in enumerate(text):
        if character.isspace():
            new = "" if not found or found[-1] == space else space
        else:
            new = unicodedata.normalize("NFD", character).casefold()
        found += new
        places += [at] * len(new)
    return found, places


def _of_words(span: str, spelled: Spelled, which: str) -> tuple[int, ...]:
    text, places = fold_text(spelled.text)
    wanted = fold_text(span.strip())[0]
    if not wanted:
        raise InputError(f"a span is empty; give words of the text, {EXAMPLES}")
    found = [
        spelled.tokens(places[match.start()], places[match.end() - 1] + 1)
        for match in re.finditer(re.escape(wanted), text)
        if not is_within_word(text, match.start()) and not is_within_word(text, match.end())
    ]
    if not found:
        raise InputError(f"{which} has no words {span!r:.80}; give words of it, {EXAMPLES}")
    if len(found) > 1:
        at = ", ".join(f"{place[0]}:{place[-1] + 1}" for place in found[:5] if place)
        raise InputError(f"{span!r:.80} occurs {len(found)} times in {which}; give positions: it is at {at}")
    if not found[0]:
        raise InputError(f"the tokenizer skips {span!r:.80}: no token covers it; give other words")
    return found[0]


def find_piece(piece: str, spelled: Spelled) -> tuple[int, int] | None:
    """Return the first tokens of a piece of the text, as first and last + 1; case and spaces do not matter."""
    text, places = fold_text(spelled.text, "")
    wanted = fold_text(piece, "")[0]
    for match in re.finditer(re.escape(wanted), text) if wanted else ():
        if match.end() == len(text) or not is_glue(text[match.end()]):
            found = spelled.tokens(places[match.start()], places[match.end() - 1] + 1)
            return (found[0], found[-1] + 1) if found else None
    return None


def words_at(positions: Sequence[int], batch: Batch) -> str:
    """Return the words at neighbouring positions of the first text, as the text has them."""
    spelled = spelling(batch, 0)
    spans = [spelled.offsets[at] for at in positions]
    real = [span for span in spans if span[1] > span[0]]
    if not real:
        return "".join(batch.tokens[0][at] for at in positions).strip() or "␣"
    begin, stop = real[0][0], real[-1][1]
    while stop < len(spelled.text) and is_glue(spelled.text[stop]) and not spelled.tokens(stop, stop + 1):
        stop += 1
    return spelled.text[begin:stop].strip() or "␣"
