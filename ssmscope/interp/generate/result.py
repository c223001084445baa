"""Written texts with what their tokens come from, and their views."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from ssmscope.api.results import TABLE_ROWS, OverTexts, Result
from ssmscope.core.ties import descending, nonzero
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block, OfTokens, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import counted, number
from ssmscope.render.table import Cell, Line, Table, as_share, number_cell, short_cell, table
from ssmscope.render.token_maps import MappedText, TokenMap, Words, token_maps
from ssmscope.render.tokens import name_scores, short_token, shorten, visible

ENDS = {
    "end": "an end token",
    "stop": "a stop string",
    "length": "the maximum length",
    "given": "the end of what was given",
}
"""Reasons why a text ends, in the words of the views."""
SOURCES = Words("written token", "written tokens", "all tokens", "comes from")
NAMED_SOURCES = 5
"""Number of a written token's strongest sources that a page names."""


@dataclass(frozen=True, eq=False)
class SourceMap(Outlined):
    """Scores (written tokens, tokens) of what each written token comes from, zero from that token on; `signed` if they
    may be against it."""

    name: str
    values: np.ndarray
    signed: bool

    @property
    def ends(self) -> tuple[float, float]:
        """Lowest and highest score of the colours."""
        most = float(np.abs(self.values).max(initial=0))
        return (-most if self.signed else 0.0, most)


@dataclass(frozen=True, eq=False)
class WrittenText(OfTokens):
    """A text and what was written after it."""

    tokens: tuple[str, ...]
    """Tokens of the prompt, then the written ones."""
    words: tuple[int | None, ...]
    """Word index of each token; None for special tokens."""
    first: int
    """Number of the prompt's tokens."""
    text: str
    """Written text."""
    log_probabilities: np.ndarray
    """(written,), in nats, and so the entropies of the model's distribution."""
    entropies: np.ndarray
    ended_by: str
    maps: tuple[SourceMap, ...]
    """Survival first, if the model has recurrent states."""
    left: np.ndarray | None
    """(tokens,): survival of every token after the last, averaged over layers; None without recurrent states."""
    half_lives: np.ndarray | None
    """(layers, tokens), in tokens, infinite beyond the text's end; None without recurrent states."""

    @property
    def written(self) -> range:
        """Positions of the written tokens."""
        return range(self.first, len(self.tokens))

    @property
    def likelihood(self) -> float:
        """Mean log-probability of a written token, in nats."""
        return float(self.log_probabilities.mean())

    @property
    def kept(self) -> float | None:
        """Share of the prompt in the states after the last token, if there are any."""
        return None if self.left is None else float(self.left[: self.first].sum())

    def strongest(self, number: int, map_: SourceMap, top: int) -> list[int]:
        """Return the positions of a written token's highest scores, ties by position."""
        row = map_.values[number, : self.first + number]
        return [int(at) for at in descending(np.abs(row))[:top] if nonzero(row)[at]]


@dataclass(frozen=True)
class Writing(Result, OverTexts[WrittenText], kind="generate"):
    """Texts that a model wrote, and the tokens that each written one comes from."""

    texts: tuple[WrittenText, ...]
    top: int
    """Number of tokens that the views name."""

    @property
    def headline(self) -> str:
        said = shorten(visible(self.texts[0].text.strip()), 60)
        more = f" and {counted(len(self) - 1, 'more text')}" * (len(self) > 1)
        if self.given:
            text = self.texts[0]
            least = int(text.log_probabilities.argmin())
            token, p = short_token(text.tokens[text.first + least], 20), math.exp(text.log_probabilities[least])
            expected = f"{number(text.likelihood)} nats a token, “{token}” expected least (p {as_share(p)})"
            return f"Continuation of {self.model_name}: “{said}”{more}; {expected}"
        return f"Writing of {self.model_name}: “{said}”{more}{self._stays()}"

    @property
    def given(self) -> bool:
        """True if the model read what it might have written."""
        return all(text.ended_by == "given" for text in self)

    def _stays(self) -> str:
        """Say what stays of the first text: the half-life of what is written at its tokens, and the prompt's share."""
        text = self.texts[0]
        if text.left is None or text.half_lives is None:
            return ""
        lives = np.median(text.half_lives[:, :-1], axis=0)
        middle = float(np.median(lives)) if lives.size else math.nan
        told = "of what a token writes "
        if math.isnan(middle):
            told = ""
        elif np.isinf(middle):
            told = f"; more than half {told}is left at the end"
        else:
            told = f"; half {told}is left after {number(middle)} {'token' if middle == 1 else 'tokens'}"
        most = int(text.left[: text.first].argmax())
        token = short_token(text.tokens[most], 20)
        return (
            f"{told}; the prompt holds {100 * (text.kept or 0.0):.0f} % of the states at the end, “{token}” most of it"
        )

    def verdict(self, at: int = 0) -> str:
        count = sum(len(text.written) for text in self)
        mean = np.concatenate([text.log_probabilities for text in self]).mean()
        kept = [text.kept for text in self if text.kept is not None]
        told = f"{'reads' if self.given else 'writes'} {counted(count, 'token')} at {number(float(mean))} nats a token"
        return f"{told}; {as_share(float(np.mean(kept)))} of the states at the end is of the prompt" if kept else told

    @classmethod
    def compare(cls, results: Sequence[Writing], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            for at, text in enumerate(result):
                cells = {"written": Cell(text=text.text), "tokens": short_cell(len(text.written))}
                cells |= {"nats a token": number_cell(text.likelihood), "entropy": number_cell(text.entropies.mean())}
                if text.kept is not None:
                    cells["prompt at the end"] = number_cell(text.kept)
                lines.append(Line((label, str(at)), cells))
        return table(("model", "text"), lines)

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, written token and earlier token: columns text, number, token, log_probability,
        entropy, position, source, then a score by each map. Numbers and positions count from 0."""
        parts = []
        for at, text in enumerate(self.texts):
            numbers, positions = np.nonzero(np.tri(len(text.written), len(text), text.first - 1))
            tokens = np.array(text.tokens, dtype=object)
            columns = {"text": at, "number": numbers, "token": pd.array(tokens[text.first + numbers], dtype="string")}
            columns |= {"log_probability": text.log_probabilities[numbers], "entropy": text.entropies[numbers]}
            columns |= {"position": positions, "source": pd.array(tokens[positions], dtype="string")}
            columns |= {each.name: each.values[numbers, positions] for each in text.maps}
            parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def token_rows(self) -> TokenRows:
        """Return every text coloured by what is left of each token at the end and by its score for all that is written:
        the sum over the written tokens."""
        name = "scores summed over the written tokens"
        if any(text.left is not None for text in self):
            name = f"survival at the end of the text; {name}"
        rows = tuple(_text(text, _rows(text, self.top)) for text in self)
        return TokenRows(rows, "map", "score", name, f"the {self.top} strongest; slanted: written", first=12)

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        legend = "a written token and what it comes from: what the states hold as it is written (survival), or scores"
        mapped = [_mapped(text) for text in self]
        yield token_maps(mapped, self.token_rows(), "sources", legend, SOURCES)
        yield Picture(self.figure, self.headline, vector=False, folded=all(text.fits for text in mapped))
        yield replace(_tokens(self), brief=TABLE_ROWS)


# ---- views


def _text(text: WrittenText, rows: Sequence[TokenRow] = ()) -> TokenText:
    said = f"{counted(len(text.written), 'token')}, {number(text.likelihood)} nats each, ended by {ENDS[text.ended_by]}"
    span = (text.first, len(text))
    return TokenText(text.tokens, text.words, rows, text.text.strip(), float("nan"), said, span)


def _rows(text: WrittenText, top: int) -> list[TokenRow]:
    rows = []
    maps = text.maps
    if text.left is not None:
        maps = (SourceMap("survival at the end", text.left[None], signed=False), *text.maps[1:])
    for each in maps:
        scores = each.values.sum(0) if each.signed else each.values.mean(0)
        order = [int(at) for at in descending(np.abs(scores))[:top] if nonzero(scores)[at]]
        most = float(np.abs(scores).max(initial=0))
        kept, against = ([at for at in order if (scores[at] > 0) == above] for above in (True, False))
        rows.append(
            TokenRow(each.name, scores, (-most if each.signed else 0.0, most), each.signed, None, kept, against)
        )
    return rows


def _mapped(text: WrittenText) -> MappedText:
    queries, positions = np.array(text.written), np.arange(len(text))

    def map_of(number: int) -> TokenMap:
        one = text.maps[number]
        named = [
            [(at, float(one.values[row, at])) for at in text.strongest(row, one, NAMED_SOURCES)]
            for row in range(len(queries))
        ]
        most = one.ends[1]
        return TokenMap(one.name, one.values, None, most, most, np.abs(one.values).max(1), named, one.signed)

    seen = positions <= queries[:, None]
    return MappedText(_text(text), queries, None, seen, len(text.maps), map_of, _notes(text))


def _notes(text: WrittenText) -> list[str]:
    """Return probability, entropy and half-life of every written token."""
    found = []
    for place, log_p, entropy in zip(text.written, text.log_probabilities, text.entropies):
        said = f"p {as_share(float(np.exp(log_p)))}, entropy {number(float(entropy))} nats"
        lives = "" if text.half_lives is None else f", half-life {_half_life(text, place)}"
        found.append(said + lives)
    return found


def _half_life(text: WrittenText, place: int) -> str:
    """Return the median half-life over layers of what is written at a token; none at the last."""
    assert text.half_lives is not None
    middle, after = float(np.median(text.half_lives[:, place])), len(text) - 1 - place
    return f"> {after}" if np.isinf(middle) and after else number(middle if after else float("nan"))


def _tokens(result: Writing) -> Table:
    """Return a row per written token: p, entropy, half-life, and the strongest sources by every map."""
    lines = []
    for at, text in enumerate(result):
        for place, log_p, entropy in zip(text.written, text.log_probabilities, text.entropies):
            row = place - text.first
            cells = {"p": Cell(text=as_share(float(np.exp(log_p)))), "entropy": short_cell(entropy)}
            if text.half_lives is not None:
                cells["half-life"] = Cell(text=_half_life(text, place))
            for each in text.maps:
                named = text.strongest(row, each, result.top)
                cells[each.name] = Cell(text=name_scores(text.tokens, each.values[row], named, 16))
            lines.append(Line((str(at), str(row), short_token(text.tokens[place], 24)), cells))
    note, score = "p and entropy (nats) of the model's own distribution. ", "score"
    if any(text.half_lives is not None for text in result):
        note += "Half-life: tokens after which half of what the layers write at this one is left, the median over "
        note, score = note + "layers, none for the last. ", "share of the states, or score"
    note += f"Then the earlier tokens of the highest {score}."
    return table(("text", "number", "token"), lines, note=note)
