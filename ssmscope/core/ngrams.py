"""Embeddings of n-grams within a model's layers, as Qwen4-Exp has them: they read the ids of the tokens before, and add
what a short convolution makes of them to the residual streams.

The library's own code runs them: it asks a cache for the last ids and the convolution's last inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.mixers import arguments
from ssmscope.core.trace import LayerState, alone, last_inputs

CONVOLUTION = 1
"""Number under which a part asks a cache for the inputs of its convolution; by another it asks for ids."""


@dataclass(frozen=True, eq=False)
class NGramState(LayerState):
    """State from which n-gram embeddings continue: in `conv` the last inputs of their convolution, and the last `ids`
    (batch, before)."""

    ids: Tensor


def is_ngram_part(part: nn.Module) -> bool:
    """Return True for n-gram embeddings with their convolution."""
    return hasattr(part, "ple_embedding") and hasattr(part, "short_conv_state_len")


def reads_ids(module: nn.Module) -> bool:
    """Return True if a model's layers, or a module of one's own around them, read its tokens' ids besides their
    embeddings."""
    return getattr(module, "reads_ids_too", False) or any(map(is_ngram_part, module.modules()))


def looked_up(
    part: Any, below: Callable[..., Any], state: LayerState | None, mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Any, LayerState]:
    """Return the output of n-gram embeddings after `state` or nothing, and their state after each row's last real
    position by `mask` (batch, length), all by default."""
    names = [*arguments(part)]
    named = dict(zip(names, args)) | kwargs
    assert state is None or isinstance(state, NGramState)
    cache = _Cache(state)
    output = below(**{**named, names[2]: cache})
    ids, before = named["input_ids"].unsqueeze(-1), part.ple_embedding.context_len
    earlier = torch.full_like(ids[:, :1], part.ple_embedding.eos_token_id).expand(-1, before, -1)
    earlier = earlier if state is None else state.ids.unsqueeze(-1)
    mask = None if mask is None else mask.to(ids.device)
    inputs = last_inputs(cache.inputs, part.short_conv_state_len + 1, None if state is None else state.conv, mask)
    return output, alone(NGramState(inputs, (), last_inputs(ids, before + 1, earlier, mask).squeeze(-1)))


class _Cache:
    """Cache of the state before a run, with the convolution's `inputs` in it, (batch, length, channels)."""

    def __init__(self, before: NGramState | None) -> None:
        self.before = before
        # Before 5.22 transformers asks for these instead of `get_conv_state`.
        self.layers: Any = defaultdict(lambda: self)
        self.conv_states: Any = defaultdict(lambda: self.get_conv_state(0, 0))
        self.has_previous_state = lambda layer, state_idx: before is not None

    def get_conv_state(self, layer: int, state_idx: int) -> Tensor | None:
        return None if self.before is None else self.before.ids

    def update_conv_state(self, new: Tensor, layer: int, state_idx: int, conv_kernel_size: int) -> Tensor:
        if state_idx != CONVOLUTION:
            return new
        self.inputs = new.mT
        if self.before is None or self.before.conv is None:
            return new
        return torch.cat([self.before.conv.mT.to(new), new], dim=-1)
