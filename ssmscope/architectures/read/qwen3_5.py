"""Qwen3.5's language model (Qwen 2026): Qwen3-Next's layers, with projections of their own for z, β and α."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from ssmscope.architectures.read.gated_delta import Projected, frozen_through, state_after, terms
from ssmscope.architectures.read.parts import projection
from ssmscope.architectures.read.qwen3_next import SMALL, output, with_longer_memory
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace

__all__ = ["output", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Qwen3_5GatedDeltaNet,)
MODEL_TYPES = ("qwen3_5_text",)


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """The layer's terms from its input `u` (batch, length, width) and weights.

    `mask` (batch, length) is True at real positions; `state` is where a run continues from.
    """
    beta = mixer.in_proj_b(u).sigmoid()
    projected = Projected(mixer.in_proj_qkv(u), mixer.in_proj_z(u), mixer.in_proj_a(u), beta)
    return terms(mixer, u, projected, mask, state)


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """The layer as a linear map, see `frozen_through`."""
    values = projection(mixer, "in_proj_qkv", slice(2 * mixer.key_dim, None))
    return frozen_through(mixer, layer, values, projection(mixer, "in_proj_z"), "norm", "out_proj")


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return {"qwen3_5": with_longer_memory(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SMALL)))}
