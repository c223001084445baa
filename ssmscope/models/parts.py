"""Pieces that the layers of several architecture families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, silu, softplus

from ssmscope.affine import (
    agrees_with_weight,
    convolved,
    depthwise,
    innermost,
    is_plain,
    linear_map,
    norm_terms,
    offset,
)
from ssmscope.errors import InputError
from ssmscope.frozen import Entry, as_diagonal
from ssmscope.intercept import is_own
from ssmscope.mixers import as_constant, reader_of
from ssmscope.scans import fused_parts, passes, passes_native
from ssmscope.scans.compiling import compiling, piece
from ssmscope.trace import LayerState, LayerTrace

BY_WEIGHT = int(transformers.__version__.split(".")[0]) >= 5
"""Whether transformers' mixers multiply by the weights of `conv1d` and `dt_proj` instead of calling them."""


class ReadMixer:
    """Mixed in before a library's mixer, its output is the one that its architecture reads: terms, scan, output."""

    def forward(self, hidden_states, cache_params=None, *args, cache=None, attention_mask=None, **kwargs):
        if cache_params is not None or cache is not None:
            raise ValueError(
                f"{type(self).__name__} fills no cache: call the model with use_cache=False, and continue a run with "
                "ssmscope's Model.run"
            )
        reader = reader_of(self)
        return reader.output(self, reader.quantities(self, hidden_states, attention_mask))


def at_least_float32(t: Tensor) -> Tensor:
    """Half-precision tensors as float32, in which recurrences are run; others as they are."""
    if t.dtype not in (torch.float16, torch.bfloat16):
        return t
    return passes.widened(t) if t.ndim == 3 and passes.applicable(t) else t.float()


def hide_padding(t: Tensor, mask: Tensor | None) -> Tensor:
    """`t` (batch, length, …) with zeros where `mask` (batch, length) is False."""
    return t if mask is None else t.masked_fill(~mask.view(*mask.shape, *[1] * (t.ndim - 2)), 0)


def as_mask(mask: Tensor | None) -> Tensor | None:
    """An attention mask as booleans, and None when nothing is masked."""
    if mask is None:
        return None
    mask = mask.bool()
    return None if bool(mask.all()) else mask


def causal_convolution(
    x: Float[Tensor, "batch length channels"],
    weight: Float[Tensor, "#channels 1 taps"],
    bias: Float[Tensor, " #channels"] | None,
    tail: Float[Tensor, "batch before channels"] | None = None,
    taps: Bool[Tensor, "batch length taps"] | None = None,
) -> Float[Tensor, "batch length channels"]:
    """Depthwise causal convolution, Σ_j weight_j x_{t − taps + 1 + j} + bias; `tail` holds the taps − 1 inputs before
    the first position (zeros when absent), and `taps` says which inputs are read, x_t first (all when absent).

    A sum of shifted copies: on a CPU ten times faster than the library's depthwise convolution.
    """
    weight, bias = as_constant(weight), None if bias is None else as_constant(bias)
    weight = weight[:, 0].to(x.dtype)
    if taps is not None:
        y = convolved(x, weight.flip(-1), tail, taps)
    else:
        before = (0, 0, weight.shape[-1] - 1, 0)
        padded = pad(x, before) if tail is None else torch.cat([tail.to(x.dtype), x], dim=1)
        y = _fused_convolution(padded, weight) if compiling() else _Convolution.apply(padded, weight)
    return y if bias is None else y + bias.to(x.dtype)


def evenly_projected(linear: nn.Module, u: Tensor) -> Tensor:
    """A linear layer's output; where pieces are compiled on a GPU with zeros behind, so that each row begins at a
    multiple of 64 bytes: products of other sizes, and kernels that read their rows, take twice as long."""
    odd = compiling() and u.is_cuda and type(linear) is nn.Linear and linear.weight.shape[0] % EVEN
    seen = odd and (linear._forward_hooks or linear._forward_pre_hooks or not is_own(linear, linear.forward))
    if not odd or seen:
        return linear(u)
    missing = -linear.weight.shape[0] % EVEN
    weight, bias = as_constant(linear.weight), None if linear.bias is None else as_constant(linear.bias)
    return nn.functional.linear(u, pad(weight, (0, 0, 0, missing)), None if bias is None else pad(bias, (0, missing)))


EVEN = 16
"""Numbers of a row that is `evenly_projected`: a multiple of so many."""


def activated_convolution(
    x: Float[Tensor, "batch length channels"],
    weight: Float[Tensor, "#channels 1 taps"],
    bias: Float[Tensor, " #channels"] | None,
    act: Callable[[Tensor], Tensor],
    tail: Float[Tensor, "batch before channels"] | None = None,
    taps: Bool[Tensor, "batch length taps"] | None = None,
) -> Float[Tensor, "batch length channels"]:
    """act(`causal_convolution`), for SiLU in one pass where pieces are compiled, by kernels of its own where there are
    some."""
    if taps is not None:
        return act(causal_convolution(x, weight, bias, tail, taps))
    is_silu = (act is silu or type(act).__name__ in SILU) and weight.shape[0] == x.shape[2]
    few = weight.shape[-1] <= passes_native.TAPS
    if is_silu and few and passes_native.applicable(x, weight, bias, tail):
        return passes_native.silu_convolution(x, *_constants(weight, bias), tail)
    if tail is None and is_silu and (kernels := _convolving(x, weight, bias)):
        return kernels.silu_convolution(x, *_constants(weight, bias))
    if compiling() and tail is None and bias is not None and is_silu:
        return _fused_silu_convolution(x, weight[:, 0].to(x.dtype), bias.to(x.dtype))
    return act(causal_convolution(x, weight, bias, tail))


def _convolving(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The kernels of a GPU for SiLU(causal convolution), without gradients or with them; None where there are none."""
    if passes.applicable(x, weight, bias):
        return passes
    taken = torch.is_grad_enabled() and fused_parts.applicable(x, weight, bias, dtypes=passes.DTYPES)
    return fused_parts if taken else None


def _constants(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A convolution's weight (channels, taps) and bias, `as_constant`."""
    return as_constant(weight)[:, 0], None if bias is None else as_constant(bias)


def convolved_and_wide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: Callable[[Tensor], Tensor],
    tail: Tensor | None = None,
    taps: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`activated_convolution` with zeros at padding, and the same in at least float32; both in one pass on a GPU."""
    if kernels := _in_one_pass(x, weight, bias, act, tail, taps, mask):
        return kernels.silu_convolution_and_wide(x, *_constants(weight, bias))
    found = hide_padding(activated_convolution(x, weight, bias, act, tail, taps), mask)
    return found, at_least_float32(found)


def step_size(v: Tensor) -> Tensor:
    """softplus(v) of (batch, length, channels), in at least float32."""
    if v.ndim == 3 and passes_native.applicable(v):
        return passes_native.softplus(v)
    if v.ndim == 3 and passes.applicable(v):
        return passes.softplus(v)
    return softplus(at_least_float32(v))


SILU = ("SiLU", "SiLUActivation")
"""The activations of the libraries that are SiLU."""


@piece
def _fused_silu_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return silu(_shifted_sum(pad(x, (0, 0, weight.shape[1] - 1, 0)), weight) + bias)


def gated(act: Callable[[Tensor], Tensor], y: Tensor, z: Tensor) -> Tensor:
    """y ⊙ act(z) in z's type, for SiLU in one pass by kernels of its own where there are some."""
    if type(act).__name__ in SILU and y.ndim == z.ndim == 3:
        if passes_native.applicable(y, z):
            return passes_native.gated(y, z)
        if passes.applicable(y, z):
            return passes.gated(y, z)
        if torch.is_grad_enabled() and fused_parts.applicable(z, y, dtypes=passes.DTYPES):
            return fused_parts.gated(y, z)
    return y.to(z.dtype) * act(z)


def gated_norm(norm: nn.Module, y: Tensor, z: Tensor) -> Tensor:
    """A gated root-mean-square norm's output, RMSNorm(y ⊙ SiLU(z)), in one pass where pieces are compiled, by kernels
    of its own where there are some."""
    size = getattr(norm, "group_size", None) or y.shape[-1]
    if type(norm).__name__ not in GATED_NORMS or not is_plain(norm, type(norm)):
        return norm(y, z)
    if y.ndim == z.ndim == 3 and passes_native.applicable(y, z, norm.weight):
        return passes_native.gated_norm(y, z, as_constant(norm.weight), float(norm.variance_epsilon), size)
    if size <= passes.MOST and y.ndim == z.ndim == 3 and passes.applicable(y, z, norm.weight):
        return passes.gated_norm(y, z, norm.weight, float(norm.variance_epsilon), size)
    if compiling() and size == y.shape[-1]:
        if y.shape[-1] <= fused_parts.MOST and fused_parts.applicable(y, z, norm.weight):
            return fused_parts.gated_norm(y, z, norm.weight, float(norm.variance_epsilon))
        return _fused_gated_norm(y, z, norm.weight, float(norm.variance_epsilon))
    return norm(y, z)


GATED_NORMS = (
    "MambaRMSNormGated",
    "BambaRMSNormGated",
    "GraniteMoeHybridRMSNormGated",
    "NemotronHRMSNormGated",
    "Zamba2RMSNormGated",
)
"""The norms of the libraries of which `gated_norm` knows what they compute."""


@piece
def _fused_gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    opened = y.float() * silu(z.float())
    normed = opened * torch.rsqrt(opened.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(y.dtype)


class _Convolution(torch.autograd.Function):
    """Σ_j w_j x_{t+j} over the taps; by hand, since the backward pass of a slice fills a whole tensor with zeros."""

    @staticmethod
    def forward(ctx, padded: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(padded, weight)
        return _sum_of_shifts(padded, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        padded, weight = ctx.saved_tensors
        taps, length = weight.shape[1], grad.shape[1]
        grad_padded = _sum_of_shifts(pad(grad, (0, 0, taps - 1, taps - 1)), weight.flip(1))
        if not ctx.needs_input_grad[1]:
            return grad_padded, None
        grad_weight = [(grad * padded[:, j : j + length]).sum((0, 1)) for j in range(taps)]
        return grad_padded, torch.stack(grad_weight, dim=1)


@piece
def _fused_convolution(padded: Tensor, weight: Tensor) -> Tensor:
    return _shifted_sum(padded, weight)


def _shifted_sum(padded: Tensor, weight: Tensor) -> Tensor:
    """As `_sum_of_shifts`, without writing into its own result, which a compiler would have to undo."""
    length = padded.shape[1] - weight.shape[1] + 1
    y = padded[:, :length] * weight[:, 0]
    for j in range(1, weight.shape[1]):
        y = y + padded[:, j : j + length] * weight[:, j]
    return y


def _sum_of_shifts(padded: Tensor, weight: Tensor) -> Tensor:
    taps = weight.shape[1]
    length = padded.shape[1] - taps + 1
    y = padded[:, :length] * weight[:, 0]
    for j in range(1, taps):
        y.addcmul_(padded[:, j : j + length], weight[:, j])
    return y


def projection(mixer: nn.Module, name: str, rows: slice | Tensor | None = None) -> Callable[[Tensor, bool], Tensor]:
    """A linear layer of a mixer, or some of its outputs, as a map that leaves its constant out unless its second
    argument is true.

    Raises:
        InputError: when the layer is none, see `ssmscope.affine`.
    """
    return linear_map(getattr(mixer, name), _named(mixer, name), rows)


def convolution(mixer: nn.Module, x: Float[Tensor, "batch length channels"]) -> tuple[Tensor, Tensor | None]:
    """The weight (channels, 1, taps) and bias (channels,) of a mixer's convolution, which reads `x`.

    Raises:
        InputError: when it is no depthwise convolution, or when the library's mixer leaves its adapter out.
    """
    _check_weight_is_all(mixer, "conv1d")
    taps = mixer.taps if hasattr(mixer, "taps") else mixer.conv_kernel_size
    return depthwise(mixer.conv1d, x.shape[-1], taps, _named(mixer, "conv1d"))


def convolved_wide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    act: Callable[[Tensor], Tensor],
    tail: Tensor | None = None,
    taps: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`activated_convolution` with zeros at padding in at least float32, in one pass on a GPU."""
    if kernels := _in_one_pass(x, weight, bias, act, tail, taps, mask):
        return kernels.silu_convolution(x, *_constants(weight, bias), wide=True)
    return at_least_float32(hide_padding(activated_convolution(x, weight, bias, act, tail, taps), mask))


def _in_one_pass(x: Tensor, weight: Tensor, bias: Tensor | None, act: Any, *absent: Tensor | None) -> Any:
    """The kernels that give the convolution of numbers of 16 bits in float32, None where there are none."""
    narrow = x.dtype in (torch.float16, torch.bfloat16) and type(act).__name__ in SILU
    whole = narrow and weight.shape[0] == x.shape[2] and all(t is None for t in absent)
    return _convolving(x, weight, bias) if whole else None


def projected_step(mixer: nn.Module, step: Tensor) -> Tensor:
    """Δ of a Mamba's mixer, softplus(dt_proj(step)) in at least float32; in one pass on a GPU.

    Raises:
        InputError: as `step_projection`.
    """
    linear = mixer.dt_proj
    plain = type(linear) is nn.Linear and linear.bias is not None and is_own(linear, linear.forward)
    narrow = step.ndim == 3 and step.dtype in (torch.float16, torch.bfloat16) and step.dtype == linear.weight.dtype
    if not (plain and narrow and not linear._forward_hooks and not linear._forward_pre_hooks):
        return step_size(step_projection(mixer, step))
    if not passes.applicable(step, linear.weight, linear.bias):
        return step_size(step_projection(mixer, step))
    return passes.projected_softplus(step, linear.weight, linear.bias)


def step_projection(mixer: nn.Module, step: Tensor) -> Tensor:
    """Δ before its softplus, of a Mamba's mixer.

    Raises:
        InputError: when the library's mixer leaves an adapter of it out.
    """
    _check_weight_is_all(mixer, "dt_proj")
    return mixer.dt_proj(step)


def _check_weight_is_all(mixer: nn.Module, name: str) -> None:
    """Refuse a part that computes something else than its weight says where transformers' mixer reads nothing else."""
    theirs = any(kind.__module__.startswith("transformers.") for kind in type(mixer).__mro__)
    if BY_WEIGHT and theirs and not isinstance(mixer, ReadMixer) and not agrees_with_weight(getattr(mixer, name)):
        raise InputError(
            f"transformers {transformers.__version__} reads the weight of {_named(mixer, name)} and leaves out what an "
            "adapter or hook adds to it: merge the adapter (peft's merge_and_unload()), or give it another target"
        )


def _named(mixer: nn.Module, name: str) -> str:
    layer = getattr(mixer, "layer_idx", getattr(mixer, "layer_id", None))
    return f"{type(mixer).__name__}.{name}" + ("" if layer is None else f" of layer {layer}")


def norm_weight(mixer: nn.Module, name: str, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Tensor:
    """The weight of a mixer's norm, a `kind`, in at least float32.

    Raises:
        InputError: when it is no such norm.
    """
    weight = norm_terms(getattr(mixer, name), kind, _named(mixer, name)).weight
    assert weight is not None
    return at_least_float32(weight)


def gated_norm_weight(mixer: nn.Module) -> Tensor:
    """The weight of a mixer's gated norm, one of `GATED_NORMS`, in at least float32.

    Raises:
        InputError: when it is no such norm.
    """
    kind = type(innermost(mixer.norm))
    known = kind.__name__ in GATED_NORMS and kind.__module__.startswith("transformers.")
    return norm_weight(mixer, "norm", kind if known else ())


def convolved_entry(
    mixer: nn.Module,
    layer: LayerTrace,
    act: Callable[[Tensor], Tensor],
    enter: Callable[[Tensor, bool], Tensor],
    channels: slice = slice(None),
) -> Entry:
    """How values come about that are act(conv1d(source)), the source being `channels` of the layer's `conv_input`."""
    assert layer.conv_input is not None
    source = at_least_float32(layer.conv_input[..., channels])
    weight, bias = convolution(mixer, layer.conv_input)
    weight, bias = weight[channels], None if bias is None else bias[channels]
    tail = None if layer.conv_tail is None else layer.conv_tail[..., channels]
    y = causal_convolution(source, weight, bias, tail, layer.taps)
    return Entry(
        source=source,
        enter=lambda u, biased: hide_padding(enter(u, biased), layer.mask),
        kernel=at_least_float32(weight[:, 0].flip(-1)),
        bias=None if bias is None else at_least_float32(bias),
        tail=tail,
        taps=layer.taps,
        activation=hide_padding(as_diagonal(act, y), layer.mask),
    )


def opened_by(
    enter: Callable[[Tensor, bool], Tensor], act: Callable[[Tensor], Tensor], z: Tensor
) -> Callable[[Tensor, bool], Tensor]:
    """An output gate act(z), z = enter(u, True), as a linear map of u with act(z) / z frozen; see `Exit.opening`."""
    return lambda u, biased: enter(u, biased) * as_diagonal(act, z)


def constant(mixer: nn.Module, name: str, u: Tensor) -> Tensor | None:
    """What a linear layer of a mixer adds, its bias, at every position of `u` (batch, length, …); None for nothing."""
    bias = offset(getattr(mixer, name), _named(mixer, name))
    return None if bias is None else bias.to(u).expand(*u.shape[:2], -1)


def rms_factor(v: Tensor, eps: float, size: int | None = None) -> Tensor:
    """1 / √(mean of v² + eps) over the last dimension, or over each `size` neighbours of it, in the shape of `v`."""
    groups = v.unflatten(-1, (-1, size or v.shape[-1]))
    return torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps).expand_as(groups).flatten(-2)


def convolution_tail(layer: LayerTrace, taps: int) -> Float[Tensor, "batch before channels"]:
    """`last_inputs` of a layer's convolution."""
    assert layer.conv_input is not None
    return last_inputs(layer.conv_input, taps, layer.conv_tail, layer.mask)


def last_inputs(
    x: Float[Tensor, "batch length channels"],
    taps: int,
    before: Float[Tensor, "batch before channels"] | None = None,
    mask: Bool[Tensor, "batch length"] | None = None,
) -> Float[Tensor, "batch before channels"]:
    """The last taps − 1 inputs of a convolution, up to each row's last real position; `before` stand those of before
    the run, zeros when absent."""
    before = before if before is not None else x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    x = torch.cat([before.to(x.dtype), x], dim=1)
    if mask is None:
        return x[:, x.shape[1] - (taps - 1) :]
    positions = torch.arange(mask.shape[1], device=x.device)
    last = (mask * (positions + 1)).amax(1)  # how many positions a row's continuation has behind it
    index = last[:, None] + torch.arange(taps - 1, device=x.device)
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


def layer_state(layer: LayerTrace, scans, taps: int | None) -> LayerState:
    """The state from which a run continues after `layer` was scanned."""
    conv = convolution_tail(layer, taps) if taps is not None else None
    return LayerState(conv=conv, ssm=tuple(s.state for s in scans))
