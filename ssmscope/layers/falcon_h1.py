"""Falcon-H1 (TII, Zuo et al. 2025): in every layer a Mamba-2 mixer and softmax attention in parallel.

The mixer is Mamba-2's with multipliers on its input and on each part of `in_proj`'s output, and a norm that may be
absent or before the gate. Attention is run by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from ssmscope.core.blocks import of_hybrids
from ssmscope.core.forms import norm_of
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import mamba2, parts


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    projected = mixer.in_proj(u * mixer.ssm_in_multiplier) * mixer.mup_vector
    return mamba2.terms(mixer, u, projected, mixer.time_step_limit, mask, state)


def _entering(mixer: Any, start: int, stop: int) -> Callable[[Tensor, bool], Tensor]:
    """Return a map of the layer's input to some widths of `in_proj`'s outputs with their multipliers."""
    rows = slice(start * mixer.intermediate_size, stop * mixer.intermediate_size)
    enter, multipliers = parts.projection(mixer, "in_proj", rows), mixer.mup_vector[..., rows]
    return lambda u, biased: enter(u * mixer.ssm_in_multiplier, biased) * multipliers


BLOCK_PARTS = of_hybrids("FalconH1")
FORM = replace(
    mamba2.FORM,
    values=lambda mixer, _: _entering(mixer, 1, 2),
    gate=lambda mixer, _: _entering(mixer, 0, 1),
    gate_first=lambda mixer, _: not mixer.mamba_rms_norm or not mixer.norm.norm_before_gate,
    norm=lambda mixer, _: norm_of(mixer, "norm") if mixer.mamba_rms_norm else None,
    inner=None,
)
