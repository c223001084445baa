"""Integrated Gradients, with the error of every token's score."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from ssmscope.errors import InputError, check_number, check_whole
from ssmscope.interp.baselines import NEUTRAL, baseline_embeddings, baseline_name, ordinary_tokens, singularity_note
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.objective import Objective

SMALLEST_DIVISOR = 1e-30


def ig(
    objective: Objective,
    *,
    baseline: str | int | float = NEUTRAL,
    special: bool = False,
    steps: int = 12,
    tolerance: float = 0.01,
    cap: int = 1500,
    fixed: int | None = None,
) -> Scores:
    """Integrated Gradients: score_t = Σ_d (e − e')_{t,d} ∫₀¹ ∂f/∂e_{t,d}(e' + α (e − e')) dα (Sundararajan et al.,
    2017, Eq. 1).

    The scores add up to f(e) − f(e') (completeness), which does not bound any single one: the errors of tokens and of
    pieces of the path cancel in the sum. So every piece of the path, at first the whole, is integrated by a
    Gauss–Legendre quadrature twice, in one and in two halves; the difference is the error of each token's score there,
    and what the halves miss of f(end) − f(beginning) is that of the sum. Pieces with the largest errors are halved
    again until

        max_t Σ_pieces |whole_t − halves_t| ≤ tolerance · max_t |score_t|   and
        Σ_pieces |Σ_t halves_t − (f(end) − f(beginning))| ≤ tolerance · max_t |score_t|,

    or until the cap is reached. The scores are those of the halves; with `fixed` those of the whole path. Half
    precision rounds f and its gradients, and more nodes do not help against that.

    Args:
        baseline: e', see `baseline_embeddings`. A path from where norms are singular (zero; the mean of a small model)
            takes several times as many gradients, and its scores depend on how near to that point it begins: the result
            says so.
        special: special tokens move too. Otherwise they keep their own embedding on the whole path, and score 0: they
            say nothing of the text and would take the largest share.
        steps: nodes of the quadrature of a piece.
        tolerance: a text has converged when both errors are within this share of its largest |score|.
        cap: the most evaluations of the gradient for a text. Below 3 · steps nothing is checked and nothing converges.
        fixed: one quadrature with so many nodes on the whole path, as captum's `n_steps`, in place of `steps` and
            `cap`. Twice as many gradients more give its error, from both halves of the path.
    """
    check_whole(1, steps=steps)
    check_number(0, tolerance=tolerance)
    check_whole(1, cap=cap)
    if not isinstance(special, bool):
        raise InputError(f"special is {special!r}; allowed is true or false")
    if fixed is not None:
        check_whole(1, fixed=fixed)
        steps, cap = fixed, 3 * fixed
    if cap < steps:
        raise InputError(f"cap is {cap}, fewer gradients than the {steps} steps of one quadrature; raise it")
    end = objective.embeddings()
    start = baseline_embeddings(objective, baseline).to(end)
    if not special:
        start = torch.where(ordinary_tokens(objective).unsqueeze(-1), start, end)
    path = _Path(objective, start, end, steps)
    checked = cap >= 3 * steps
    if objective.meter is not None:
        objective.meter.plan("ig", objective.lengths, 3 * steps if checked else steps, cap if checked else steps)
    lowest, highest = objective.values(start).tolist(), objective.values(end).tolist()
    texts = range(len(objective))
    once = path.integrated([_Piece(text, 0.0, 1.0, lowest[text], highest[text]) for text in texts])
    if fixed is not None:
        pairs = list(zip(path.halved(once), lowest, highest))
        found = [_summed(each.whole.scores, _error([each]), *change) for each, *change in pairs]
        used = [3 * steps] * len(objective)
    elif not checked:
        unknown = [math.inf if path.difference[text].any() else 0.0 for text in texts]
        found = [_summed(once[text].scores, unknown[text], lowest[text], highest[text]) for text in texts]
        used = [steps] * len(objective)
    else:
        found, used = _refined(path, once, steps, tolerance, cap)
    scores, errors, deltas = zip(*found)
    notes = [singularity_note(objective, start)]
    if fixed is not None:
        notes.append(f"{fixed} fixed steps, with an error of {100 * max(errors):.2g} % of a text's largest score")
    return Scores(
        torch.stack(scores).to(path.difference),
        delta=torch.tensor(deltas, dtype=torch.float64),
        steps=torch.tensor(used),
        converged=torch.tensor([error <= tolerance for error in errors]),
        error=torch.tensor(errors, dtype=torch.float64),
        baseline=baseline_name(objective, baseline),
        note="; ".join(filter(None, notes)),
    )


@dataclass(eq=False)
class _Piece:
    """Piece of a text's path, with f at both ends, and its tokens' scores by one quadrature, (length,) float64;
    of series (length, channels)."""

    text: int
    first: float
    last: float
    before: float
    after: float
    scores: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def missed(self) -> float:
        """Difference between the sum of the scores and the change of f."""
        return abs(float(self.scores.sum()) - (self.after - self.before))


@dataclass(eq=False)
class _Halved:
    """A piece in two halves, and its difference from them."""

    whole: _Piece
    halves: tuple[_Piece, _Piece]

    def __post_init__(self) -> None:
        self.scores = self.halves[0].scores + self.halves[1].scores
        self.errors = (self.whole.scores - self.scores).abs()
        self.missed = sum(half.missed for half in self.halves)
        self.worst = max(float(self.errors.max()), self.missed)


_Sum = tuple[Tensor, float, float]
"""Scores of a text, their largest error and the missing change of f, as shares."""


def _summed(scores: Tensor, error: float, before: float, after: float) -> _Sum:
    """Sum the pieces of a text; `error` is in units of the scores. Where nothing has moved, nothing is missing."""
    missed, largest = abs(float(scores.sum()) - (after - before)), float(scores.abs().max())
    share = 0.0 if error == 0 else error / max(largest, SMALLEST_DIVISOR)
    return scores, share, 0.0 if missed == 0 else missed / max(abs(after - before), SMALLEST_DIVISOR)


def _refined(path: _Path, once: list[_Piece], steps: int, tolerance: float, cap: int) -> tuple[list[_Sum], list[int]]:
    """Return every text's sum and its number of gradients."""
    pieces: dict[int, list[_Halved]] = defaultdict(list)
    used, open_texts, new = [3 * steps] * len(once), list(range(len(once))), path.halved(once)
    while new:
        for halved in new:
            pieces[halved.whole.text].append(halved)
        split: list[_Halved] = []
        for text in list(open_texts):
            worst = _worst(pieces[text], tolerance)[: (cap - used[text]) // (4 * steps)]
            if not worst:
                open_texts.remove(text)
            pieces[text] = [each for each in pieces[text] if each not in worst]
            used[text] += 4 * steps * len(worst)
            split += worst
        path.done = len(once) - len(open_texts)
        new = path.halved([part for each in split for part in each.halves]) if split else []
    ends = [(pieces[text], piece.before, piece.after) for text, piece in enumerate(once)]
    return [_summed(_total(own), _error(own), *change) for own, *change in ends], used


def _total(pieces: Sequence[_Halved]) -> Tensor:
    return torch.stack([piece.scores for piece in pieces]).sum(0)


def _error(pieces: Sequence[_Halved]) -> float:
    """Return the largest of the tokens' errors and of the missing changes of f; nothing cancels."""
    tokens = torch.stack([piece.errors for piece in pieces]).sum(0)
    return max(float(tokens.max()), sum(piece.missed for piece in pieces))


def _worst(pieces: list[_Halved], tolerance: float) -> list[_Halved]:
    """Return the pieces to halve, the worst first: as many as leave the others with half of the allowed error."""
    bearable = tolerance * float(_total(pieces).abs().max())
    if _error(pieces) <= bearable:
        return []
    order = sorted(pieces, key=lambda piece: -piece.worst)
    kept = len(order)
    while kept > 1 and _error(order[kept - 1 :]) <= bearable / 2:
        kept -= 1
    return order[:kept]


class _Path:
    """Straight paths of an objective's texts from `start` to `end`, (texts, length, width)."""

    def __init__(self, objective: Objective, start: Tensor, end: Tensor, steps: int) -> None:
        self.objective, self.start, self.end = objective, start, end
        wide = torch.promote_types(end.dtype, torch.float32)
        self.difference = end.to(wide) - start.to(wide)
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        self.nodes, self.weights = (nodes + 1) / 2, weights / 2
        self._timed = self.objective.meter is None
        self.done = 0

    def points(self, texts: list[int], places: list[float]) -> Tensor:
        """Return points on the paths, (runs, longest of them, width)."""
        longest = max(self.objective.lengths[text] for text in texts)
        start, end = (t[texts, :longest].to(self.difference) for t in (self.start, self.end))
        alpha = torch.tensor(places, dtype=torch.float64).to(start.dtype).to(start.device).view(-1, 1, 1)
        return torch.lerp(start, end, alpha).to(self.end.dtype)  # Half precision would round the places.

    def integrated(self, pieces: list[_Piece]) -> list[_Piece]:
        """Set the pieces' `scores`: Σ_width (end − start) · the integral of the gradient along each."""
        runs = [(piece, step) for piece in range(len(pieces)) for step in range(len(self.nodes))]
        each = self.objective.by_token(self.end).shape[1:]
        values = torch.zeros(len(runs), *each, dtype=torch.float64)  # Not every device has float64.
        for part in self._parts([pieces[piece].text for piece, _ in runs]):
            owners = [pieces[runs[place][0]] for place in part]
            texts = [piece.text for piece in owners]
            at = [self.nodes[runs[place][1]] for place in part]
            points = self.points(texts, [piece.first + (piece.last - piece.first) * x for piece, x in zip(owners, at)])
            slopes = self.objective.gradient(points, texts) * self.difference[texts, : points.shape[1]]
            values[part, : points.shape[1]] = self.objective.by_token(slopes).cpu().double()
            if self.objective.meter is not None:
                tokens = sum(self.objective.lengths[text] for text in texts)
                self.objective.meter.ran(len(texts), tokens, self.done)
        weights = torch.from_numpy(self.weights)
        for piece, own in zip(pieces, torch.einsum("n,pn...->p...", weights, values.unflatten(0, (len(pieces), -1)))):
            piece.scores = (piece.last - piece.first) * own
        return pieces

    def _parts(self, texts: list[int]) -> Iterator[list[int]]:
        """Yield places in batches, the very first a single run: a meter knows early how long a gradient takes."""
        for part in self.objective.batches(texts, gradients=True):
            if not self._timed and len(part) > 1:
                yield part[:1]
                part = part[1:]
            self._timed = True
            yield part

    def halved(self, pieces: list[_Piece]) -> list[_Halved]:
        """Return every piece with its two integrated halves."""
        texts, middles = [piece.text for piece in pieces], [(piece.first + piece.last) / 2 for piece in pieces]
        between = [0.0] * len(pieces)
        for part in self.objective.batches(texts):
            chosen = [texts[place] for place in part]
            with torch.no_grad():
                values = self.objective(self.points(chosen, [middles[place] for place in part]), chosen)
            for place, value in zip(part, values.tolist()):
                between[place] = value
        halves = []
        for piece, middle, value in zip(pieces, middles, between):
            halves.append(_Piece(piece.text, piece.first, middle, piece.before, value))
            halves.append(_Piece(piece.text, middle, piece.last, value, piece.after))
        self.integrated(halves)
        return [_Halved(piece, (first, last)) for piece, first, last in zip(pieces, halves[::2], halves[1::2])]
