"""Zamba (Zyphra, Glorioso et al. 2024): Mamba's mixers in several heads, and one attention layer shared by many depths.

A Zamba mixer is Mamba's with Δ, B and C of each head computed from that head's channels alone, and with x and z
interleaved in `in_proj`'s output. The attention layer is run by the model itself.
"""

from __future__ import annotations

from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.models.zamba.modeling_zamba import ZambaMambaMixer

from ssmscope.architectures.read import mamba
from ssmscope.architectures.read.mamba import output, state_after
from ssmscope.architectures.read.parts import (
    activation,
    as_mask,
    at_least_float32,
    convolution,
    convolve,
    mask_padding,
)
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Recurrence

__all__ = ["output", "state_after"]

MIXERS: tuple[type[nn.Module], ...] = (ZambaMambaMixer,)
MODEL_TYPES = ("zamba",)
X, Z = slice(0, None, 2), slice(1, None, 2)
"""Outputs of `in_proj` that are the recurrence's input, and its gate."""


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms: Mamba's, head by head."""
    mask = as_mask(mask)
    projected = mixer.in_proj(u)
    conv_input, z = projected[..., X], projected[..., Z]
    x, around = convolve(mixer, conv_input, convolution(mixer, conv_input), mask, state, activation(mixer))
    by_head = rearrange(x, "b t (h p) -> b t h p", h=mixer.n_mamba_heads)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    made = einsum(by_head, mixer.x_proj_weight, "b t h p, h n p -> b t h n")
    step, B, C = made.split(sizes, dim=-1)
    delta = einsum(step, mixer.dt_proj_weight, "b t h n, h p n -> b t h p") + mixer.dt_proj_bias
    delta = rearrange(softplus(at_least_float32(delta)), "b t h p -> b t (h p)")
    recurrence = Recurrence(
        x=at_least_float32(x).unsqueeze(-1),
        b=at_least_float32(B),
        c=at_least_float32(C),
        delta=mask_padding(delta, mask),
        A=-at_least_float32(mixer.A_log).exp().flatten(0, 1),
        D=at_least_float32(mixer.D).flatten(),
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=z, **around)


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, B, C, SiLU and the gate frozen."""
    return mamba.linearized(mixer, layer, X, Z)


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import ZambaConfig, ZambaForCausalLM

    sizes = dict(vocab_size=97, hidden_size=24, intermediate_size=16, num_hidden_layers=4, initializer_range=0.1)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, n_mamba_heads=2, mamba_d_state=5, mamba_dt_rank=3)
    layers = dict(attn_layer_period=2, attn_layer_offset=0, use_mamba_kernels=False)
    return {"zamba": ZambaForCausalLM(ZambaConfig(**sizes, **heads, **layers))}
