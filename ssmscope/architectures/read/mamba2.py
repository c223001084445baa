"""Mamba-2 (Dao & Gu 2024): the layers of transformers' model.

One recurrence with heads of some width, one decay exp(Δ_{t,h} A_h) per head, B and C shared by groups of heads, and a
gated root-mean-square norm before the output projection.
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from ssmscope.architectures.read.parts import (
    activation,
    as_mask,
    at_least_float32,
    constant,
    convolution,
    convolve,
    convolved_input_map,
    gated_norm_weight,
    mask_padding,
    opened_by,
    projection,
    rms_factor,
    state_after,
)
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Recurrence, Scan

__all__ = ["state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Mamba2Mixer,)
MODEL_TYPES = ("mamba2", "mamba2attn")


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms (Mamba-2, section 7)."""
    return terms(mixer, u, mixer.in_proj(u), mixer.time_step_limit, mask, state)


def terms(
    mixer: nn.Module,
    u: Tensor,
    projected: Tensor,
    limits: tuple[float, float],
    mask: Tensor | None,
    state: LayerState | None,
) -> LayerTrace:
    """Return the layer's terms from `in_proj`'s output, z, x, B, C and Δ before its softplus, and perhaps more after
    these; Δ is clamped from limits[0] to limits[1]."""
    mask = as_mask(mask)
    sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
    z, conv_input, step, _ = projected.split([*sizes, projected.shape[-1] - sum(sizes)], dim=-1)
    xBC, around = convolve(mixer, conv_input, convolution(mixer, conv_input), mask, state, activation(mixer))
    delta = softplus(at_least_float32(step) + at_least_float32(mixer.dt_bias)).clamp(*limits)
    recurrence = recurrence_of(mixer, at_least_float32(xBC), mask_padding(delta, mask))
    return LayerTrace(u, (recurrence,), mask=mask, z=z, **around)


def recurrence_of(mixer: nn.Module, xBC: Tensor, delta: Tensor) -> Recurrence:
    """Return the layer's recurrence from x, B and C, (batch, length, channels), and Δ, (batch, length, heads)."""
    per_group = mixer.n_groups * mixer.ssm_state_size
    x, B, C = xBC.split([mixer.intermediate_size, per_group, per_group], dim=-1)
    return Recurrence(
        x=rearrange(x, "b t (h p) -> b t h p", h=mixer.num_heads),
        b=rearrange(B, "b t (g n) -> b t g n", g=mixer.n_groups),
        c=rearrange(C, "b t (g n) -> b t g n", g=mixer.n_groups),
        delta=delta,
        A=-at_least_float32(mixer.A_log).exp().unsqueeze(-1),
        D=at_least_float32(mixer.D),
    )


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms: out_proj(RMSNorm(y ⊙ SiLU(z)))."""
    (scanned,) = layer.scan() if scans is None else scans
    assert layer.z is not None
    y = rearrange(scanned.y, "b t h p -> b t (h p)")
    return mixer.out_proj(mixer.norm(y, layer.z).to(layer.z.dtype))


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, B, C, SiLU, the gate and the norm frozen."""
    u = at_least_float32(layer.u)
    (scanned,) = layer.scan()
    path = Path(layer.recurrence, input_map(mixer, layer), output_map(mixer, layer, scanned.y))
    return LinearizedLayer(u, (path,), rest=constant(mixer, "out_proj", u))


def input_map(mixer: nn.Module, layer: LayerTrace) -> InputMap:
    """Return the map from the layer's input to its recurrence's."""
    inner = mixer.intermediate_size
    enter = projection(mixer, "in_proj", slice(inner, 2 * inner))
    return convolved_input_map(mixer, layer, activation(mixer), enter, slice(0, inner))


def output_map(mixer: nn.Module, layer: LayerTrace, y: Tensor) -> OutputMap:
    """Return the map from the recurrence's output to the layer's, with the norm's factor frozen at `y` (batch, length,
    heads, width)."""
    assert layer.z is not None
    norm, project = mixer.norm, projection(mixer, "out_proj")
    z = at_least_float32(layer.z)
    opened, opening = silu(z), opened_by(projection(mixer, "in_proj", slice(0, mixer.intermediate_size)), silu, z)
    size = getattr(norm, "group_size", None)  # transformers before 5 has one group.
    factor = rms_factor(rearrange(y, "b t h p -> b t (h p)") * opened, norm.variance_epsilon, size)
    factor = factor * gated_norm_weight(mixer)
    return OutputMap(lambda v: project(v, False), gate=opened * factor, opening=opening, factor=factor)


def with_longer_memory(module: nn.Module) -> nn.Module:
    """Give a random hybrid steps like those of Mamba and Mamba-2; as initialised most layers forget within one."""
    for name, parameter in module.named_parameters():
        if name.endswith(("dt_bias", "dt_proj.bias")):
            parameter.data.uniform_(-5.0, -2.0)
    return module


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    from ssmscope.architectures.read.mamba2attn import Mamba2AttnConfig, Mamba2AttnForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, state_size=6, num_hidden_layers=2)
    sizes |= dict(expand=2, conv_kernel=4, chunk_size=8)
    hybrid = dict(sizes, num_hidden_layers=3, num_heads=6, head_dim=8, n_groups=1, initializer_range=0.1)
    options = dict(num_heads=4, num_heads_kv=2, head_dim=8, causal=True, d_conv=4, rotary_emb_dim=4)
    attention = Mamba2AttnConfig(**hybrid, attn_layer_idx=[1], attn_cfg=options, d_intermediate=16)
    return {
        "mamba2": Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=6, head_dim=8, n_groups=2)),
        "mamba2-one-group": Mamba2ForCausalLM(
            Mamba2Config(**sizes, num_heads=4, head_dim=12, n_groups=1, use_bias=True, time_step_limit=(0.01, 0.2))
        ),
        "mamba2attn": with_longer_memory(Mamba2AttnForCausalLM(attention)),
    }
