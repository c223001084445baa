"""LFM2 (Liquid AI 2025): layers of a short gated convolution, and of softmax attention, with a feed-forward part each.

A short convolution is y = W_O (C ⊙ (k ∗ (B ⊙ x))), with B, C and x projections of the layer's input and k of a few taps
per channel. It is no recurrence, and nothing is kept beyond the taps: here a recurrence whose decay is e^−80, which is
less than rounding, reads k ∗ (B ⊙ x). So it has implicit attention, relevance and runs from states, and no memory that
could be asked about. Attention and feed-forward parts are run by the model itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from ssmscope.architectures.read.parts import (
    as_mask,
    at_least_float32,
    causal_convolution,
    constant,
    convolution,
    layer_state,
    mask_padding,
    projection,
)
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path
from ssmscope.core.mixers import conv_tap_mask, edit_conv_input
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Recurrence, Scan
from ssmscope.ops.exponents import smallest_exponent

MIXERS: tuple[type[nn.Module], ...] = (Lfm2ShortConv,)
MODEL_TYPES = ("lfm2",)
HAS_RECURRENT_STATE = False


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """The layer's terms from its input `u` (batch, length, width) and weights.

    `mask` (batch, length) is True at real positions; `state` is where a run continues from.
    """
    mask = as_mask(mask) if mask is None or mask.ndim == 2 else None  # 4.57 hands over that of attention
    B, C, x = mixer.in_proj(u).chunk(3, dim=-1)
    conv_input = edit_conv_input(mixer, mask_padding(B * x, mask))
    tail = state.conv if state is not None else None
    taps = conv_tap_mask(mixer, conv_input, mixer.config.conv_L_cache)
    convolved = at_least_float32(causal_convolution(conv_input, *_convolution(mixer, conv_input), tail, taps))
    convolved = mask_padding(convolved, mask).unsqueeze(-1)
    log_a = mask_padding(torch.full_like(convolved, smallest_exponent(torch.float32)), mask)
    one = torch.ones_like(convolved)
    recurrence = Recurrence(x=convolved, b=one, c=one, log_a=log_a)
    around = {"conv_input": conv_input, "conv_tail": tail, "taps": taps, "z": C, "reach": mixer.config.conv_L_cache}
    return LayerTrace(u, (recurrence,), mask=mask, extras={"B": B}, **around)


def _convolution(mixer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return convolution(mixer, x, "conv", mixer.config.conv_L_cache)


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """The mixer's output (batch, length, width) from its terms: W_O (C ⊙ y)."""
    (scanned,) = layer.scan() if scans is None else scans
    assert layer.z is not None
    return mixer.out_proj(scanned.y.squeeze(-1).to(layer.z.dtype) * layer.z)


def state_after(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...]) -> LayerState:
    """Where a run continues from after this layer."""
    return layer_state(layer, scans, mixer.config.conv_L_cache)


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """The layer as a linear map with B and C frozen; C opens, B is frozen for relevance too."""
    assert layer.conv_input is not None and layer.z is not None
    u, B = at_least_float32(layer.u), at_least_float32(layer.extras["B"])
    width = layer.z.shape[-1]
    enter_gate, enter = (projection(mixer, "in_proj", slice(start * width, (start + 1) * width)) for start in (1, 2))
    weight, bias = _convolution(mixer, layer.conv_input)
    shown = None if layer.mask is None else layer.mask.unsqueeze(-1).to(u).expand_as(layer.conv_input)
    input_map = InputMap(
        source=at_least_float32(layer.conv_input),
        enter=lambda u, biased: mask_padding(enter(u, biased) * B, layer.mask),
        kernel=at_least_float32(weight[:, 0].flip(-1)),
        bias=None if bias is None else at_least_float32(bias),
        tail=layer.conv_tail,
        taps=layer.taps,
        activation=shown,
    )
    project = projection(mixer, "out_proj")
    output_map = OutputMap(lambda v: project(v, False), gate=at_least_float32(layer.z), opening=enter_gate)
    return LinearizedLayer(u, (Path(layer.recurrence, input_map, output_map),), rest=constant(mixer, "out_proj", u))


def examples() -> dict[str, nn.Module]:
    """Small random language models of this family, by name; seeded by the caller."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return {"lfm2": Lfm2ForCausalLM(Lfm2Config(**SMALL))}


SMALL: dict = dict(
    **dict(vocab_size=97, hidden_size=24, intermediate_size=32, num_hidden_layers=3, conv_bias=True),
    **dict(num_attention_heads=2, num_key_value_heads=1, block_auto_adjust_ff_dim=False, initializer_range=0.2),
    layer_types=["conv", "full_attention", "conv"],
)
