"""RecurrentGemma (Google 2024; Griffin, De et al. 2024): two blocks of RG-LRU, one of local attention, repeated.

A channel of RG-LRU has a state of one number, h_t = a_t h_{t−1} + √(1 − a_t²) i_t x_t, a_t = e^{−8 r_t softplus(Λ)},
with gates r and i of its own head's channels, and x after a convolution without an activation (Griffin, Eqs. 1 to 4).
At a text's first token the root is 1. Attention is run by the model itself. Transformers 4.57 keeps its keys and values
out of reach, so that runs do not continue from states there.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import softplus
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

from ssmscope.architectures.read import parts
from ssmscope.core.affine import depthwise
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Recurrence, Scan


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    # Transformers 4.57 passes the mask of attention.
    mask = parts.as_mask(mask) if mask is None or mask.ndim == 2 else None
    conv_input = mixer.linear_x(u)
    convolved, around = parts.convolve(mixer, conv_input, _convolution(mixer, conv_input), mask, state)
    x = parts.at_least_float32(convolved)
    log_a = -8.0 * _gate(mixer, x, "recurrent_gate") * softplus(parts.at_least_float32(mixer.rg_lru.recurrent_param))
    root = SqrtBoundDerivative.apply(1 - torch.exp(2 * log_a))  # The library's own is not expm1 either.
    if state is None:
        real = torch.ones(u.shape[:2], dtype=torch.bool, device=u.device) if mask is None else mask
        root = torch.where((real & (real.cumsum(1) == 1)).unsqueeze(-1), 1.0, root)
    b = parts.mask_padding(_gate(mixer, x, "input_gate") * root, mask).unsqueeze(-1)
    log_a = parts.mask_padding(log_a, mask).unsqueeze(-1)
    recurrence = Recurrence(x=x.unsqueeze(-1), b=b, c=torch.ones_like(b), log_a=log_a)
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.linear_y(u), **around)


def _gate(mixer: Any, x: Tensor, name: str) -> Tensor:
    """Return σ(W x + b) of each head's own channels, (batch, length, channels)."""
    weight, bias = (parts.at_least_float32(getattr(mixer.rg_lru, f"{name}_{each}")) for each in ("weight", "bias"))
    by_head = rearrange(x, "b t (h p) -> b t h p", h=len(weight))
    made = einsum(by_head, weight, "b t h p, h p q -> b t h q") + bias
    return torch.sigmoid(rearrange(made, "b t h q -> b t (h q)"))


def _convolution(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return depthwise(mixer.conv_1d, x.shape[-1], mixer.conv1d_width, f"{type(mixer).__name__}.conv_1d")


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms: W_O (h ⊙ GELU(z))."""
    (scanned,) = layer.scan() if scans is None else scans
    return mixer.linear_out(scanned.y.squeeze(-1).to(layer.gate.dtype) * mixer.act_fn(layer.gate))


def returned(output: Tensor) -> Tensor | tuple[Tensor, None]:
    """Return the output in the form of the mixer's own forward pass."""
    return (output, None) if parts.BY_WEIGHT else output


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with a, i and the output gate frozen."""
    assert layer.conv_input is not None
    z, enter = parts.at_least_float32(layer.gate), parts.projection(mixer, "linear_x")
    input_map = parts.convolved_input_map(mixer, layer, None, enter, kernel=_convolution(mixer, layer.conv_input))
    gate_map = parts.opened_by(parts.projection(mixer, "linear_y"), mixer.act_fn, z)
    return parts.one_path(mixer, layer, input_map, mixer.act_fn(z), "linear_out", gate_map=gate_map)
