"""Two Mamba-2 mixers of one size over the same input, computed as one mixer with the heads of both.

A projection whose modules compute what their weights say is one product with the weights of both; other modules (with
adapters or hooks) are called, and their outputs concatenated. Equations as in `ssmscope.architectures.read.mamba2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from ssmscope.architectures.read.mamba2 import recurrence_of
from ssmscope.architectures.read.parts import (
    activated_convolution,
    activation,
    at_least_float32,
    convolution,
    mask_padding,
)
from ssmscope.core.affine import is_plain
from ssmscope.core.intercept import is_changed
from ssmscope.core.mixers import as_constant, conv_tap_mask, edit_conv_input
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.ops import Scan

Pair = tuple[Any, Any]


def terms(both: Pair, u: Tensor, mask: Tensor | None, state: LayerState | None) -> LayerTrace:
    """Return the terms of both, a recurrence for each; `conv_input`, `conv_tail`, `taps` and `z` have both along the
    last dimension, as `state.conv` has."""
    m, tail = both[0], None if state is None else state.conv
    sizes = [m.intermediate_size, m.conv_dim, m.num_heads]
    z, conv_input, step = _projected(both, u, sizes).split([2 * size for size in sizes], dim=-1)
    conv_input = mask_padding(conv_input, mask)
    inputs = conv_input.chunk(2, dim=-1)
    edited = [edit_conv_input(each, x) for each, x in zip(both, inputs)]
    if any(new is not old for new, old in zip(edited, inputs)):
        conv_input = torch.cat(edited, dim=-1)
    read = [conv_tap_mask(each, x, m.conv_kernel_size) for each, x in zip(both, edited)]
    chosen = [each for each in read if each is not None]
    taps = torch.cat(chosen, dim=-1) if chosen else None
    xBC = at_least_float32(mask_padding(_convolved(both, conv_input, tail, taps), mask))
    delta = softplus(at_least_float32(step) + at_least_float32(torch.cat([each.dt_bias for each in both])))
    delta = mask_padding(delta.clamp(*m.time_step_limit), mask)
    recurrences = tuple(map(recurrence_of, both, xBC.chunk(2, dim=-1), delta.chunk(2, dim=-1)))
    around = {"conv_input": conv_input, "conv_tail": tail, "taps": taps, "z": z, "reach": m.conv_kernel_size}
    return LayerTrace(u, recurrences, mask=mask, **around)


def _projected(both: Pair, u: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return z of both, then what their convolutions read, then their Δ before its softplus."""

    def by_part(first: Tensor, second: Tensor, dim: int) -> Tensor:
        return torch.cat([part for pair in zip(*(t.split(sizes, dim) for t in (first, second))) for part in pair], dim)

    first, second = (m.in_proj for m in both)
    if not _are_plain(first, second):
        return by_part(first(u), second(u), -1)
    bias = None if first.bias is None else by_part(as_constant(first.bias), as_constant(second.bias), 0)
    return linear(u, by_part(as_constant(first.weight), as_constant(second.weight), 0), bias)


def _convolved(both: Pair, x: Tensor, tail: Tensor | None, taps: Tensor | None) -> Tensor:
    """Return act(conv1d(x)), of each by itself where an edited run chooses the taps that each reads, or where an
    activation is not SiLU, or has hooks."""
    inputs = x.chunk(2, dim=-1)
    acts = list(map(activation, both))
    kernels, biases = zip(*(convolution(m, own) for m, own in zip(both, inputs)))
    alike = (biases[0] is None) == (biases[1] is None) and all(map(_is_silu, acts))
    if taps is None and alike and not any(isinstance(act, nn.Module) and is_changed(act) for act in acts):
        bias = None if biases[0] is None else torch.cat(biases)
        return activated_convolution(x, torch.cat(kernels), bias, acts[0], tail)
    tails, read = ((None, None) if t is None else t.chunk(2, dim=-1) for t in (tail, taps))
    return torch.cat(list(map(activated_convolution, inputs, kernels, biases, acts, tails, read)), dim=-1)


def _is_silu(act: Any) -> bool:
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"


def difference(both: Pair, layer: LayerTrace, scans: Sequence[Scan], weight: Tensor) -> Tensor:
    """Return the first's output − `weight` · the second's, (batch, length, width)."""
    assert layer.z is not None
    gates = layer.z.chunk(2, dim=-1)
    y1, y2 = (m.norm(rearrange(s.y, "b t h p -> b t (h p)"), z).to(z.dtype) for m, s, z in zip(both, scans, gates))
    first, second = (m.out_proj for m in both)
    if not _are_plain(first, second) or first.bias is not None:
        return first(y1) - weight * second(y2)
    found, subtracted = linear(y1, as_constant(first.weight)), -weight * as_constant(second.weight)
    return torch.addmm(found.flatten(0, -2), y2.flatten(0, -2), subtracted.mT).view(found.shape)


def _are_plain(first: Any, second: Any) -> bool:
    """Return True if linear layers compute what their weights say, and both or neither have a bias."""
    return is_plain(first, nn.Linear) and is_plain(second, nn.Linear) and (first.bias is None) == (second.bias is None)
