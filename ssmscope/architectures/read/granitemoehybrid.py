"""GraniteMoeHybrid (IBM 2025, Granite 4.0): Mamba-2's mixers, some layers of softmax attention, and experts.

The mixers are Mamba-2's, term by term; release 5 of transformers norms by groups of channels, release 4 over all of
them. Attention and experts are run by the model itself.
"""

from __future__ import annotations

from torch import nn
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

from ssmscope.architectures.read.mamba2 import compute_terms, linearized, output, state_after, with_longer_memory

__all__ = ["linearized", "output", "compute_terms", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (GraniteMoeHybridMambaLayer,)
MODEL_TYPES = ("granitemoehybrid",)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, shared_intermediate_size=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=6)
    layers = dict(layer_types=["mamba", "attention", "mamba"], num_local_experts=4, num_experts_per_tok=2)
    config = GraniteMoeHybridConfig(**sizes, **heads, **layers, mamba_chunk_size=8, initializer_range=0.1)
    return {"granitemoehybrid": with_longer_memory(GraniteMoeHybridForCausalLM(config))}
