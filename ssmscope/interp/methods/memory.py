"""Methods of a model's memory and implicit attention, occlusion, and random scores, which every method has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError, check_whole
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.attention.measure import exceeds_map_limit
from ssmscope.interp.attention.result import ImplicitAttention
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.explain.scored_text import Scores, scores_are
from ssmscope.interp.methods.gradients import output_gradients
from ssmscope.interp.objective import Objective, text_generator


def check_survival(model: Model) -> None:
    """Raise InputError if a model has no memory in which something could be left."""
    model.check_recurrent_state("the method survival")


@scores_are(signed=False, gate="written", embeddings=False)
def survival(objective: Objective) -> Scores:
    """Share of token t in the states after the text's last token, or after the position that is asked about, averaged
    over layers: see `ssmscope.ops.survival.shares`.

    It depends on the text alone, not on the target: how much of a token the model still has, not how it uses it.
    """
    mask, model = objective.batch.mask, objective.model
    check_survival(model)
    total = torch.zeros(mask.shape, dtype=torch.float64)

    def add(_: int, rows: Sequence[int], layer: LayerTrace) -> None:
        left = layer.survival(model.position).double().cpu()
        total[list(rows), : left.shape[1]] += left / model.num_layers

    model.trace(objective.batch, keep_inputs=False, visit=add)
    return Scores(total.masked_fill(~mask.cpu(), 0).float())


@scores_are(signed=False, gate="kept", embeddings=False)
def self_retention(objective: Objective) -> Scores:
    """E[A_t], the mean of the retention gate over layers, channels (or heads) and states (Baleen, Eq. 10).

    It depends on the text alone, not on the target: the average of `selection_heatmap`.
    """
    objective.model.check_recurrent_state("the method self-retention, or self-write,")
    retention = objective.model.trace(objective.batch, keep_inputs=False).retention.cpu().double().mean(0)
    return Scores(retention.masked_fill(~objective.batch.mask.cpu(), 0).float())


@scores_are(signed=False, gate="written", embeddings=False)
def self_write(objective: Objective) -> Scores:
    """1 − E[A_t]: the share of the memory that is overwritten."""
    kept = self_retention(objective).scores
    return Scores((1 - kept).masked_fill(~objective.batch.mask.cpu(), 0))


def occlusion(objective: Objective, *, baseline: str | int | float = "mean", window: int = 1) -> Scores:
    """Occlusion: score_t = f(e) − f(e with the baseline's embedding at t) (after Zeiler & Fergus, 2014).

    Args:
        baseline: embedding of hidden tokens, see `baseline_embeddings`.
        window: number of neighbouring tokens hidden at a time; a token's score is the mean over the windows that it
            is in. A window is at most as long as the text.
    """
    check_whole(1, window=window)
    embeddings, lengths = objective.embeddings(), objective.lengths
    hidden = baseline_embeddings(objective, baseline).to(embeddings)
    whole_texts = objective.values(embeddings)
    spans = [
        (text, slice(first, first + min(window, length)))
        for text, length in enumerate(lengths)
        for first in range(length - min(window, length) + 1)
    ]
    total = torch.zeros_like(embeddings[..., 0], dtype=whole_texts.dtype)
    count = torch.zeros_like(total)
    for part in objective.batches([text for text, _ in spans]):
        texts = [spans[place][0] for place in part]
        runs = embeddings[texts, : max(lengths[text] for text in texts)]
        for run, (text, span) in zip(runs, [spans[place] for place in part]):
            run[span] = hidden[text, span]
        with torch.no_grad():
            falls = whole_texts[texts] - objective(runs, texts).to(whole_texts)
        for fall, place in zip(falls, part):
            total[spans[place]] += fall
            count[spans[place]] += 1
    return Scores(total / count.clamp(min=1))


@scores_are(signed=False, embeddings=False)
def random(objective: Objective, *, seed: int = 0) -> Scores:
    """Uniform scores from 0 to 1, the same for a text and a seed in any batch."""
    scores = torch.zeros(objective.batch.mask.shape, dtype=torch.float32)
    for text, length in enumerate(objective.lengths):
        scores[text, :length] = torch.from_numpy(text_generator(objective, text, seed).random(length, dtype="float32"))
    return Scores(scores)


@scores_are(signed=False, embeddings=False)
def attention_rollout(objective: Objective, *, residual: float = 0.5) -> Scores:
    """Attention rollout (Abnar & Zuidema, 2020) of the layers' implicit attention: score_t is the entry at t of the
    last row, or of that of the position asked about, of Π_layers (residual · I + (1 − residual) · A), A the absolute
    value of the signed mean over channels, its rows divided by their sums; or of the mean row in pictures without a
    class token, whose every position is read.

    It depends on the text alone, not on the target, and needs whole maps: of at most 8192 tokens.

    Args:
        residual: the share of the residual stream, from 0 to 1.
    """
    scores = torch.zeros(objective.batch.mask.shape, dtype=torch.float32)
    rows: Any = "last" if getattr(objective.model.config, "class_token", True) else "all"
    rows = rows if objective.model.position is None else [objective.model.position]
    for chosen in objective.batches(range(len(objective))):
        part = objective.batch.rows(chosen)
        found = implicit_attention(objective.model, part, rollout=True, residual=residual, rows=rows, pool=0)
        assert isinstance(found, ImplicitAttention)
        for text, each in zip(chosen, found):
            scores[text, : len(each)] = torch.from_numpy(each.maps[0].values.mean(0))
    return Scores(scores)


@scores_are(embeddings=False)
def attention_gradient(objective: Objective) -> Scores:
    """Attention × gradient: score_s = Σ_layers Σ_t Σ_channels g[t] M[t, s] x[s], M a layer's block-level matrix, x its
    input and g the gradient of f at its output: the columns' sums of the maps of `ssmscope.attention` with
    `gradient` (after Chefer et al., 2021), with their signs. A column's sum is x[s] (gᵀ M)[s], without materializing
    the map; only softmax attention A has A ⊙ ∂f/∂A of its heads.
    """
    if objective.continues:
        raise InputError("attention-gradient explains one token; give one as target, not a continuation")
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
