"""Human rationales: the parts of a text that people marked as the reason for its label."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ssmscope.core.reading import parse_json
from ssmscope.data.rows import Row
from ssmscope.errors import InputError

Spans = tuple[tuple[int, int], ...]
"""Spans of characters [start, end) of a text, in order and not touching."""


def rationale_spans(row: Row, number: int, place: str | Path) -> Spans | None:
    """Read the column `rationale` of a row as spans of characters of its stripped text; None if absent or empty.

    The column holds spans of characters, [[0, 4], [10, 17]] (end exclusive); a 0 or 1 for every white-space-separated
    word, [0, 1, 1] or "0 1 1"; or the marked words themselves, "a gripping film" or ["a", "film"], each of which occurs
    in the text once. In a csv or tsv file lists are written as JSON. Anything else raises InputError.
    """
    given = row.get("rationale")
    whole = row["text"]
    if isinstance(given, str):
        given = _parsed_rationale(given, len(whole.split()))
    if given is None or given != given or given == []:
        return None
    which = f"the rationale of row {number} of {place}"
    if not isinstance(given, list):
        raise InputError(f"{which} is {given!r}; allowed are {RATIONALES}")
    if all(isinstance(item, str) for item in given):
        spans = [_found(words, whole, which) for words in given]
    elif all(isinstance(item, list) for item in given):
        spans = [_checked_span(item, len(whole), which) for item in given]
    elif all(item in (0, 1) for item in given):
        words = [match.span() for match in re.finditer(r"\S+", whole)]
        if len(given) != len(words):
            raise InputError(f"{which} has {len(given)} numbers for {len(words)} words; give a 0 or 1 for every word")
        spans = [span for span, marked in zip(words, given) if marked]
    else:
        raise InputError(f"{which} is {given!r:.60}; allowed are {RATIONALES}")
    return _joined_spans(spans, whole)


RATIONALES = "spans [[start, end], …], a 0 or 1 for every word, or words of the text"


def _parsed_rationale(given: str, words: int) -> Any:
    """Parse a string as a JSON list, as digits for `words` words, or as the one marked text."""
    given = given.strip()
    if not given:
        return None
    if re.fullmatch(r"[01](\s+[01])*", given) and len(given.split()) == words:
        return [int(digit) for digit in given.split()]
    try:
        found = parse_json(given)
    except ValueError:
        found = None
    return found if isinstance(found, list) else [given]


def _found(words: str, whole: str, which: str) -> tuple[int, int]:
    if (times := whole.count(words) if words else 0) != 1:
        hint = f"in its text {times} times; give spans [[start, end], …] instead"
        hint = hint if times else "not in its text; rename the column if it holds something else"
        raise InputError(f"{which}, {words!r:.60}, is {hint}")
    start = whole.index(words)
    return start, start + len(words)


def _checked_span(span: Sequence[Any], length: int, which: str) -> tuple[int, int]:
    whole = len(span) == 2 and all(isinstance(end, int) and not isinstance(end, bool) for end in span)
    if not whole or not 0 <= span[0] < span[1] <= length:
        raise InputError(f"{which} has the span {span!r:.60}; allowed are [start, end] within 0 to {length}")
    return span[0], span[1]


def _joined_spans(spans: Iterable[tuple[int, int]], whole: str) -> Spans | None:
    """Sort spans, merge those that overlap or touch, and count from the first character that is no space."""
    before, end = len(whole) - len(whole.lstrip()), len(whole.strip())
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((max(a - before, 0), min(b - before, end)) for a, b in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined) or None
