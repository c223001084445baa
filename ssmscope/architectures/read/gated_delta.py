"""Gated delta rule of other libraries' hybrids; the rule is that of `delta`.

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t / √d,

q, k and v after a convolution and SiLU, q and k divided by √(‖·‖² + 10⁻⁶), α_t = exp(−e^A softplus(a_t + b)) and β_t =
σ(b_t), once per head of values; several of these may read one head of keys. Each head's o_t is normalised by its root
mean square, gated by SiLU(z_t), and projected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from ssmscope.architectures.read.parts import (
    activation,
    as_mask,
    at_least_float32,
    constant,
    convolution,
    convolve,
    convolved_input_map,
    mask_padding,
    norm_weight,
    opened_by,
    projection,
    rms_factor,
)
from ssmscope.core.affine import innermost
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import DeltaRecurrence, Scan

UNIT_EPSILON = 1e-6
"""ε under the root of the length of q and k, as in transformers and flash-linear-attention."""


class Projected(NamedTuple):
    """Projections of a mixer's input: `qkv` (batch, length, 2 · key + value sizes), `z` (batch, length, value size),
    `a` (batch, length, heads), from which α is computed, and β, `beta` (batch, length, heads)."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    beta: Tensor


def terms(
    mixer: nn.Module, u: Tensor, projected: Projected, mask: Tensor | None, state: LayerState | None
) -> LayerTrace:
    """The layer's terms from its input `u` (batch, length, width) and projections. At padding nothing is exchanged."""
    mask = as_mask(mask)
    qkv, act = projected.qkv, activation(mixer, silu)
    convolved, around = convolve(mixer, qkv, convolution(mixer, qkv), mask, state, act)
    q, k, v = at_least_float32(convolved).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    q, k = (unit(rearrange(t, "b t (h n) -> b t h n", n=mixer.head_k_dim)) for t in (q, k))
    step = softplus(at_least_float32(projected.a) + at_least_float32(mixer.dt_bias))
    log_a = mask_padding(-at_least_float32(mixer.A_log).exp() * step, mask)
    recurrence = DeltaRecurrence(
        x=rearrange(v, "b t (h p) -> b t h p", p=mixer.head_v_dim),
        b=k,
        c=q * mixer.head_k_dim**-0.5,
        log_a=log_a.unsqueeze(-1),
        beta=at_least_float32(projected.beta),
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=projected.z, **around)


def unit(t: Tensor, eps: float = UNIT_EPSILON) -> Tensor:
    """Return t / √(‖t‖² + eps) over the last dimension."""
    return t * torch.rsqrt(t.square().sum(-1, keepdim=True) + eps)


def output_through(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None, norm: str, out: str) -> Tensor:
    """Return the mixer's output (batch, length, width) by its modules of these names: W_O (norm(o) ⊙ SiLU(z))."""
    (scanned,) = layer.scan() if scans is None else scans
    assert layer.z is not None
    z = rearrange(layer.z, "b t (h p) -> b t h p", p=scanned.y.shape[-1])
    normed = getattr(mixer, norm)(scanned.y.to(layer.z.dtype), z)
    return getattr(mixer, out)(rearrange(normed, "b t h p -> b t (h p)"))


def linearized_through(
    mixer: nn.Module,
    layer: LayerTrace,
    enter: Callable[[Tensor, bool], Tensor],
    enter_gate: Callable[[Tensor, bool], Tensor],
    norm: str,
    out: str,
) -> LinearizedLayer:
    """Return the layer as a linear map with q, k, β, decays, SiLU, the gate and the norms of its heads
    frozen; `enter` maps the layer's input to v, `enter_gate` to z."""
    u = at_least_float32(layer.u)
    (scanned,) = layer.scan()
    assert layer.z is not None
    z, kind = at_least_float32(layer.z), type(innermost(getattr(mixer, norm)))
    factor = rms_factor(scanned.y, getattr(mixer, norm).variance_epsilon) * norm_weight(mixer, norm, kind)
    factor = rearrange(factor, "b t h p -> b t (h p)")
    project = projection(mixer, out)
    output_map = OutputMap(
        lambda v: project(v, False), gate=factor * silu(z), opening=opened_by(enter_gate, silu, z), factor=factor
    )
    input_map = convolved_input_map(mixer, layer, activation(mixer, silu), enter, slice(2 * mixer.key_dim, None))
    return LinearizedLayer(u, (Path(layer.recurrence, input_map, output_map),), rest=constant(mixer, out, u))
