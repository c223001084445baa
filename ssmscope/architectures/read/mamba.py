"""Mamba (Gu & Dao 2023) and Falcon-Mamba: the layers of transformers' models.

One recurrence with a head of width 1 per channel: Δ, B, C come from the convolved input, the decay of state n of
channel d is exp(Δ_{t,d} A_{d,n}). Falcon-Mamba normalises Δ's low-rank input, B and C by their root mean square.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import rms_norm, softplus
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer

from ssmscope.architectures.read.parts import (
    activation,
    as_mask,
    at_least_float32,
    constant,
    convolution,
    convolve,
    convolved_input_map,
    gate_activation,
    mask_padding,
    opened_by,
    projection,
    state_after,
    step_projection,
)
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Recurrence, Scan

__all__ = ["state_after"]

MIXERS: tuple[type[nn.Module], ...] = (MambaMixer, FalconMambaMixer)
MODEL_TYPES = ("mamba", "falcon_mamba")


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms (Mamba, Algorithm 2)."""
    mask = as_mask(mask)
    conv_input, z = mixer.in_proj(u).chunk(2, dim=-1)
    x, around = convolve(mixer, conv_input, convolution(mixer, conv_input), mask, state, activation(mixer))
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    step, B, C = mixer.x_proj(x).split(sizes, dim=-1)
    if hasattr(mixer, "dt_layernorm"):  # Jamba has these and, in transformers 5, Falcon-Mamba.
        step, B, C = mixer.dt_layernorm(step), mixer.b_layernorm(B), mixer.c_layernorm(C)
    elif isinstance(mixer, FalconMambaMixer):
        step, B, C = (_unit_rms(t, mixer.rms_eps) for t in (step, B, C))
    delta = mask_padding(softplus(at_least_float32(step_projection(mixer, step))), mask)
    recurrence = Recurrence(
        x=at_least_float32(x).unsqueeze(-1),
        b=at_least_float32(B).unsqueeze(2),
        c=at_least_float32(C).unsqueeze(2),
        delta=delta,
        A=-at_least_float32(mixer.A_log).exp(),
        D=at_least_float32(mixer.D),
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=z, **around)


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms: out_proj(y ⊙ SiLU(z))."""
    (scanned,) = layer.scan() if scans is None else scans
    assert layer.z is not None
    return mixer.out_proj(scanned.y.squeeze(-1).to(layer.z.dtype) * gate_activation(mixer)(layer.z))


def linearized(
    mixer: nn.Module, layer: LayerTrace, x_rows: slice | None = None, z_rows: slice | None = None
) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, B, C, SiLU and the gate frozen; see `input_map` and `output_map`."""
    u = at_least_float32(layer.u)
    path = Path(layer.recurrence, input_map(mixer, layer, x_rows), output_map(mixer, layer, rows=z_rows))
    return LinearizedLayer(u, (path,), rest=constant(mixer, "out_proj", u))


def input_map(mixer: nn.Module, layer: LayerTrace, rows: slice | None = None) -> InputMap:
    """Return the map from the layer's input to its recurrence's, `rows` of `in_proj`, by default the first half."""
    enter = projection(mixer, "in_proj", rows or slice(0, mixer.intermediate_size))
    return convolved_input_map(mixer, layer, activation(mixer), enter)


def output_map(mixer: nn.Module, layer: LayerTrace, y: Tensor | None = None, rows: slice | None = None) -> OutputMap:
    """Return the map from the recurrence's output to the layer's, z being `rows` of `in_proj`, by default the second
    half. It does not depend on `y`."""
    assert layer.z is not None
    project, z = projection(mixer, "out_proj"), at_least_float32(layer.z)
    enter = projection(mixer, "in_proj", rows or slice(mixer.intermediate_size, None))
    act = gate_activation(mixer)
    return OutputMap(lambda v: project(v, False), gate=act(z), opening=opened_by(enter, act, z))


def _unit_rms(t: Tensor, eps: float) -> Tensor:
    return rms_norm(at_least_float32(t), t.shape[-1:], eps=eps).to(t.dtype)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, state_size=5, num_hidden_layers=2)
    sizes |= dict(expand=2, conv_kernel=4, time_step_rank=3)
    return {
        "mamba": MambaForCausalLM(MambaConfig(**sizes)),
        "mamba-with-biases": MambaForCausalLM(MambaConfig(**{**sizes, "use_bias": True, "conv_kernel": 3})),
        "falcon-mamba": FalconMambaForCausalLM(FalconMambaConfig(**sizes)),
    }
