"""LFM2 with experts (Liquid AI 2025): its mixers are LFM2's; experts are run by the model itself."""

from __future__ import annotations

from torch import nn
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv

from ssmscope.architectures.read.lfm2 import (
    EXAMPLE_SIZES,
    HAS_RECURRENT_STATE,
    compute_terms,
    linearized,
    output,
    state_after,
)

__all__ = ["HAS_RECURRENT_STATE", "linearized", "output", "compute_terms", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Lfm2MoeShortConv,)
MODEL_TYPES = ("lfm2_moe",)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    sizes = {name: value for name, value in EXAMPLE_SIZES.items() if name != "block_auto_adjust_ff_dim"}
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1)
    return {"lfm2_moe": Lfm2MoeForCausalLM(Lfm2MoeConfig(**sizes, **experts))}
