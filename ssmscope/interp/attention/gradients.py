"""Attention × gradient: the gradient of a target's logit at the output of each layer, and the maps it weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.attention.measure import add_maps
from ssmscope.interp.attention.shown import ShownText
from ssmscope.interp.methods.gradients import outputs_kept
from ssmscope.model import as_batch
from ssmscope.signature import chosen_layers

if TYPE_CHECKING:
    from ssmscope.encoding import Batch
    from ssmscope.model import Model, TextsLike
    from ssmscope.trace import Trace


def target_of(model: Model, target: int | str | None) -> int | None:
    """The number of a class, or a token's id, of what `target` names.

    Raises:
        InputError: the model does not have it.
    """
    if target is None:
        return None
    if isinstance(target, str):
        labels = model.labels or []
        if target in labels:
            return labels.index(target)
        if not target.isdecimal():
            what = f"its classes are {', '.join(labels)}" if labels else "give a token's id"
            raise InputError(f"{model.name} has no class {target!r}; {what}{did_you_mean(target, labels)}")
        target = int(target)
    most = len(model.labels) if model.labels is not None else model.vocabulary
    if not 0 <= target < most:
        raise InputError(f"there is no target {target}; allowed are 0 to {most - 1}")
    return target


def output_gradients(
    model: Model, batch: Batch, target: int | None, chosen: Sequence[int]
) -> tuple[dict[int, Tensor], list[str]]:
    """The gradient of each text's target logit at the output of each layer, (batch, length, width), and the targets."""
    kept: dict[int, Tensor] = {}
    layers = [model.mixers[index] for index in chosen]
    with torch.no_grad():
        embeddings = model.embed(batch)
    # Gradients come from the embeddings: weights may be frozen, as those under an adapter are.
    embeddings = embeddings.detach().requires_grad_()
    with torch.enable_grad(), model.running(mask=batch.mask), outputs_kept(layers, kept):
        logits = model.forward_embeddings(embeddings, batch.mask)
    best = logits.argmax(-1) if target is None else torch.full((len(logits),), target, device=logits.device)
    wanted = logits.gather(-1, best.unsqueeze(-1)).sum()
    found = torch.autograd.grad(wanted, [kept[place] for place in range(len(layers))])
    labels = model.labels
    names = [labels[i] if labels is not None else str(i) for i in best.tolist()]
    return dict(zip(chosen, found)), names


def add_contributions(
    model: Model,
    texts: TextsLike,
    layers: str | Sequence[int],
    heads: str,
    rows: str | Sequence[int],
    pool: int | None,
    span: str | None,
    top: int,
    target: int | str | None,
) -> tuple[Trace, list[ShownText], list[str]]:
    """The texts with a map of attention × gradient for each layer, (queries, keys), their trace, and the targets."""
    batch = as_batch(model, texts)
    trace = model.trace(batch)
    chosen = chosen_layers(layers, trace.layer_numbers)
    shown = [ShownText(trace, row, rows=rows, pool=pool, span=span) for row in range(len(trace))]
    found, names = output_gradients(model, batch, target_of(model, target), chosen)
    for index in chosen:
        frozen = trace.frozen[index]
        weighed = frozen.contributions(found[index].to(frozen.u))
        for row, text in enumerate(shown):
            one = weighed.of_text(row, text.length)
            channels = one.channels[0] * one.channels[1]
            add_maps(text, one, str(trace.layer_numbers[index]), "block", heads, True, None, top, channels)
    return trace, shown, names
