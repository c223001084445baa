"""Qwen3-Next (Qwen 2025): layers of the gated delta rule, every fourth one softmax attention, and experts after each.

q, k, v and z share one projection, one head of keys after another. Attention and experts are run by the
model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from ssmscope.architectures.read.gated_delta import Projected, linearized_through, output_through, terms
from ssmscope.architectures.read.parts import projection, state_after
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Scan

__all__ = ["state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Qwen3NextGatedDeltaNet,)
MODEL_TYPES = ("qwen3_next",)


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms."""
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(u), mixer.in_proj_ba(u))
    qkv = torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1)
    return terms(mixer, u, Projected(qkv, z.flatten(2), a, b.sigmoid()), mask, state)


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms."""
    return output_through(mixer, layer, scans, "norm", "out_proj")


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map, see `linearized_through`."""
    each = mixer.num_v_heads // mixer.num_k_heads * mixer.head_v_dim
    places = torch.arange(mixer.in_proj_qkvz.out_features).view(mixer.num_k_heads, -1)
    values, gates = places[:, -2 * each : -each].flatten(), places[:, -each:].flatten()
    enter, enter_gate = (projection(mixer, "in_proj_qkvz", rows) for rows in (values, gates))
    return linearized_through(mixer, layer, enter, enter_gate, "norm", "out_proj")


EXAMPLE_SIZES: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=16,
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=8,
    initializer_range=0.05,
)
"""Sizes of a small model, for tests."""


def with_longer_memory(module: nn.Module) -> nn.Module:
    """Make a random hybrid's heads keep their states for some steps; as initialised most forget within one."""
    for name, parameter in module.named_parameters():
        if name.endswith("dt_bias"):
            parameter.data.uniform_(-6.0, -3.0)
        elif name.endswith("A_log"):
            parameter.data.uniform_(0.0, 2.0)
    return module


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
    return {"qwen3_next": with_longer_memory(Qwen3NextForCausalLM(Qwen3NextConfig(**EXAMPLE_SIZES, **experts)))}
