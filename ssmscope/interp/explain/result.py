"""Explanations of a model's output by its tokens: scores of every method, and the result that holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Float
from markupsafe import Markup
from torch import Tensor

from ssmscope.api.results import TABLE_ROWS, OverTexts, Result
from ssmscope.core.ties import descending, nonzero
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.heatmap.text_result import FLAT_REMARK, half_mass
from ssmscope.interp.heatmap.words import is_selective
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block, OfTokens, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import number
from ssmscope.render.table import MAX_COMPARED_ROWS, Cell, Line, Table, number_cell, table
from ssmscope.render.tokens import name_scores, shorten, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssmscope.interp.objective import Objective
    from ssmscope.render.figure import Frame

Declared = TypeVar("Declared", bound=Callable[..., Any])
NAMED = 8
AGAINST = "strongest against"
MAX_TOLD, TOLD_WORDS = 3, 2
TOLD_WIDTH = 60


@dataclass(frozen=True, eq=False)
class Scores(Outlined):
    """Scores of a method for all texts of an objective.

    Attributes:
        scores: (texts, length), the relevance of every token; signed where the method is. Zero at padding. Of series
            they may be (texts, length, channels).
        delta: (texts,), |Σ scores − (f(x) − f(baseline))| / |f(x) − f(baseline)|, for methods whose scores should add
            up to that; None for the others.
        steps: (texts,), number of evaluations of the gradient; None where that has no meaning.
        converged: (texts,) bool, True where `error`, or without one `delta`, is within the tolerance; None as for
        `delta`.
        error: (texts,), the largest error of a token's score as a share of the largest |score|, estimated; infinite
            where nothing was checked, None for methods without one.
        baseline: description of what a text is compared with; "" for methods without a baseline.
        note: note on that baseline.
    """

    scores: Float[Tensor, "texts length *channels"]
    delta: Float[Tensor, " texts"] | None = None
    steps: Tensor | None = None
    converged: Tensor | None = None
    error: Float[Tensor, " texts"] | None = None
    baseline: str = ""
    note: str = ""


Method = Callable[["Objective"], Scores]
"""Method of explanation with its options bound."""


@dataclass(frozen=True)
class Kind:
    """Kind of a method's scores.

    Attributes:
        signed: False for scores that have a size and no direction; views colour them from lowest to highest.
        gate: "kept" or "written" for scores that are read off gates: what of the state they keep, or write.
        embeddings: False for scores that depend on the tokens, whatever embeddings an objective has for them.
    """

    signed: bool = True
    gate: Literal["", "kept", "written"] = ""
    embeddings: bool = True


def scores_are(
    *, signed: bool = True, gate: Literal["", "kept", "written"] = "", embeddings: bool = True
) -> Callable[[Declared], Declared]:
    """Declare the `Kind` of a method's scores: decorator of its function."""

    def declared(method: Declared) -> Declared:
        method.kind = Kind(signed, gate, embeddings)  # type: ignore[attr-defined]
        return method

    return declared


def kind_of(method: Any) -> Kind:
    """Return the `Kind` that a method's function declares; by default signed scores of the embeddings."""
    return getattr(getattr(method, "func", method), "kind", Kind())


@dataclass(frozen=True, eq=False)
class Attribution(Outlined):
    """One text explained by one method."""

    method: str
    scores: np.ndarray
    """(tokens,) float32; special tokens have their scores too."""
    delta: float | None
    """The relative convergence delta of methods whose scores should add up to f(x) − f(baseline), else None."""
    steps: int | None
    converged: bool | None
    error: float | None = None
    """This and the following as in `Scores`."""
    baseline: str = ""
    note: str = ""
    channels: np.ndarray | None = None
    """(tokens, channels) float32 of the steps of a series, which `scores` are the sums of; None without."""
    kind: Kind | None = None
    """None in results saved without it: signed if any score is negative."""

    @staticmethod
    def of(name: str, found: Scores, row: int, length: int, kind: Kind | None = None) -> Attribution:
        """Return the scores of one text of a batch, of so many tokens, by a method of this kind."""
        scores = found.scores[row, :length].detach().float().cpu().numpy()
        if not np.isfinite(scores).all():
            raise InputError(f"the scores of {name} for text {row} are not finite: the model is damaged")
        measured = {"delta": found.delta, "steps": found.steps, "converged": found.converged, "error": found.error}
        own: dict[str, Any] = {key: None if each is None else each[row].item() for key, each in measured.items()}
        channels, scores = (scores, scores.sum(1)) if scores.ndim == 2 else (None, scores)
        return Attribution(name, scores, **own, baseline=found.baseline, note=found.note, channels=channels, kind=kind)

    @property
    def signed(self) -> bool:
        """True if scores are for (positive) or against (negative) what is explained."""
        return bool((self.scores < 0).any()) if self.kind is None else self.kind.signed


@dataclass(frozen=True, eq=False)
class ExplainedText(OfTokens):
    """One text and its attributions."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    """Word index of each token; None for special tokens."""
    answer: str
    probability: float
    target: str
    """Explained class, token, or difference "a − b"."""
    value: float
    """f(x)."""
    attributions: tuple[Attribution, ...]
    pixels: np.ndarray | None = None
    """(height, width, channels) float32 for an image whose pixels are the tokens."""
    series: np.ndarray | None = None
    """(length, channels) float32, the numbers of a series whose steps are the tokens."""

    def top(self, attribution: Attribution, k: int) -> list[int]:
        """Return positions of at most k ordinary tokens of the highest scores above 0, ties by position."""
        return self._highest(attribution.scores, k)

    def against(self, attribution: Attribution, k: int) -> list[int]:
        """Return positions of at most k ordinary tokens most against what is explained; none without signs."""
        return self._highest(-attribution.scores, k) if attribution.signed else []

    def named(self, attribution: Attribution, at: int) -> str:
        """Return a token, and the channel that counts most of a step of a series."""
        several = attribution.channels
        return self.tokens[at] if several is None else f"{self.tokens[at]}, channel {int(np.abs(several[at]).argmax())}"

    def _highest(self, scores: np.ndarray, k: int) -> list[int]:
        order = descending(np.where(self.special, -np.inf, scores))
        places = order[(scores > 0)[order] & nonzero(scores)[order] & ~self.special[order]]
        return places[:k].tolist()


@dataclass(frozen=True)
class Explanation(Result, OverTexts[ExplainedText], kind="explain"):
    """Texts explained by one or several methods."""

    texts: tuple[ExplainedText, ...]
    methods: tuple[str, ...]
    top: int
    notes: tuple[str, ...] = ()

    @property
    def of_images(self) -> bool:
        """True if the tokens are pixels of images whose size is known, and the views are maps."""
        return any(text.pixels is not None for text in self.texts)

    def token_rows(self) -> TokenRows:
        return rows(self)

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
            return f"{about}: {_rests_on(self[0])}"
        told = [f"text {at}: {_answer_in_words(text)}" for at, text in enumerate(self.texts[:MAX_TOLD])]
        more = f"; {len(self) - MAX_TOLD} more" * (len(self) > MAX_TOLD)
        return f"{about}: {'; '.join(told)}{more} ({self.methods[0]})"

    def verdict(self, at: int = 0) -> str:
        converged = self.summary()["converged"]
        failed = int((converged == False).sum())  # noqa: E712  # missing counts as neither
        line = f"{', '.join(self.methods)} on {len(self)} text{'s' * (len(self) > 1)}"
        if len(self) and all(text.pixels is None for text in self):
            told = [_answer_in_words(text) for text in list(self)[:MAX_TOLD]]
            more = f"; {len(self) - MAX_TOLD} more" * (len(self) > MAX_TOLD)
            line = f"{'; '.join(told)}{more} ({self.methods[0]})"
        return f"{line}; {failed} of {len(converged)} attributions incomplete" if failed else line

    @classmethod
    def compare(cls, results: Sequence[Explanation], labels: Sequence[Sequence[str]]) -> Table:
        lines = [line for result, (label,) in zip(results, labels) for line in strongest(result, label)]
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
        error."""
        rows = [
            (self.model_name, at, text.target, text.value, one.method, one.delta, one.steps, one.converged, one.error)
            for at, text in enumerate(self.texts)
            for one in text.attributions
        ]
        columns = ["model", "text", "target", "value", "method", "delta", "steps", "converged", "error"]
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

        return draw_rows(rows(self), self.headline, frame, start=start)

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        yield rows(self)
        yield Picture(self.figure, self.headline, vector=False, folded=not self.of_images, photo=self.of_images)
        yield replace(table(("text", "method"), list(strongest(self)), most=MAX_COMPARED_ROWS), brief=TABLE_ROWS)
        yield from (Prose(line, "note") for line in baselines(self))
        yield from (Prose(f"{note[0].upper()}{note[1:]}.", "note") for note in self.notes)


# ---- views: tokens in the colours of every method, the strongest words, and notes


def rows(result: Explanation) -> TokenRows:
    """Return every text with a row per method."""
    return TokenRows(
        texts=tuple(_text(text, result.top) for text in result),
        of="method",
        score="score",
        name="each method in its own range",
        marked=f"the {result.top} strongest, at most half of the tokens",
    )


def _text(text: ExplainedText, top: int) -> TokenText:
    made = tuple(_row(each, text, top) for each in text.attributions)
    return TokenText(
        text.tokens,
        text.words,
        made,
        text.answer,
        text.probability,
        about(text),
        pixels=text.pixels,
        series=text.series,
    )


def _row(each: Attribution, text: ExplainedText, top: int) -> TokenRow:
    either = sorted([*text.top(each, top), *text.against(each, top)])
    strongest = [either[at] for at in descending(np.abs(each.scores[either]))]
    flat, seen = is_flat(each, text), ends(each, text)
    # If all tokens were marked, none would stand out.
    marked = strongest[: 0 if flat else min(top, max(int((~text.special).sum()) // 2, 1))]
    kept, against = ([at for at in marked if (each.scores[at] > 0) == above] for above in (True, False))
    nothing = None if each.scores.any() else np.ones(len(text), dtype=bool)  # Zeros have no rank.
    said = "; ".join(filter(None, (doubt(each), "every score is 0" * (nothing is not None), FLAT_REMARK * flat)))
    used, own = ((sum(seen) / 2,) * 2, seen) if flat else (seen, None)
    return TokenRow(each.method, each.scores, used, each.signed, nothing, kept, against, remark=said, own=own)


def is_flat(each: Attribution, text: ExplainedText) -> bool:
    """Return True for a score of the gates that varies over a text's ordinary tokens by less than a tenth: noise."""
    seen = each.scores[~text.special].astype(np.float64)
    gate = "" if each.kind is None else each.kind.gate
    read = gate and text.pixels is None and each.scores.any()
    return bool(read) and not is_selective(1 - seen if gate == "kept" else seen)


def ends(each: Attribution, text: ExplainedText) -> tuple[float, float]:
    """Return the ends of a method's colours: lowest and highest score of an ordinary token, or ± the largest |score| if
    signed. A special token beyond them has the colour of the end."""
    scores = each.scores[~text.special if not text.special.all() else slice(None)].astype(np.float64)
    end = float(np.abs(scores).max())
    return (-end, end) if each.signed else (float(scores.min()), float(scores.max()))


def doubt(each: Attribution) -> str:
    """Return a remark where scores have not converged, or do not add up; else ""."""
    if each.converged is None or each.converged:
        return ""
    if each.error is not None:
        return f"not converged, ±{each.error:.1%}" if math.isfinite(each.error) else "convergence not checked"
    if each.delta is None:
        return ""
    return f"misses {each.delta:.1%}" if each.delta < 10 else f"misses {each.delta:.0f}×"


def baselines(result: Explanation) -> list[str]:
    """Return notes on each method's baseline, and on the number of gradients that methods took."""
    found: dict[str, None] = {}
    for each in (each for text in result for each in text.attributions if each.baseline):
        found[f"{each.method} compares with {'; '.join(filter(None, (each.baseline, each.note)))}."] = None
    for method in result.methods:
        every = [each.steps for text in result for each in text.attributions if each.method == method and each.steps]
        if every:
            most = f" to {max(every):,}" if max(every) > min(every) else ""
            found[f"{method} took {min(every):,}{most} gradients a text."] = None
    return list(found)


def _answer_in_words(text: ExplainedText) -> str:
    """Name what is explained and the words that are strongest for it by the first method."""
    first, target = text.attributions[0], shorten(visible(text.target.strip() or text.target), 32)
    named = [shorten(visible(text.named(first, at)).strip(), TOLD_WIDTH) for at in text.top(first, TOLD_WORDS)]
    words = ", ".join(f"“{each}”" for each in named)
    return f"{target} by {words or 'no word'}"


def _rests_on(text: ExplainedText) -> str:
    """Name the token that each method scores highest, methods that agree together."""
    chosen: dict[str, list[str]] = {}
    for each in text.attributions:
        if each.method == "random":
            continue
        best = () if is_flat(each, text) else text.top(each, 1)
        token = f"“{shorten(visible(text.named(each, best[0])).strip(), TOLD_WIDTH)}”" if best else "no token"
        chosen.setdefault(token, []).append(each.method)
    target = shorten(visible(text.target.strip() or text.target), 32)
    ranked = sorted(chosen.items(), key=lambda item: (item[0] == "no token", -len(item[1])))
    return f"“{target}” rests most on " + ", ".join(f"{token} ({', '.join(by)})" for token, by in ranked)


def about(text: ExplainedText) -> str:
    """Describe what is explained, and its value."""
    return f"explained: {shorten(visible(text.target), 48)}, f = {number(text.value, significant=4)}"


def strongest(result: Explanation, label: str = "") -> Iterator[Line]:
    """Yield a row per text and method; in a comparison, with the model's `label`, also what is explained."""
    for at, text in enumerate(result):
        sides = {"highest scores": text.top} | (
            {AGAINST: text.against} if any(each.signed for each in text.attributions) else {}
        )
        for each in text.attributions:
            cells = {"of": Cell(text=text.target), "f": number_cell(text.value)} if label else {}
            flat = is_flat(each, text)
            for name, places in sides.items():
                said = name_scores(text.tokens, each.scores, places(each, result.top)[:NAMED])
                cells[name] = Cell(
                    text=said and FLAT_REMARK if flat else said or "none" * (each.signed or name != AGAINST)
                )
            if text.special.any():
                cells["special tokens"] = Cell(text=_special(each, text))
            if label:
                cells["relative error of the sum"] = number_cell(math.nan if each.delta is None else each.delta)
            elif said := doubt(each):
                of = " of f(x) − f(baseline)" if each.error is None else " of the largest score"
                cells["error"] = Cell(text=said + of * (said[-1] in "%×"))
            yield Line((label, str(at), each.method) if label else (str(at), each.method), cells)


def _special(each: Attribution, text: ExplainedText) -> str:
    """Return the special tokens with the largest |score|, and the share of Σ |score| that all special tokens have."""
    places, sizes = np.flatnonzero(text.special), np.abs(each.scores.astype(np.float64))
    strongest = places[descending(sizes[places])][:NAMED].tolist()
    share = 100 * float(sizes[places].sum() / sizes.sum()) if sizes.any() else 0.0
    return f"{name_scores(text.tokens, each.scores, strongest)} ({share:.0f} % of all)"
