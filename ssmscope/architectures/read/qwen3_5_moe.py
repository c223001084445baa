"""Qwen3.5's language model with experts (Qwen 2026): its mixers are Qwen3.5's; experts are run by the model itself."""

from __future__ import annotations

from torch import nn
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from ssmscope.architectures.read.qwen3_5 import compute_terms, linearized, output, state_after
from ssmscope.architectures.read.qwen3_next import EXAMPLE_SIZES, with_longer_memory

__all__ = ["linearized", "output", "compute_terms", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Qwen3_5MoeGatedDeltaNet,)
MODEL_TYPES = ("qwen3_5_moe_text",)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    return {"qwen3_5_moe": with_longer_memory(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**EXAMPLE_SIZES, **experts)))}
