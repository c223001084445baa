"""MiniMax-Text-01 and MiniMax-M1 (MiniMax 2025) as published: transformers' MiniMax that rotates a part of each head.

Pairs of dimensions of queries and keys are turned for `rotary_dim` dimensions of a head and stay for the others, where
transformers' own turns all. It pairs dimension i of a head with i + half its width, so those that turn are the first of
both halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM, MiniMaxModel
from ssmscope.errors import InputError
from ssmscope.layers.parts import at_least_float32
from ssmscope.networks.generation import ContinuesFromStates


class MiniMaxM1Config(MiniMaxConfig):
    """Configuration of a MiniMax-M1.

    Args (in addition to those of `MiniMaxConfig`):
        rotary_dim: the dimensions of a head that are rotated; by default all.
        rotary_base: pair i of them turns by base^{−2i / rotary_dim} a token.

    Raises:
        InputError: if rotary_dim is not an even number of a head's dimensions.
    """

    model_type = "ssm-minimax"

    def __init__(self, rotary_dim: int | None = None, rotary_base: float = 1e7, **kwargs):
        super().__init__(**{**kwargs, "use_cache": False})
        head = self.head_dim or self.hidden_size // self.num_attention_heads
        self.rotary_dim, self.rotary_base = head if rotary_dim is None else rotary_dim, rotary_base
        if type(self.rotary_dim) is not int or self.rotary_dim % 2 or not 0 <= self.rotary_dim <= head:
            raise InputError(f"rotary_dim {rotary_dim!r:.60} must be an even number up to the width of a head, {head}")


class PartialRotation(nn.Module):
    """Cosines and sines (batch, length, head) of positions (batch, length), of angle 0 where nothing turns."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head = config.head_dim or config.hidden_size // config.num_attention_heads
        self.size, self.base = config.rotary_dim, config.rotary_base

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        exponent = torch.arange(0, self.size, 2, device=x.device, dtype=at_least_float32(x).dtype) / max(1, self.size)
        angle = position_ids.to(exponent)[..., None] * self.base**-exponent
        still = angle.new_zeros(*angle.shape[:-1], (self.head - self.size) // 2)
        angle = torch.cat([angle, still, angle, still], dim=-1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class MiniMaxM1Model(MiniMaxModel):
    """Backbone of embedding, blocks and norm."""

    config_class = MiniMaxM1Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rotary_emb = PartialRotation(config)


class MiniMaxM1ForCausalLM(ContinuesFromStates, MiniMaxForCausalLM):
    """Language model of the backbone and a head on the vocabulary."""

    config_class = MiniMaxM1Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MiniMaxM1Model(config)
        self.post_init()

    @property
    def backbone(self) -> MiniMaxM1Model:
        return self.model


AUTO = (MiniMaxM1Model, MiniMaxM1ForCausalLM)
