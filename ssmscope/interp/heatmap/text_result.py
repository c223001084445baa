"""Heatmaps of texts: scored tokens, the words that stand out, and their views."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import TABLE_ROWS, OverTexts, Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.errors import InputError
from ssmscope.interp.heatmap.scored_text import LIFT_WINDOW, SHARES, ScoredText, lifts, times
from ssmscope.interp.heatmap.words import BEYOND, UNKNOWN, median_half_life
from ssmscope.render.blocks import Block, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import counted, number_runs, score_range
from ssmscope.render.table import MAX_COMPARED_ROWS, Cell, Line, Table, table
from ssmscope.render.tokens import short_token

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from ssmscope.render.blocks import Block, TokenRows
    from ssmscope.render.figure import Frame

SCORES = {
    "survival": "survival: the share of the state that was written at each token",
    "readable": "readable: the share of what can be read of the state that was written at each token",
    "retention": "retention E[A_t]: the share of its old state that a layer keeps when it reads the token",
    "lift": f"lift: survival over the median of the {LIFT_WINDOW} tokens on either side",
    "write": "write 1 − E[A_t]: the share of its old state that a layer overwrites when it reads the token",
}
"""Scores by name, with their names in the views."""
MAX_NAMED_WORDS = 8
"""Largest number of words that a table names."""


def layers_name(layers: Sequence[int]) -> str:
    """Name averaged layers."""
    return f"layer {layers[0]}" if len(layers) == 1 else f"mean of layers {number_runs(layers)}"


@dataclass(frozen=True)
class Head:
    """Head that is shown, and the coefficient of variation over tokens of what it overwrites, averaged over texts."""

    layer: int
    head: int
    selectivity: float


@dataclass(frozen=True)
class SelectionHeatmap(Result, OverTexts[ScoredText], kind="heatmap"):
    """Heatmap of one or several texts. `len`, iteration and `[i]` are over the texts."""

    vector: ClassVar[bool] = False

    texts: tuple[ScoredText, ...]
    score: str
    """"survival", "readable", "retention" or "write"."""
    layers: tuple[int, ...]
    """Numbers of the layers in the rows of every text's `scores`, which its `mean` averages."""
    size: int
    """Largest number of words in a rationale."""
    by_layer: bool
    """True if table and terminal show every layer, not only the average."""
    at: int | None = None
    """Position whose states are examined, with survival; None for the end."""
    contrast: str | None = None
    """Data over which every token's own average was taken: scores are z-scores then."""
    through: bool = False
    """True if survival is followed through the layers below to the tokens of the input."""
    reach: int = 1
    """Number of positions that contribute to a write, by convolutions."""
    shared: bool = True
    """True if all rows of all texts are coloured on one scale."""
    heads: tuple[Head, ...] = ()
    """Heads that are shown, the most selective first."""
    attends: bool = False
    """True if the model also has layers of attention, which keep no state."""
    selects: bool = True
    """False for survival in a model whose gates hardly vary over these tokens, see `ssmscope.interp.gates`."""

    @property
    def of_images(self) -> bool:
        """True if the tokens are pixels of images whose size is known, and the views are maps."""
        return any(text.pixels is not None for text in self)

    def token_rows(self) -> TokenRows:
        return rows(self)

    def draw(self, frame: Frame, *, start: int = 0) -> Figure:  # type: ignore[override]
        """Draw every text in the colours of its average, its layers and its heads; long texts as strips over positions,
        images as maps. One figure holds 8 texts, from number `start` on."""
        from ssmscope.render.token_figure import draw_rows

        return draw_rows(rows(self), self.headline, frame, start=start)

    @property
    def summed(self) -> bool:
        """True if the scores of a word's tokens add up."""
        return self.score in SHARES and self.contrast is None

    @property
    def score_name(self) -> str:
        """Score with its formula, as the views call it."""
        name = SCORES[self.score]
        if self.score in SHARES and self.at is not None:
            name = name.replace("the state", f"the state after token {self.at}")
        if self.score == "lift" and self.at is not None:
            name = name.replace("survival", f"survival after token {self.at}")
        above = f", in standard deviations above the token's own average over {self.contrast}"
        return name + above if self.contrast else name

    @property
    def layers_name(self) -> str:
        return layers_name(self.layers)

    def written(self, score: float) -> str:
        """Format a score: shares in percent."""
        if self.summed:
            return f"{100 * score:.0f} %" if score >= 0.1 else f"{100 * score:.1f} %"
        if self.score == "lift":
            return times(score)
        return f"{score:+.1f}".replace("-", "−") if self.contrast else f"{score:.3f}"

    def list_words(self, text: ScoredText, scores: np.ndarray, places: Sequence[int]) -> str:
        """List words of a text with their scores, for a table."""
        words = text.named(scores, places, summed=self.summed)[:MAX_NAMED_WORDS]
        return " · ".join(f"{word} {self.written(score)}" for word, score in words)

    def said(self, text: ScoredText, most: int = 3) -> str:
        """List the words of a text that stand out, with their scores."""
        words = text.named(text.mean, text.rationale, summed=self.summed, quoted=True)[:most]
        return ", ".join(f"{word} {self.written(score)}" for word, score in words) or "no word stands out"

    def of_marks(self, text: ScoredText, scores: np.ndarray, most: int = 3) -> str:
        """List shares of punctuation and special tokens, which are not among the words that may stand out."""
        found = text.marks(scores)[:most] if self.summed and not self.of_images else []
        return ", ".join(f"{name} {self.written(score)}" for name, score in found)

    def beside(self, text: ScoredText) -> list[str]:
        """Say what holds the state besides words, and most of it in which layer, and how many tokens are unknown."""
        said = []
        if marks := self.of_marks(text, text.mean):
            ends = [text.marks(row)[0] for row in text.scores]
            at = max(range(len(ends)), key=lambda layer: ends[layer][1])
            layer = f"; in layer {self.layers[at]} {ends[at][0]} holds {self.written(ends[at][1])}" * (len(ends) > 1)
            said.append(marks + layer)
        if text.unknown:
            said.append(f"{len(text.unknown)} of {counted(len(text), 'token')} {UNKNOWN}")
        return said

    def verdict(self, at: int = 0) -> str:
        if not len(self) or self.of_images:
            hardly = ", which hardly selects" * any(text.flat[:1] == (True,) for text in self)
            lies = half_mass([text.mean for text in self]) if self.summed and len(self) else 0.0
            share = f": half of it lies on {100 * lies:.0f} % of the pixels" if lies else ""
            return f"{self.score} of {counted(len(self), 'image')}, {self.layers_name}{hardly}{share}"
        if self.score == "lift":
            first = enumerate(self.texts[:3])
            told = [f"text {number}: " * (len(self) > 1) + text.lifted(self.layers) for number, text in first]
            return "; ".join(told)
        where = "of what can be read of the states" if self.score == "readable" else "of the states"
        where += " at the end" if self.at is None else f" after token {self.at}"
        if len(self) == 1:
            text = self[0]
            rest = "".join(f"; {each}" for each in self.beside(text))
            if not text.rationale:
                noise = text.flat[:1] == (True,)
                why = "nothing stands out: the spread over tokens is noise" if noise else "no word stands out"
                return f"{why}{rest} ({self.score}, {self.layers_name})"
            if self.score in SHARES and not self.contrast:
                return f"{self.said(text)} {where}{rest}{self._half_life(text)} ({self.layers_name})"
            of = f"most above their own average over {self.contrast}" if self.contrast else f"highest {self.score}"
            return f"{of}: {self.said(text)}{rest} ({self.layers_name})"
        shown = "; ".join(f"text {number}: {self.said(text, 2)}" for number, text in enumerate(self.texts[:3]))
        rest = f"; {counted(len(self) - 3, 'more text')}" if len(self) > 3 else ""
        return f"{shown}{rest} ({self.score}, {self.layers_name})"

    def _half_life(self, text: ScoredText) -> str:
        if text.half_lives is None:
            return ""
        found = [median_half_life(row[~text.special]) for row in text.half_lives]
        found = found[:1] if len(set(found)) == 1 else found
        if BEYOND in found:
            return f"; half-life in tokens: {', '.join(found)}" * (len(found) <= 3)
        each = " and ".join(filter(None, [", ".join(found[:-1]), found[-1]]))
        return f"; half of what is written is left after {each} tokens" * (len(found) <= 3)

    @classmethod
    def compare(cls, results: Sequence[SelectionHeatmap], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            for number, text in enumerate(result):
                tokens = result.list_words(text, text.mean, text.rationale)
                cells = {"answer": Cell(text=text.answer), "p": Cell(Estimate(text.probability, math.nan, math.nan))}
                cells |= {"score": Cell(text=result.score), "stands out": Cell(text=tokens or "nothing")}
                lines.append(Line((label, str(number)), cells))
        return table(("model", "text"), lines, most=MAX_COMPARED_ROWS)

    @property
    def headline(self) -> str:
        return f"Memory of {self.model_name}: {self.verdict()}"

    def top(self, k: int) -> pd.DataFrame:
        """Return the k highest tokens of every text: columns text, rank, position, token, score."""
        rows = [
            (number, rank, *entry)
            for number, text in enumerate(self.texts)
            for rank, entry in enumerate(text.top(k), start=1)
        ]
        return pd.DataFrame(rows, columns=["text", "rank", "position", "token", "score"])

    def lifts(self, window: int = LIFT_WINDOW) -> pd.DataFrame:
        """Return a row per text, layer and token, the highest lift first: columns text, layer, position, token, score,
        lift, the score over the median of those of the `window` tokens on either side. A kept marker that the mean over
        layers hides stands out in its layer. Raises InputError where the scores are lifts themselves."""
        if self.score == "lift":
            raise InputError("the scores of this heatmap are lifts already; read them in to_frame()")
        parts = []
        for number, text in enumerate(self.texts):
            last = len(text) if self.at is None else self.at + 1
            shown = text.scores[:, :last].astype(np.float64)
            for layer, scores, over in zip(self.layers, shown, lifts(shown, window)):
                first = {"text": number, "layer": layer, "position": range(last), "token": text.tokens[:last]}
                parts.append(pd.DataFrame({**first, "score": scores, "lift": over}))
        return pd.concat(parts).sort_values("lift", ascending=False, kind="stable", ignore_index=True)

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import strips_of

        return strips_of("tokens of the first texts by score", self.token_rows())

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, layer and token: columns model, text, position, token, word, layer, head, score,
        half_life (with survival, infinite where the text is too short for it), in_rationale.

        `layer` is "mean" for the average; the layers follow if they were asked for, and the heads. `text` and
        `position` count from 0. `word` is missing for special tokens, `head` and `half_life` where not defined.
        """
        parts = []
        for number, text in enumerate(self.texts):
            unknown = np.full((len(self.layers), len(text)), np.nan)
            lives = unknown if text.half_lives is None else text.half_lives
            rows: list[tuple[str, int | None, np.ndarray, np.ndarray]] = [("mean", None, text.mean, unknown[0])]
            of_layers = zip(self.layers, text.scores, lives) if self.by_layer else ()
            rows += [(str(layer), None, row, life) for layer, row, life in of_layers]
            of_heads = () if text.heads is None else zip(self.heads, text.heads)
            rows += [(str(head.layer), head.head, row, unknown[0]) for head, row in of_heads]
            tokens, words = pd.array(text.tokens, dtype="string"), pd.array(text.words, dtype="Int64")
            first = {"text": number, "position": range(len(text)), "token": tokens, "word": words}
            kept = np.isin(range(len(text)), text.rationale)
            for layer, head, scores, half_lives in rows:
                columns = {**first, "layer": layer, "head": pd.array([head] * len(text), dtype="Int64")}
                columns |= {"score": scores, "half_life": half_lives, "in_rationale": kept}
                parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def blocks(self) -> Iterable[Block]:
        return blocks(self)


def half_mass(maps: Iterable[np.ndarray]) -> float:
    """Return the smallest share of the pixels that holds half of |score|, on average over maps."""
    found = []
    for scores in maps:
        falling = np.sort(np.abs(scores.astype(np.float64)))[::-1]
        found.append((np.searchsorted(falling.cumsum(), falling.sum() / 2) + 1) / len(falling))
    return float(np.mean(found))


FLAT_REMARK = "flat: noise"
IMAGE_REMARK = "hardly selects"
"""Remark on a flat row of an image; it is drawn all the same, since neighbouring pixels show what is not noise."""
CONVOLUTION_REMARK = "; in italics, or underlined in orange: the convolution is not yet full"


def blocks(result: SelectionHeatmap) -> Iterator[Block]:
    """Yield the verdict, the coloured texts with their picture, a table of what stands out, and notes."""
    yield Prose(result.headline, "title")
    yield rows(result)
    yield Picture(result.figure, result.headline, vector=False, folded=not result.of_images, photo=result.of_images)
    if not result.of_images:
        yield replace(table(("text", "of"), list(strongest(result)), most=MAX_COMPARED_ROWS), brief=TABLE_ROWS)
    yield from (Prose(line, "note") for line in notes(result))
    if told := definitions(result):
        yield Prose(" ".join(told), "definition")


def rows(result: SelectionHeatmap, *, every: bool = True) -> TokenRows:
    """Return every text with a row for the average and, with `every`, for each layer and head."""
    shared = scale(result) if result.shared else None
    of_heads = _ends(result, [text.heads[:, ~text.special] for text in result if text.heads is not None])
    return TokenRows(
        texts=tuple(_text(text, result, shared, of_heads, every) for text in result),
        of="layer",
        score=result.score if result.contrast is None else f"{result.score}, z",
        name=result.score_name,
        around=("below its average", "above"),
        marked=f"up to {result.size} {'places' if result.of_images else 'words'} that stand out"
        + CONVOLUTION_REMARK * (result.reach > 1 and not result.of_images),
        first=None if result.by_layer else 1,
        summed=result.summed,
    )


def scale(result: SelectionHeatmap) -> tuple[float, float]:
    """Return the ends of the colours that averages and layers of all texts share."""
    return _ends(result, [np.vstack([text.mean[None], text.scores])[:, ~text.special] for text in result])


def _ends(result: SelectionHeatmap, scores: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the ends of a colour scale: 0 to the largest share, lowest to highest, symmetric for z-scores."""
    every = np.concatenate([each.ravel() for each in scores]) if scores else np.zeros(0)
    if not every.size:
        return 0.0, 0.0
    low, high = float(every.min()), float(every.max())
    if result.contrast is not None:
        return -max(-low, high), max(-low, high)
    return (0.0, high) if result.score in (*SHARES, "lift") else (low, high)


def _text(
    text: ScoredText,
    result: SelectionHeatmap,
    shared: tuple[float, float] | None,
    of_heads: tuple[float, float],
    every: bool,
) -> TokenText:
    outside = text.special.copy()
    if result.at is not None:
        outside[result.at + 1 :] = True

    def row(
        name: str, scores: np.ndarray, flat: bool, marked: Sequence[int], ends: tuple[float, float] | None
    ) -> TokenRow:
        seen, hidden = scores[~outside], flat and not result.of_images
        middle = float(seen.mean()) if seen.size else 0.0
        used = (middle, middle) if hidden else ends or _ends(result, [seen])
        signed, remark = result.contrast is not None and not hidden, FLAT_REMARK * hidden or IMAGE_REMARK * flat
        own = (float(seen.min()), float(seen.max())) if seen.size and (ends or hidden) else None
        return TokenRow(name, scores, used, signed, outside, marked, remark=remark, own=own)

    single = len(result.layers) == 1
    flat = text.flat or (False,) * (1 + len(result.layers))
    standing = text.standing or ((),) * len(result.layers)
    made = [row(result.layers_name if single else "mean", text.mean, flat[0], text.rationale, shared)]
    if every and not single:
        each = zip(result.layers, text.scores, flat[1:], standing)
        made += [row(f"layer {number}", scores, noise, marked, shared) for number, scores, noise, marked in each]
    if every and text.heads is not None:
        for head, scores in zip(result.heads, text.heads):
            name = f"layer {head.layer} head {head.head}\nselectivity {head.selectivity:.2f}"
            made.append(row(name, scores, False, (), of_heads if result.shared else None))
    warm = min(result.reach - 1, len(text))
    span = (0, warm) if warm and not result.of_images else None
    about = f"stands out: {result.said(text)}" if text.rationale else "no word stands out"
    about = "" if result.of_images else "; ".join((about, *result.beside(text)))
    return TokenText(
        text.tokens, text.words, made, text.answer, text.probability, about, span, text.pixels, text.series
    )


def strongest(result: SelectionHeatmap) -> Iterator[Line]:
    """Yield a row per text and layer, the average first, then heads."""
    single = len(result.layers) == 1
    names = [result.layers_name] if single else ["mean", *(f"layer {layer}" for layer in result.layers)]
    of_heads = [f"layer {head.layer} head {head.head}" for head in result.heads]
    seen = slice(None if result.at is None else result.at + 1)
    for number, text in enumerate(result):
        scores, standing = (text.mean, *text.scores), (text.rationale, *text.standing)
        shown = len(names) if result.by_layer else 1
        for at, (name, row, places) in enumerate(zip(names[:shown], scores, standing)):
            said = result.list_words(text, row, places) or (FLAT_REMARK if any(text.flat[at : at + 1]) else "nothing")
            cells = {"stands out": Cell(text=said)}
            if marks := result.of_marks(text, row):
                cells["punctuation, special tokens"] = Cell(text=marks)
            if text.half_lives is not None and (at or single):
                life = text.half_lives[max(at - 1, 0)]
                cells["half-life in tokens"] = Cell(text=median_half_life(life[~text.special]))
            ends = {"tokens from – to": Cell(text=score_range(row[seen], text.special[seen]))}
            yield Line((str(number), name), cells | ends)
        for name, row in zip(of_heads, () if text.heads is None else text.heads):
            strongest = text.top(3, row)
            said = " · ".join(f"{short_token(token, 24)} {result.written(score)}" for _, token, score in strongest)
            ends = {"tokens from – to": Cell(text=score_range(row[seen], text.special[seen]))}
            yield Line((str(number), name), {"stands out": Cell(text=said), **ends})


def definitions(result: SelectionHeatmap) -> list[str]:
    """Return the definitions of the scores."""
    found = []
    if result.score in SHARES:
        found.append(
            f"{result.score.capitalize()}: what is left in the states of what was written at a token, as a share of "
            f"all that is left{' as it is read' * (result.score == 'readable')}, exact in every head, heads weighted "
            "by what they hold."
            + " Half-life: tokens after which half of what was written is left, the median over the text."
            * any(text.half_lives is not None for text in result)
        )
    if result.score == "lift":
        found.append(
            f"Lift: the share of a layer's states that was written at a token, over the median of those of the "
            f"{LIFT_WINDOW} tokens on either side: what a layer keeps while it lets its neighbours fade."
        )
    if result.contrast is not None:
        of = "the logarithm of a token's share, in units of an even spread" if result.score in SHARES else "scores"
        found.append(
            f"z-scores of {of}: how far it lies above the token's own average over {result.contrast}, in standard "
            "deviations of tokens around theirs. Averages of rare tokens are shrunk towards the overall average."
        )
    if result.through:
        found.append("Followed through the layers below to the input tokens, half of each step by the residual stream.")
    elif len(result.layers) > 1 and result.score in SHARES:
        found.append(
            "Earlier layers have mixed other tokens into what a deeper layer writes at a token; see the option through."
        )
    if any(any(text.flat) for text in result):
        by = "by less than a tenth of its mean (of what is overwritten, for retention)"
        of_image = f"“{IMAGE_REMARK.capitalize()}”: a map varies over the image {by}, and its colours exaggerate that."
        of_text = f"A flat row varies over the tokens {by}: that is noise, and is not coloured."
        found.append(of_image if result.of_images else of_text)
    if result.reach > 1 and not result.of_images:
        found.append(
            f"The first {result.reach - 1} tokens, in italics or underlined in orange: the convolution's window "
            "begins before the text, and what is written there comes from fewer tokens."
        )
    if result.attends:
        found.append("Layers of attention keep no state and have no row.")
    return found


def notes(result: SelectionHeatmap) -> list[str]:
    """Return the notes on what the scores do not say."""
    found = []
    if not result.selects:
        found.append(
            f"The gates hardly select: they vary over these tokens by a tenth or more in fewer than half of the heads. "
            f"What survives says where a {'pixel' if result.of_images else 'token'} stands rather than what it is."
        )
    return found
