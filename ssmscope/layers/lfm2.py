"""LFM2 (Liquid AI 2025), LFM2 with experts, and LFM3 (Liquid AI 2026): layers of a short gated convolution, and of
softmax attention, with a feed-forward part or experts each.

A short convolution is y = W_O (C ⊙ (k ∗ (B ⊙ x))), with B, C and x projections of the layer's input and k of a few taps
per channel. It is no recurrence, and nothing is kept beyond the taps: here a recurrence whose decay is e^−80, which is
less than rounding, reads k ∗ (B ⊙ x). So it has implicit attention, relevance and runs from states, but no memory to
ask about. Attention, which in LFM3 has windows and a gate, feed-forward parts and experts are run by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from ssmscope.core.blocks import ATTENTION, GATED, of_hybrids
from ssmscope.core.forms import Form
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import parts
from ssmscope.ops import Recurrence
from ssmscope.ops.recurrence import smallest_exponent

HAS_RECURRENT_STATE = False
_MLP = replace(GATED, product=("w1", "w3"), out="w2")
_GATED_ATTENTION = replace(ATTENTION, frozen=(*ATTENTION.frozen, "g_proj"))
BLOCK_PARTS = of_hybrids("Lfm2", "Lfm2Moe", MLP=_MLP) | of_hybrids("Lfm3", MLP=_MLP, Attention=_GATED_ATTENTION)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    # Transformers 4.57 passes the mask of attention.
    mask = parts.as_mask(mask) if mask is None or mask.ndim == 2 else None
    B, C, x = mixer.in_proj(u).chunk(3, dim=-1)
    convolved, around = parts.convolve(mixer, B * x, _convolution(mixer, x), mask, state)
    convolved = parts.at_least_float32(convolved).unsqueeze(-1)
    log_a = parts.mask_padding(torch.full_like(convolved, smallest_exponent(torch.float32)), mask)
    one = torch.ones_like(convolved)
    recurrence = Recurrence(x=convolved, b=one, c=one, log_a=log_a)
    return LayerTrace(u, (recurrence,), mask=mask, z=C, extras={"B": B}, **around)


def _convolution(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return parts.convolution(mixer, x, "conv", mixer.config.conv_L_cache)


def _values(mixer: Any, layer: LayerTrace) -> Callable[[Tensor, bool], Tensor]:
    """Return B ⊙ x as a map of the layer's input, with B frozen."""
    B, width = parts.at_least_float32(layer.extras["B"]), layer.gate.shape[-1]
    enter = parts.projection(mixer, "in_proj", slice(2 * width, 3 * width))
    return lambda u, biased: enter(u, biased) * B


FORM = Form(
    values=_values,
    convolution=lambda mixer, layer: _convolution(mixer, layer.conv_input),
    gate=lambda mixer, layer: ("in_proj", slice(layer.gate.shape[-1], 2 * layer.gate.shape[-1])),
    gate_activation=None,
)
