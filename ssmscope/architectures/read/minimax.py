"""MiniMax-01 (MiniMax 2025): layers of lightning attention, between them softmax attention, and experts after each.

Lightning attention is linear attention with a constant decay e^{−s_h} per head, smaller in later layers, with an
activation on q, k and v, a norm over all heads, and a sigmoid gate. Attention and experts are run by the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxRMSNorm

from ssmscope.architectures.read import parts
from ssmscope.core.linearized import InputMap, LinearizedLayer, as_diagonal
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Recurrence, Scan


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    mask = parts.as_mask(mask)
    qkv = parts.at_least_float32(parts.mask_padding(mixer.act_fn(mixer.qkv_proj(u)), mask))
    q, k, v = rearrange(qkv, "b t (h three p) -> three b t h p", three=3, p=mixer.head_dim)
    slope = parts.at_least_float32(mixer.slope_rate).flatten()
    log_a = parts.mask_padding(-slope.expand(*u.shape[:2], -1), mask)
    recurrence = Recurrence(x=v, b=k, c=q, log_a=log_a.unsqueeze(-1))
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.output_gate(u))


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms: W_O (σ(z) ⊙ RMSNorm(y))."""
    (scanned,) = layer.scan() if scans is None else scans
    normed = mixer.norm(rearrange(scanned.y, "b t h p -> b t (h p)").to(layer.u.dtype))
    return mixer.out_proj(torch.sigmoid(layer.gate) * normed)


def returned(output: Tensor) -> tuple[Tensor, None]:
    """Return the output as the mixer's own forward pass does: with a state, which nothing reads."""
    return output, None


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with q, k, the activation of v, the norm and the gate frozen."""
    places = torch.arange(mixer.qkv_proj.out_features).view(mixer.num_attention_heads, -1)
    value = parts.projection(mixer, "qkv_proj", places[:, 2 * mixer.head_dim :].flatten())
    source = parts.mask_padding(value(parts.at_least_float32(layer.u), True), layer.mask)
    input_map = InputMap(
        source=source,
        enter=lambda u, biased: parts.mask_padding(value(u, biased), layer.mask),
        activation=parts.mask_padding(as_diagonal(mixer.act_fn, source), layer.mask),
    )
    (scanned,) = layer.scan()
    y = rearrange(scanned.y, "b t h p -> b t (h p)")
    factor = parts.rms_factor(y, mixer.norm.variance_epsilon) * parts.norm_weight(mixer, "norm", MiniMaxRMSNorm)
    return parts.one_path(mixer, layer, input_map, torch.sigmoid(parts.at_least_float32(layer.gate)) * factor)
