"""The selection heatmap of texts: scored tokens, their rationale, and how both are shown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ssmscope.bootstrap import Estimate
from ssmscope.results import Result
from ssmscope.show.table import ROWS, Cell, Line, Table, table
from ssmscope.show.tokens import numbers, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType


SCORES = {"retention": "retention E[A_t]", "write": "write 1 − E[A_t]"}
"""The scores by name, and how the views call them."""


def ranked(scores: np.ndarray, words: Sequence[int | None]) -> list[int]:
    """Positions of the non-special tokens from the highest score to the lowest, ties by position."""
    return sorted((i for i, word in enumerate(words) if word is not None), key=lambda i: (-scores[i], i))


@dataclass(frozen=True, eq=False)
class ScoredText:
    """One text and its scores. After merging, the tokens are words; `rationale` counts in what `tokens`
    holds."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    """Per token the word it belongs to; None marks a special token."""
    scores: np.ndarray
    """(layers, tokens) float32."""
    mean: np.ndarray
    """(tokens,) float32: the average over the layers."""
    rationale: tuple[int, ...]
    """Positions of the top-k tokens, the highest first."""
    answer: str
    probability: float
    pixels: np.ndarray | None = None
    """(height, width, channels) float32, of an image whose pixels are the tokens."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def special(self) -> np.ndarray:
        """(tokens,) bool: the tokens that the tokenizer added."""
        return np.array([word is None for word in self.words], dtype=bool)

    def top(self, k: int, scores: np.ndarray | None = None) -> list[tuple[int, str, float]]:
        """(position, token, score) of the k highest tokens by the average, or by the given scores, highest
        first."""
        values = self.mean if scores is None else scores
        return [(i, self.tokens[i], float(values[i])) for i in ranked(values, self.words)[:k]]


@dataclass(frozen=True)
class SelectionHeatmap(Result, kind="heatmap"):
    """The selection heatmap of one or several texts. `len`, iteration and `[i]` are over the texts."""

    vector: ClassVar[bool] = False

    texts: tuple[ScoredText, ...]
    score: str
    """"retention" or "write"."""
    layers: tuple[int, ...]
    """The layer numbers that the rows of every text's `scores` belong to, and that its `mean` averages."""
    size: int
    """How many tokens a rationale has at most."""
    by_layer: bool
    """Whether table and terminal show every layer, or only the average."""

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[ScoredText]:
        return iter(self.texts)

    def __getitem__(self, index: int) -> ScoredText:
        return self.texts[index]

    @property
    def of_images(self) -> bool:
        """Whether the tokens are pixels of images whose size is known, and the views are maps."""
        return any(text.pixels is not None for text in self.texts)

    @property
    def score_name(self) -> str:
        """The score with its formula, as the views call it."""
        return SCORES[self.score]

    @property
    def layers_name(self) -> str:
        """The layers that are averaged, in words."""
        return f"layer {self.layers[0]}" if len(self.layers) == 1 else f"mean of layers {numbers(self.layers)}"

    def verdict(self, at: int = 0) -> str:
        if len(self) != 1 or self.of_images:
            return f"{self.score} of {len(self):,} {'images' if self.of_images else 'texts'}, {self.layers_name}"
        tokens = ", ".join(f"“{visible(token).strip()}” {score:.3f}" for _, token, score in self[0].top(3))
        return f"highest {self.score}: {tokens or 'no tokens'}"

    @classmethod
    def compare(cls, results: Sequence[SelectionHeatmap], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            for number, text in enumerate(result):
                tokens = " · ".join(f"{token.strip()} {score:.3f}" for _, token, score in text.top(result.size)[:8])
                cells = {"answer": Cell(text=text.answer), "p": Cell(Estimate(text.probability, math.nan, math.nan))}
                cells |= {"score": Cell(text=result.score), "highest tokens": Cell(text=tokens)}
                lines.append(Line((label, str(number)), cells))
        return table(("model", "text"), lines, most=ROWS)

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        return f"Selection heatmap of {model}: {self.score}, {self.layers_name}"

    def top(self, k: int) -> DataFrame:
        """The k highest tokens of every text: columns text, rank, position, token, score."""
        import pandas as pd

        rows = [
            (number, rank, *entry)
            for number, text in enumerate(self.texts)
            for rank, entry in enumerate(text.top(k), start=1)
        ]
        return pd.DataFrame(rows, columns=["text", "rank", "position", "token", "score"])

    def to_frame(self) -> DataFrame:
        """A row per text, layer and token: columns text, position, token, word, layer, score, in_rationale.

        `layer` is "mean" for the average; the layers follow if they were asked for. `text` and `position`
        count from 0. `word` is missing for special tokens.
        """
        import pandas as pd

        parts = []
        for number, text in enumerate(self.texts):
            kept = set(text.rationale)
            rows = zip(("mean", *self.layers), (text.mean, *text.scores), strict=True)
            for layer, scores in rows if self.by_layer else [("mean", text.mean)]:
                columns = {
                    "text": number,
                    "position": range(len(text)),
                    "token": pd.array(text.tokens, dtype="string"),
                    "word": pd.array(text.words, dtype="Int64"),
                    "layer": str(layer),
                    "score": scores,
                    "in_rationale": [position in kept for position in range(len(text))],
                }
                parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def figure(self, *, start: int = 0) -> Figure:
        """Every text as coloured tokens above its layers. One figure holds 8 texts, from number `start`
        on. Of images it is each of them beside the maps of its scores."""
        if self.of_images:
            from ssmscope.interp.heatmap.image import draw as draw_images

            return draw_images(self, start=start)
        from ssmscope.interp.heatmap.figure import draw

        return draw(self, start=start)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.interp.heatmap.terminal import terminal_view

        coloured = console.color_system in ("256", "truecolor") and not console.no_color and not self.of_images
        return terminal_view(self, coloured=coloured)

    def _repr_html_(self) -> str:
        if self.of_images:
            return super()._repr_html_()
        from ssmscope.interp.heatmap.page import fragment

        return fragment(self)
