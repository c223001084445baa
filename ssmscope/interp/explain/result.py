"""Explanations of a model's output by its tokens: scores of every method, and the result that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import TABLE_ROWS, OverTexts, Result
from ssmscope.core.ties import descending, nonzero
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.explain.scored_text import Attribution, ExplainedText
from ssmscope.interp.explain.views import answer_in_words, baselines, rests_on, rows, strongest
from ssmscope.interp.heatmap.text_result import half_mass
from ssmscope.render.blocks import Block, Picture, Prose, TokenRows
from ssmscope.render.numbers import counted, format_probability
from ssmscope.render.table import MAX_COMPARED_ROWS, Line, Table, table
from ssmscope.render.token_maps import MappedText, TokenMap, Words, token_maps
from ssmscope.render.tokens import short_token, shorten, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from ssmscope.render.figure import Frame

ANSWERS = Words("answer at", "positions", "all tokens", "rests on")
LISTED = 8
"""Number of answers that stand above the text."""
MAX_ROWS = 48
"""Largest number of positions that a picture has."""
MAX_TOLD = 3
"""Number of texts that a headline names."""


@dataclass(frozen=True)
class Explanation(Result, OverTexts[ExplainedText], kind="explain"):
    """Texts explained by one or several methods."""

    texts: tuple[ExplainedText, ...]
    methods: tuple[str, ...]
    top: int
    """Number of tokens that the views name."""
    notes: tuple[str, ...] = ()

    @property
    def of_images(self) -> bool:
        """True if the tokens are pixels of images whose size is known, and the views are maps."""
        return any(text.pixels is not None for text in self.texts)

    def token_rows(self) -> TokenRows:
        return rows(self.texts, self.top)

    def lines(self, label: str = "") -> list[Line]:
        """Return a table's row for each text and method; in a comparison, with the model's `label`."""
        return list(strongest(list(self), self.top, label))

    @property
    def headline(self) -> str:
        about = f"Explanation of {self.model_name}"
        if not len(self):
            return f"{about}: {', '.join(self.methods)}"
        if self.of_images:
            maps: dict[str, list[np.ndarray]] = {}
            for each in (each for text in self for each in text.attributions):
                maps.setdefault(each.method, []).append(each.scores)
            shares = ", ".join(f"{100 * half_mass(found):.0f} % ({method})" for method, found in maps.items())
            return f"{about}: half of all scores lies on {shares} of the pixels"
        if len(self) == 1:
            at = self.provenance.get("position", -1)
            return f"{about}: {rests_on(self[0], f' at position {at}' * (at >= 0))}"
        told = [f"text {at}: {answer_in_words(text)}" for at, text in enumerate(self.texts[:MAX_TOLD])]
        more = f"; {len(self) - MAX_TOLD} more" * (len(self) > MAX_TOLD)
        return f"{about}: {'; '.join(told)}{more} ({self.methods[0]})"

    def verdict(self, at: int = 0) -> str:
        converged = self.summary()["converged"]
        failed = int((converged == False).sum())  # noqa: E712  # missing counts as neither
        line = f"{', '.join(self.methods)} on {len(self)} text{'s' * (len(self) > 1)}"
        if len(self) and all(text.pixels is None for text in self):
            told = [answer_in_words(text) for text in list(self)[:MAX_TOLD]]
            more = f"; {len(self) - MAX_TOLD} more" * (len(self) > MAX_TOLD)
            line = f"{'; '.join(told)}{more} ({self.methods[0]})"
        return f"{line}; {failed} of {len(converged)} attributions incomplete" if failed else line

    @classmethod
    def compare(cls, results: Sequence[Explanation], labels: Sequence[Sequence[str]]) -> Table:
        lines = [line for result, (label,) in zip(results, labels) for line in result.lines(label)]
        return table(("model", "text", "method"), lines, most=MAX_COMPARED_ROWS)

    def attribution(self, text: int = 0, method: str | None = None) -> Attribution:
        """Return the attribution of one text by one method; by default the first.

        Raises:
            InputError: when there is no such text or method.
        """
        if not -len(self) <= text < len(self):
            raise InputError(f"there is no text {text}; allowed are 0 to {len(self) - 1}")
        for each in self.texts[text].attributions:
            if method in (None, each.method):
                return each
        hint = did_you_mean(str(method), self.methods)
        raise InputError(f"there is no method {method!r} in this result; allowed are {', '.join(self.methods)}{hint}")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import strips_of

        return strips_of("tokens of the first texts by score", self.token_rows())

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, method and token: columns model, text, position, token, word, method, score, in_top.

        `text` and `position` count from 0. `word` is missing for special tokens, which are never in the top. Of series
        the scores of each channel follow, in columns channel_0, …
        """
        parts = []
        for at, text in enumerate(self.texts):
            tokens, words = pd.array(text.tokens, dtype="string"), pd.array(text.words, dtype="Int64")
            head = {"text": at, "position": range(len(text)), "token": tokens, "word": words}
            for each in text.attributions:
                top = np.isin(range(len(text)), text.top(each, self.top))
                columns = {**head, "method": each.method, "score": each.scores, "in_top": top}
                several: Any = () if each.channels is None else each.channels.T
                columns |= {f"channel_{number}": scores for number, scores in enumerate(several)}
                parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def summary(self) -> pd.DataFrame:
        """Return a row per text and method: columns model, text, target, value (f), method, delta, steps, converged,
        error, constants (`ExplainedText.constants`)."""
        rows = [
            (
                *(self.model_name, at, text.target, text.value, one.method),
                *(one.delta, one.steps, one.converged, one.error, text.constants(one)),
            )
            for at, text in enumerate(self.texts)
            for one in text.attributions
        ]
        columns = ["model", "text", "target", "value", "method", "delta", "steps", "converged", "error"]
        columns += ["constants"]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.astype({"delta": "float64", "steps": "Int64", "converged": "boolean", "error": "float64"})

    def highest(self, k: int | None = None) -> pd.DataFrame:
        """Return at most k tokens (by default `top`) of the highest scores above zero of every text and method: columns
        model, text, method, rank, position, token, score."""
        rows = [
            (self.model_name, at, each.method, rank, position, text.tokens[position], float(each.scores[position]))
            for at, text in enumerate(self.texts)
            for each in text.attributions
            for rank, position in enumerate(text.top(each, self.top if k is None else k), start=1)
        ]
        return pd.DataFrame(rows, columns=["model", "text", "method", "rank", "position", "token", "score"])

    def draw(self, frame: Frame, *, start: int = 0) -> Figure:  # type: ignore[override]
        """Draw every text with a row of coloured tokens per method; long texts as a strip over positions per method,
        images as a map next to each. One figure holds 8 texts, from number `start` on."""
        from ssmscope.render.token_figure import draw_rows

        return draw_rows(rows(self.texts, self.top), self.headline, frame, start=start)

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        yield rows(self.texts, self.top)
        yield Picture(self.figure, self.headline, vector=False, folded=not self.of_images, photo=self.of_images)
        yield replace(table(("text", "method"), self.lines(), most=MAX_COMPARED_ROWS), brief=TABLE_ROWS)
        yield from (Prose(line, "note") for line in baselines(self.texts, self.methods))
        yield from (Prose(f"{note[0].upper()}{note[1:]}.", "note") for note in self.notes)


@dataclass(frozen=True)
class PositionExplanation(Explanation, kind="explain-positions"):
    """One text whose answers at all positions are explained: the answer of `texts[at]` is the one at `at`."""

    @property
    def headline(self) -> str:
        return f"Explanation of {self.model_name}: {self.verdict()}"

    def verdict(self, at: int = 0) -> str:
        best = [text.top(text.attributions[0], 1) for text in self]
        apart = np.array([found[0] - own for own, found in enumerate(best) if found])
        unit = "step" if self[0].series is not None else "token"
        counts = {f"their own {unit}": (apart == 0).sum(), "an earlier one": (apart < 0).sum()}
        counts |= {"a later one": (apart > 0).sum(), f"no {unit}": len(self) - len(apart)}
        (name, count), *rest = [(name, count) for name, count in counts.items() if count]
        told = [f"{count} of {counted(len(self), 'answer')} rest most on {name}"]
        told += [f"{count} on {name}" for name, count in rest]
        far = f", {np.abs(apart[apart != 0]).mean():.1f} {unit}s away on average" if apart.any() else ""
        return f"{', '.join(told)}{far} ({self.methods[0]})"

    def token_rows(self) -> TokenRows:
        found = rows(self.texts, self.top)
        named = [
            replace(row, name=f"{self._asked(at)}\n{row.name}", query=at)
            for at, text in enumerate(found.texts[:MAX_ROWS])
            for row in text.rows
        ]
        rest = f"the first {MAX_ROWS} positions; the files hold all" if len(self) > MAX_ROWS else ""
        whole = replace(found.texts[0], rows=named, answer=self._whole(), probability=float("nan"), about=rest)
        return replace(found, texts=(whole,), of="answer", first=None)

    def draw(self, frame: Frame, *, start: int = 0) -> Figure:  # type: ignore[override]
        """Draw the text in the colours of its answers' scores, a row for each position and method."""
        from ssmscope.render.token_figure import draw_rows

        return draw_rows(self.token_rows(), self.headline, frame, start=start)

    def to_frame(self) -> pd.DataFrame:
        """Return a row per answer, method and token: columns model, at, answer, then as `Explanation.to_frame`."""
        frame = super().to_frame().rename(columns={"text": "at"})
        frame.insert(2, "answer", frame["at"].map(lambda at: self[at].answer))
        return frame

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        legend = "under each token the model's answer there, and what it rests on"
        yield token_maps([_mapped(self)], self.token_rows(), "answers", legend, ANSWERS)
        yield Picture(self.figure, self.headline, vector=False, folded=True)
        lines = [Line((self._asked(int(line.labels[0])), *line.labels[1:]), line.cells) for line in self.lines()]
        yield replace(table(("answer", "method"), lines), brief=TABLE_ROWS)
        yield from (Prose(line, "note") for line in baselines(self.texts, self.methods))
        yield from (Prose(f"{note[0].upper()}{note[1:]}.", "note") for note in self.notes)

    def _asked(self, at: int) -> str:
        """Name a position, its token and its answer."""
        return f"{at} “{short_token(self[at].tokens[at], 20)}” {shorten(visible(self[at].answer), 24)}"

    def _whole(self) -> str:
        """List the first answers."""
        said = [shorten(visible(text.answer), 24) for text in self]
        return " ".join(said[:LISTED]) + " …" * (len(said) > LISTED)


def _mapped(result: PositionExplanation) -> MappedText:
    length, first = len(result), rows(result.texts, result.top).texts[0]
    values = [np.stack([text.attributions[at].scores for text in result]) for at in range(len(result.methods))]
    ahead = any(np.triu(each, 1).any() for each in values)

    def map_of(number: int) -> TokenMap:
        found, signed = values[number], any(text.attributions[number].signed for text in result)
        order = [descending(np.abs(row))[: result.top] for row in found]
        named = [[(int(at), float(row[at])) for at in places if nonzero(row)[at]] for row, places in zip(found, order)]
        most, ends = float(np.abs(found).max()), np.abs(found).max(1)
        return TokenMap(result.methods[number], found, None, most, most, ends, named, signed)

    seen = np.ones((length, length), dtype=bool) if ahead else np.tri(length, dtype=bool)
    answers = [shorten(visible(text.answer), 24) for text in result]
    notes = [", ".join(filter(None, (each, format_probability(p.probability)))) for each, p in zip(answers, result)]
    whole = replace(first, rows=(), answer=result._whole(), probability=float("nan"), about="")
    return MappedText(whole, np.arange(length), None, seen, len(values), map_of, notes, answers)
