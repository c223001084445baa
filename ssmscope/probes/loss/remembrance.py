"""Effective remembrance (Buitrago and Gu 2025, arXiv 2507.02782): how far the next token's distribution moves when all
but the last tokens of a text are left out, and how much of the states stems from what is left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor
from ssmscope.core.attention_layers import attention_layers
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.cuts import cut_attention
from ssmscope.core.edits import Edit
from ssmscope.core.mixers import memory_of
from ssmscope.core.model import Model
from ssmscope.evaluation.running import max_batch_tokens
from ssmscope.interp.scoring import means_with_intervals
from ssmscope.probes.loss.result import Remembrance


def remembrances(
    model: Model, windows: Int[np.ndarray, "windows length+1"], spans: Sequence[int], seed: int
) -> tuple[Remembrance, ...]:
    """Return for every number of last tokens the total variation ½ Σ |q(· | all) − q(· | last n)| after the windows'
    last token, in hybrids also that with attention alone cut off from earlier keys, and the share of the states that
    earlier tokens have (`survival.shares`, mean over layers); intervals are over windows."""
    rows = windows[:, :-1]
    step = max(1, max_batch_tokens(model) // rows.shape[1])
    columns = np.concatenate([_of_rows(model, rows[at : at + step], spans) for at in range(0, len(rows), step)])
    found = means_with_intervals(columns, seed).tolist()
    return tuple(Remembrance(span, *(Estimate(*each) for each in own)) for span, own in zip(spans, found))


def _of_rows(model: Model, rows: np.ndarray, spans: Sequence[int]) -> Float[np.ndarray, "rows spans 3"]:
    length = rows.shape[1]
    recurrent, attends = memory_of(model.module)["has_recurrent_state"], bool(attention_layers(model.module))
    found = np.full((len(rows), len(spans), 3), np.nan)
    whole = _next(model, rows)
    kept = model.trace(ids=rows.tolist(), retention=False).survival().mean(0).cpu() if recurrent else None
    for at, span in enumerate(spans):
        found[:, at, 0] = _variation(whole, _next(model, rows[:, length - span :]))
        if attends:
            cut = cut_attention(range(length - span), range(length - span, length))
            found[:, at, 1] = _variation(whole, _next(model, rows, cut))
        if kept is not None:
            found[:, at, 2] = kept[:, : length - span].sum(1).numpy()
    return found


def _next(model: Model, rows: np.ndarray, edits: Edit | Sequence[Edit] = ()) -> Tensor:
    """Return the distribution of the next token after each row, (rows, vocabulary) float64."""
    return model.run(model.encode(ids=rows.tolist()), last_only=True, edits=edits).logits.double().softmax(-1)


def _variation(p: Tensor, q: Tensor) -> np.ndarray:
    return ((p - q).abs().sum(1) / 2).cpu().numpy()
