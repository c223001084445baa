"""A layer as a linear map of its input: its recurrences with gates, activations, norms and steps frozen.

What a state-space layer computes from its input u by way of the recurrence's input is linear once the rest is taken as
given (Ali et al., The hidden attention of Mamba models, 2024; Zimerman et al., Explaining modern gated-linear RNNs via
a unified implicit attention formulation, 2024):

    source = enter(u),  values = activation ⊙ (kernel ∗ source + bias),  y = weight ⊙ (α + D)(filter ∗ values),
    output = project(gate ⊙ y) + rest,

summed over the paths of a layer that has several recurrences. SiLU is a diagonal, silu(c) / c = σ(c), a norm is the
factor that it has at its values. This is exact, the convolution's bias, D and what comes from states before the first
position included: `LinearizedLayer.matvec(u) + LinearizedLayer.bias` is the layer's own output. The matrices of a path
act on `values` (level "ssm") or on `source` (level "block"), channel by channel; projections mix channels and are in no
map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from ssmscope import ops
from ssmscope.core.affine import convolved, is_plain
from ssmscope.errors import InputError, did_you_mean
from ssmscope.ops import Recurrence
from ssmscope.ops.order import along, straight

LEVELS = ("ssm", "block")
AT_ONCE = 2**24  # numbers of what stands around a recurrence that pooled maps hold at a time

Channels = Float[Tensor, "batch length channels"]


@dataclass(frozen=True, eq=False)
class InputMap:
    """How a layer's input becomes what its recurrence reads.

    Attributes:
        source: (batch, length, channels), the input of the convolution; the values themselves without one.
        enter: u (batch, length, width) → source, without constants or, when its second argument is true, with them.
        kernel: (channels, taps) of the causal convolution, the current position's coefficient first; None without one.
        bias: (channels,) of the convolution.
        tail: (batch, taps − 1, channels), its inputs before the first position, where those are not zero.
        taps: (batch, length, taps) bool, which inputs it reads, the current position's first, where not all.
        activation: (batch, length, channels), act(c) / c at the convolution's outputs c; None without an activation.
        order: (length,), that of the recurrence where it has one: in it the convolution, without tail and taps, reads.
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
        """activation ⊙ (kernel ∗ source), with bias and tail where `biased`."""
        if (kernel := self.kernel) is not None:
            tail = self.tail if biased else None
            source = along(self.order, lambda t: convolved(t, kernel, tail, self.taps), source)
            if biased and self.bias is not None:
                source = source + self.bias
        return source if self.activation is None else source * self.activation


@dataclass(frozen=True, eq=False)
class OutputMap:
    """How a recurrence's output becomes the layer's.

    Attributes:
        project: (batch, length, channels) → (batch, length, width), linear; what stands behind a projection is in it.
        gate: (batch, length, channels), the output gate times the norm's factor; None without both.
        centred: whether the norm subtracts the mean over the width of each head.
        behind: (batch, length) or a number, the factor of each position that stands behind the projection, as a part of
            maps.
        opening: u (batch, length, width) → the output gate alone, (batch, length, channels), as a linear map of the
            layer's input with act(z) / z frozen, without constants or, when its second argument is true, with them.
            None without a gate, and for one that is no product with z. No map is made of it, nor of what follows.
        factor: (batch, length, channels), the norm's factor where there is an opening: `gate` is both together.
        shift: (channels,) that the norm adds to what the gate multiplies; with the gate it is in the layer's `rest`.
    """

    project: Callable[[Tensor], Tensor]
    gate: Tensor | None = None
    centred: bool = False
    behind: Tensor | float | None = None
    opening: Callable[[Tensor, bool], Tensor] | None = None
    factor: Tensor | None = None
    shift: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Path:
    """One of a layer's recurrences with what stands before and behind it.

    Attributes:
        recurrence: α and D; its `x` gives only the shape.
        name: "" where it is the whole layer, else which part it is.
        filter: (taps,) between the values and the recurrence, k_0 first; None without one.
        filter_tail: (batch, taps − 1, channels), the values before the first position, where those are not zero.
        initial: (batch, heads, width, state) before the first position, where that is not zero.
        weight: how the recurrence's output enters the layer's sum, a number or (batch, length, channels); None is 1.
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
        """What the recurrence reads of the values, filter ∗ values."""
        if self.filter is not None:
            values = convolved(values, self.filter.unsqueeze(0), self.filter_tail if biased else None, None)
        return rearrange(values, "b t (h p) -> b t h p", h=self.recurrence.shape[2]).to(self.recurrence.x)

    def read(self, values: Channels, biased: bool) -> Channels:
        """weight ⊙ (α + D)(filter ∗ values), with what comes from before the first position where `biased`."""
        x = self.written(values, biased)
        y = ops.scan(replace(self.recurrence, x=x), self.initial if biased else None).y
        y = rearrange(y, "b t h p -> b t (h p)")
        return y if self.weight is None else y * self.weight

    def finish(self, y: Channels) -> Float[Tensor, "batch length width"]:
        """project(gate ⊙ y)."""
        y = self._centred(y)
        return self.output_map.project(y if self.output_map.gate is None else y * self.output_map.gate)

    def shown(self, y: Channels) -> Channels:
        """What the output gate multiplies: y, with the norm's factor and shift where there is a norm."""
        y = self._centred(y)
        y = y if self.output_map.factor is None else y * self.output_map.factor
        return y if self.output_map.shift is None else y + self.output_map.shift

    def forward(self, u: Float[Tensor, "batch length width"], biased: bool) -> Float[Tensor, "batch length width"]:
        """From the layer's input to its output."""
        source = self.input_map.enter(u, biased)
        return self.finish(self.read(self.input_map.values(source, biased), biased))

    def around(self, level: str) -> tuple[Tensor | None, Tensor | None]:
        """`left` and `taps` of `ops.attention` at a level."""
        heads = self.recurrence.shape[2]
        left = self._weight()
        if level == "ssm":
            spread = None if self.filter is None else self.filter.view(1, 1, -1, 1).expand(*self._shape(), -1, -1)
            taps = None if spread is None else spread.expand(-1, -1, -1, self.recurrence.x[0, 0].numel())
        else:
            left = _product(left, self.output_map.gate)
            if self.output_map.behind is not None:
                behind = self.output_map.behind
                left = _product(left, behind.unsqueeze(-1) if isinstance(behind, Tensor) else self._full(behind))
            taps = self._taps()
        return (
            None if left is None else rearrange(left, "b t (h p) -> b t h p", h=heads),
            None if taps is None else rearrange(taps, "b t i (h p) -> b t i h p", h=heads),
        )

    def attention(
        self,
        level: str,
        *,
        groups: int = 1,
        absolute: bool = False,
        skip: bool = True,
        rows: Sequence[int] | None = None,
    ) -> Float[Tensor, "batch groups rows length"]:
        """The matrix of `ops.attention` at a level."""
        left, taps = self.around(level)
        return ops.attention(
            self.recurrence, groups=groups, absolute=absolute, skip=skip, rows=rows, left=left, taps=taps
        )

    def pooled_attention(self, level: str, cells: int, *, groups: int = 1, skip: bool = True) -> Tensor:
        """The map of `ops.pooled_attention` at a level, (batch, groups, cells, cells)."""
        heads = self.recurrence.shape[2]
        each = heads // groups
        # What stands around is of the size of the input times the reach: of a long text some heads at a time.
        slices = next(n for n in range(1, each + 1) if each % n == 0 and (n == each or self._size() <= n * AT_ONCE))
        found = []
        for first in range(0, heads, each // slices):
            path = self.of_heads(first, first + each // slices)
            left, taps = path.around(level)
            found.append(ops.pooled_attention(path.recurrence, cells, skip=skip, left=left, taps=taps))
        return rearrange(torch.cat(found, dim=1), "b (g n) t s -> b g n t s", g=groups).mean(2)

    def of_heads(self, start: int, stop: int) -> Path:
        """The path of some heads: what maps are made of."""
        heads, width = self.recurrence.shape[2:4]
        channels = slice(start * width, stop * width)

        def cut(t):
            return t[..., channels] if isinstance(t, Tensor) and t.ndim > 1 else t

        input_map = replace(
            self.input_map,
            source=cut(self.input_map.source),
            activation=cut(self.input_map.activation),
            kernel=None if self.input_map.kernel is None else self.input_map.kernel[channels],
        )
        return replace(
            self,
            recurrence=self.recurrence.of_heads(start, stop),
            input_map=input_map,
            output_map=replace(self.output_map, gate=cut(self.output_map.gate)),
            weight=cut(self.weight),
        )

    def _size(self) -> int:
        """Numbers in `taps` at the level of the block."""
        kernel = 1 if self.input_map.kernel is None else self.input_map.kernel.shape[1]
        reach = kernel + (0 if self.filter is None else len(self.filter) - 1)
        return self.recurrence.x.numel() * reach

    def sink(self, level: str) -> Float[Tensor, "batch length heads width"] | None:
        """What each position reads of the state before the first one; None where that is zero."""
        if self.initial is None:
            return None
        nothing = replace(self.recurrence, x=torch.zeros_like(self.recurrence.x))
        y = ops.scan(nothing, self.initial).y
        left, _ = self.around(level)
        return y if left is None else y * left

    def of_text(self, row: int, length: int) -> Path:
        """The path of one sequence of the batch, up to a length: what maps are made of."""

        def cut(t):
            return t[row : row + 1, :length] if isinstance(t, Tensor) and t.ndim > 1 else t

        own = {name: cut(getattr(self.input_map, name)) for name in ("source", "activation", "taps")}
        output_map = replace(self.output_map, gate=cut(self.output_map.gate), behind=cut(self.output_map.behind))
        return replace(
            self,
            recurrence=self.recurrence.of_rows(row, row + 1).between(0, length),
            input_map=replace(self.input_map, tail=_row(self.input_map.tail, row), **own),
            output_map=output_map,
            filter_tail=_row(self.filter_tail, row),
            initial=_row(self.initial, row),
            weight=cut(self.weight),
        )

    def _centred(self, y: Channels) -> Channels:
        """y less the mean over the width of each head, where the norm subtracts it."""
        if not self.output_map.centred:
            return y
        by_head = rearrange(y, "b t (h p) -> b t h p", h=self.recurrence.shape[2])
        return rearrange(by_head - by_head.mean(-1, keepdim=True), "b t h p -> b t (h p)")

    def _shape(self) -> tuple[int, int]:
        batch, length = self.recurrence.shape[:2]
        return batch, length

    def _full(self, number: float | Tensor) -> Tensor:
        x = self.recurrence.x
        return torch.as_tensor(number, dtype=x.dtype, device=x.device).expand(*self._shape(), x[0, 0].numel())

    def _weight(self) -> Tensor | None:
        if self.weight is None:
            return None
        return self.weight if isinstance(self.weight, Tensor) and self.weight.ndim == 3 else self._full(self.weight)

    def _taps(self) -> Float[Tensor, "batch length reach channels"] | None:
        """By what the source at s is multiplied when it arrives at the recurrence at s + i: the convolution, then the
        activation where it arrived, then the filter."""
        if (order := self.recurrence.order) is not None:
            activation = None if self.input_map.activation is None else self.input_map.activation[:, order]
            input_map = replace(self.input_map, activation=activation)
            taps = Path._taps(replace(self, recurrence=straight(self.recurrence), input_map=input_map))
            return None if taps is None else taps[:, order.argsort()]
        kernel, activation, filtering = self.input_map.kernel, self.input_map.activation, self.filter
        if kernel is None and activation is None and filtering is None:
            return None
        channels = self.recurrence.x[0, 0].numel()
        length = self._shape()[1]
        like = self.recurrence.x
        kernel = like.new_ones(channels, 1) if kernel is None else kernel.to(like)
        filtering = like.new_ones(1) if filtering is None else filtering.to(like)
        activation = like.new_ones(*self._shape(), channels) if activation is None else activation.to(like)
        taps = like.new_zeros(*self._shape(), kernel.shape[1] + len(filtering) - 1, channels)
        for j in range(min(kernel.shape[1], length)):
            read = 1 if self.input_map.taps is None else self.input_map.taps[:, j:, j, None]
            arrived = kernel[:, j] * activation[:, j:] * read
            for i, k in enumerate(filtering):
                taps[:, : length - j, i + j] += k * arrived
        return taps


@dataclass(frozen=True, eq=False)
class LinearizedLayer:
    """A layer's output as a linear map of its input u (batch, length, width).

    Attributes:
        u: the input at which everything is frozen.
        paths: they are summed.
        rest: (batch, length, width), what the layer adds that comes through no recurrence; None for nothing.
        joined: whether the paths' channels are the same ones, added before the gate; else each path has its own.
        beside: (u, Σ of the paths' outputs) → `rest`, where that is no constant, as a linear map of both with
            everything else frozen, without constants or, when its third argument is true, with them.
    """

    u: Float[Tensor, "batch length width"]
    paths: tuple[Path, ...]
    rest: Tensor | None = None
    joined: bool = True
    beside: Callable[[Tensor, Tensor, bool], Tensor] | None = None

    @property
    def channels(self) -> tuple[int, int]:
        """Heads, and the width of each."""
        return self.paths[0].recurrence.shape[2], self.paths[0].recurrence.shape[3]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that the layer is the sum of; empty where it is one."""
        names = tuple(dict.fromkeys(path.name for path in self.paths))
        return names if len(names) > 1 else ()

    def matvec(self, v: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """The frozen map of any input, in the time of a scan: its matrix is never made."""
        return torch.stack([path.forward(v, biased=False) for path in self.paths]).sum(0)

    def vecmat(self, w: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        """The transposed map, wᵀ M: how much every input matters for Σ w ⊙ output, in the time of a backward pass."""
        with torch.enable_grad():
            v = torch.zeros_like(self.u, requires_grad=True)
            (found,) = torch.autograd.grad(self.matvec(v), v, w)
        return found

    @property
    def bias(self) -> Float[Tensor, "batch length width"]:
        """What the map adds: the layer's output is `matvec(u) + bias`."""
        found = torch.stack([path.forward(torch.zeros_like(self.u), biased=True) for path in self.paths]).sum(0)
        return found if self.rest is None else found + self.rest

    def attention(
        self,
        level: str = "block",
        *,
        groups: int = 1,
        absolute: bool = False,
        skip: bool = True,
        rows: Sequence[int] | None = None,
        part: str | None = None,
    ) -> Float[Tensor, "batch groups rows length"]:
        """The layer's implicit attention, the signed mean over channels, or the mean of absolute values; see
        `ops.attention`.

        Args:
            level: "ssm", of the recurrence's input; "block", of the convolution's, with gate and norm.
            part: one of `parts` alone.

        Raises:
            InputError: for another level or part.
            ValueError: as `ops.attention`.
        """
        paths = self.chosen(level, part)
        if absolute and len(paths) > 1 and self.joined:
            return self._joint_absolute(paths, level, groups, skip, rows)
        each = [path.attention(level, groups=groups, absolute=absolute, skip=skip, rows=rows) for path in paths]
        return torch.stack(each).sum(0)

    def pooled_attention(
        self, level: str, cells: int, *, groups: int = 1, skip: bool = True, part: str | None = None
    ) -> Float[Tensor, "batch groups cells cells"]:
        """`attention` in cells × cells cells, see `ops.pooled_attention`."""
        paths = self.chosen(level, part)
        return torch.stack([path.pooled_attention(level, cells, groups=groups, skip=skip) for path in paths]).sum(0)

    def sink(
        self, level: str = "block", *, groups: int = 1, absolute: bool = False, part: str | None = None
    ) -> Float[Tensor, "batch groups length"] | None:
        """What every position takes from the states before the first one, as a column of `attention`; None where they
        are zero."""
        found = [sink for path in self.chosen(level, part) if (sink := path.sink(level)) is not None]
        if not found:
            return None
        if absolute and not self.joined:
            total = torch.stack([sink.abs() for sink in found]).sum(0)
        else:
            total = torch.stack(found).sum(0)
            total = total.abs() if absolute else total
        return rearrange(total, "b t (g h) p -> b g t (h p)", g=groups).mean(-1)

    def contributions(self, gradient: Float[Tensor, "batch length width"]) -> LinearizedLayer:
        """The layer as a map whose entries [t, s], summed over channels, are what position s contributes to
        Σ gradient_t · output_t through position t: attention × gradient.

        Its block-level `attention` is that sum's mean over channels. Over all t and s, and over `sink`, it is
        Σ gradient ⊙ (output − rest) less what the convolution's bias gives.
        """
        paths = []
        for path in self.paths:
            with torch.enable_grad():
                y = torch.zeros_like(path.input_map.source, requires_grad=True)
                (pulled,) = torch.autograd.grad(path.finish(y), y, gradient)
            scaled = replace(path.output_map, gate=pulled, behind=None)
            paths.append(_Weighed(**{**vars(path), "output_map": scaled}))
        return replace(self, paths=tuple(paths))

    def of_text(self, row: int, length: int) -> LinearizedLayer:
        """The layer on one sequence of the batch, up to a length: for maps, not for `matvec`."""
        return replace(self, u=self.u[row : row + 1, :length], paths=tuple(p.of_text(row, length) for p in self.paths))

    def chosen(self, level: str, part: str | None) -> tuple[Path, ...]:
        """The paths of a part, all of them for None.

        Raises:
            InputError: when there is no such part, or level.
        """
        if level not in LEVELS:
            raise InputError(
                f"unknown level {level!r}; allowed are 'ssm' and 'block'{did_you_mean(str(level), LEVELS)}"
            )
        if part is None:
            return self.paths
        found = tuple(path for path in self.paths if path.name == part)
        if not found:
            known = ", ".join(map(repr, self.parts)) or "none: the layer is one"
            raise InputError(f"no part {part!r}; the parts of this layer are {known}{did_you_mean(part, self.parts)}")
        return found

    def _joint_absolute(
        self, paths: tuple[Path, ...], level: str, groups: int, skip: bool, rows: Sequence[int] | None
    ) -> Tensor:
        """The mean of |Σ over paths| over channels, channel by channel."""
        heads, width = self.channels
        around = [path.around(level) for path in paths]
        length = self.u.shape[1]
        at_once = max(1, 2**24 // max(1, len(self.u) * length * (len(rows) if rows is not None else length)))
        means = []
        for group in range(groups):
            total = torch.zeros((), dtype=self.u.dtype, device=self.u.device)
            members = range(group * heads // groups, (group + 1) * heads // groups)
            for first in members[::at_once]:
                stop = min(first + at_once, members.stop)
                for p in range(width):
                    each = [
                        ops.attention(
                            _channel(path.recurrence.of_heads(first, stop), p),
                            groups=stop - first,
                            skip=skip,
                            rows=rows,
                            left=None if left is None else left[:, :, first:stop, p : p + 1],
                            taps=None if taps is None else taps[..., first:stop, p : p + 1],
                        )
                        for path, (left, taps) in zip(paths, around)
                    ]
                    total = total + torch.stack(each).sum(0).abs().sum(1)
            means.append(total * groups / (heads * width))
        return torch.stack(means, dim=1)


@dataclass(frozen=True, eq=False)
class _Weighed(Path):
    """A path whose block-level maps are multiplied by its source: contributions instead of coefficients."""

    def _taps(self) -> Tensor | None:
        taps, source = super()._taps(), self._centred(self.input_map.source).unsqueeze(2)
        return source if taps is None else taps * source


def as_diagonal(act: Callable[[Tensor], Tensor], c: Tensor) -> Tensor:
    """act(c) / c of an activation with act(0) = 0; σ(c) for SiLU.

    Raises:
        InputError: for an activation that is no diagonal, as it is not 0 at 0.
    """
    plain = is_plain(act, type(act)) if isinstance(act, nn.Module) else act is silu
    if plain and (act is silu or isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"):
        return torch.sigmoid(c)
    zero = torch.zeros_like(c[:1], dtype=torch.float64)  # in its shape, which somebody's hook may look at
    if act(zero).any():
        raise InputError(f"the activation {act} is not 0 at 0: it is no factor, and the layer no linear map")
    slope = (act(zero + 1e-6) / 1e-6).to(c)
    return torch.where(c == 0, slope, act(c) / torch.where(c == 0, 1, c))


def _channel(recurrence: Recurrence, place: int) -> Recurrence:
    """One channel of every head."""
    D = recurrence.D
    if D is not None and D.ndim == 2:
        D = D[:, place : place + 1]
    return replace(recurrence, x=recurrence.x[..., place : place + 1], D=D)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a * b


def _row(t: Tensor | None, row: int) -> Tensor | None:
    return None if t is None else t[row : row + 1]
