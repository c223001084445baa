"""Which tokens the selection mechanism retains or writes: the importance that the gates themselves show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.views.tokens import numbers
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.trace import Trace

SCORES = {"retention": "retention E[A_t]", "write": "write 1 − E[A_t]"}
"""The scores by name, and how the views call them."""


def selection_heatmap(
    trace: Trace,
    *,
    score: str = "retention",
    layers: str | Sequence[int] = "mean",
    top: int = 5,
    merge: bool = False,
) -> SelectionHeatmap:
    """The selection heatmap of every text of a trace (Baleen, Eq. 10), with its top-k rationale.

    Importance(t) = (1 / ND) Σ_d Σ_n E[A_t]^(n, d), the retention gate averaged over channels (or heads) and
    state: how much of its memory a layer keeps when it reads token t.

    - `score`: "retention" is Eq. 10 to the letter; a token that is strongly written scores low. "write" is
      1 − retention. Which of the two explains a model better is measured by fidelity AUC.
    - `layers`: "mean" averages all layers; "all", or a list of layer numbers, averages the chosen ones and
      also shows each of them in the table and the terminal. Figure and page show the layers in every case.
    - `top`: how many tokens the rationale has: the ones of highest average score, ties by position, special
      tokens left out.
    - `merge`: put the tokens of a word together, scored by their mean. Special tokens stay as they are.

    Raises InputError for an option that is not one of these, or if a score is not finite.
    """
    if score not in SCORES:
        raise InputError(f"unknown score {score!r}; allowed are {_listed(SCORES)}{did_you_mean(str(score), SCORES)}")
    if not _is_whole(top) or top < 1:
        raise InputError(f"top is {top!r}; allowed is a whole number of tokens from 1 on")
    chosen = _chosen(layers, len(trace.retention))
    retention = trace.retention.detach().double().cpu().numpy()[list(chosen)]
    importance = retention if score == "retention" else 1.0 - retention
    texts = []
    for row, real in enumerate(trace.mask.cpu().numpy()):
        scores = importance[:, row, real]
        if not np.isfinite(scores).all():
            layer = chosen[int(np.flatnonzero(~np.isfinite(scores).all(axis=1))[0])]
            raise InputError(f"the retention of text {row + 1} is not finite at layer {layer}; the model is damaged")
        tokens: Sequence[str] = trace.tokens[row]
        words: Sequence[int | None] = trace.words[row]
        if merge:
            tokens, words, scores = _merged(tokens, words, scores)
        mean = scores.mean(axis=0).astype(np.float32)
        answer, probability = trace.answers[row]
        texts.append(
            ScoredText(
                tokens=tuple(tokens),
                words=tuple(words),
                scores=scores.astype(np.float32),
                mean=mean,
                rationale=tuple(ranked(mean, words)[:top]),
                answer=answer,
                probability=float(probability),
                pixels=None if trace.pixels is None else trace.pixels[row].float().cpu().numpy(),
            )
        )
    kept_layers = layers if isinstance(layers, str) else list(chosen)
    options = {"score": score, "layers": kept_layers, "top": int(top), "merge": merge}
    return SelectionHeatmap(
        provenance=record_provenance(trace.source, options=options),
        texts=tuple(texts),
        score=score,
        layers=chosen,
        size=int(top),
        by_layer=layers != "mean",
    )


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
            from ssmscope.interp.views.image import draw as draw_images

            return draw_images(self, start=start)
        from ssmscope.interp.views.figure import draw

        return draw(self, start=start)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.interp.views.terminal import terminal_view

        coloured = console.color_system in ("256", "truecolor") and not console.no_color and not self.of_images
        return terminal_view(self, coloured=coloured)

    def _repr_html_(self) -> str:
        if self.of_images:
            return super()._repr_html_()
        from ssmscope.interp.views.page import fragment

        return fragment(self)


def _merged(
    tokens: Sequence[str], words: Sequence[int | None], scores: np.ndarray
) -> tuple[list[str], list[int | None], np.ndarray]:
    """Neighbouring tokens of the same word as one, its score the mean of theirs. `scores` is (layers,
    tokens)."""
    groups = [
        [position for _, position in group]
        for _, group in groupby(
            ((word, position) for position, word in enumerate(words)),
            key=lambda pair: (pair[0], pair[1] if pair[0] is None else None),
        )
    ]
    merged = [tokens[group[0]] + "".join(tokens[i].removeprefix("##") for i in group[1:]) for group in groups]
    means = np.stack([scores[:, group].mean(axis=1) for group in groups], axis=1) if groups else scores
    return merged, [words[group[0]] for group in groups], means


def _chosen(layers: str | Sequence[int], count: int) -> tuple[int, ...]:
    allowed = f"allowed are 'mean', 'all' or a list of layer numbers from 0 to {count - 1}"
    if isinstance(layers, str):
        if layers not in ("mean", "all"):
            raise InputError(f"unknown layers {layers!r}; {allowed}{did_you_mean(layers, ('mean', 'all'))}")
        return tuple(range(count))
    if not isinstance(layers, Iterable):
        raise InputError(f"layers is {layers!r}; {allowed}")
    chosen = list(layers)
    wrong = [layer for layer in chosen if not _is_whole(layer) or not 0 <= layer < count]
    if wrong:
        raise InputError(f"there is no layer {wrong[0]!r}; {allowed}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise InputError(f"layers is {chosen}; name at least one layer, and each once; {allowed}")
    return tuple(int(layer) for layer in chosen)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _listed(names: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in names)
