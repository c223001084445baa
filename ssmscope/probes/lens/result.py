"""Results of a fitted lens, and of the answers that a lens reads layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate, with_intervals
from ssmscope.probes.lens.lensed_text import Column, LensedText
from ssmscope.render.blocks import Block, Custom, Picture, Prose
from ssmscope.render.table import Cell, Line, Table, table, with_interval

if TYPE_CHECKING:
    from pandas import DataFrame


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
        model = self.model_name
        return (
            f"Tuned lens of {model}: KL to its own answers {self.tuned.value:.3f} nats, mean of {len(self.layers)} "
            f"layers; logit lens {self.logit.value:.3f}"
        )

    def to_frame(self) -> DataFrame:
        """Return a row per layer: columns layer (i: the input of block i), tuned, logit, gained (logit − tuned), in
        nats, each with the ends of its 95 % interval in columns ending in _low and _high."""
        import pandas as pd

        return pd.DataFrame(
            {"layer": one.layer, **with_intervals(tuned=one.tuned, logit=one.logit, gained=one.gained)}
            for one in self.layers
        )

    @property
    def measured_on(self) -> str:
        """Description of the held-out rows."""
        data = self.provenance["data"]["measured"]
        where = "positions" if self.positions == "every" else "last positions"
        rows = f"{self.rows:,} rows of {data['name']} ({data['split']})"
        return f"{self.measured:,} {where} of {rows} that took no part in the fit"

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        lines = []
        for one in self.layers:
            cells = {"tuned lens": Cell(one.tuned), "logit lens": Cell(one.logit), "gained": Cell(one.gained)}
            lines.append(Line((str(one.layer),), cells))
        lines.append(Line(("mean",), {"tuned lens": Cell(self.tuned), "logit lens": Cell(self.logit)}))
        note = (
            f"KL(model ‖ lens) in nats over {self.measured_on}; 95 % bootstrap intervals over rows. Layer i reads the "
            f"input of block i, 0 the embeddings. Weights of step {self.best_step}."
        )
        yield table(("layer",), lines, note=note)


@dataclass(frozen=True)
class Trajectory(Result, kind="trajectory"):
    """Answers of a lens at every layer and position of some texts."""

    drawn_by: ClassVar[str] = "show_figure"

    lens: str
    """Title of the lens: "logit lens", or "tuned lens" with its directory."""
    positions: str
    statistic: str
    """Statistic that the views show in colour."""
    classes: bool
    """True if answers are classes rather than tokens."""
    texts: tuple[LensedText, ...]

    @property
    def layers(self) -> int:
        """Number of layers L; the rows are 0 … L."""
        return len(self.texts[0].top) - 1

    @cached_property
    def panels(self) -> tuple[tuple[Column, ...], ...]:
        """Columns of each panel of the views: the positions of one text, or the last positions of all texts."""
        every = [
            tuple(Column(text, number, at) for at in range(len(text.positions)))
            for number, text in enumerate(self.texts)
        ]
        return tuple(every) if self.positions == "every" else (tuple(panel[0] for panel in every),)

    def verdict(self, at: int = 0) -> str:
        settled = np.concatenate([text.settled for text in self.texts])
        if len(settled) == 1:
            return f"the answer leads from layer {settled[0]} of {self.layers} on, {self.lens}"
        where = f"mean of {len(settled):,} positions"
        return f"the answer leads from layer {settled.mean():.1f} of {self.layers} on, {where}, {self.lens}"

    @property
    def headline(self) -> str:
        return f"Answers by layer of {self.model_name}: {self.verdict()}"

    def to_frame(self) -> DataFrame:
        """Return a row per text, position and layer.

        Columns: text and position (from 0), token, layer (0 the embeddings, the last one the model), answer (the
        layer's own), top_probability (its), final (the model's answer), answer_probability (its), agrees, settled (the
        layer from which on the final answer leads), entropy, kl and, of a language model, cross_entropy (nats).
        """
        import pandas as pd

        columns: dict[str, list[Any]] = {}
        for number, text in enumerate(self.texts):
            shape = text.top.T.shape
            every = {
                "text": np.full(shape, number),
                "position": np.broadcast_to(text.positions[:, None], shape),
                "token": np.broadcast_to(np.array([text.tokens[p] for p in text.positions])[:, None], shape),
                "layer": np.broadcast_to(np.arange(shape[1]), shape),
                "answer": np.array(text.answers).T,
                "top_probability": text.top_probability.T,
                "final": np.broadcast_to(np.array(text.final)[:, None], shape),
                "answer_probability": text.answer_probability.T,
                "agrees": text.agrees.T,
                "settled": np.broadcast_to(text.settled[:, None], shape),
                "entropy": text.entropy.T,
                "kl": text.kl.T,
                "cross_entropy": text.cross_entropy.T,
            }
            for name, array in every.items():
                columns.setdefault(name, []).append(array.ravel())
        frame = pd.DataFrame({name: np.concatenate(arrays) for name, arrays in columns.items()})
        return frame.drop(columns="cross_entropy") if self.classes else frame

    def blocks(self) -> Iterable[Block]:
        from ssmscope.probes.lens.show_page import STYLE, fragment
        from ssmscope.probes.lens.show_terminal import TerminalView

        yield Prose(self.headline, "title")
        yield Prose(f"Layer i reads the input of block i, 0 the embeddings; {self.layers} is the model itself.", "note")
        yield Picture(self.figure, self.headline, vector=False, folded=True)
        yield Custom(lambda colours: [TerminalView(self)], lambda: fragment(self), STYLE, on_request=True)
