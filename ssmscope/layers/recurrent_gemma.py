"""RecurrentGemma (Google 2024; Griffin, De et al. 2024): two blocks of RG-LRU, one of local attention, repeated.

A channel of RG-LRU has a state of one number, h_t = a_t h_{t−1} + √(1 − a_t²) i_t x_t, a_t = e^{−8 r_t softplus(Λ)},
with gates r and i of its own head's channels, and x after a convolution without an activation (Griffin, Eqs. 1 to 4).
At a text's first token the root is 1. Attention is run by the model itself. Transformers 4.57 keeps its keys and values
out of reach, so that runs do not continue from states there.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as library
from ssmscope.core.affine import depthwise
from ssmscope.core.blocks import ATTENTION, GATED, of_hybrids
from ssmscope.core.forms import Form, named
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import parts
from ssmscope.ops import Recurrence


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    # Transformers 4.57 passes the mask of attention.
    mask = parts.as_mask(mask) if mask is None or mask.ndim == 2 else None
    conv_input = mixer.linear_x(u)
    kernel = depthwise(mixer.conv_1d, conv_input.shape[-1], mixer.conv1d_width, named(mixer, "conv_1d"))
    convolved, around = parts.convolve(mixer, conv_input, kernel, mask, state)
    x = parts.at_least_float32(convolved)
    log_a = -8.0 * _gate(mixer, x, "recurrent_gate") * softplus(parts.at_least_float32(mixer.rg_lru.recurrent_param))
    root = library.SqrtBoundDerivative.apply(1 - torch.exp(2 * log_a))  # The library's own is not expm1 either.
    if state is None:
        real = torch.ones(u.shape[:2], dtype=torch.bool, device=u.device) if mask is None else mask
        root = torch.where((real & (real.cumsum(1) == 1)).unsqueeze(-1), 1.0, root)
    b = parts.mask_padding(_gate(mixer, x, "input_gate") * root, mask).unsqueeze(-1)
    log_a = parts.mask_padding(log_a, mask).unsqueeze(-1)
    recurrence = Recurrence(x=x.unsqueeze(-1), b=b, c=torch.ones_like(b), log_a=log_a)
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.linear_y(u), **around)


def _gate(mixer: Any, x: Tensor, name: str) -> Tensor:
    """Return σ(W x + b) of each head's own channels, (batch, length, channels)."""
    weight, bias = (parts.at_least_float32(getattr(mixer.rg_lru, f"{name}_{each}")) for each in ("weight", "bias"))
    by_head = rearrange(x, "b t (h p) -> b t h p", h=len(weight))
    made = einsum(by_head, weight, "b t h p, h p q -> b t h q") + bias
    return torch.sigmoid(rearrange(made, "b t h q -> b t (h q)"))


SOFT_CAP = "logits_soft_cap"
BLOCK_PARTS = of_hybrids("RecurrentGemma", SdpaAttention=ATTENTION, Mlp=GATED)
FORM = Form(values="linear_x", convolution="conv_1d", gate="linear_y", gate_activation="act_fn", out="linear_out")


def returned(output: Tensor) -> Tensor | tuple[Tensor, None]:
    """Return the output in the form of the mixer's own forward pass."""
    return (output, None) if hasattr(library, "RecurrentGemmaAttention") else output
