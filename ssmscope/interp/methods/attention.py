"""Methods based on the implicit attention of the layers: rollout, and attention × gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.core.linearized import LinearizedLayer
from ssmscope.errors import InputError
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.attention.measure import exceeds_map_limit
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.methods.gradients import output_gradients
from ssmscope.interp.objective import Objective


def attention_rollout(objective: Objective, *, residual: float = 0.5) -> Scores:
    """Attention rollout (Abnar & Zuidema, 2020) of the layers' implicit attention: score_t is the entry at t of the
    last row of Π_layers (residual · I + (1 − residual) · A), A the absolute value of the signed mean over channels, its
    rows divided by their sums.

    It is of the text alone, whatever the target, and needs whole maps: of at most 8192 tokens.

    Args:
        residual: the share of the residual stream, from 0 to 1.
    """
    scores = torch.zeros(objective.batch.mask.shape, dtype=torch.float32)
    for chosen in objective.batches(range(len(objective))):
        trace = objective.model.trace(objective.batch.rows(chosen))
        found = implicit_attention(objective.model, trace, rollout=True, residual=residual, rows="last")
        for text, each in zip(chosen, found, strict=True):
            scores[text, : len(each)] = torch.from_numpy(each.maps[0].values[0])
    return Scores(scores)


def attention_gradient(objective: Objective) -> Scores:
    """Attention × gradient: score_s = Σ_layers Σ_t Σ_channels g[t] M[t, s] x[s], M a layer's block-level matrix, x its
    input and g the gradient of f at its output: the columns' sums of the maps of `ssmscope.attention_gradient` (after
    Chefer et al., 2021), with their signs. No map is made: a column's sum is x[s] (gᵀ M)[s]; but of softmax attention A
    the A ⊙ ∂f/∂A of its heads are.
    """
    if objective.continues:
        raise InputError("attention-gradient explains one token: a continuation of several is in its maps itself")
    embeddings = objective.embeddings()
    model = objective.model
    scores = torch.zeros_like(embeddings[..., 0], dtype=torch.promote_types(embeddings.dtype, torch.float32))
    if exceeds_map_limit(model, 1, longest := max(objective.lengths)):
        raise InputError(f"a text has {longest:,} tokens, too many for whole maps of the layers of attention")
    for chosen, longest in objective.parts():
        found = output_gradients(objective, embeddings[chosen, :longest], chosen, model.mixers, attention=True)
        trace = model.trace(objective.batch.rows(chosen))
        for linearized, (_, gradient) in zip(trace.linearized, found):
            scores[chosen, :longest] += column_sums(linearized, gradient.to(linearized.u)).to(scores)
        for A, gradient in found[len(trace.linearized) :]:
            scores[chosen, :longest] += (A * gradient).sum((1, 2)).to(scores)
    return Scores(scores.masked_fill(~objective.batch.mask, 0))


def column_sums(
    linearized: LinearizedLayer, gradient: Float[Tensor, "batch length width"]
) -> Float[Tensor, "batch length"]:
    """Return the sums over columns and channels of the maps of `linearized.contributions(gradient)`, without them."""
    total = torch.zeros_like(gradient[..., 0])
    for path in linearized.paths:
        with torch.enable_grad():
            source = path.input_map.source.detach().requires_grad_()
            output = path.finish(path.read(path.input_map.values(source, False), False))
            (pulled,) = torch.autograd.grad(output, source, gradient)
        total = total + (pulled * source.detach()).sum(-1)
    return total
