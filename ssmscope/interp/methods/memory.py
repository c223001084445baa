"""Methods without gradients: the memory itself, occlusion, and random scores, which any method has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.methods.checks import check_whole, text_generator
from ssmscope.interp.objective import Objective


def check_survival(model: Model) -> None:
    """Raise InputError if a model has no memory in which something could be left."""
    model.check_recurrent_state("the method survival")


def survival(objective: Objective) -> Scores:
    """Share of token t in the states after the text's last token, averaged over layers: see
    `ssmscope.ops.survival.shares`.

    It is of the text alone, whatever the target: what the model still has of a token, and not what it makes of it.
    """
    mask, model = objective.batch.mask, objective.model
    check_survival(model)
    total = torch.zeros(mask.shape, dtype=torch.float64)

    def add(_: int, rows: Sequence[int], layer: LayerTrace) -> None:
        left = layer.survival().double().cpu()
        total[list(rows), : left.shape[1]] += left / model.num_layers

    model.trace(objective.batch, keep_inputs=False, visit=add)
    return Scores(total.masked_fill(~mask.cpu(), 0).float())


def self_retention(objective: Objective) -> Scores:
    """E[A_t], the mean of the retention gate over layers, channels (or heads) and states (Baleen, Eq. 10).

    It is of the text alone, whatever the target: the average of `selection_heatmap`.
    """
    objective.model.check_recurrent_state("the method self-retention, or self-write,")
    retention = objective.model.trace(objective.batch, keep_inputs=False).retention.cpu().double().mean(0)
    return Scores(retention.masked_fill(~objective.batch.mask.cpu(), 0).float())


def self_write(objective: Objective) -> Scores:
    """1 − E[A_t]: the share of the memory that is overwritten."""
    kept = self_retention(objective).scores
    return Scores((1 - kept).masked_fill(~objective.batch.mask.cpu(), 0))


def occlusion(objective: Objective, *, baseline: str | int | float = "mean", window: int = 1) -> Scores:
    """score_t = f(e) − f(e with the baseline's embedding at t) (after Zeiler & Fergus, 2014).

    Args:
        baseline: embedding of hidden tokens, see `baseline_embeddings`.
        window: number of neighbouring tokens hidden at a time; a token's score is the mean over the windows that it
            is in. A window is at most as long as the text.
    """
    check_whole("window", window, 1)
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
        for fall, place in zip(falls, part, strict=True):
            total[spans[place]] += fall
            count[spans[place]] += 1
    return Scores(total / count.clamp(min=1))


def random(objective: Objective, *, seed: int = 0) -> Scores:
    """Uniform scores from 0 to 1, the same for a text and a seed in any batch."""
    scores = torch.zeros(objective.batch.mask.shape, dtype=torch.float32)
    for text, length in enumerate(objective.lengths):
        scores[text, :length] = torch.from_numpy(text_generator(objective, text, seed).random(length, dtype="float32"))
    return Scores(scores)
