"""Zamba2 (Zyphra, Glorioso et al. 2024): Mamba-2's mixers, and attention layers shared by many depths.

The mixers are Mamba-2's with a norm in groups; whatever `time_step_limit` says, their steps have a lower bound alone.
The attention layers are run by the model itself. The slow path of transformers 4.57 sums the states of chunks over the
wrong index, so texts longer than `chunk_size` get other logits there than on a GPU, or than release 5 and we give them.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from transformers.models.zamba2.modeling_zamba2 import Zamba2MambaMixer

from ssmscope.architectures.read.mamba2 import linearized, output, state_after, terms
from ssmscope.core.trace import LayerState, LayerTrace

__all__ = ["linearized", "output", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Zamba2MambaMixer,)
MODEL_TYPES = ("zamba2",)


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms."""
    return terms(mixer, u, mixer.in_proj(u), (mixer.config.time_step_min, math.inf), mask, state)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=3, initializer_range=0.1)
    heads = dict(num_attention_heads=2, mamba_d_state=6, mamba_headdim=8, n_mamba_heads=6, mamba_ngroups=2)
    layers = dict(layers_block_type=["mamba", "hybrid", "mamba"], chunk_size=32, adapter_rank=4)
    return {"zamba2": Zamba2ForCausalLM(Zamba2Config(**sizes, **heads, **layers))}
