"""Scores of sentences, lines or spans: the sums of their tokens' scores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from ssmscope.core.encoding import Batch
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import ExplainedText
from ssmscope.interp.spans import positions_of, span_name, spelling
from ssmscope.render.tokens import visible

ENDS = {"sentence": r"[.!?…]+[\"'’”)\]]*(?=\s)|\n\s*\n|[。！？]", "line": r"\n"}
"""Patterns that end a sentence, or a line."""
REST = "…"
"""Name of all ordinary tokens that no span names."""


def grouped(text: ExplainedText, batch: Batch, row: int, by: Sequence[str]) -> ExplainedText:
    """Return a text whose tokens are its sentences, its lines, or the spans that are named and the rest of it, each
    with the sum of its tokens' scores. Special tokens stay tokens of their own. Raises InputError for an image, spans
    that overlap or are not in the text."""
    if text.pixels is not None or batch.values is not None:
        raise InputError("by=… is of texts: images and series have no sentences, lines or words")
    own = np.array([word is not None for word in text.words])
    groups = _cut(batch, row, ENDS[by[0]]) if len(by) == 1 and by[0] in ENDS else _named(batch, row, by, own)
    groups = [*groups, *[(text.tokens[at], [at]) for at in np.flatnonzero(~own).tolist()]]
    groups = sorted((each for each in groups if each[1]), key=lambda each: each[1][0])
    special = [not own[places[0]] for _, places in groups]
    parts = tuple(
        replace(each, scores=np.array([each.scores[places].sum() for _, places in groups], dtype=each.scores.dtype))
        for each in text.attributions
    )
    return replace(
        text,
        tokens=tuple(name for name, _ in groups),
        words=tuple(None if alone else number for number, alone in enumerate(special)),
        attributions=parts,
    )


def _cut(batch: Batch, row: int, end: str) -> list[tuple[str, list[int]]]:
    """Return the ordinary tokens between the ends of a pattern, with their text."""
    spelled = spelling(batch, row)
    stops = [match.end() for match in re.finditer(end, spelled.text)]
    starts = [0, *stops]
    found: dict[int, list[int]] = {}
    for at, (begin, stop) in enumerate(spelled.offsets):
        if batch.words[row][at] is None:
            continue
        blank = len(spelled.text[begin:stop]) - len(spelled.text[begin:stop].lstrip())
        first = begin + (blank if begin + blank < stop else 0)
        found.setdefault(sum(end <= first for end in stops), []).append(at)
    stops = [*stops, len(spelled.text)]
    return [(visible(spelled.text[starts[part] : stops[part]].strip()), places) for part, places in found.items()]


def _named(batch: Batch, row: int, by: Sequence[str], own: np.ndarray) -> list[tuple[str, list[int]]]:
    """Return the spans that are named, and the rest."""
    left, found = set(np.flatnonzero(own).tolist()), []
    for span in by:
        places = positions_of(span, batch, row)
        if not left.issuperset(places):
            raise InputError(f"by=… names a token of {span!r:.60} twice, or a special token; give spans apart")
        left -= set(places)
        found.append((span_name(span), list(places)))
    return [*found, (REST, sorted(left))]
