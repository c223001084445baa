"""Mamba-2 (Dao & Gu 2024): the layers of transformers' model, and of its hybrids.

One recurrence with heads of some width, one decay exp(Δ_{t,h} A_h) per head, B and C shared by groups of heads, and a
gated root-mean-square norm before the output projection.

Bamba (Glorioso et al. 2024; IBM 2024), GraniteMoeHybrid (IBM 2025, Granite 4.0), Nemotron-H (NVIDIA 2025) and Zamba2
(Zyphra, Glorioso et al. 2024) have the same mixers between layers of softmax attention, feed-forward parts and experts,
which the model itself runs. From 5.23 on transformers norms Bamba's and Granite's by groups of channels, before over
all of them; whatever Zamba2's `time_step_limit` says, its steps have a lower bound alone. The slow path of transformers
4.57 sums the states of a Zamba2's chunks over the wrong index, so texts longer than `chunk_size` get other logits there
than on a GPU, or than release 5 and we give them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from einops import rearrange
from torch import Tensor
from torch.nn.functional import softplus
from ssmscope.core.blocks import AS_IS, ATTENTION, FEED_FORWARD, GATED, of_hybrids
from ssmscope.core.forms import Form
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.core.weights import prepared
from ssmscope.layers import parts
from ssmscope.ops import Recurrence

RECORDABLE_TRAINING = ("mamba2",)
_GRANITE = replace(GATED, act="activation", out="output_linear")
_ADAPTED = replace(ATTENTION, frozen=(*ATTENTION.frozen, "linear_q_adapter_list", "linear_k_adapter_list"))
BLOCK_PARTS = {
    **of_hybrids("Bamba"),
    **of_hybrids("GraniteMoeHybrid", MLP=_GRANITE, MoE=replace(_GRANITE, frozen=("router",)), ParallelExperts=AS_IS),
    **of_hybrids("NemotronH", MLP=FEED_FORWARD, Experts=FEED_FORWARD),
    **of_hybrids("Zamba2", Attention=_ADAPTED),
}


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms (Mamba-2, section 7)."""
    unbounded = any(kind.__name__ == "Zamba2MambaMixer" for kind in type(mixer).__mro__)
    limits = (mixer.config.time_step_min, math.inf) if unbounded else mixer.time_step_limit
    return terms(mixer, u, mixer.in_proj(u), limits, mask, state)


def terms(
    mixer: Any, u: Tensor, projected: Tensor, limits: tuple[float, float], mask: Tensor | None, state: LayerState | None
) -> LayerTrace:
    """Return the layer's terms from `in_proj`'s output, z, x, B, C and Δ before its softplus, and perhaps more after
    these; Δ is clamped from limits[0] to limits[1]."""
    mask = parts.as_mask(mask)
    sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
    z, conv_input, step, _ = projected.split([*sizes, projected.shape[-1] - sum(sizes)], dim=-1)
    xBC, around = parts.convolve(
        mixer, conv_input, parts.convolution(mixer, conv_input), mask, state, parts.activation(mixer)
    )
    delta = softplus(parts.at_least_float32(step) + prepared(mixer, _rates)[0])
    delta = delta if tuple(limits) == (0.0, math.inf) else delta.clamp(*limits)
    recurrence = recurrence_of(mixer, parts.at_least_float32(xBC), parts.mask_padding(delta, mask))
    return LayerTrace(u, (recurrence,), mask=mask, z=z, **around)


def recurrence_of(mixer: Any, xBC: Tensor, delta: Tensor) -> Recurrence:
    """Return the layer's recurrence from x, B and C, (batch, length, channels), and Δ, (batch, length, heads)."""
    per_group = mixer.n_groups * mixer.ssm_state_size
    x, B, C = xBC.split([mixer.intermediate_size, per_group, per_group], dim=-1)
    _, A, D = prepared(mixer, _rates)
    return Recurrence(
        x=rearrange(x, "b t (h p) -> b t h p", h=mixer.num_heads),
        b=rearrange(B, "b t (g n) -> b t g n", g=mixer.n_groups),
        c=rearrange(C, "b t (g n) -> b t g n", g=mixer.n_groups),
        delta=delta,
        A=A,
        D=D,
    )


def _rates(mixer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return Δ's bias (heads,), A (heads, 1) and D (heads,)."""
    bias, A_log, D = (parts.at_least_float32(t) for t in (mixer.dt_bias, mixer.A_log, mixer.D))
    return bias, -A_log.exp().unsqueeze(-1), D


FORM = Form(
    values=lambda mixer, _: ("in_proj", slice(mixer.intermediate_size, 2 * mixer.intermediate_size)),
    convolution=lambda mixer, layer: parts.convolution(mixer, layer.conv_input),
    channels=lambda mixer, _: slice(0, mixer.intermediate_size),
    activation=lambda mixer, _: parts.activation(mixer),
    gate=lambda mixer, _: ("in_proj", slice(0, mixer.intermediate_size)),
    gate_first=True,
    norm="norm",
    inner=lambda mixer, layer, y: mixer.norm(y.flatten(2), layer.gate).to(layer.gate.dtype),
)
