"""Comparison of two models: results of one analysis on the same texts, and their difference by token or word."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
from ssmscope.api.results import TABLE_ROWS, Result
from ssmscope.core.ties import descending
from ssmscope.errors import InputError
from ssmscope.render.blocks import OF_DIFFERENCES, Block, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import format_probability, number
from ssmscope.render.table import Cell, Line, Table, table
from ssmscope.render.token_rows import MAX_COLOURED_ROWS
from ssmscope.render.tokens import name_scores, short_token, spell_tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from ssmscope.render.figure import Frame

DIFFERENCE = "difference"
MIN_NAMED_SHARE, NAMED_PER_SIDE = 0.1, 3
"""Smallest share of the scale of a named difference, and number of differences named on each side."""


@dataclass(frozen=True)
class Paired(Result, kind="pair"):
    """Results of an analysis of two models."""

    vector: ClassVar[bool] = False

    results: tuple[Result, ...]
    """Results of the first and of the second model."""

    @property
    def names(self) -> list[str]:
        """Names of the two models, numbered where they have the same name."""
        found = [result.model_name for result in self.results]
        return found if found[0] != found[1] else [f"{name} ({at})" for at, name in enumerate(found, start=1)]

    @property
    def headline(self) -> str:
        first = self.results[0]
        about = first.headline.partition(": ")[0]
        for of in (" of ", " on "):
            about = about.replace(of + first.model_name, of + self.model_name, 1)
        return f"{about}: {self._differs()}"

    def _differs(self) -> str:
        """Say what one model has more of than the other, in the first texts' first rows."""
        shown, told, of = self.rows(), [], ""
        if hasattr(self.results[0], "differ") or shown is None:
            return self.results[0].differ(self.results, self.names)  # type: ignore[attr-defined]
        for at, text in enumerate(shown.texts[:NAMED_PER_SIDE]):
            row = next((row for row in text.rows if row.name.startswith(DIFFERENCE)), None)
            if row is None:
                continue
            of = f", {row.name.partition(chr(10))[2]}"
            sides = [
                f"{name} more at "
                + ", ".join(f"“{short_token(text.tokens[at], 20)}” ({number(abs(row.scores[at]))})" for at in places)
                for name, places in zip(self.names, (row.marked, row.against))
                if places
            ]
            said = "; ".join(sides) or "no token differs by a tenth of the scale"
            if text.pixels is not None:
                alike = np.corrcoef(text.rows[0].scores.astype(np.float64), text.rows[1].scores.astype(np.float64))[
                    0, 1
                ]
                said = f"the two maps correlate by {number(float(alike), 2)}"
            what = "text" if text.pixels is None else "image"
            told.append(f"{what} {at}: {said}" if len(shown.texts) > 1 else said)
        return f"{'; '.join(told) or 'no row of one is a row of the other'} ({shown.score}{of})"

    def verdict(self, at: int = 0) -> str:
        return self.results[at].verdict()

    def rows(self) -> TokenRows | None:
        """Return the tokens in the colours of both models and of the difference; None without rows of tokens."""
        first, other = (result.token_rows() for result in self.results)  # type: ignore[attr-defined]
        return None if first is None or other is None else paired_rows(first, other, self.names)

    def to_frame(self) -> pd.DataFrame:
        """Return a row per model, text, row and token, or word where the tokenizers differ: columns model (one of the
        two, or "difference", the first minus the other), text, row (the layer or method), position, token, score.
        Results without rows of tokens give both tables, with a column model."""
        shown = self.rows()
        if shown is None:
            frames = [result.to_frame().assign(model=name) for name, result in zip(self.names, self.results)]
            return pd.concat(frames, ignore_index=True)
        found = []
        for at, text in enumerate(shown.texts):
            for row in text.rows:
                of, _, name = row.name.partition("\n")
                cells = {"model": of, "text": at, "row": name, "position": range(len(text.tokens))}
                found.append(pd.DataFrame({**cells, "token": text.tokens, "score": row.scores}))
        return pd.concat(found, ignore_index=True)

    def draw(self, frame: Frame, *, start: int = 0) -> Figure:  # type: ignore[override]
        """Draw every text in the colours of both models and of the difference; one figure holds 8 texts, from number
        `start` on. Results over a data set share one picture, with their differences."""
        from ssmscope.render.token_figure import draw_rows

        shown = self.rows()
        if shown is None:
            return self.results[0].draw_pair(self, frame)  # type: ignore[attr-defined]
        return draw_rows(shown, self.headline, frame, start=start)

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        for name, result in zip(self.names, self.results):
            yield Prose(f"{name}: {result.verdict()}.")
        shown = self.rows()
        if shown is None:
            first: Any = self.results[0]
            yield Picture(self.figure, self.headline, vector=False)
            yield first.differences(self.results, self.names)
            yield first.compare(self.results, [[name] for name in self.names])
            for result in self.results:
                yield Prose(result.headline, "heading")
                yield from (each for each in result.blocks() if not (isinstance(each, Prose) and each.kind == "title"))
            return
        yield shown
        photo = any(t.pixels is not None for t in shown.texts)
        yield Picture(self.figure, self.headline, vector=False, folded=not photo, photo=photo)
        yield replace(differences(shown, self.names), brief=TABLE_ROWS)


def pair(results: Sequence[Result]) -> Paired:
    """Return the results of an analysis of two models on the same texts as one."""
    first, other = (result.provenance for result in results)
    names = [result.model_name for result in results]
    notes = [*first.get("notes", ()), *other.get("notes", ())]
    provenance = {**first, "model": " and ".join(names), "models": [dict(first), dict(other)]}
    provenance |= {"notes": notes} if notes else {}
    found = Paired(provenance=provenance, results=tuple(results))
    found.rows()
    return found


def paired_rows(first: TokenRows, other: TokenRows, names: Sequence[str]) -> TokenRows:
    """Return every row that both results have: the first model's, the other's, and the difference, on one scale."""
    signed = any(row.signed for text in first.texts for row in text.rows)
    both = zip(first.texts, other.texts, strict=True)
    return TokenRows(
        texts=tuple(_text(number, *texts, names, first.summed) for number, texts in enumerate(both)),
        of=first.of,
        score=first.score,
        name=f"difference: {names[0]} minus {names[1]}; {first.name}",
        around=first.around if signed else OF_DIFFERENCES,
        marked=first.marked,
        first=MAX_COLOURED_ROWS if first.first is None else 3 * first.first,
        summed=first.summed,
    )


def _text(number: int, first: TokenText, other: TokenText, names: Sequence[str], summed: bool) -> TokenText:
    if first.tokens != other.tokens:
        first, other = _by_word(number, first, other, summed)
    found = []
    for mine, theirs in _matched(number, first, other):
        low, high = min(mine.ends[0], theirs.ends[0]), max(mine.ends[1], theirs.ends[1])
        about = "\n" + mine.name.replace("\n", " · ")
        for name, row in zip(names, (mine, theirs)):
            flat = row.ends[0] == row.ends[1]
            found.append(replace(row, name=f"{name}{about}", ends=row.ends if flat else (low, high)))
        end = high if mine.signed else high - low
        found.append(_difference(mine, theirs, f"{DIFFERENCE}{about}", end, first.special))
    answer = f"{names[1]}: “{other.answer}”" + (f" ({said})" if (said := format_probability(other.probability)) else "")
    return replace(first, rows=found, about=answer)


def _matched(number: int, first: TokenText, other: TokenText) -> list[tuple[TokenRow, TokenRow]]:
    """Return pairs of rows of the same name; if none, those at one place, unless they are queries of different
    words."""
    theirs = {row.name: row for row in other.rows}
    named = [(row, theirs[row.name]) for row in first.rows if row.name in theirs]
    placed = list(zip(first.rows, other.rows))
    found = named or [(mine, row) for mine, row in placed if mine.query == row.query or None in (mine.query, row.query)]
    if placed and not found:
        raise InputError(
            f"text {number}: the chosen rows belong to different words of the two models; give rows='last'"
        )
    return found


def _difference(mine: TokenRow, theirs: TokenRow, name: str, end: float, special: np.ndarray) -> TokenRow:
    either = [row.outside for row in (mine, theirs) if row.outside is not None]
    outside = np.any(either, axis=0) if either else None
    scores = mine.scores.astype(np.float64) - theirs.scores
    shown = np.where(_unnamed(special, outside, (mine, theirs)), 0.0, scores)
    largest = float(np.abs(np.concatenate([mine.scores, theirs.scores])).max(initial=0))
    large = [
        int(at) for at in descending(np.abs(shown), largest) if abs(shown[at]) >= MIN_NAMED_SHARE * end and shown[at]
    ]
    more, less = ([at for at in large if (shown[at] > 0) == above][:NAMED_PER_SIDE] for above in (True, False))
    return TokenRow(name, scores, (-end, end), True, outside, more, less, query=mine.query)


def _unnamed(special: np.ndarray, outside: np.ndarray | None, rows: Sequence[TokenRow]) -> np.ndarray:
    """Return True where no difference is named: outside the scores, and at special tokens that no row names."""
    named = [at for row in rows for at in (*row.marked, *row.against)]
    hidden = special & ~np.isin(np.arange(len(special)), named)
    return hidden if outside is None else hidden | outside


def _by_word(number: int, first: TokenText, other: TokenText, summed: bool) -> tuple[TokenText, TokenText]:
    """Return both texts in words that both have: the pieces between the ends of words of both."""
    spans = [_spans(text) for text in (first, other)]
    read = ["".join(piece for *_, piece in found).lower() for found in spans]
    if read[0] != read[1] or first.pixels is not None:
        raise InputError(
            f"text {number} is not read as the same characters by the two models: their words cannot be compared"
        )
    ends = set.intersection(*({stop for _, stop, _ in found} for found in (_words(first), _words(other))))
    cuts = [0, *sorted(ends)]
    tokens = _pieces(first, cuts)
    made = []
    for text, found in zip((first, other), spans):
        rows = [_of_words(row, _groups(text, found, cuts), summed) for row in text.rows]
        made.append(replace(text, tokens=tokens, words=tuple(range(len(tokens))), rows=rows, span=None))
    return made[0], made[1]


def _groups(text: TokenText, spans: Sequence[tuple[int, int, str]], cuts: Sequence[int]) -> list[list[int]]:
    """Return the tokens between each two cuts: whole words, as every cut is the end of one."""
    groups: list[list[int]] = [[] for _ in cuts[1:]]
    for _, run in groupby(range(len(text.words)), key=lambda at: text.words[at]):
        tokens = list(run)
        starts = [start for start, stop, _ in (spans[at] for at in tokens) if start < stop]
        if starts:
            groups[bisect_right(cuts, starts[0]) - 1] += tokens
    return groups


def _spans(text: TokenText) -> list[tuple[int, int, str]]:
    """Return each token's start and end among the characters other than white space, and these characters."""
    at, found = 0, []
    for token, word in zip(text.tokens, text.words):
        piece = "" if word is None else "".join(token.split())
        found.append((at, at + len(piece), piece))
        at += len(piece)
    return found


def _words(text: TokenText) -> list[tuple[int, int, str]]:
    """Return the last token of each word, in the form of `_spans`."""
    found = [(word, span) for word, span in zip(text.words, _spans(text)) if word is not None]
    return [list(run)[-1][1] for _, run in groupby(found, key=lambda each: each[0])]


def _pieces(text: TokenText, cuts: Sequence[int]) -> tuple[str, ...]:
    """Return the text between the cuts, with a space in front where it has one."""
    found = {start: "" for start in cuts[:-1]}
    shown = spell_tokens(text.tokens, text.words)
    for (start, _, piece), (gap, _) in zip(_spans(text), shown):
        if piece:
            found[cuts[bisect_right(cuts, start) - 1]] += (" " if gap else "") + piece
    return tuple(found.values())


def _of_words(row: TokenRow, groups: Sequence[Sequence[int]], summed: bool) -> TokenRow:
    place = {at: number for number, group in enumerate(groups) for at in group}
    values = [row.scores[list(group)].astype(np.float64) for group in groups]
    scores = np.array([each.sum() if summed else each.mean() for each in values])
    outside = None if row.outside is None else np.array([bool(row.outside[list(group)].all()) for group in groups])
    low, high = row.ends
    if low != high:
        seen = scores if outside is None else scores[~outside]
        most = float(np.abs(seen).max(initial=0)) if row.signed else float(seen.max(initial=high))
        low, high = (-max(high, most), max(high, most)) if row.signed else (low, most)

    def moved(places: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(place[at] for at in places if at in place))

    query = None if row.query is None else place.get(row.query)
    shown = replace(row, scores=scores, ends=(low, high), outside=outside)
    return replace(shown, marked=moved(row.marked), against=moved(row.against), query=query)


def differences(block: TokenRows, names: Sequence[str]) -> Table:
    """Return a row per text and row: the tokens with more in the first model, and with more in the other."""
    lines = []
    for at, text in enumerate(block.texts):
        for row in text.rows:
            of, _, about = row.name.partition("\n")
            if of == DIFFERENCE:
                more = name_scores(text.tokens, row.scores, row.marked)
                less = name_scores(text.tokens, -row.scores, row.against)
                cells = {f"more in {names[0]}": Cell(text=more or "–"), f"more in {names[1]}": Cell(text=less or "–")}
                seen = ~_unnamed(text.special, row.outside, (row,))
                cells["largest difference"] = Cell(text=number(float(np.abs(row.scores[seen]).max(initial=0))))
                lines.append(Line((str(at), about), cells))
    return table(("text", block.of), lines, note="Differences of at least a tenth of the scale.")
