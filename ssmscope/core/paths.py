"""Paths through a layer: a recurrence with the maps before and after it, see `ssmscope.core.linearized`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from ssmscope import ops
from ssmscope.core.affine import Channels, convolved
from ssmscope.ops import Recurrence
from ssmscope.ops.recurrence import along, straight

MAX_TAP_NUMBERS = 2**24


@dataclass(frozen=True, eq=False)
class InputMap:
    """Map from a layer's input to the values that its recurrence reads.

    Attributes:
        source: (batch, length, channels), the input of the convolution; the values themselves without one.
        enter: u (batch, length, width) → source, without constants or, when its second argument is true, with them.
        kernel, bias: (channels, taps) of the causal convolution, the current position's coefficient first, and
            (channels,); None without one.
        tail: (batch, taps − 1, channels), its inputs before the first position, where those are not zero.
        taps: (batch, length, taps) bool, True at the inputs that it reads; None for all.
        activation: (batch, length, channels), act(c) / c at the convolution's outputs c; None without an activation.
        order: (length,), the recurrence's order if it has one, in which the convolution (without tail and taps) reads.
    """

    source: Channels
    enter: Callable[[Tensor, bool], Tensor]
    kernel: Tensor | None = None
    bias: Tensor | None = None
    tail: Tensor | None = None
    taps: Tensor | None = None
    activation: Tensor | None = None
    order: Tensor | None = None

    def values(self, source: Channels, biased: bool) -> Channels:
        """Return activation ⊙ (kernel ∗ source), with bias and tail if `biased`."""
        if (kernel := self.kernel) is not None:
            tail, bias = (self.tail, self.bias) if biased else (None, None)
            bias = None if bias is None else bias.to(source.dtype)
            source = along(self.order, lambda t: convolved(t, kernel, tail, self.taps, bias), source)
        return source if self.activation is None else source * self.activation


@dataclass(frozen=True, eq=False)
class OutputMap:
    """Map from a recurrence's output to the layer's.

    Attributes:
        project: (batch, length, channels) → (batch, length, width), linear, including whatever follows the projection.
        gate: (batch, length, channels), the output gate times the norm's factor; None without both.
        centred: number of neighbouring channels whose mean the norm subtracts, None if it subtracts none. Where they
            are more than a head's, the mean mixes heads as a projection does, and is in no matrix.
        scale: (batch, length) or a number, each position's factor after the projection, which maps include.
        gate_map: u → the output gate alone, as a linear map of the layer's input with act(z) / z frozen, with constants
            as in `InputMap.enter`. None without a gate, and for one that is not a product with z. Maps use neither this
            nor the next two.
        factor: (batch, length, channels), the norm's factor where there is a gate_map: `gate` is both together.
        shift: (channels,) that the norm adds before the gate; times the gate it is in the layer's `rest`.
    """

    project: Callable[[Tensor], Tensor]
    gate: Tensor | None = None
    centred: int | None = None
    scale: Tensor | float | None = None
    gate_map: Callable[[Tensor, bool], Tensor] | None = None
    factor: Tensor | None = None
    shift: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Path:
    """One of a layer's recurrences, whose `x` gives only the shape, with the maps before and after it.

    Attributes:
        name: name of the part of the layer; "" for the whole layer.
        filter: (taps,) between the values and the recurrence, k_0 first; None without one.
        filter_tail: (batch, taps − 1, channels), the values before the first position, where those are not zero.
        initial: (batch, heads, width, state) before the first position, where that is not zero.
        weight: factor of the recurrence's output in the layer's sum, a number or (batch, length, channels); None is 1.
    """

    recurrence: Recurrence
    input_map: InputMap
    output_map: OutputMap
    name: str = ""
    filter: Tensor | None = None
    filter_tail: Tensor | None = None
    initial: Tensor | None = None
    weight: Tensor | float | None = None

    def written(self, values: Channels, biased: bool) -> Float[Tensor, "batch length heads width"]:
        """Return the recurrence's input, filter ∗ values."""
        if self.filter is not None:
            values = convolved(values, self.filter.unsqueeze(0), self.filter_tail if biased else None, None)
        return rearrange(values, "b t (h p) -> b t h p", h=self.recurrence.shape[2]).to(self.recurrence.x)

    def read(self, values: Channels, biased: bool) -> Channels:
        """Return weight ⊙ (α + D)(filter ∗ values), with contributions from before the first position if `biased`."""
        x = self.written(values, biased)
        y = ops.scan(replace(self.recurrence, x=x), self.initial if biased else None).y
        y = rearrange(y, "b t h p -> b t (h p)")
        return y if self.weight is None else y * self.weight

    def gated(self, y: Channels) -> Channels:
        """Return gate ⊙ y, the input of the output map's projection."""
        y = self._centred(y)
        return y if self.output_map.gate is None else y * self.output_map.gate

    def finish(self, y: Channels) -> Float[Tensor, "batch length width"]:
        """Return project(gate ⊙ y)."""
        return self.output_map.project(self.gated(y))

    def shown(self, y: Channels) -> Channels:
        """Return the output gate's input: y, with the norm's factor and shift where there is a norm."""
        y = self._centred(y)
        y = y if self.output_map.factor is None else y * self.output_map.factor
        return y if self.output_map.shift is None else y + self.output_map.shift

    def forward(self, u: Float[Tensor, "batch length width"], biased: bool) -> Float[Tensor, "batch length width"]:
        """Return the path's output from the layer's input."""
        source = self.input_map.enter(u, biased)
        return self.finish(self.read(self.input_map.values(source, biased), biased))

    def gate_and_taps(self, level: str) -> tuple[Tensor | None, Tensor | None]:
        """Return `left` and `taps` of `ops.attention` at a level."""
        x, heads, output_map = self.recurrence.x, self.recurrence.shape[2], self.output_map
        (batch, length), channels = x.shape[:2], x[0, 0].numel()
        factors, taps = [self.weight], None
        if level == "block":
            scale = output_map.scale.unsqueeze(-1) if isinstance(output_map.scale, Tensor) else output_map.scale
            factors, taps = [self.weight, output_map.gate, scale], self._taps()
        elif self.filter is not None:
            taps = self.filter.view(1, 1, -1, 1).expand(batch, length, -1, channels)
        factors = [factor for factor in factors if factor is not None]
        left = None
        if factors:
            left = torch.as_tensor(math.prod(factors), dtype=x.dtype, device=x.device).expand(batch, length, channels)
        return (
            None if left is None else rearrange(left, "b t (h p) -> b t h p", h=heads),
            None if taps is None else rearrange(taps, "b t i (h p) -> b t i h p", h=heads),
        )

    def attention(self, level: str, **options: Any) -> Float[Tensor, "batch groups rows length"]:
        """Return the matrix of `ops.attention` at a level, with its options."""
        left, taps = self.gate_and_taps(level)
        return ops.attention(self.recurrence, left=left, taps=taps, **options)

    def pooled_attention(self, level: str, cells: int, *, groups: int = 1, skip: bool = True) -> Tensor:
        """Return the map of `ops.pooled_attention` at a level, (batch, groups, cells, cells)."""
        heads = self.recurrence.shape[2]
        each = heads // groups
        # Gate and taps are as large as the input times their reach, so for a long text they are made for some heads.
        kernel = 1 if self.input_map.kernel is None else self.input_map.kernel.shape[1]
        size = self.recurrence.x.numel() * (kernel + (0 if self.filter is None else len(self.filter) - 1))
        slices = next(n for n in range(1, each + 1) if each % n == 0 and (n == each or size <= n * MAX_TAP_NUMBERS))
        found = []
        for first in range(0, heads, each // slices):
            path = self.of_heads(first, first + each // slices)
            left, taps = path.gate_and_taps(level)
            found.append(ops.pooled_attention(path.recurrence, cells, skip=skip, left=left, taps=taps))
        return rearrange(torch.cat(found, dim=1), "b (g n) t s -> b g n t s", g=groups).mean(2)

    def of_heads(self, start: int, stop: int) -> Path:
        """Return the path restricted to some heads, for maps alone."""
        channels = slice(start * self.recurrence.shape[3], stop * self.recurrence.shape[3])

        def change(t):
            return t[..., channels] if isinstance(t, Tensor) and t.ndim > 1 else t

        kernel = None if self.input_map.kernel is None else self.input_map.kernel[channels]
        return self._cut(self.recurrence.of_heads(start, stop), change, kernel=kernel)

    def of_text(self, row: int, length: int) -> Path:
        """Return the path on one sequence of the batch, up to a length, for maps alone."""

        def change(t, length=length):
            return t[row : row + 1, :length] if isinstance(t, Tensor) and t.ndim > 1 else t

        of_row = partial(change, length=None)
        taps, tail = change(self.input_map.taps), of_row(self.input_map.tail)
        found = self._cut(self.recurrence.of_rows(row, row + 1).between(0, length), change, taps=taps, tail=tail)
        output_map = replace(found.output_map, scale=change(self.output_map.scale))
        tail, initial = of_row(self.filter_tail), of_row(self.initial)
        return replace(found, output_map=output_map, filter_tail=tail, initial=initial)

    def _cut(self, recurrence: Recurrence, change: Callable[[Any], Any], **inputs: Any) -> Path:
        input_map = self.input_map
        inputs |= {name: change(getattr(input_map, name)) for name in ("source", "activation")}
        return replace(
            self,
            recurrence=recurrence,
            input_map=replace(input_map, **inputs),
            output_map=replace(self.output_map, gate=change(self.output_map.gate)),
            weight=change(self.weight),
        )

    def sink(self, level: str) -> Float[Tensor, "batch length heads width"] | None:
        """Return each position's reading of the state before the first one; None if that is zero."""
        if self.initial is None:
            return None
        nothing = replace(self.recurrence, x=torch.zeros_like(self.recurrence.x))
        y = ops.scan(nothing, self.initial).y
        left, _ = self.gate_and_taps(level)
        return y if left is None else y * left

    def _centred(self, y: Channels) -> Channels:
        if self.output_map.centred is None:
            return y
        groups = rearrange(y, "b t (g p) -> b t g p", p=self.output_map.centred)
        return rearrange(groups - groups.mean(-1, keepdim=True), "b t g p -> b t (g p)")

    def _taps(self) -> Float[Tensor, "batch length reach channels"] | None:
        """Return the factor of the source at s on arrival at s + i: convolution's tap, activation there, filter."""
        if (order := self.recurrence.order) is not None:
            activation = None if self.input_map.activation is None else self.input_map.activation[:, order]
            input_map = replace(self.input_map, activation=activation)
            taps = Path._taps(replace(self, recurrence=straight(self.recurrence), input_map=input_map))
            return None if taps is None else taps[:, order.argsort()]
        kernel, activation, filtering = self.input_map.kernel, self.input_map.activation, self.filter
        if kernel is None and activation is None and filtering is None:
            return None
        like = self.recurrence.x
        (batch, length), channels = like.shape[:2], like[0, 0].numel()
        kernel = like.new_ones(channels, 1) if kernel is None else kernel.to(like)
        filtering = like.new_ones(1) if filtering is None else filtering.to(like)
        activation = like.new_ones(batch, length, channels) if activation is None else activation.to(like)
        taps = like.new_zeros(batch, length, kernel.shape[1] + len(filtering) - 1, channels)
        for j in range(min(kernel.shape[1], length)):
            read = 1 if self.input_map.taps is None else self.input_map.taps[:, j:, j, None]
            arrived = kernel[:, j] * activation[:, j:] * read
            for i, k in enumerate(filtering):
                taps[:, : length - j, i + j] += k * arrived
        return taps
