"""Softmax attention of a hybrid's other layers: its maps next to the implicit ones, in rollouts, and × gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.api.options import chosen_layers
from ssmscope.core.attention_layers import attending, attention_layers, attention_numbers
from ssmscope.errors import InputError
from ssmscope.interp.attention.measure import head_names
from ssmscope.interp.attention.result import SOFTMAX
from ssmscope.interp.attention.shown import ShownText

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model

MAX_MAP_WEIGHTS = 2**29
"""Largest number of weights of a layer's whole maps of a text, which are in memory at once."""


def split_layers(
    layers: str | Sequence[int], numbers: Sequence[int], softmax: Sequence[int]
) -> tuple[str | tuple[int, ...], tuple[int, ...]]:
    """Split the chosen layers into state-space layers, with these `numbers`, and layers of attention.

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
    """Add the maps of the attention layers with these numbers to the texts: softmax(q kᵀ) of each head, or their mean,
    as the model's own code computes it. A text whose maps have more than `MAX_MAP_WEIGHTS` weights gets none."""
    for row, text in enumerate(texts):

        def add(number: int, weights: Tensor, text: ShownText = text) -> None:
            names = head_names(weights.shape[1], heads)
            maps = weights[0].unflatten(0, (len(names), -1)).mean(1)
            for name, values in zip(names, maps):
                text.add(f"{number} {SOFTMAX}", "", name, text.shown(values), None, top)

        if not exceeds_map_limit(model, 1, text.length):
            _see(model, batch, row, layers, add)


def add_gradient_products(products: Mapping[int, Tensor], texts: Sequence[ShownText], heads: str, top: int) -> None:
    """Add the maps A ⊙ ∂f/∂A of attention layers (batch, heads, length, length), by number, summed over all heads or
    over those of each group."""
    for number, every in products.items():
        names = head_names(every.shape[1], heads)
        maps = every.unflatten(1, (len(names), -1)).sum(2)
        for row, text in enumerate(texts):
            for name, values in zip(names, maps[row, :, : text.length, : text.length]):
                text.add(f"{number} {SOFTMAX}", "", name, text.shown(values), None, top)
    sort_by_layer(texts)


def sort_by_layer(texts: Sequence[ShownText]) -> None:
    """Sort the maps of every text by the numbers of their layers."""
    for text in texts:
        text.maps.sort(key=lambda each: int(each.layer.split()[0]))


def mean_weights(
    model: Model, batch: Batch, row: int, layers: Sequence[int]
) -> dict[int, Float[Tensor, "length keys"]]:
    """Return softmax(q kᵀ) of a text, averaged over heads, by the number of the layer.

    Raises:
        InputError: a text whose maps have more than `MAX_MAP_WEIGHTS` weights.
    """
    found: dict[int, Tensor] = {}
    if exceeds_map_limit(model, 1, batch.lengths[row]):
        raise InputError(f"text {row} has {batch.lengths[row]:,} tokens, too many for whole maps of attention layers")
    _see(model, batch, row, layers, lambda number, weights: found.update({number: weights[0].mean(0).float().cpu()}))
    return found


def exceeds_map_limit(model: Model, texts: int, length: int) -> bool:
    """Return True if an attention layer has more than `MAX_MAP_WEIGHTS` weights on so many texts of this length."""
    counts = [part.config.num_attention_heads for part in attention_layers(model.module).values()]
    return texts * length**2 * max(counts, default=0) > MAX_MAP_WEIGHTS


def _see(model: Model, batch: Batch, row: int, layers: Sequence[int], take: Callable[[int, Tensor], None]) -> None:
    """Run a text and pass the weights (1, heads, length, length) of the layers with these numbers to `take`."""
    numbers, one = attention_numbers(model.module), batch.rows([row])

    def see(index: int, weights: Tensor) -> None:
        if numbers[index] in layers:
            take(numbers[index], weights)

    with torch.no_grad(), model.running(mask=one.mask), attending(model.module, mask=one.mask, see=see):
        model.forward(one, last_only=True, checked=False)
