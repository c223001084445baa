"""Attention × gradient: the gradient of a target's logit at the output of each layer, and the maps it weighs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssmscope.api.options import chosen_layers
from ssmscope.core.attention_layers import attending, attention_numbers
from ssmscope.core.model import as_batch
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.attention.measure import add_maps
from ssmscope.interp.attention.shown import ShownText
from ssmscope.interp.attention.softmax import add_gradient_products, exceeds_map_limit, split_layers
from ssmscope.interp.methods.gradients import keep_outputs

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model, TextsLike
    from ssmscope.core.trace import Trace


def target_id(model: Model, target: int | str | None) -> int | None:
    """Return the class number, or the token id, that `target` names.

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
    model: Model, batch: Batch, target: int | None, chosen: Sequence[int], beside: Sequence[int] = ()
) -> tuple[dict[int, Tensor], dict[int, Tensor], list[str]]:
    """Return the gradient of each text's target logit at the output of each layer, (batch, length, width); A ⊙ ∂f/∂A of
    the softmax weights A (batch, heads, length, length) of the layers numbered `beside`; and the names of the
    targets."""
    kept: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    layers, numbers = [model.mixers[index] for index in chosen], attention_numbers(model.module)

    def see(index: int, found: Tensor) -> None:
        if numbers[index] in beside:
            weights[numbers[index]] = found

    with torch.no_grad():
        embeddings = model.embed(batch)
    # Gradients start at the embeddings: weights may be frozen, as under an adapter.
    embeddings = embeddings.detach().requires_grad_()
    with ExitStack() as around:
        around.enter_context(torch.enable_grad())
        around.enter_context(model.running(mask=batch.mask))
        around.enter_context(keep_outputs(layers, kept))
        if beside:
            around.enter_context(attending(model.module, mask=batch.mask, see=see))
        logits = model.forward_embeddings(embeddings, batch.mask)
        best = logits.argmax(-1) if target is None else torch.full((len(logits),), target, device=logits.device)
        wanted = logits.gather(-1, best.unsqueeze(-1)).sum()
    found = torch.autograd.grad(wanted, [*(kept[place] for place in range(len(layers))), *weights.values()])
    labels = model.labels
    names = [labels[i] if labels is not None else str(i) for i in best.tolist()]
    products = {n: (A * g).detach() for (n, A), g in zip(weights.items(), found[len(layers) :])}
    return dict(zip(chosen, found)), products, names


def gradient_maps(
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
    """Return the texts with a map of attention × gradient for each layer, (queries, keys), their trace, and the
    targets."""
    batch = as_batch(model, texts)
    trace = model.trace(batch)
    asked, beside = split_layers(layers, trace.layer_numbers, attention_numbers(model.module))
    chosen = chosen_layers(asked, trace.layer_numbers)
    beside = () if exceeds_map_limit(model, len(trace), max(batch.lengths)) else beside
    shown = [ShownText(trace, row, rows=rows, pool=pool, span=span) for row in range(len(trace))]
    found, products, names = output_gradients(model, batch, target_id(model, target), chosen, beside)
    for index in chosen:
        linearized = trace.linearized[index]
        weighed = linearized.contributions(found[index].to(linearized.u))
        for row, text in enumerate(shown):
            one = weighed.of_text(row, text.length)
            channels = one.channels[0] * one.channels[1]
            add_maps(text, one, str(trace.layer_numbers[index]), "block", heads, True, None, top, channels)
    add_gradient_products(products, shown, heads, top)
    return trace, shown, names
