"""Exact effect of knocking a token out on a classifier, which scores are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.cuts import cut_attention, cut_edges
from ssmscope.core.edits import edited
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import is_bidirectional
from ssmscope.core.model import Model
from ssmscope.interp.fidelity.perturbed import target_values
from ssmscope.interp.knockout.measure import roads_of
from ssmscope.interp.sanity.measure import spearman


def knockout_effects(
    model: Model,
    batch: Batch,
    targets: Sequence[int],
    *,
    layers: Sequence[int | None] = (None,),
    value: str = "probability",
    batch_size: int | None = None,
) -> list[Float[np.ndarray, "cuts _"]]:
    """Return f(x) − f(x with the edges from token i to all later tokens cut) for every non-special token of every text.

    The cut covers everything that the token becomes after the convolution (level "block" of `cut_edges`): no later
    position reads it in these layers' recurrences, nor in their softmax attention; where layers look ahead, no other
    position does. The token's own position keeps it, so that the effect of a text's last token is 0 where a model
    reads there.

    Args:
        targets: per text the class.
        layers: layers of each cut, by the model's own number, or None for all layers at once.
        value: the quantity f, "probability" or "logit".
        batch_size: number of runs that go together; by default as many as suit the device.
    """
    own = [[at for at, word in enumerate(words) if word is not None] for words in batch.words]
    runs = [
        (text, at, where)
        for text, places in enumerate(own)
        for where, at in ((None, None), *itertools.product(layers, places))
    ]
    found, roads = np.empty(len(runs)), roads_of(model)
    lengths = [batch.lengths[text] for text, *_ in runs]
    for chosen in by_length(lengths, tokens_at_once(model.device), size=batch_size):
        part = batch.rows([runs[run][0] for run in chosen])
        at = torch.tensor([-1 if (place := runs[run][1]) is None else place for run in chosen]).unsqueeze(1)
        steps = torch.arange(part.input_ids.shape[1])
        others = steps != at if is_bidirectional(model.module) else steps > at
        sources, reads = steps == at, others & part.mask.cpu() & (at >= 0)
        here = {number: torch.tensor([runs[run][2] in (number, None) for run in chosen]) for number in roads}
        cuts = []
        for number, (states, attending) in roads.items():
            if states:
                cuts.append(cut_edges(sources, reads, rows=dict.fromkeys(states, here[number]), level="block"))
            if attending:
                cuts.append(cut_attention(sources, reads, rows=dict.fromkeys(attending, here[number])))
        with edited(model, cuts), torch.no_grad(), model.running(mask=part.mask):
            logits = model.forward(part)
        wanted = torch.tensor([targets[runs[run][0]] for run in chosen], device=logits.device)
        found[chosen] = target_values(model, logits, wanted, value)
    each = np.split(found, np.cumsum([1 + len(layers) * len(places) for places in own])[:-1])
    return [(values[0] - values[1:]).reshape(len(layers), -1) for values in each]


def correlations(
    scores: Float[np.ndarray, "rankings n"], effects: Float[np.ndarray, "cuts n"]
) -> Float[np.ndarray, "rankings cuts"]:
    """Return Spearman's correlation of the signed scores of one text's tokens with these effects; NaN where either is
    constant."""
    return np.array([[spearman(own, effect) for effect in effects] for own in scores])
