"""Qwen3.5's language model (Qwen 2026): Qwen3-Next's layers, with projections of their own for z, β and α."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from ssmscope.architectures.read.gated_delta import Projected, linearized_through, terms
from ssmscope.architectures.read.parts import projection, state_after
from ssmscope.architectures.read.qwen3_next import EXAMPLE_SIZES, output, with_longer_memory
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace

__all__ = ["output", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Qwen3_5GatedDeltaNet,)
MODEL_TYPES = ("qwen3_5_text",)


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms."""
    beta = mixer.in_proj_b(u).sigmoid()
    projected = Projected(mixer.in_proj_qkv(u), mixer.in_proj_z(u), mixer.in_proj_a(u), beta)
    return terms(mixer, u, projected, mask, state)


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map, see `linearized_through`."""
    values = projection(mixer, "in_proj_qkv", slice(2 * mixer.key_dim, None))
    return linearized_through(mixer, layer, values, projection(mixer, "in_proj_z"), "norm", "out_proj")


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return {"qwen3_5": with_longer_memory(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**EXAMPLE_SIZES)))}
