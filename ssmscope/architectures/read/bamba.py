"""Bamba (Glorioso et al. 2024; IBM 2024): Mamba-2's mixers with some layers of softmax attention between them.

The mixers are Mamba-2's, term by term; release 5 of transformers norms by groups of channels, release 4 over all of
them. The attention layers are run by the model itself and have no recurrence to read.
"""

from __future__ import annotations

from torch import nn
from transformers.models.bamba.modeling_bamba import BambaMixer

from ssmscope.architectures.read.mamba2 import compute_terms, linearized, output, state_after, with_longer_memory

__all__ = ["linearized", "output", "compute_terms", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (BambaMixer,)
MODEL_TYPES = ("bamba",)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import BambaConfig, BambaForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, attn_layer_indices=[1])
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=6, mamba_d_head=8, mamba_d_state=6)
    module = BambaForCausalLM(BambaConfig(**sizes, **heads, mamba_chunk_size=8, initializer_range=0.1))
    return {"bamba": with_longer_memory(module)}
