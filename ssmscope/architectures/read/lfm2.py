"""LFM2 (Liquid AI 2025): layers of a short gated convolution, and of softmax attention, with a feed-forward part each.

A short convolution is y = W_O (C ⊙ (k ∗ (B ⊙ x))), with B, C and x projections of the layer's input and k of a few taps
per channel. It is no recurrence, and nothing is kept beyond the taps: here a recurrence whose decay is e^−80, which is
less than rounding, reads k ∗ (B ⊙ x). So it has implicit attention, relevance and runs from states, but no memory to
ask about. Attention and feed-forward parts are run by the model itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from ssmscope.architectures.read.parts import (
    as_mask,
    at_least_float32,
    constant,
    convolution,
    convolve,
    convolved_input_map,
    mask_padding,
    projection,
    state_after,
)
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Recurrence, Scan
from ssmscope.ops.recurrence import smallest_exponent

__all__ = ["state_after"]

MIXERS: tuple[type[nn.Module], ...] = (Lfm2ShortConv,)
MODEL_TYPES = ("lfm2",)
HAS_RECURRENT_STATE = False


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms."""
    mask = as_mask(mask) if mask is None or mask.ndim == 2 else None  # transformers 4.57 passes the mask of attention.
    B, C, x = mixer.in_proj(u).chunk(3, dim=-1)
    convolved, around = convolve(mixer, B * x, _convolution(mixer, x), mask, state)
    convolved = at_least_float32(convolved).unsqueeze(-1)
    log_a = mask_padding(torch.full_like(convolved, smallest_exponent(torch.float32)), mask)
    one = torch.ones_like(convolved)
    recurrence = Recurrence(x=convolved, b=one, c=one, log_a=log_a)
    return LayerTrace(u, (recurrence,), mask=mask, z=C, extras={"B": B}, **around)


def _convolution(mixer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return convolution(mixer, x, "conv", mixer.config.conv_L_cache)


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the mixer's output (batch, length, width) from its terms: W_O (C ⊙ y)."""
    (scanned,) = layer.scan() if scans is None else scans
    assert layer.z is not None
    return mixer.out_proj(scanned.y.squeeze(-1).to(layer.z.dtype) * layer.z)


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with B and C frozen; C opens, B is frozen for relevance too."""
    assert layer.conv_input is not None and layer.z is not None
    u, B = at_least_float32(layer.u), at_least_float32(layer.extras["B"])
    width = layer.z.shape[-1]
    enter_gate, enter = (projection(mixer, "in_proj", slice(start * width, (start + 1) * width)) for start in (1, 2))
    kernel = _convolution(mixer, layer.conv_input)
    input_map = convolved_input_map(mixer, layer, None, lambda u, biased: enter(u, biased) * B, kernel=kernel)
    project = projection(mixer, "out_proj")
    output_map = OutputMap(lambda v: project(v, False), gate=at_least_float32(layer.z), opening=enter_gate)
    return LinearizedLayer(u, (Path(layer.recurrence, input_map, output_map),), rest=constant(mixer, "out_proj", u))


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return {"lfm2": Lfm2ForCausalLM(Lfm2Config(**EXAMPLE_SIZES))}


EXAMPLE_SIZES: dict = dict(
    **dict(vocab_size=97, hidden_size=24, intermediate_size=32, num_hidden_layers=3, conv_bias=True),
    **dict(num_attention_heads=2, num_key_value_heads=1, block_auto_adjust_ff_dim=False, initializer_range=0.2),
    layer_types=["conv", "full_attention", "conv"],
)
