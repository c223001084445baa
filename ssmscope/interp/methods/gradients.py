"""Methods that read gradients of f: Gradient × Input, Integrated Gradients, SmoothGrad, Grad-CAM on tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssmscope.errors import InputError
from ssmscope.intercept import After, watched
from ssmscope.interp.attribution import Scores
from ssmscope.interp.methods.checks import drawn_from, number, whole
from ssmscope.interp.objective import baseline_embeddings
from ssmscope.mixers import weights_constant

if TYPE_CHECKING:
    from ssmscope.interp.objective import Objective


def gradxinput(objective: Objective) -> Scores:
    """Gradient × Input: score_t = Σ_d ∂f/∂e_{t,d} · e_{t,d} (Shrikumar et al., Not just a black box, 2016).

    It is zero where f does not change with an embedding's length, as in RWKV, whose embeddings meet a norm at once.
    """
    embeddings = objective.embeddings()
    scores = torch.zeros_like(embeddings[..., 0])
    for chosen in objective.batches(range(len(objective)), gradients=True):
        longest = max(objective.lengths[text] for text in chosen)
        inputs = embeddings[chosen, :longest]
        scores[chosen, :longest] = (objective.gradient(inputs, chosen) * inputs).sum(-1)
    return Scores(scores)


def ig(
    objective: Objective,
    *,
    baseline: str | int | float = "mean",
    steps: int = 32,
    tolerance: float = 0.01,
    cap: int = 512,
) -> Scores:
    """Integrated Gradients: score_t = Σ_d (e − e')_{t,d} ∫₀¹ ∂f/∂e_{t,d}(e' + α (e − e')) dα (Sundararajan et al.,
    2017, Eq. 1).

    All real tokens move, special ones too, so that the scores add up to f(e) − f(e') (completeness). The integral is a
    Gauss–Legendre quadrature over the whole path first. Of texts that have not converged it is refined where the
    gradient has peaks: completeness holds on every piece of the path, Σ scores of the piece = f(its end) − f(its
    beginning), and the pieces that miss it most are cut in two until the rest of them misses little.

    Args:
        baseline: e', see `baseline_embeddings`: "mean", "zero", a token or a token's id; of pixels a grey.
        steps: nodes of the quadrature over the whole path.
        tolerance: a text has converged when |Σ scores − (f(e) − f(e'))| is below this share of |f(e) − f(e')|.
        cap: the most evaluations of the gradient for a text; as many as `steps` refines nothing.

    Raises:
        InputError: for an unknown baseline, or options out of range.
    """
    whole("steps", steps, 1)
    number("tolerance", tolerance, 0)
    whole("cap", cap, 1)
    end = objective.embeddings()
    start = baseline_embeddings(objective, baseline).to(end)
    path = _Path(objective, start, end)
    lowest, highest = objective.values(start).tolist(), objective.values(end).tolist()
    gaps = [abs(b - a) for a, b in zip(lowest, highest, strict=True)]
    pieces = [_Piece(text, 0.0, 1.0, a, b) for text, (a, b) in enumerate(zip(lowest, highest, strict=True))]
    path.integrate(pieces, steps)
    used = [steps] * len(objective)
    while True:
        by_text = [[piece for piece in pieces if piece.text == text] for text in range(len(objective))]
        missed = [abs(sum(piece.missed for piece in each)) for each in by_text]
        worst: list[_Piece] = []
        for text, each in enumerate(by_text):
            if missed[text] >= tolerance * gaps[text]:
                allowed = max(cap - used[text], 0) // (2 * NODES)
                chosen = _worst(each, tolerance * gaps[text] / 2)[:allowed]
                used[text] += 2 * NODES * len(chosen)
                worst += chosen
        if not worst:
            break
        halves = path.halves(worst)
        path.integrate(halves, NODES)
        gone = set(map(id, worst))
        pieces = [piece for piece in pieces if id(piece) not in gone] + halves
    scores = torch.stack([torch.stack([piece.scores for piece in each]).sum(0) for each in by_text])
    # Where nothing has moved there is nothing to explain, and nothing is missed.
    delta = [0.0 if miss == 0 else miss / max(gap, TINY) for miss, gap in zip(missed, gaps, strict=True)]
    return Scores(
        scores.to(torch.promote_types(end.dtype, torch.float32)),
        delta=torch.tensor(delta, dtype=torch.float64),
        steps=torch.tensor(used),
        converged=torch.tensor([each < tolerance for each in delta]),
    )


NODES = 8
"""Of the quadrature over a piece of a path."""
TINY = 1e-30


@dataclass(eq=False)
class _Piece:
    """From `first` to `last` (of 0 to 1) on the path of a text, f at both ends, and what the tokens give there."""

    text: int
    first: float
    last: float
    before: float
    after: float
    scores: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    @property
    def missed(self) -> float:
        return float(self.scores.sum()) - (self.after - self.before)


def _worst(pieces: list[_Piece], bearable: float) -> list[_Piece]:
    """The pieces that miss most, the worst first: as many as leave others that together miss less than is bearable."""
    order = sorted(pieces, key=lambda piece: -abs(piece.missed))
    rest = sum(abs(piece.missed) for piece in order)
    for count, piece in enumerate(order):
        if rest < bearable:
            return order[:count]
        rest -= abs(piece.missed)
    return order


class _Path:
    """The straight paths of an objective's texts from `start` to `end`, (texts, length, width)."""

    def __init__(self, objective: Objective, start: Tensor, end: Tensor) -> None:
        self.objective, self.start, self.end = objective, start, end

    def points(self, texts: list[int], places: list[float]) -> Tensor:
        """(runs, longest of them, width)."""
        longest = max(self.objective.lengths[text] for text in texts)
        alpha = torch.tensor(places).to(self.end).view(-1, 1, 1)
        return torch.lerp(self.start[texts, :longest], self.end[texts, :longest], alpha)

    def integrate(self, pieces: list[_Piece], steps: int) -> None:
        """Set every piece's `scores`: Σ_width (end − start) · the integral of the gradient along it."""
        nodes, weights = _quadrature(steps)
        runs = [(piece, step) for piece in range(len(pieces)) for step in range(steps)]
        total = torch.zeros(len(pieces), self.end.shape[1], dtype=torch.float64)  # not every device has it
        difference = self.end - self.start
        for part in self.objective.batches([pieces[piece].text for piece, _ in runs], gradients=True):
            owners = [runs[place][0] for place in part]
            at = [runs[place][1] for place in part]
            texts = [pieces[owner].text for owner in owners]
            sizes = [pieces[owner].last - pieces[owner].first for owner in owners]
            places = [pieces[owner].first + size * nodes[step] for owner, size, step in zip(owners, sizes, at)]
            points = self.points(texts, places)
            slopes = (self.objective.gradient(points, texts) * difference[texts, : points.shape[1]]).sum(-1)
            weight = torch.tensor([size * weights[step] for size, step in zip(sizes, at)], dtype=torch.float64)
            shares = slopes.cpu().double() * weight.unsqueeze(1)
            total[:, : points.shape[1]].index_add_(0, torch.tensor(owners), shares)
        for piece, scores in zip(pieces, total, strict=True):
            piece.scores = scores

    def halves(self, pieces: list[_Piece]) -> list[_Piece]:
        """Every piece as two, with f between them."""
        texts, middles = [piece.text for piece in pieces], [(piece.first + piece.last) / 2 for piece in pieces]
        found = [0.0] * len(pieces)
        for part in self.objective.batches(texts):
            chosen = [texts[place] for place in part]
            with torch.no_grad():
                values = self.objective(self.points(chosen, [middles[place] for place in part]), chosen)
            for place, value in zip(part, values.tolist(), strict=True):
                found[place] = value
        return [
            half
            for piece, middle, value in zip(pieces, middles, found, strict=True)
            for half in (
                _Piece(piece.text, piece.first, middle, piece.before, value),
                _Piece(piece.text, middle, piece.last, value, piece.after),
            )
        ]


@lru_cache(maxsize=16)
def _quadrature(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes in (0, 1) and weights that sum to 1 (Gauss–Legendre)."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    return (nodes + 1) / 2, weights / 2


def smoothgrad(objective: Objective, *, samples: int = 25, noise: float = 0.15, seed: int = 0) -> Scores:
    """SmoothGrad of Gradient × Input: its mean over noisy copies, score = (1/n) Σ_i GxI(e + ε_i), ε_i ~ N(0, σ²)
    (Smilkov et al., 2017).

    Args:
        samples: n.
        noise: σ as a share of max − min over the embeddings of the text.
        seed: of the noise; it is drawn for each text by itself, whatever the batch.

    Raises:
        InputError: for options out of range.
    """
    whole("samples", samples, 1)
    number("noise", noise, 0)
    embeddings, lengths = objective.embeddings(), objective.lengths
    draws = [drawn_from(objective, text, seed) for text in range(len(objective))]
    spread = [float(embeddings[text, :n].max() - embeddings[text, :n].min()) for text, n in enumerate(lengths)]
    total = torch.zeros_like(embeddings[..., 0], dtype=torch.promote_types(embeddings.dtype, torch.float32))
    runs = [text for text in range(len(objective)) for _ in range(samples)]
    for part in objective.batches(runs, gradients=True):  # of one text its copies come in order
        texts = [runs[place] for place in part]
        longest = max(lengths[text] for text in texts)
        points = embeddings[texts, :longest]
        for run, text in enumerate(texts):
            drawn = draws[text].standard_normal((lengths[text], points.shape[-1]), dtype=np.float32)
            points[run, : lengths[text]] += noise * spread[text] * torch.from_numpy(drawn).to(points)
        product = (objective.gradient(points, texts) * points).sum(-1).to(total)
        total[:, :longest].index_add_(0, torch.tensor(texts, device=total.device), product)
    return Scores(total / samples)


def gradcam(objective: Objective, *, layer: int = -1) -> Scores:
    """Grad-CAM on tokens: score_t = ReLU(Σ_d w_d a_{t,d}), w_d the mean of ∂f/∂a_{t,d} over the real tokens, a the
    output of a state-space layer before it is added to the residual stream (Selvaraju et al., 2017, Eq. 1 and 2).

    Behind the last layer only the last token is read, so that its w is that token's gradient over their number.

    Args:
        layer: whose output; negative numbers count from the last.

    Raises:
        InputError: for a layer that the model does not have.
    """
    mixers = objective.model.mixers
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not -len(mixers) <= layer < len(mixers):
        raise InputError(f"there is no layer {layer!r}; allowed are 0 to {len(mixers) - 1}, or -1 for the last")
    embeddings = objective.embeddings()
    scores = torch.zeros_like(embeddings[..., 0])
    for chosen in objective.batches(range(len(objective)), gradients=True):
        longest = max(objective.lengths[text] for text in chosen)
        ((a, gradient),) = output_gradients(objective, embeddings[chosen, :longest], chosen, [mixers[layer]])
        mask = objective.batch.mask[chosen, :longest].unsqueeze(-1)
        a, gradient = a[:, :longest], gradient[:, :longest]  # a continuation's tokens follow
        w = (gradient * mask).sum(1) / mask.sum(1)
        scores[chosen, :longest] = torch.einsum("btd,bd->bt", a * mask, w).relu().to(scores)
    return Scores(scores)


def output_gradients(
    objective: Objective, embeddings: Float[Tensor, "runs length width"], texts: list[int], layers: list[nn.Module]
) -> list[tuple[Tensor, Tensor]]:
    """The output of each of these layers and the gradient of f there, (runs, length, width) each."""
    kept: dict[int, Tensor] = {}
    with weights_constant(objective.model.module), torch.enable_grad(), outputs_kept(layers, kept):
        values = objective(embeddings.detach().requires_grad_(), texts)
        outputs = [kept[index] for index in range(len(layers))]
        gradients = torch.autograd.grad(values.sum(), outputs)
    return [(output.detach(), gradient) for output, gradient in zip(outputs, gradients, strict=True)]


@contextmanager
def outputs_kept(layers: list[nn.Module], kept: dict[int, Tensor]) -> Iterator[None]:
    """Within the context `kept` receives the output of each of these layers, by its place, when it has run."""

    def keep(index: int) -> After:
        def kept_from(module: nn.Module, output: Any) -> None:
            kept[index] = output[0] if isinstance(output, tuple) else output

        return kept_from

    with watched(after=[(layer, keep(index)) for index, layer in enumerate(layers)]):
        yield
