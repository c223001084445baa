"""Layers of sparse attention whose indexer chooses the keys that each query reads, as those of Qwen4-Exp and
GLM-5.3-Flash (after DeepSeek's sparse attention).

An indexer groups a row's tokens, scores each group by keys of its own, and chooses the best ones and the last,
incomplete group. It asks the cache for what it kept of earlier tokens. A changed mask acts on the chosen keys: an edge
that is cut does not make another one chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.intercept import twin

Choose = Callable[[Tensor], Tensor]
"""Function from a mask of the keys that each query reads, (batch, heads or 1, queries, keys) bool, to a new mask."""


def chooses_keys(part: nn.Module) -> bool:
    """Return True if an attention layer reads the keys that an indexer chose, its own or an earlier layer's."""
    return hasattr(part, "indexer")


def masks_by_row(part: nn.Module) -> bool:
    """Return True if the layer computes its mask itself, from a mask of the real positions, (batch, length)."""
    return hasattr(part, "build_attention_mask_from_topk")


def with_changed_choice(part: Any, change: Choose) -> nn.Module:
    """Return a layer with the same weights that reads the keys for which `change` of its chosen ones is True."""
    found: Any = twin(part)
    if masks_by_row(part):

        def build_attention_mask(topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
            built = type(part).build_attention_mask_from_topk(found, topk_indices, query_states, kv_length)
            return additive(change(is_read(built)), query_states.dtype)

        vars(found)["build_attention_mask_from_topk"] = build_attention_mask
        return found

    def indexer(hidden: Tensor, positions: Any, mask: Tensor, cache: Any) -> Tensor:
        chosen = part.indexer(hidden, positions, mask, cache)
        reads = change(is_read(chosen) & is_read(mask))
        return reads if chosen.dtype == torch.bool else additive(reads, chosen.dtype)

    vars(found)["indexer"] = indexer
    return found


def is_read(mask: Tensor) -> Tensor:
    """Return a mask of the keys read, from one of booleans or of numbers that are added to scores."""
    return mask if mask.dtype == torch.bool else mask == 0


def additive(reads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as numbers that are added to scores: 0 where a key is read, else the lowest of the dtype."""
    return torch.zeros_like(reads, dtype=dtype).masked_fill(~reads, torch.finfo(dtype).min)


def in_one_piece(real: Tensor, earlier: int) -> Tensor | None:
    """Return an order of the columns, (batch, keys), in which a row's real ones among the first `earlier` are the last
    of these; None if they are in all rows. `real` is (batch, keys) bool."""
    before = real[:, :earlier].to(torch.int8)
    if bool((before.diff(dim=1) >= 0).all()):
        return None
    rest = torch.arange(earlier, real.shape[1], device=real.device).expand(len(real), -1)
    return torch.cat([before.argsort(dim=1, stable=True), rest], dim=1)


def columns(t: Tensor, order: Tensor | None, dim: int) -> Tensor:
    """Return a tensor (batch, …) with the columns `order` (batch, keys) of dimension `dim`."""
    if order is None:
        return t
    shape = [len(order), *[1] * (t.ndim - 1)]
    shape[dim] = -1
    return t.take_along_dim(order.view(shape), dim)
