"""Falcon-H1 (TII, Zuo et al. 2025): in every layer a Mamba-2 mixer and softmax attention in parallel.

The mixer is Mamba-2's with multipliers on its input and on each part of `in_proj`'s output, and a norm that may be
absent or before the gate. Attention is run by the model itself.
"""

from __future__ import annotations

from typing import Any

from einops import rearrange
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

from ssmscope.architectures.read import parts
from ssmscope.architectures.read.mamba2 import terms
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Scan


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    projected = mixer.in_proj(u * mixer.ssm_in_multiplier) * mixer.mup_vector
    return terms(mixer, u, projected, mixer.time_step_limit, mask, state)


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms: out_proj of RMSNorm(y ⊙ SiLU(z)), RMSNorm(y) ⊙
    SiLU(z) or y ⊙ SiLU(z)."""
    (scanned,) = layer.scan() if scans is None else scans
    y, z = rearrange(scanned.y, "b t h p -> b t (h p)"), parts.at_least_float32(layer.gate)
    factor = _norm_factor(mixer, y, z)
    return mixer.out_proj((y * silu(z) if factor is None else y * silu(z) * factor).to(layer.u.dtype))


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, B, C, SiLU, the gate and the norm frozen."""
    inner, (scanned,) = mixer.intermediate_size, layer.scan()
    y, z = rearrange(scanned.y, "b t h p -> b t (h p)"), parts.at_least_float32(layer.gate)
    factor, gate_map = _norm_factor(mixer, y, z), parts.opened_by(_entering(mixer, slice(0, inner)), silu, z)
    gate, enter = silu(z) if factor is None else silu(z) * factor, _entering(mixer, slice(inner, 2 * inner))
    input_map = parts.convolved_input_map(mixer, layer, parts.activation(mixer), enter, slice(0, inner))
    return parts.one_path(mixer, layer, input_map, gate, gate_map=gate_map, factor=factor)


def _norm_factor(mixer: Any, y: Tensor, z: Tensor) -> Tensor | None:
    """Return the norm's factor at `y` and `z` (batch, length, channels); None without a norm."""
    if not mixer.mamba_rms_norm:
        return None
    norm = mixer.norm
    normed = y if norm.norm_before_gate else y * silu(z)
    factor = parts.rms_factor(normed, norm.variance_epsilon, y.shape[-1] // norm.n_groups)
    return factor * parts.norm_weight(mixer, "norm", FalconH1RMSNormGated)


def _entering(mixer: Any, rows: slice):
    """Return a map of the layer's input to `rows` of `in_proj`'s outputs with their multipliers."""
    enter, multipliers = parts.projection(mixer, "in_proj", rows), mixer.mup_vector[..., rows]
    return lambda u, biased: enter(u * mixer.ssm_in_multiplier, biased) * multipliers
