"""Mamba (Gu & Dao 2023), Falcon-Mamba, Jamba and Zamba: the layers of transformers' models.

One recurrence with a head of width 1 per channel: Δ, B, C come from the convolved input, the decay of state n of
channel d is exp(Δ_{t,d} A_{d,n}). Falcon-Mamba normalises Δ's low-rank input, B and C by their root mean square, and
Jamba (AI21, Lieber et al. 2024) has norms there. In Zamba (Zyphra, Glorioso et al. 2024) Δ, B and C of each head come
from that head's channels alone, and x and z are interleaved in `in_proj`'s output. Attention and experts between such
layers are run by the model itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import rms_norm, softplus
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from ssmscope.core.blocks import EXPERTS, of_hybrids
from ssmscope.core.forms import Form
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.core.weights import prepared
from ssmscope.layers import parts
from ssmscope.ops import Recurrence


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms (Mamba, Algorithm 2)."""
    mask, projected = parts.as_mask(mask), mixer.in_proj(u)
    if hasattr(mixer, "x_proj_weight"):
        conv_input, z = (projected[..., rows] for rows in _rows(mixer))
    else:  # Contiguous halves, whose gradients are joined without filling up each with zeros.
        conv_input, z = projected.chunk(2, dim=-1)
    x, around = parts.convolve(
        mixer, conv_input, parts.convolution(mixer, conv_input), mask, state, parts.activation(mixer)
    )
    step, B, C = _head_terms(mixer, x) if hasattr(mixer, "x_proj_weight") else _channel_terms(mixer, x)
    A, D = prepared(mixer, _rates)
    recurrence = Recurrence(
        x=parts.at_least_float32(x).unsqueeze(-1),
        b=parts.at_least_float32(B),
        c=parts.at_least_float32(C),
        delta=parts.mask_padding(softplus(parts.at_least_float32(step)), mask),
        A=A,
        D=D,
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=z, **around)


def _rates(mixer: Any) -> tuple[Tensor, Tensor]:
    """Return A (channels, state) and D (channels,)."""
    A = -parts.at_least_float32(mixer.A_log).exp()
    return A.flatten(0, -2), parts.at_least_float32(mixer.D).flatten()


def _rows(mixer: Any) -> tuple[slice, slice]:
    """Return the outputs of `in_proj` that are the recurrence's input, and its gate."""
    if hasattr(mixer, "x_proj_weight"):
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, mixer.intermediate_size), slice(mixer.intermediate_size, None)


def _sizes(mixer: Any) -> list[int]:
    return [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]


def _channel_terms(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Δ before its softplus (batch, length, channels), and B and C (batch, length, 1, state)."""
    made = mixer.x_proj(x)
    step, B, C = made.split(_sizes(mixer), dim=-1)
    if hasattr(mixer, "dt_layernorm"):  # Jamba has these and, in transformers 5, Falcon-Mamba.
        step, B, C = mixer.dt_layernorm(step), mixer.b_layernorm(B), mixer.c_layernorm(C)
    elif isinstance(mixer, FalconMambaMixer):
        step, B, C = (_unit_rms(t, mixer.rms_eps) for t in (step, B, C))
    else:
        B, C = parts.at_least_float32(made[..., step.shape[-1] :]).chunk(2, dim=-1)
    return parts.step_projection(mixer, step), B.unsqueeze(2), C.unsqueeze(2)


def _head_terms(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms as `_channel_terms`, B and C (batch, length, heads, state), for weights per head."""
    by_head = rearrange(x, "b t (h p) -> b t h p", h=mixer.n_mamba_heads)
    made = einsum(by_head, mixer.x_proj_weight, "b t h p, h n p -> b t h n")
    step, B, C = made.split(_sizes(mixer), dim=-1)
    delta = einsum(step, mixer.dt_proj_weight, "b t h n, h p n -> b t h p") + mixer.dt_proj_bias
    return rearrange(delta, "b t h p -> b t (h p)"), B, C


BLOCK_PARTS = of_hybrids("Jamba", SparseMoeBlock=replace(EXPERTS, frozen=("router",))) | of_hybrids("Zamba")
FORM = Form(
    values=lambda mixer, _: ("in_proj", _rows(mixer)[0]),
    convolution=lambda mixer, layer: parts.convolution(mixer, layer.conv_input),
    activation=lambda mixer, _: parts.activation(mixer),
    gate=lambda mixer, _: ("in_proj", _rows(mixer)[1]),
    gate_activation=lambda mixer, _: parts.gate_activation(mixer),
)


def _unit_rms(t: Tensor, eps: float) -> Tensor:
    return rms_norm(parts.at_least_float32(t), t.shape[-1:], eps=eps).to(t.dtype)
