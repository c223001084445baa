"""OLMo-hybrid (Ai2 2026): layers of the gated delta rule, every fourth one softmax attention.

Every term has a projection of its own, and β is up to 2, which makes eigenvalues of the transition negative, where
`linear_allow_neg_eigval` is set. Attention is run by the model itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

from ssmscope.architectures.read.gated_delta import Projected, linearized_through, output_through, terms
from ssmscope.architectures.read.parts import projection, state_after
from ssmscope.architectures.read.qwen3_next import EXAMPLE_SIZES, with_longer_memory
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Scan

__all__ = ["state_after"]

MIXERS: tuple[type[nn.Module], ...] = (OlmoHybridGatedDeltaNet,)
MODEL_TYPES = ("olmo_hybrid",)


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms."""
    qkv = torch.cat([mixer.q_proj(u), mixer.k_proj(u), mixer.v_proj(u)], dim=-1)
    beta = mixer.b_proj(u).sigmoid() * (2.0 if mixer.allow_neg_eigval else 1.0)
    return terms(mixer, u, Projected(qkv, mixer.g_proj(u), mixer.a_proj(u), beta), mask, state)


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms."""
    return output_through(mixer, layer, scans, "o_norm", "o_proj")


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map, see `linearized_through`."""
    return linearized_through(
        mixer, layer, projection(mixer, "v_proj"), projection(mixer, "g_proj"), "o_norm", "o_proj"
    )


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    sizes = {name: value for name, value in EXAMPLE_SIZES.items() if name != "head_dim"}
    tokens = dict(pad_token_id=0, eos_token_id=1)
    return {
        name: with_longer_memory(
            OlmoHybridForCausalLM(OlmoHybridConfig(**sizes, **tokens, linear_allow_neg_eigval=negative))
        )
        for name, negative in (("olmo_hybrid", False), ("olmo_hybrid-negative-eigenvalues", True))
    }
