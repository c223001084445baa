"""Kimi-Linear (Zhang et al. 2025): layers of the delta rule with a decay per channel of the keys, between them latent
softmax attention, and experts after most.

    S_t = S_{t−1} Diag(α_t) (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t / √d,

q, k and v after a convolution and SiLU, q and k divided by √(‖·‖² + 10⁻⁶), α_t = exp(−e^A softplus(W₂ W₁ x_t + b)) and
β_t = σ(W_β x_t). Each head's o_t is normalised by its root mean square, gated by σ(z_t), and projected. Attention and
experts are run by the model itself.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

from ssmscope.architectures.read.gated_delta import output as output
from ssmscope.architectures.read.gated_delta import unit
from ssmscope.architectures.read.parts import (
    activation,
    as_mask,
    at_least_float32,
    convolution,
    convolve,
    convolved_input_map,
    mask_padding,
    norm_weight,
    one_path,
    projection,
    rms_factor,
)
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import DeltaRecurrence


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    mask, gate = as_mask(mask), mixer.forget_gate
    qkv = torch.cat([mixer.q_proj(u), mixer.k_proj(u), mixer.v_proj(u)], dim=-1)
    convolved, around = convolve(mixer, qkv, convolution(mixer, qkv), mask, state, activation(mixer))
    q, k, v = rearrange(at_least_float32(convolved), "b t (three h p) -> three b t h p", three=3, p=mixer.head_dim)
    step = softplus(at_least_float32(gate.f_b_proj(gate.f_a_proj(u))) + at_least_float32(gate.dt_bias))
    step = rearrange(step, "b t (h p) -> b t h p", p=mixer.head_dim)
    recurrence = DeltaRecurrence(
        x=v,
        b=unit(k),
        c=unit(q) * mixer.head_dim**-0.5,
        log_a=mask_padding(-at_least_float32(gate.A_log).exp() * step, mask),
        beta=at_least_float32(torch.sigmoid(mixer.b_proj(u))),
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.g_b_proj(mixer.g_a_proj(u)), **around)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map of v with q, k, β, decays, SiLU, the gate and the norms of its heads frozen."""
    (scanned,) = layer.scan()
    factor = rms_factor(scanned.y, mixer.o_norm.variance_epsilon) * norm_weight(mixer, "o_norm", KimiLinearRMSNormGated)
    gate = torch.sigmoid(at_least_float32(layer.gate)) * rearrange(factor, "b t h p -> b t (h p)")
    values = slice(2 * mixer.qkv_dim, None)
    input_map = convolved_input_map(mixer, layer, activation(mixer), projection(mixer, "v_proj"), values)
    return one_path(mixer, layer, input_map, gate, "o_proj")
