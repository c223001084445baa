"""Integrated Gradients, with the error of every token's score."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ssmscope.errors import InputError
from ssmscope.interp.baselines import NEUTRAL, baseline_embeddings, baseline_name, near_singular, ordinary
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.methods.checks import number, whole

if TYPE_CHECKING:
    from ssmscope.interp.objective import Objective


def ig(
    objective: Objective,
    *,
    baseline: str | int | float = NEUTRAL,
    special: bool = False,
    steps: int = 12,
    tolerance: float = 0.01,
    cap: int = 1500,
) -> Scores:
    """Integrated Gradients: score_t = Σ_d (e − e')_{t,d} ∫₀¹ ∂f/∂e_{t,d}(e' + α (e − e')) dα (Sundararajan et al.,
    2017, Eq. 1).

    The scores add up to f(e) − f(e') (completeness), which says little of any of them: the errors of tokens and of
    pieces of the path cancel in the sum. So every piece of the path, at first the whole, is integrated by a
    Gauss–Legendre quadrature twice, in one and in two halves; the difference is the error of each token's score there,
    and what the halves miss of f(end) − f(beginning) is that of the sum. Pieces with the largest errors are halved
    again until

        max_t Σ_pieces |whole_t − halves_t| ≤ tolerance · max_t |score_t|   and
        Σ_pieces |Σ_t halves_t − (f(end) − f(beginning))| ≤ tolerance · max_t |score_t|,

    or until the cap is reached. The scores are those of the halves. Gradients of a model in half precision are rounded,
    which puts a floor under the errors. There a text is left where halving has twice raised their sum, or not lowered
    those of most pieces, alike in both halves; the scores are those with the smallest errors.

    Args:
        baseline: e', see `baseline_embeddings`: "neutral" (the token for unknown words where there is a trained one,
            else the scaled mean), "scaled-mean", "mean", "zero", a token or a token's id; of pixels a grey. A path from
            where norms are singular (zero; the mean of a small model) takes several times as many gradients, and its
            scores hang on how near it begins: the result says so.
        special: special tokens move too. Otherwise they keep their own embedding on the whole path, and score 0: they
            say nothing of the text and would take the largest share.
        steps: nodes of the quadrature of a piece.
        tolerance: a text has converged when both errors are within this share of its largest |score|.
        cap: the most evaluations of the gradient for a text. Below 3 · steps nothing is checked and nothing converges.

    Raises:
        InputError: for an unknown baseline, or options out of range.
    """
    whole("steps", steps, 1)
    number("tolerance", tolerance, 0)
    whole("cap", cap, 1)
    if not isinstance(special, bool):
        raise InputError(f"special is {special!r}; allowed is true or false")
    if cap < steps:
        raise InputError(f"cap is {cap}, fewer gradients than the {steps} steps of one quadrature; raise it")
    end = objective.embeddings()
    start = baseline_embeddings(objective, baseline).to(end)
    if not special:
        start = torch.where(ordinary(objective).unsqueeze(-1), start, end)
    path = _Path(objective, start, end, steps)
    checked = cap >= 3 * steps
    if objective.meter is not None:
        objective.meter.plan("ig", objective.lengths, 3 * steps if checked else steps, cap if checked else steps)
    lowest, highest = objective.values(start).tolist(), objective.values(end).tolist()
    texts = range(len(objective))
    once = path.integrated([_Piece(text, 0.0, 1.0, lowest[text], highest[text]) for text in texts])
    if not checked:
        errors = [math.inf if path.difference[text].any() else 0.0 for text in texts]
        found = [_Sum.of(once[text].scores, errors[text], lowest[text], highest[text]) for text in texts]
        used = [steps] * len(objective)
    else:
        found, used = _refined(path, once, steps, tolerance, cap)
    dtype = torch.promote_types(end.dtype, torch.float32)
    return Scores(
        torch.stack([each.scores for each in found]).to(end.device, dtype),
        delta=torch.tensor([each.delta for each in found], dtype=torch.float64),
        steps=torch.tensor(used),
        converged=torch.tensor([each.error <= tolerance for each in found]),
        error=torch.tensor([each.error for each in found], dtype=torch.float64),
        baseline=baseline_name(objective, baseline),
        note=near_singular(objective, start),
    )


TINY = 1e-30


@dataclass(eq=False)
class _Piece:
    """From `first` to `last` (of 0 to 1) on the path of a text, f at both ends, and what the tokens give there by one
    quadrature, (length,) float64."""

    text: int
    first: float
    last: float
    before: float
    after: float
    scores: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def missed(self) -> float:
        """What the sum of the scores misses of the change of f."""
        return abs(float(self.scores.sum()) - (self.after - self.before))


@dataclass(eq=False)
class _Halved:
    """A piece in two halves, and how far the whole is from them."""

    whole: _Piece
    halves: tuple[_Piece, _Piece]

    def __post_init__(self) -> None:
        self.scores = self.halves[0].scores + self.halves[1].scores
        self.errors = (self.whole.scores - self.scores).abs()
        self.missed = sum(half.missed for half in self.halves)
        self.worst = max(float(self.errors.max()), self.missed)


@dataclass(eq=False)
class _Sum:
    """Of the pieces of a text: the scores, their largest error and what they miss of f's change, as shares."""

    scores: Tensor
    error: float
    delta: float

    @classmethod
    def of(cls, scores: Tensor, error: float, before: float, after: float) -> _Sum:
        """`error` is in units of the scores. Where nothing has moved there is nothing to miss."""
        missed, largest = abs(float(scores.sum()) - (after - before)), float(scores.abs().max())
        share = 0.0 if error == 0 else error / max(largest, TINY)
        return cls(scores, share, 0.0 if missed == 0 else missed / max(abs(after - before), TINY))


def _refined(path: _Path, once: list[_Piece], steps: int, tolerance: float, cap: int) -> tuple[list[_Sum], list[int]]:
    """Every text's sum and how many gradients it took."""
    pieces: dict[int, list[_Halved]] = defaultdict(list)
    used, stuck = [3 * steps] * len(once), [0] * len(once)
    rounded = path.end.dtype in (torch.float16, torch.bfloat16)
    for halved in path.halved(once):
        pieces[halved.whole.text].append(halved)
    least = {text: (_error(each), each) for text, each in pieces.items()}
    open_texts = list(pieces)
    while True:
        split: list[_Halved] = []
        for text in list(open_texts):
            worst = [] if stuck[text] == TWICE else _worst(pieces[text], tolerance)
            worst = worst[: (cap - used[text]) // (4 * steps)]
            if not worst:
                open_texts.remove(text)
            used[text] += 4 * steps * len(worst)
            split += worst
        if not split:
            break
        path.done = len(once) - len(open_texts)
        gone = set(map(id, split))
        for text in open_texts:
            pieces[text] = [each for each in pieces[text] if id(each) not in gone]
        halves = path.halved([half for each in split for half in each.halves])
        for halved in halves:
            pieces[halved.whole.text].append(halved)
        alike: dict[int, list[bool]] = defaultdict(list)
        for before, *two in zip(split, halves[::2], halves[1::2], strict=True):
            alike[before.whole.text].append(_no_better(before, *two))
        for text in open_texts:
            error = _error(pieces[text])
            if rounded:
                rises = error > 1.1 * least[text][0]
                stuck[text] = stuck[text] + 1 if rises or 2 * sum(alike[text]) > len(alike[text]) else 0
            if error <= least[text][0] or not rounded:
                least[text] = error, pieces[text]
    found = []
    for text, whole_path in enumerate(once):
        error, each = least[text]
        scores = torch.stack([piece.scores for piece in each]).sum(0)
        found.append(_Sum.of(scores, error, whole_path.before, whole_path.after))
    return found, used


TWICE = 2


def _no_better(before: _Halved, first: _Halved, second: _Halved) -> bool:
    """Whether a piece's error is that of rounding: its halves' are together as large, and alike. That of a bend is in
    one of them."""
    low, high = sorted((first.worst, second.worst))
    return low + high > 0.7 * before.worst and low > high / 4


def _error(pieces: Sequence[_Halved]) -> float:
    """The largest of the tokens' errors and of what the sums miss; nothing cancels."""
    tokens = torch.stack([piece.errors for piece in pieces]).sum(0)
    return max(float(tokens.max()), sum(piece.missed for piece in pieces))


def _worst(pieces: list[_Halved], tolerance: float) -> list[_Halved]:
    """The pieces that have to be halved again, the worst first: as many as leave others whose errors together are
    below half of what is allowed; none where all errors together are within it."""
    bearable = tolerance * float(torch.stack([piece.scores for piece in pieces]).sum(0).abs().max())
    if _error(pieces) <= bearable:
        return []
    order = sorted(pieces, key=lambda piece: -piece.worst)
    kept = len(order)
    while kept > 1 and _error(order[kept - 1 :]) <= bearable / 2:
        kept -= 1
    return order[:kept]


class _Path:
    """The straight paths of an objective's texts from `start` to `end`, (texts, length, width)."""

    def __init__(self, objective: Objective, start: Tensor, end: Tensor, steps: int) -> None:
        self.objective, self.start, self.end = objective, start, end
        self.difference = end - start
        self.nodes, self.weights = _quadrature(steps)
        self.done = 0
        self._timed = objective.meter is None

    def points(self, texts: list[int], places: list[float]) -> Tensor:
        """(runs, longest of them, width)."""
        longest = max(self.objective.lengths[text] for text in texts)
        alpha = torch.tensor(places).to(self.end).view(-1, 1, 1)
        return torch.lerp(self.start[texts, :longest], self.end[texts, :longest], alpha)

    def integrated(self, pieces: list[_Piece]) -> list[_Piece]:
        """The same with their `scores`: Σ_width (end − start) · the integral of the gradient along each."""
        runs = [(piece, step) for piece in range(len(pieces)) for step in range(len(self.nodes))]
        total = torch.zeros(len(pieces), self.end.shape[1], dtype=torch.float64)  # not every device has it
        for part in self._parts([pieces[piece].text for piece, _ in runs]):
            owners = [runs[place][0] for place in part]
            at = [runs[place][1] for place in part]
            texts = [pieces[owner].text for owner in owners]
            sizes = [pieces[owner].last - pieces[owner].first for owner in owners]
            places = [pieces[owner].first + size * self.nodes[step] for owner, size, step in zip(owners, sizes, at)]
            points = self.points(texts, places)
            slopes = self.objective.gradient(points, texts) * self.difference[texts, : points.shape[1]]
            weight = torch.tensor([size * self.weights[step] for size, step in zip(sizes, at)], dtype=torch.float64)
            shares = slopes.sum(-1).cpu().double() * weight.unsqueeze(1)
            total[:, : points.shape[1]].index_add_(0, torch.tensor(owners), shares)
            if self.objective.meter is not None:
                tokens = sum(self.objective.lengths[text] for text in texts)
                self.objective.meter.ran(len(texts), tokens, self.done)
        for piece, scores in zip(pieces, total, strict=True):
            piece.scores = scores
        return pieces

    def _parts(self, texts: list[int]) -> Iterator[list[int]]:
        """Places in batches. At the very first a single run, so that a meter knows early what a gradient takes."""
        for part in self.objective.batches(texts, gradients=True):
            if not self._timed and len(part) > 1:
                yield part[:1]
                part = part[1:]
            self._timed = True
            yield part

    def halved(self, pieces: list[_Piece]) -> list[_Halved]:
        """Every piece with its halves, which are integrated, and f between them."""
        texts, middles = [piece.text for piece in pieces], [(piece.first + piece.last) / 2 for piece in pieces]
        between = [0.0] * len(pieces)
        for part in self.objective.batches(texts):
            chosen = [texts[place] for place in part]
            with torch.no_grad():
                values = self.objective(self.points(chosen, [middles[place] for place in part]), chosen)
            for place, value in zip(part, values.tolist(), strict=True):
                between[place] = value
        halves = []
        for piece, middle, value in zip(pieces, middles, between, strict=True):
            halves.append(_Piece(piece.text, piece.first, middle, piece.before, value))
            halves.append(_Piece(piece.text, middle, piece.last, value, piece.after))
        self.integrated(halves)
        return [_Halved(piece, (first, last)) for piece, first, last in zip(pieces, halves[::2], halves[1::2])]


@lru_cache(maxsize=16)
def _quadrature(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in (0, 1) and weights that sum to 1 (Gauss–Legendre)."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    return (nodes + 1) / 2, weights / 2
