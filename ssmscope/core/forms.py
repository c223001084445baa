"""Form of a layer: what stands around its recurrence, declared, from which the layer's output and linear map follow.

    x = activation(convolution(values(u))),    y = recurrence(x),    output = out(norm(read(y)) ⊙ act(z)),

or out(norm(read(y) ⊙ act(z))). A layer's terms give the recurrence and z, its form the rest:

    Form(values="v", convolution="conv", activation="silu", norm="norm", gate="z", out="o")

for a mixer whose parts have these names. Nothing needs to be said of how any of this is linear in u.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from ssmscope.core import affine
from ssmscope.core.linearized import LinearizedLayer, as_diagonal, vanishes
from ssmscope.core.paths import InputMap, OutputMap, Path
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError, did_you_mean
from ssmscope.ops import Scan

TORCH_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm)
CHECKED_POSITIONS = 8


@dataclass(frozen=True, eq=False)
class Norm:
    """Norm of every `size` neighbouring channels: (y − mean) ⊙ weight / √(mean square of y − mean + eps) + bias.

    Attributes:
        weight, bias: (channels,), or (size,) for all groups alike; None without.
        eps: by default the smallest number of y's dtype.
        size: of a group; by default all channels are one.
        centred: whether the mean is subtracted; else it is 0 above.
    """

    weight: Tensor | None
    bias: Tensor | None = None
    eps: float | None = None
    size: int | None = None
    centred: bool = False

    def __call__(self, y: affine.Channels) -> affine.Channels:
        """Return the norm of y, in at least float32."""
        groups, scale = self.groups(y)
        groups = groups * scale
        groups = groups if self.weight is None else groups * self._by_group(self.weight, groups)
        return (groups if self.bias is None else groups + self._by_group(self.bias, groups)).flatten(-2)

    def factor(self, y: affine.Channels) -> affine.Channels:
        """Return what the norm of y multiplies y, or y − mean, by."""
        groups, scale = self.groups(y)
        factor = scale if self.weight is None else scale * self._by_group(self.weight, groups)
        return factor.expand_as(groups).flatten(-2)

    def groups(self, y: affine.Channels) -> tuple[Tensor, Tensor]:
        """Return y by group, less the mean where that is subtracted, and the inverse of each group's size."""
        groups = at_least_float32(y).unflatten(-1, (-1, self.size or y.shape[-1]))
        groups = groups - groups.mean(-1, keepdim=True) if self.centred else groups
        eps = torch.finfo(groups.dtype).eps if self.eps is None else self.eps
        return groups, torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)

    @staticmethod
    def _by_group(t: Tensor, groups: Tensor) -> Tensor:
        return at_least_float32(t).view(-1, groups.shape[-1])


@dataclass(frozen=True)
class Form:
    """Declaration of how a mixer's layer stands around its recurrence.

    Parts are given by their (dotted) names in the mixer, activations by a part's or by that of a function of
    torch.nn.functional. Any field may be a function of the mixer and its `LayerTrace` instead, which returns one.

    Attributes:
        values: linear layer that makes the recurrence's input, (name, rows) for some of its outputs, or a map (u,
            biased), without its constant where `biased` is false; None for u itself.
        convolution: depthwise causal convolution of the trace's `conv_input`, or its weight (channels, 1, taps) and
            bias (channels,); None without one.
        channels: slice of `conv_input` that has the values; by default all of it.
        activation, read: of the values, and of the recurrence's output y; both 0 at 0, as SiLU is.
        norm: a part, or a `Norm`. A part is called with heads or all channels, as wide as its weight is.
        gate: linear layer that makes the trace's z, as `values`. None if z is no such map of u: then it is frozen.
        gate_activation: None for z itself.
        gate_first: whether the norm is that of the gated values.
        out: linear layer after all this; None without one.
        inner: function (mixer, trace, y by head) that computes the input of `out` as the mixer's library does, to the
            last digit; it must compute what the other fields say.
    """

    values: Any = None
    convolution: Any = None
    channels: Any = None
    activation: Any = None
    read: Any = None
    norm: Any = None
    gate: Any = None
    gate_activation: Any = "silu"
    gate_first: Any = False
    out: Any = "out_proj"
    inner: Callable[[Any, LayerTrace, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, nn.Module) or (callable(value) and _is_torchs(value)):
                said = f"{field.name}={value!r:.60}: give a name, such as 'silu' or that of a part of the mixer,"
                raise InputError(f"{said} or a function of the mixer and its trace that returns this")

    def output(self, mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
        """Return the mixer's output (batch, length, width) from its terms; outputs of several recurrences are added."""
        inner, out = self._inner(mixer, layer, _added(layer, scans)), self._of("out", mixer, layer)
        return inner if out is None else part_of(mixer, out)(inner)

    def linearized(
        self, mixer: Any, layer: LayerTrace, paths: Callable[[OutputMap], Sequence[Path]] | None = None
    ) -> LinearizedLayer:
        """Return the layer as a linear map with everything else frozen; `paths` gives those of a layer of several
        recurrences, with the same output map. Raise InputError if a part is missing, or is not what the form says."""
        output_map, added = self._around(mixer, layer)
        start = None if layer.initial is None else layer.initial[0]
        found = (
            [Path(layer.recurrence, self.input_map(mixer, layer), output_map, initial=start)]
            if paths is None
            else paths(output_map)
        )
        u, out = at_least_float32(layer.u), self._of("out", mixer, layer)
        if out is not None:
            added = constant(mixer, out, u) if added is None else projection(mixer, out)(added, True)
        return LinearizedLayer(u, tuple(found), rest=added)

    def input_map(self, mixer: Any, layer: LayerTrace) -> InputMap:
        """Return the map from the layer's input to its (first) recurrence's."""
        project, act = self._map("values", mixer, layer), self._activation("activation", mixer, layer)

        def enter(u: Tensor, biased: bool) -> Tensor:
            return mask_padding(u if project is None else project(u, biased), layer.mask)

        if self.convolution is None:
            x = at_least_float32(layer.recurrences[0].x).flatten(2)
            source = mask_padding(x, layer.mask) if act is None else enter(at_least_float32(layer.u), True)
            found = InputMap(source=source, enter=enter)
            return found if act is None else replace(found, activation=as_diagonal(act, source))
        weight, bias = self._kernel(mixer, layer)
        channels = self._of("channels", mixer, layer) or slice(None)
        assert layer.conv_input is not None
        found = InputMap(
            source=at_least_float32(layer.conv_input[..., channels]),
            enter=enter,
            kernel=at_least_float32(weight[channels, 0].flip(-1)),
            bias=None if bias is None else at_least_float32(bias[channels]),
            tail=None if layer.conv_tail is None else layer.conv_tail[..., channels],
            taps=layer.taps,
        )
        if act is None and layer.mask is None:
            return found
        convolved = found.values(found.source, True)
        diagonal = torch.ones_like(convolved) if act is None else as_diagonal(act, convolved)
        return replace(found, activation=mask_padding(diagonal, layer.mask))

    def output_map(self, mixer: Any, layer: LayerTrace, y: Tensor | None = None) -> OutputMap:
        """Return the map from the recurrence's output to the layer's, with norm and gate frozen as they are at `y`
        (batch, length, heads, width), by default the sum of the recurrences' own outputs."""
        return self._around(mixer, layer, y)[0]

    def _around(self, mixer: Any, layer: LayerTrace, y: Tensor | None = None) -> tuple[OutputMap, Tensor | None]:
        """Return the output map, and what the norm adds to the input of `out`; None without."""
        norm, read = self._of("norm", mixer, layer), self._activation("read", mixer, layer)
        act, first = self._activation("gate_activation", mixer, layer), bool(self._of("gate_first", mixer, layer))
        part = part_of(mixer, norm) if isinstance(norm, str) else None
        checked = norm is not None and (
            self.inner is not None or (part is not None and not affine.is_plain(part, TORCH_NORMS))
        )
        name, norm = norm, norm if part is None else norm_of(mixer, norm)
        z = None if layer.z is None else at_least_float32(layer.z)
        opened = z if z is None or act is None else act(z)
        factor = shift = None
        if norm is not None or read is not None:
            y = _added(layer) if y is None else y
            flat = at_least_float32(y).flatten(2)
            shown = flat if read is None else read(flat)
            if norm is not None:
                if norm.centred and (read is not None or first):
                    said = f"{type(mixer).__name__}: a norm that subtracts the mean is a linear map of a layer only"
                    raise InputError(f"{said} before the gate and without `read`; use a norm by the RMS")
                factor, shift = norm.factor(shown if opened is None or not first else shown * opened), norm.bias
            if read is not None:
                factor = as_diagonal(read, flat) * (1 if factor is None else factor)
        gate = opened if factor is None else factor if opened is None else opened * factor
        added = None
        if shift is not None:
            assert factor is not None
            shift = at_least_float32(shift).repeat(factor.shape[-1] // len(shift))
            added = shift.expand_as(factor) if first or opened is None else opened * shift
        if checked:
            assert y is not None
            self._check(mixer, layer, y, norm, gate, added, "inner" if part is None else name)
        more: dict[str, Any] = {}
        if z is not None and (act is None or vanishes(act, z)):
            enter = self._map("gate", mixer, layer)
            if enter is not None:
                more = {"gate_map": opened_by(enter, act, z), "factor": factor, "shift": None if first else shift}
        out = self._of("out", mixer, layer)
        project = None if out is None else projection(mixer, out)
        centred = None
        if norm is not None and norm.centred:
            centred = norm.size or flat.shape[-1]
        return OutputMap(lambda v: v if project is None else project(v, False), gate, centred, **more), added

    def _check(self, mixer: Any, layer: LayerTrace, y: Tensor, norm: Norm, gate: Any, added: Any, name: str) -> None:
        """Raise InputError if the mixer's own norm and gate compute something other than the form says, at some
        positions: they act on each by itself."""
        some = slice(None, None, max(1, y.shape[1] // CHECKED_POSITIONS))
        with torch.no_grad():
            y, z = y[:, some], None if layer.z is None else layer.z[:, some]
            found = self._inner(mixer, replace(layer, u=layer.u[:, some], z=z), y)
            wide = at_least_float32(y)
            expected = norm.groups(wide.flatten(2))[0].flatten(2) * gate[:, some]
            expected = expected if added is None else expected + added[:, some]
        if not affine.agree(found, expected.to(found)):
            if parts := affine.changed_parts(mixer):
                raise InputError(f"{affine.described(mixer, parts)} make it another map than its terms do: remove them")
            said = f"{named(mixer, name)} does not compute the norm, with the gate where it has one, that"
            raise InputError(f"{said} the layer's form declares")

    def _inner(self, mixer: Any, layer: LayerTrace, y: Float[Tensor, "batch length heads width"]) -> affine.Channels:
        """Return the input of `out`."""
        if self.inner is not None:
            return self.inner(mixer, layer, y)
        read, z = self._activation("read", mixer, layer), layer.z
        act = None if z is None else self._activation("gate_activation", mixer, layer)
        dtype, y = (layer.u if z is None else z).dtype, y if read is None else read(y)
        if z is not None and self._of("gate_first", mixer, layer):
            z = at_least_float32(z)
            return self._normed(mixer, layer, y * (z if act is None else act(z)).unflatten(-1, y.shape[2:])).to(dtype)
        y = self._normed(mixer, layer, y).to(dtype)
        return y if z is None else y * (z if act is None else act(z))

    def _normed(self, mixer: Any, layer: LayerTrace, y: Float[Tensor, "batch length heads width"]) -> affine.Channels:
        norm = self._of("norm", mixer, layer)
        if isinstance(norm, str):
            part = part_of(mixer, norm)
            if not affine.is_plain(part, TORCH_NORMS):
                own, y = affine.innermost(part), y.to(layer.u.dtype)
                if isinstance(own, nn.GroupNorm):  # Its channels come second.
                    return part(y.flatten(2).flatten(0, 1)).view(*y.shape[:2], -1)
                weight = affine.norm_weight(own)
                return part(y if weight is not None and weight.shape[-1] == y.shape[-1] else y.flatten(2)).flatten(2)
            norm = norm_of(mixer, norm)
        return y.flatten(2) if norm is None else norm(y.flatten(2))

    def _of(self, field: str, mixer: Any, layer: LayerTrace) -> Any:
        value = getattr(self, field)
        return value(mixer, layer) if callable(value) else value

    def _map(self, field: str, mixer: Any, layer: LayerTrace) -> Callable[[Tensor, bool], Tensor] | None:
        value = self._of(field, mixer, layer)
        if value is None or callable(value):
            return value
        return projection(mixer, *value) if isinstance(value, tuple) else projection(mixer, value)

    def _activation(self, field: str, mixer: Any, layer: LayerTrace) -> Callable[[Tensor], Tensor] | None:
        value = self._of(field, mixer, layer)
        if not isinstance(value, str):
            return value
        found = getattr(mixer, value, None) or getattr(functional, value, None)
        if found is None:
            said = f"{field}={value!r} is neither a part of {type(mixer).__name__} nor a function of"
            raise InputError(f"{said} torch.nn.functional{did_you_mean(value, dir(functional))}")
        return found

    def _kernel(self, mixer: Any, layer: LayerTrace) -> tuple[Tensor, Tensor | None]:
        if layer.conv_input is None:
            said = f"{type(mixer).__name__}: its form has a convolution, and its terms no `conv_input`:"
            raise InputError(f"{said} give the input of the convolution to LayerTrace")
        value = self._of("convolution", mixer, layer)
        if not isinstance(value, str):
            return value
        return affine.depthwise(part_of(mixer, value), layer.conv_input.shape[-1], layer.reach, named(mixer, value))


def _is_torchs(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "torch").partition(".")[0] == "torch"


def _added(layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Float[Tensor, "batch length heads width"]:
    first, *others = layer.scan() if scans is None else scans
    return sum((scan.y for scan in others), first.y)


def opened_by(
    enter: Callable[[Tensor, bool], Tensor], act: Callable[[Tensor], Tensor] | None, z: Tensor
) -> Callable[[Tensor, bool], Tensor]:
    """Return an output gate act(z), z = enter(u, True), as a linear map of u, act(z) / z frozen; see `OutputMap`."""
    return enter if act is None else lambda u, biased: enter(u, biased) * as_diagonal(act, z)


# ---- the parts of a mixer


def part_of(mixer: Any, name: str) -> Any:
    """Return a part of a mixer by its dotted name. Raise InputError if there is none."""
    try:
        return reduce(getattr, name.split("."), mixer)
    except AttributeError:
        known = [each for each, _ in mixer.named_modules() if each]
        said = f"{type(mixer).__name__} has no part {name!r}; its parts are {', '.join(known)}"
        raise InputError(f"{said}{did_you_mean(name, known)}") from None


def named(mixer: Any, name: str) -> str:
    """Return a part's name in errors: "MambaMixer.norm of layer 0"."""
    layer = getattr(mixer, "layer_idx", getattr(mixer, "layer_id", None))
    return f"{type(mixer).__name__}.{name}" + ("" if layer is None else f" of layer {layer}")


def projection(mixer: Any, name: str, rows: slice | Tensor | None = None) -> Callable[[Tensor, bool], Tensor]:
    """Return a linear layer of a mixer, or the `rows` of its outputs, as a map (x, biased), without its bias if
    `biased` is False. Raise InputError if the layer is not linear, see `ssmscope.core.affine`."""
    return affine.linear_map(part_of(mixer, name), named(mixer, name), rows)


def constant(mixer: Any, name: str, u: Tensor) -> Tensor | None:
    """Return a linear layer's bias at every position of `u` (batch, length, …); None without one."""
    bias = affine.offset(part_of(mixer, name), named(mixer, name))
    return None if bias is None else bias.to(u).expand(*u.shape[:2], -1)


def norm_of(mixer: Any, name: str) -> Norm:
    """Return a part of a mixer as a `Norm`, in groups as the part has them. Raise InputError if it is no norm."""
    part = part_of(mixer, name)
    own: Any = affine.innermost(part)
    weight, bias, eps = affine.norm_terms(part, type(own), named(mixer, name))
    if isinstance(own, nn.GroupNorm):
        return Norm(weight, bias, eps, own.num_channels // own.num_groups, centred=True)
    width = own.normalized_shape[-1] if weight is None else weight.shape[-1]
    size = getattr(own, "group_size", None) or width // getattr(own, "n_groups", 1)
    return Norm(weight, bias, eps, size, affine.norm_constants(part, named(mixer, name))[1])


# ---- tensors


def at_least_float32(t: Tensor) -> Tensor:
    """Return half-precision tensors as float32, in which recurrences are run, and others unchanged."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def mask_padding(t: Tensor, mask: Tensor | None) -> Tensor:
    """Return `t` (batch, length, …) with zeros where `mask` (batch, length) is False."""
    return t if mask is None else t.masked_fill(~mask.view(*mask.shape, *[1] * (t.ndim - 2)), 0)
