"""Scores that methods give a text's tokens, and texts with such scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float
from torch import Tensor
from ssmscope.core.ties import descending, nonzero
from ssmscope.errors import InputError
from ssmscope.outline import Outlined
from ssmscope.render.blocks import OfTokens

if TYPE_CHECKING:
    from ssmscope.interp.objective import Objective

Declared = TypeVar("Declared", bound=Callable[..., Any])


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

    def constants(self, attribution: Attribution) -> float:
        """Return what f(x) has beyond the sum of complete LRP scores: the relevance of biases and the like; NaN for
        other scores."""
        complete = attribution.method == "lrp" and bool(attribution.converged)
        return self.value - float(attribution.scores.sum(dtype=np.float64)) if complete else math.nan

    def named(self, attribution: Attribution, at: int) -> str:
        """Return a token, and the channel that counts most of a step of a series."""
        several = attribution.channels
        return self.tokens[at] if several is None else f"{self.tokens[at]}, channel {int(np.abs(several[at]).argmax())}"

    def _highest(self, scores: np.ndarray, k: int) -> list[int]:
        order = descending(np.where(self.special, -np.inf, scores))
        places = order[(scores > 0)[order] & nonzero(scores)[order] & ~self.special[order]]
        return places[:k].tolist()
