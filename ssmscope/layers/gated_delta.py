"""Gated delta rule of other libraries' hybrids: Qwen3-Next (Qwen 2025), Qwen3.5 and its kin (Lara-mini, Qwen4-Exp),
OLMo-hybrid (Ai2 2026), and Kimi's delta attention (Kimi Linear, Zhang et al. 2025; Ling 3.0).

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t / √d,

q, k and v after a convolution and SiLU, q and k divided by √(‖·‖² + 10⁻⁶), α_t = exp(−e^A softplus(a_t + b)) and β_t =
σ(b_t), once per head of values; several of these may read one head of keys. Each head's o_t is normalised by its root
mean square, gated by SiLU(z_t), and projected. The rule is that of `delta`.

Qwen3-Next has one projection for q, k, v and z, one head of keys after another, Qwen3.5 others for z, β and α, and
OLMo-hybrid one for every term; its β is up to 2, which makes eigenvalues of the transition negative, where
`linear_allow_neg_eigval` is set. Kimi's has a decay per channel of the keys, α_t = exp(−e^A softplus(a_t + b)), or one
with a lower bound, exp(m σ(e^A (a_t + b))) with m < 0, and gates by σ(z_t), as some Qwen4-Exp do; a_t and z_t are W₂ W₁
x_t, in Ling 3.0 W x_t. Attention, experts and hyper-connections are run by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.activations import ACT2FN
from ssmscope.core.affine import innermost
from ssmscope.core.blocks import CONSTANT, EXPERTS, LATENT, UNREAD, of_hybrids
from ssmscope.core.forms import Form
from ssmscope.core.growth import GrowthLimit, gates_at_most_one
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import parts
from ssmscope.ops import DeltaRecurrence

UNIT_EPSILON = 1e-6
"""ε under the root of the length of q and k, as in transformers and flash-linear-attention."""


class Projected(NamedTuple):
    """Projections of a mixer's input: `qkv` (batch, length, 2 · key + value sizes), `z` (batch, length, value size),
    `a` (batch, length, heads or channels), from which α is computed, and β, `beta` (batch, length, heads)."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    beta: Tensor


def _is_kimi(mixer: Any) -> bool:
    return hasattr(mixer, "forget_gate")


def _projected(mixer: Any, u: Tensor) -> Projected:
    if hasattr(mixer, "in_proj_qkvz"):  # Qwen3-Next
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(u), mixer.in_proj_ba(u))
        return Projected(torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1), z.flatten(2), a, b.sigmoid())
    if hasattr(mixer, "in_proj_qkv"):  # Qwen3.5
        return Projected(mixer.in_proj_qkv(u), mixer.in_proj_z(u), mixer.in_proj_a(u), mixer.in_proj_b(u).sigmoid())
    qkv = torch.cat([mixer.q_proj(u), mixer.k_proj(u), mixer.v_proj(u)], dim=-1)
    if _is_kimi(mixer):
        forget = mixer.forget_gate
        a = forget.f_proj(u) if hasattr(forget, "f_proj") else forget.f_b_proj(forget.f_a_proj(u))
        z = mixer.g_proj(u) if hasattr(mixer, "g_proj") else mixer.g_b_proj(mixer.g_a_proj(u))
        return Projected(qkv, z, a, mixer.b_proj(u).sigmoid())
    beta = mixer.b_proj(u).sigmoid() * (2.0 if mixer.allow_neg_eigval else 1.0)
    return Projected(qkv, mixer.g_proj(u), mixer.a_proj(u), beta)


def _entering(mixer: Any) -> list[Callable[[Tensor, bool], Tensor]]:
    """Return the maps of the layer's input to v and, unless that is a product of two, to z."""
    if hasattr(mixer, "in_proj_qkvz"):
        each = mixer.num_v_heads // mixer.num_k_heads * mixer.head_v_dim
        places = torch.arange(mixer.in_proj_qkvz.out_features).view(mixer.num_k_heads, -1)
        rows = places[:, -2 * each : -each].flatten(), places[:, -each:].flatten()
        return [parts.projection(mixer, "in_proj_qkvz", each) for each in rows]
    if hasattr(mixer, "in_proj_qkv"):
        values = parts.projection(mixer, "in_proj_qkv", slice(2 * mixer.key_dim, None))
        return [values, parts.projection(mixer, "in_proj_z")]
    return [parts.projection(mixer, name) for name in ("v_proj", "g_proj") if hasattr(mixer, name)]


def _named(mixer: Any) -> tuple[str, str]:
    """Return the names of a mixer's norm and output projection."""
    return ("o_norm", "o_proj") if hasattr(mixer, "o_norm") else ("norm", "out_proj")


_SHARED = replace(EXPERTS, frozen=("gate", "shared_expert_gate"))
BLOCK_PARTS = {
    **of_hybrids("Qwen3Next", SparseMoeBlock=_SHARED),
    **of_hybrids("Qwen3_5", "Qwen3_5Moe", TextRotaryEmbedding=CONSTANT, SparseMoeBlock=_SHARED),
    **of_hybrids("Qwen4ExpText", SparseMoeBlock=_SHARED, GatedResidual=UNREAD),
    **of_hybrids("LaraMini", "OlmoHybrid"),
    **of_hybrids("KimiLinear", Attention=LATENT),
    **of_hybrids("BailingHybrid", Attention=replace(LATENT, frozen=(*LATENT.frozen, "g_proj"))),
}


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms. At padding nothing is exchanged."""
    mask, projected = parts.as_mask(mask), _projected(mixer, u)
    qkv, act = projected.qkv, parts.activation(mixer, silu)
    convolved, around = parts.convolve(mixer, qkv, parts.convolution(mixer, qkv), mask, state, act)
    rates = mixer.forget_gate if _is_kimi(mixer) else mixer
    sizes = [mixer.qkv_dim] * 3 if _is_kimi(mixer) else [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    key, value = [mixer.head_dim] * 2 if _is_kimi(mixer) else [mixer.head_k_dim, mixer.head_v_dim]
    q, k, v = parts.at_least_float32(convolved).split(sizes, dim=-1)
    q, k = (unit(rearrange(t, "b t (h n) -> b t h n", n=key)) for t in (q, k))
    rate = parts.at_least_float32(rates.A_log).exp().flatten()
    step = parts.at_least_float32(projected.a) + parts.at_least_float32(rates.dt_bias)
    log_a = _log_decay(rates, rearrange(step, "b t (h n) -> b t h n", h=len(rate)), rate.unsqueeze(-1))
    recurrence = DeltaRecurrence(
        x=rearrange(v, "b t (h p) -> b t h p", p=value),
        b=k,
        c=q * key**-0.5,
        log_a=parts.mask_padding(log_a, mask),
        beta=parts.at_least_float32(projected.beta),
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=projected.z, **around)


def growth_limit(mixer: nn.Module, layer: LayerTrace, recurrence: DeltaRecurrence) -> GrowthLimit:
    """Return the limit of the rule's transitions α (I − β k kᵀ), at most 1 since α ≤ 1, ‖k‖ ≤ 1 and 0 ≤ β ≤ 2."""
    return gates_at_most_one(recurrence)


def _log_decay(rates: Any, step: Tensor, rate: Tensor) -> Tensor:
    """Return ln α = −e^A softplus(a + b), or m σ(e^A (a + b)) with a lower bound m, from a + b and e^A."""
    bound = rates.lower_bound if getattr(rates, "safe_gate", False) else getattr(rates, "safe_gate_lower_bound", None)
    return -rate * softplus(step) if bound is None else bound * torch.sigmoid(rate * step)


def unit(t: Tensor, eps: float = UNIT_EPSILON) -> Tensor:
    """Return t / √(‖t‖² + eps) over the last dimension."""
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps)


def _inner(mixer: Any, layer: LayerTrace, y: Tensor) -> Tensor:
    """Return norm(o) ⊙ SiLU(z), or with σ(z), which the mixer's norm computes."""
    z = layer.gate.unflatten(-1, y.shape[2:])
    return getattr(mixer, _named(mixer)[0])(y.to(z.dtype), z).flatten(2)


FORM = Form(
    values=lambda mixer, _: _entering(mixer)[0],
    convolution=lambda mixer, layer: parts.convolution(mixer, layer.conv_input),
    channels=lambda mixer, layer: slice(-layer.gate.shape[-1], None),
    activation=lambda mixer, _: parts.activation(mixer, silu),
    norm=lambda mixer, _: _named(mixer)[0],
    gate=lambda mixer, _: _entering(mixer)[1],
    gate_activation=lambda mixer, _: ACT2FN[getattr(innermost(getattr(mixer, _named(mixer)[0])), "activation", "silu")],
    out=lambda mixer, _: _named(mixer)[1],
    inner=_inner,
)
