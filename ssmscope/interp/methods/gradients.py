"""Methods based on gradients of f: Gradient × Input, SmoothGrad, Grad-CAM on tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from ssmscope.core.attention_layers import attending
from ssmscope.core.heads import hidden_vectors
from ssmscope.core.intercept import observe
from ssmscope.core.mixers import positions
from ssmscope.core.model import Model
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError, check_number, check_whole
from ssmscope.interp.explain.scored_text import Scores, scores_are
from ssmscope.interp.objective import Objective, text_generator


def gradxinput(objective: Objective) -> Scores:
    """Gradient × Input: score_t = Σ_d ∂f/∂e_{t,d} · e_{t,d} (Shrikumar et al., Not just a black box, 2016).

    It is zero where f does not change with an embedding's length, as in RWKV, whose embeddings meet a norm at once.
    """
    embeddings = objective.embeddings()
    scores = torch.zeros_like(objective.by_token(embeddings))
    for chosen, longest in objective.parts():
        inputs = embeddings[chosen, :longest]
        scores[chosen, :longest] = objective.by_token(objective.gradient(inputs, chosen) * inputs)
    return Scores(scores)


def smoothgrad(objective: Objective, *, samples: int = 25, noise: float = 0.15, seed: int = 0) -> Scores:
    """SmoothGrad of Gradient × Input: its mean over noisy copies, score = (1/n) Σ_i GxI(e + ε_i), ε_i ~ N(0, σ²)
    (Smilkov et al., 2017).

    Args:
        samples: n.
        noise: σ as a share of max − min over the embeddings of the text.
        seed: seed of the noise, which is drawn for each text by itself, in any batch.
    """
    check_whole(1, samples=samples)
    check_number(0, noise=noise)
    embeddings, lengths = objective.embeddings(), objective.lengths
    draws = [text_generator(objective, text, seed) for text in range(len(objective))]
    spread = [float(embeddings[text, :n].max() - embeddings[text, :n].min()) for text, n in enumerate(lengths)]
    total = torch.zeros_like(embeddings[..., 0], dtype=torch.promote_types(embeddings.dtype, torch.float32))
    runs = [text for text in range(len(objective)) for _ in range(samples)]
    for part in objective.batches(runs, gradients=True):  # The copies of a text stay in order.
        texts = [runs[place] for place in part]
        longest = max(lengths[text] for text in texts)
        points = embeddings[texts, :longest]
        for run, text in enumerate(texts):
            drawn = draws[text].standard_normal((lengths[text], points.shape[-1]), dtype=np.float32)
            points[run, : lengths[text]] += noise * spread[text] * torch.from_numpy(drawn).to(points)
        product = (objective.gradient(points, texts) * points).sum(-1).to(total)
        total[:, :longest].index_add_(0, torch.tensor(texts, device=total.device), product)
    return Scores(total / samples)


@scores_are(signed=False)
def gradcam(objective: Objective, *, layer: int = -1) -> Scores:
    """Grad-CAM on tokens: score_t = ReLU(Σ_d w_d a_{t,d}), w_d the mean of ∂f/∂a_{t,d} over the real tokens, a the
    output of a state-space layer before it is added to the residual stream (Selvaraju et al., 2017, Eq. 1 and 2).

    After the last layer only the last token is read, so that its w is that token's gradient over their number.

    Args:
        layer: layer whose output is read; negative numbers count from the last.
    """
    mixers = objective.model.mixers
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not -len(mixers) <= layer < len(mixers):
        raise InputError(f"there is no layer {layer!r}; allowed are 0 to {len(mixers) - 1}, or -1 for the last")
    embeddings = objective.embeddings()
    scores = torch.zeros_like(embeddings[..., 0])
    for chosen, longest in objective.parts():
        ((a, gradient),) = output_gradients(objective, embeddings[chosen, :longest], chosen, [mixers[layer]])
        mask = objective.batch.mask[chosen, :longest].unsqueeze(-1).to(a.device)
        a, gradient = a[:, :longest], gradient[:, :longest]  # A continuation's tokens follow.
        w = (gradient * mask).sum(1) / mask.sum(1)
        scores[chosen, :longest] = torch.einsum("btd,bd->bt", a * mask, w).relu().to(scores)
    return Scores(scores)


def output_gradients(
    objective: Objective,
    embeddings: Float[Tensor, "runs length width"],
    texts: list[int],
    layers: list[nn.Module],
    *,
    attention: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Return each layer's output and the gradient of f there; with `attention` also of all softmax weights."""
    kept: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    module, mask = objective.model.module, objective.batch.mask[texts, : embeddings.shape[1]]
    see = attending(module, mask=mask, see=weights.__setitem__) if attention else nullcontext()
    with weights_constant(module), torch.enable_grad(), keep_outputs(layers, kept), see:
        values = objective(embeddings.detach().requires_grad_(), texts)
        outputs = [*(kept[index] for index in range(len(layers))), *weights.values()]
        gradients = torch.autograd.grad(values.sum(), outputs)
    found = [(output.detach(), gradient) for output, gradient in zip(outputs, gradients)]
    own = [(positions(layer, a), positions(layer, b)) for layer, (a, b) in zip(layers, found)]
    return own + found[len(layers) :]


@contextmanager
def keep_outputs(layers: list[nn.Module], kept: dict[int, Tensor]) -> Iterator[None]:
    """Store in `kept`, within the context, the output of each of these layers by its place, once it has run."""

    def keep(index: int, _: nn.Module, output: Any) -> None:
        kept[index] = output[0] if isinstance(output, tuple) else output

    with observe(after=[(layer, partial(keep, index)) for index, layer in enumerate(layers)]):
        yield


def head_input(model: Model, embeddings: Tensor, mask: Tensor) -> Float[Tensor, "texts length width"]:
    """Return the vectors that the head reads at every position, in the caller's context."""
    module = model.module
    if module.base_model is not module:
        return hidden_vectors(module, inputs_embeds=embeddings, attention_mask=mask.long())
    kept: dict[int, Tensor] = {}  # A model that is its own base has one bare layer.
    with keep_outputs(model.mixers[-1:], kept):
        module(inputs_embeds=embeddings, attention_mask=mask.long())
    return kept[0]
