"""LFM3 (Liquid AI 2026): its mixers are LFM2's; attention, with windows and a gate, is run by the model itself."""

from __future__ import annotations

from torch import nn
from transformers.models.lfm3.modeling_lfm3 import Lfm3ShortConv

from ssmscope.architectures.read.lfm2 import (
    EXAMPLE_SIZES,
    HAS_RECURRENT_STATE,
    compute_terms,
    linearized,
    output,
    state_after,
)

__all__ = ["HAS_RECURRENT_STATE", "linearized", "output", "compute_terms", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Lfm3ShortConv,)
MODEL_TYPES = ("lfm3",)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Lfm3Config, Lfm3ForCausalLM

    sizes = {
        name: value for name, value in EXAMPLE_SIZES.items() if name not in ("block_auto_adjust_ff_dim", "layer_types")
    }
    kinds = ["conv", "full_attention", "conv", "sliding_attention"]
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = Lfm3Config(**{**sizes, "num_hidden_layers": 4}, **ends, layer_types=kinds, head_dim=12, sliding_window=6)
    return {"lfm3": Lfm3ForCausalLM(config)}
