"""Falcon-H1 (TII, Zuo et al. 2025): in every layer a Mamba-2 mixer and softmax attention in parallel.

The mixer is Mamba-2's with multipliers on its input and on each part of `in_proj`'s output, and a norm that may be
absent or before the gate. Attention is run by the model itself.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, FalconH1RMSNormGated

from ssmscope.architectures.read.mamba2 import state_after, terms, with_longer_memory
from ssmscope.architectures.read.parts import (
    activation,
    at_least_float32,
    constant,
    convolved_input_map,
    norm_weight,
    opened_by,
    projection,
    rms_factor,
)
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Scan

__all__ = ["state_after"]

MIXERS: tuple[type[nn.Module], ...] = (FalconH1Mixer,)
MODEL_TYPES = ("falcon_h1",)


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms."""
    projected = mixer.in_proj(u * mixer.ssm_in_multiplier) * mixer.mup_vector
    return terms(mixer, u, projected, mixer.time_step_limit, mask, state)


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms: out_proj of RMSNorm(y ⊙ SiLU(z)), RMSNorm(y) ⊙
    SiLU(z) or y ⊙ SiLU(z)."""
    (scanned,) = layer.scan() if scans is None else scans
    y, z = rearrange(scanned.y, "b t h p -> b t (h p)"), _gate_input(layer)
    factor = _norm_factor(mixer, y, z)
    return mixer.out_proj((y * silu(z) if factor is None else y * silu(z) * factor).to(layer.u.dtype))


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, B, C, SiLU, the gate and the norm frozen."""
    u, inner = at_least_float32(layer.u), mixer.intermediate_size
    (scanned,) = layer.scan()
    y, z = rearrange(scanned.y, "b t h p -> b t (h p)"), _gate_input(layer)
    factor, project = _norm_factor(mixer, y, z), projection(mixer, "out_proj")
    output_map = OutputMap(
        lambda v: project(v, False),
        gate=silu(z) if factor is None else silu(z) * factor,
        opening=opened_by(_entering(mixer, slice(0, inner)), silu, z),
        factor=factor,
    )
    enter = _entering(mixer, slice(inner, 2 * inner))
    input_map = convolved_input_map(mixer, layer, activation(mixer), enter, slice(0, inner))
    return LinearizedLayer(u, (Path(layer.recurrence, input_map, output_map),), rest=constant(mixer, "out_proj", u))


def _gate_input(layer: LayerTrace) -> Tensor:
    assert layer.z is not None
    return at_least_float32(layer.z)


def _norm_factor(mixer: nn.Module, y: Tensor, z: Tensor) -> Tensor | None:
    """Return the norm's factor at `y` and `z` (batch, length, channels); None without a norm."""
    if not mixer.mamba_rms_norm:
        return None
    norm = mixer.norm
    normed = y if norm.norm_before_gate else y * silu(z)
    factor = rms_factor(normed, norm.variance_epsilon, y.shape[-1] // norm.n_groups)
    return factor * norm_weight(mixer, "norm", FalconH1RMSNormGated)


def _entering(mixer: nn.Module, rows: slice):
    """Return a map of the layer's input to `rows` of `in_proj`'s outputs with their multipliers."""
    enter, multipliers = projection(mixer, "in_proj", rows), mixer.mup_vector[..., rows]
    return lambda u, biased: enter(u * mixer.ssm_in_multiplier, biased) * multipliers


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=2, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, mamba_n_heads=6, mamba_d_head=8, mamba_d_ssm=48)
    scales = dict(ssm_multipliers=[0.7, 1.2, 0.9, 1.1, 0.8], ssm_in_multiplier=1.3, lm_head_multiplier=0.5)
    small = dict(**sizes, **heads, **scales, mamba_d_state=6, mamba_n_groups=2, mamba_chunk_size=8)
    each = {
        "falcon_h1": dict(mamba_rms_norm=False),
        "falcon_h1-gate-then-norm": dict(mamba_rms_norm=True, mamba_norm_before_gate=False),
        "falcon_h1-norm-then-gate": dict(mamba_rms_norm=True, mamba_norm_before_gate=True),
    }
    models = {name: FalconH1ForCausalLM(FalconH1Config(**small, **more)) for name, more in each.items()}
    return {name: with_longer_memory(module) for name, module in models.items()}
