"""Results of a fitted lens, and of the answers that a lens reads layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.errors import InputError, did_you_mean
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block, Picture, Prose
from ssmscope.render.table import Cell, Line, Table, table, with_interval
from ssmscope.render.word_grid import WordGrid, WordGrids

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from ssmscope.render.figure import Frame


STATISTICS = {
    "answer_probability": "probability of the final answer",
    "top_probability": "probability of the layer's own answer",
    "entropy": "entropy, nats",
    "cross_entropy": "cross-entropy to the next token, nats",
    "kl": "KL(model ‖ lens), nats",
}
"""Statistics of every layer and position, with their names in the views."""


@dataclass(frozen=True)
class LayerFit:
    """KL(model ‖ lens) of both lenses at one layer in nats, mean over held-out positions."""

    layer: int
    """i: the input of block i is read, 0 being the embeddings."""
    tuned: Estimate
    logit: Estimate
    gained: Estimate
    """logit − tuned, from the same resamples."""


@dataclass(frozen=True)
class Evaluation:
    """Mean KL over all layers after `step` steps: in training since the previous evaluation, and on held-out rows."""

    step: int
    training: float
    held_out: float


@dataclass(frozen=True)
class LensFit(Result, kind="lens-fit"):
    """KL of a tuned lens and of the logit lens on held-out rows that took no part in the fit."""

    drawn_by: ClassVar[str] = "fit_figure"

    positions: str
    layers: tuple[LayerFit, ...]
    tuned: Estimate
    """Mean over the layers."""
    logit: Estimate
    measured: int
    """Number of positions that the numbers are means over."""
    rows: int
    """Number of rows with these positions, which are resampled."""
    best_step: int
    """Step of the kept weights; 0 if none was better than the logit lens."""
    history: tuple[Evaluation, ...]

    def verdict(self, at: int = 0) -> str:
        return (
            f"KL {with_interval(self.tuned)} nats with the tuned lens, {with_interval(self.logit)} with the logit lens"
        )

    @classmethod
    def compare(cls, results: Sequence[LensFit], labels: Sequence[Sequence[str]]) -> Table:
        lines = [
            Line((label,), {"tuned lens": Cell(result.tuned), "logit lens": Cell(result.logit)})
            for result, (label,) in zip(results, labels)
        ]
        return table(("model",), lines, note="KL to the model's own answers in nats, mean over layers.")

    @property
    def headline(self) -> str:
        mean = f"{self.tuned.value:.3f} nats, mean of {len(self.layers)} layers; logit lens {self.logit.value:.3f}"
        return f"Tuned lens of {self.model_name}: KL to its own answers {mean}"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per layer: columns layer (i: the input of block i), tuned, logit, gained (logit − tuned), in
        nats, each with the ends of its 95 % interval in columns ending in _low and _high."""
        return pd.DataFrame(
            {"layer": one.layer, **with_intervals(tuned=one.tuned, logit=one.logit, gained=one.gained)}
            for one in self.layers
        )

    @property
    def measured_on(self) -> str:
        data = self.provenance["data"]["measured"]
        where = "positions" if self.positions == "every" else "last positions"
        rows = f"{self.rows:,} rows of {data['name']} ({data['split']})"
        return f"{self.measured:,} {where} of {rows} that took no part in the fit"

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        means = {"tuned lens": Cell(self.tuned), "logit lens": Cell(self.logit)}
        lines = [
            Line((str(i),), {"tuned lens": Cell(one.tuned), "logit lens": Cell(one.logit), "gained": Cell(one.gained)})
            for i, one in enumerate(self.layers)
        ]
        note = (
            f"KL(model ‖ lens) in nats over {self.measured_on}; 95 % bootstrap intervals over rows. Layer i reads the "
            f"input of block i, 0 the embeddings. Weights of step {self.best_step}."
        )
        yield table(("layer",), [*lines, Line(("mean",), means)], note=note)


@dataclass(frozen=True)
class LensedText(Outlined):
    """Readings of one text; arrays are (layers + 1, positions), the last row being the model itself."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    positions: np.ndarray
    """Positions that were read, (positions,)."""
    answer_probability: np.ndarray
    """q_i of the final answer."""
    top_probability: np.ndarray
    """q_i of the layer's own answer."""
    entropy: np.ndarray
    cross_entropy: np.ndarray
    """Cross-entropy to the next token; NaN at the last one, and everywhere for a classifier."""
    kl: np.ndarray
    """KL(p ‖ q_i)."""
    top: np.ndarray
    """The layer's own answer, the id of a token or class."""
    answers: tuple[tuple[str, ...], ...]
    """Names of these answers."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def final(self) -> tuple[str, ...]:
        return self.answers[-1]

    @cached_property
    def agrees(self) -> np.ndarray:
        """True where a layer's answer is the final one, (layers + 1, positions)."""
        return self.top == self.top[-1]

    @cached_property
    def settled(self) -> np.ndarray:
        """The first layer from which on the final answer leads, (positions,)."""
        stays = np.logical_and.accumulate(self.agrees[::-1])[::-1]
        return stays.argmax(0)

    def grid(self, label: str, numbers: np.ndarray) -> WordGrid:
        tokens = [self.tokens[position] for position in self.positions]
        scores = {name: getattr(self, name) for name in STATISTICS}
        return WordGrid(label, numbers, tokens, self.answers, scores, self.agrees, self.settled)


def joined(texts: Sequence[LensedText]) -> LensedText:
    """Return the readings of several texts as those of one, whose tokens are the ones that were read."""
    names = [*STATISTICS, "top"]
    return LensedText(
        tuple(text.tokens[position] for text in texts for position in text.positions),
        (),
        np.arange(sum(len(text.positions) for text in texts)),
        **{name: np.concatenate([getattr(text, name) for text in texts], axis=1) for name in names},
        answers=tuple(tuple(chain(*layer)) for layer in zip(*(text.answers for text in texts))),
    )


@dataclass(frozen=True)
class Trajectory(Result, kind="trajectory"):
    """Answers of a lens at every layer and position of some texts."""

    lens: str
    """Title of the lens: "logit lens", or "tuned lens" with its directory."""
    positions: str
    statistic: str
    classes: bool
    """True if answers are classes rather than tokens."""
    texts: tuple[LensedText, ...]

    @property
    def layers(self) -> int:
        """Number of layers L; the rows are 0 … L."""
        return len(self.texts[0].top) - 1

    @cached_property
    def grids(self) -> tuple[WordGrid, ...]:
        """Grids of the views: one per text, or one of all texts' last positions."""
        if self.positions == "every":
            return tuple(text.grid(f"text {number}", text.positions) for number, text in enumerate(self.texts))
        return (joined(self.texts).grid("", np.arange(len(self.texts))),)

    def _views(self, statistic: str) -> WordGrids:
        column: Literal["token", "text"] = "token" if self.positions == "every" else "text"
        return WordGrids(self.grids, column, self.lens, STATISTICS, statistic)

    def verdict(self, at: int = 0) -> str:
        settled = np.concatenate([text.settled for text in self.texts])
        if len(settled) == 1:
            return f"the answer leads from layer {settled[0]} of {self.layers} on, {self.lens}"
        where = f"mean of {len(settled):,} positions"
        return f"the answer leads from layer {settled.mean():.1f} of {self.layers} on, {where}, {self.lens}"

    @property
    def headline(self) -> str:
        return f"Answers by layer of {self.model_name}: {self.verdict()}"

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        last = self.texts[0].answer_probability[:, -1]
        return curve("probability of the answer by layer", last, ends=(0.0, 1.0))

    def to_frame(self) -> pd.DataFrame:
        """Return a row per text, position and layer. Columns: text and position (from 0), token, layer (0 the
        embeddings, the last one the model), answer (the layer's own), top_probability (its), final (the model's
        answer), answer_probability (its), agrees, settled (the layer from which on the final answer leads), entropy, kl
        and, of a language model, cross_entropy (nats)."""
        parts = []
        for number, text in enumerate(self.texts):
            layers, read = text.top.shape
            columns = {
                "text": number,
                "position": text.positions.repeat(layers),
                "token": np.array([text.tokens[position] for position in text.positions]).repeat(layers),
                "layer": np.tile(np.arange(layers), read),
                "answer": np.array(text.answers).T.ravel(),
                "top_probability": text.top_probability.T.ravel(),
                "final": np.array(text.final).repeat(layers),
                "answer_probability": text.answer_probability.T.ravel(),
                "agrees": text.agrees.T.ravel(),
                "settled": text.settled.repeat(layers),
            }
            parts.append(
                pd.DataFrame(
                    columns | {name: getattr(text, name).T.ravel() for name in ("entropy", "kl", "cross_entropy")}
                )
            )
        frame = pd.concat(parts, ignore_index=True)
        return frame.drop(columns="cross_entropy") if self.classes else frame

    def draw(self, frame: Frame, *, statistic: str | None = None, start: int = 0) -> Figure:  # type: ignore[override]
        """Draw layers × tokens of up to 4 texts with the layer's own answer in every cell, the embeddings at the bottom
        and the model at the top: 24 tokens, from number `start` on, and 24 layers; raise InputError for an unknown
        statistic, or a `start` that no text has."""
        from ssmscope.render.word_grid_figure import draw

        statistic = statistic or self.statistic
        allowed = [name for name in STATISTICS if not (name == "cross_entropy" and self.classes)]
        if statistic not in allowed:
            near = did_you_mean(str(statistic), allowed)
            raise InputError(f"unknown statistic {statistic!r}; allowed are {', '.join(allowed)}{near}")
        views = self._views(statistic)
        most = max(len(grid.tokens) for grid in self.grids)
        if not 0 <= start < most:
            raise InputError(
                f"there is no {views.column} {start!r} to start the figure at; allowed are 0 to {most - 1}"
            )
        return draw(views, self.headline, frame, start=start)

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        yield Prose(
            f"Layer i reads the input of block i, 0 the embeddings; {self.layers} is the model itself.", "definition"
        )
        yield Picture(self.figure, self.headline, vector=False, folded=True)
        yield self._views(self.statistic).block()
