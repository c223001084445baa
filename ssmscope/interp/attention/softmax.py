"""The softmax attention of a hybrid's other layers, whose maps stand beside the implicit ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssmscope.attention_layers import attending, attention_layers, attention_numbers
from ssmscope.interp.attention.measure import grouped
from ssmscope.interp.attention.result import SOFTMAX
from ssmscope.interp.attention.shown import ShownText
from ssmscope.signature import chosen_layers

if TYPE_CHECKING:
    from ssmscope.encoding import Batch
    from ssmscope.model import Model

MOST = 2**29
"""How many weights a layer's whole maps of a text have at most: they are made at once."""


def divided(
    layers: str | Sequence[int], numbers: Sequence[int], softmax: Sequence[int]
) -> tuple[str | tuple[int, ...], tuple[int, ...]]:
    """Which of the layers that are asked for are state-space layers, with these `numbers`, and which attend.

    Raises:
        InputError: a layer that is neither, or one that is named twice.
    """
    if isinstance(layers, str) or not softmax:
        return layers if isinstance(layers, str) else tuple(layers), tuple(dict.fromkeys(softmax))
    chosen_layers(layers, sorted({*numbers, *softmax}))
    own, others = (tuple(layer for layer in layers if layer in some) for some in (numbers, softmax))
    return own, others


def add_softmax(
    model: Model, batch: Batch, layers: Sequence[int], texts: Sequence[ShownText], heads: str, top: int
) -> None:
    """Add the maps of the layers of attention with these numbers to the texts: softmax(q kᵀ) of each head, or their
    mean, as the model's own code computes it. A text whose maps have more than `MOST` weights gets none."""
    numbers = attention_numbers(model.module)
    counts = [part.config.num_attention_heads for part in attention_layers(model.module).values()]
    for row, text in enumerate(texts):
        if text.length**2 * max(counts) > MOST:
            continue
        one = batch.rows([row])

        def see(index: int, weights: Tensor, text: ShownText = text) -> None:
            if numbers[index] not in layers:
                return
            names = grouped(weights.shape[1], heads)
            maps = weights[0].unflatten(0, (len(names), -1)).mean(1)
            for name, values in zip(names, maps):
                text.add(f"{numbers[index]} {SOFTMAX}", "", name, text.shown(values), None, top)

        with torch.no_grad(), model.running(mask=one.mask), attending(model.module, mask=one.mask, see=see):
            model.forward(one, last_only=True)
