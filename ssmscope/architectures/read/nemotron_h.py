"""Nemotron-H (NVIDIA 2025): blocks of one part each: a Mamba-2 mixer, softmax attention, feed-forward or experts.

The mixers are Mamba-2's, term by term, with a norm in groups. The other layers are run by the model itself.
"""

from __future__ import annotations

from torch import nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from ssmscope.architectures.read.mamba2 import compute_terms, linearized, output, state_after, with_longer_memory

__all__ = ["linearized", "output", "compute_terms", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (NemotronHMamba2Mixer,)
MODEL_TYPES = ("nemotron_h",)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, head_dim=12, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_num_heads=6, mamba_head_dim=8, n_groups=2)
    layers = dict(layers_block_type=["mamba", "attention", "moe", "mamba"], ssm_state_size=6, chunk_size=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
    config = NemotronHConfig(**sizes, **heads, **layers, **experts, moe_shared_expert_intermediate_size=16)
    return {"nemotron_h": with_longer_memory(NemotronHForCausalLM(config))}
