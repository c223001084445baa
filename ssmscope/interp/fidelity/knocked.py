"""What knocking a token out does to a classifier, exactly: what its scores are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from ssmscope.attention_layers import attention_layers
from ssmscope.batching import by_length, tokens_at_once
from ssmscope.cuts import cut_attention, cut_edges
from ssmscope.edits import edited
from ssmscope.encoding import Batch
from ssmscope.interp.fidelity.perturbed import of_target
from ssmscope.interp.sanity.measure import spearman
from ssmscope.model import Model


def knocked_out(
    model: Model, batch: Batch, targets: Sequence[int], *, value: str = "probability", batch_size: int | None = None
) -> list[Float[np.ndarray, " _"]]:
    """f(x) − f(x with the edges from token i to all later tokens cut), for every non-special token of every text.

    They are cut in all layers at once, with all that comes of the token behind the convolution (level "block" of
    `ssmscope.cuts.cut_edges`): no later position reads it in any recurrence, nor in softmax attention. The token's own
    position keeps it, so that the effect of a text's last token is 0 where a model reads there.

    Args:
        targets: per text the class.
        value: what f is of it, "probability" or "logit".
        batch_size: runs that go together; by default as many as suit the device.
    """
    own = [[at for at, word in enumerate(words) if word is not None] for words in batch.words]
    runs = [(text, at) for text, places in enumerate(own) for at in (None, *places)]
    found = np.empty(len(runs))
    lengths = [batch.lengths[text] for text, _ in runs]
    for chosen in by_length(lengths, tokens_at_once(model.device), size=batch_size):
        part = batch.rows([runs[run][0] for run in chosen])
        at = torch.tensor([-1 if runs[run][1] is None else runs[run][1] for run in chosen]).unsqueeze(1)
        steps = torch.arange(part.input_ids.shape[1])
        sources, reads = steps == at, (steps > at) & part.mask.cpu() & (at >= 0)
        cuts = [cut_edges(sources, reads, level="block")]
        if attention_layers(model.module):
            cuts.append(cut_attention(sources, reads))
        with edited(model, cuts), torch.no_grad(), model.running(mask=part.mask):
            logits = model.forward(part)
        wanted = torch.tensor([targets[runs[run][0]] for run in chosen], device=logits.device)
        found[chosen] = of_target(logits, wanted, value)
    each = np.split(found, np.cumsum([1 + len(places) for places in own])[:-1])
    return [values[0] - values[1:] for values in each]


def correlations(scores: Float[np.ndarray, "rankings n"], effects: Float[np.ndarray, " n"]) -> np.ndarray:
    """(rankings,) Spearman's correlation of the signed scores of one text's tokens with these effects; NaN where either
    is constant."""
    return np.array([spearman(own, effects) for own in scores])
