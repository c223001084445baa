"""Jamba (AI21, Lieber et al. 2024): Mamba's mixers, with norms on Δ, B and C, between layers of softmax attention.

The mixers are Mamba's, term by term, but for those norms. Attention and experts are run by the model itself.
"""

from __future__ import annotations

from torch import nn
from transformers.models.jamba.modeling_jamba import JambaMambaMixer

from ssmscope.architectures.read.mamba import compute_terms, linearized, output, state_after
from ssmscope.architectures.read.mamba2 import with_longer_memory

__all__ = ["linearized", "output", "compute_terms", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (JambaMambaMixer,)
MODEL_TYPES = ("jamba",)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import JambaConfig, JambaForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_d_state=5, mamba_dt_rank=3)
    layers = dict(attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4)
    config = JambaConfig(**sizes, **heads, **layers, use_mamba_kernels=False)
    return {"jamba": with_longer_memory(JambaForCausalLM(config))}
