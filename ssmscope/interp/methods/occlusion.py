"""Occlusion: how much f falls when a token is hidden."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.methods.checks import check_whole

if TYPE_CHECKING:
    from ssmscope.interp.objective import Objective


def occlusion(objective: Objective, *, baseline: str | int | float = "mean", window: int = 1) -> Scores:
    """score_t = f(e) − f(e with the baseline's embedding at t) (after Zeiler & Fergus, 2014).

    Args:
        baseline: embedding of hidden tokens, see `baseline_embeddings`.
        window: number of neighbouring tokens hidden at a time; a token's score is the mean over the windows that it
            is in. A window is at most as long as the text.

    Raises:
        InputError: for an unknown baseline or a window below 1.
    """
    check_whole("window", window, 1)
    embeddings = objective.embeddings()
    hidden = baseline_embeddings(objective, baseline).to(embeddings)
    whole_texts = objective.values(embeddings)
    spans = [
        (text, first, first + min(window, length))
        for text, length in enumerate(objective.lengths)
        for first in range(length - min(window, length) + 1)
    ]
    total = torch.zeros_like(embeddings[..., 0], dtype=whole_texts.dtype)
    count = torch.zeros_like(total)
    for part in objective.batches([text for text, _, _ in spans]):
        texts = [spans[place][0] for place in part]
        longest = max(objective.lengths[text] for text in texts)
        runs = embeddings[texts, :longest]
        for run, place in enumerate(part):
            text, first, last = spans[place]
            runs[run, first:last] = hidden[text, first:last]
        with torch.no_grad():
            falls = whole_texts[texts] - objective(runs, texts).to(whole_texts)
        for fall, place in zip(falls, part, strict=True):
            text, first, last = spans[place]
            total[text, first:last] += fall
            count[text, first:last] += 1
    return Scores(total / count.clamp(min=1))
