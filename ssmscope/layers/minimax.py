"""MiniMax-01 (MiniMax 2025): layers of lightning attention, between them softmax attention, and experts after each.

Lightning attention is linear attention with a constant decay e^{−s_h} per head, smaller in later layers, with an
activation on q, k and v, a norm over all heads, and a sigmoid gate. Attention and experts are run by the model itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from ssmscope.core.blocks import CONSTANT, GATED, of_hybrids
from ssmscope.core.forms import Form
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import parts
from ssmscope.ops import Recurrence


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    mask = parts.as_mask(mask)
    qkv = parts.at_least_float32(parts.mask_padding(mixer.act_fn(mixer.qkv_proj(u)), mask))
    q, k, v = rearrange(qkv, "b t (h three p) -> three b t h p", three=3, p=mixer.head_dim)
    slope = parts.at_least_float32(mixer.slope_rate).flatten()
    log_a = parts.mask_padding(-slope.expand(*u.shape[:2], -1), mask)
    recurrence = Recurrence(x=v, b=k, c=q, log_a=log_a.unsqueeze(-1))
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.output_gate(u))


def returned(output: Tensor) -> tuple[Tensor, None]:
    """Return the output as the mixer's own forward pass does: with a state, which nothing reads."""
    return output, None


def _values(mixer: Any) -> Tensor:
    """Return the places of v in `qkv_proj`'s output."""
    places = torch.arange(mixer.qkv_proj.out_features).view(mixer.num_attention_heads, -1)
    return places[:, 2 * mixer.head_dim :].flatten()


BLOCK_PARTS = of_hybrids("MiniMax", BlockSparseTop2MLP=replace(GATED, out="w2")) | {"PartialRotation": CONSTANT}
FORM = Form(
    values=lambda mixer, _: ("qkv_proj", _values(mixer)), activation="act_fn", norm="norm", gate_activation="sigmoid"
)
