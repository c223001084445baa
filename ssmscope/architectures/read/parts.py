"""Functions that the layers of several architecture families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from ssmscope.core.affine import (
    agrees_with_weight,
    convolved,
    depthwise,
    innermost,
    linear_map,
    norm_terms,
    offset,
    unreadable,
)
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path, as_diagonal
from ssmscope.core.mixers import adapter_for, as_constant, conv_tap_mask, edit_conv_input, prepared
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.ops.compiling import compilable

BY_WEIGHT = int(transformers.__version__.split(".")[0]) >= 5
"""True if transformers' mixers multiply by the weights of `conv1d` and `dt_proj` instead of calling them."""

Activation = Callable[[Tensor], Tensor]


class ReadMixer:
    """Mixin before a mixer that computes its output as its architecture is read: terms, scan, output."""

    def forward(self, hidden_states, cache_params=None, *args, cache=None, attention_mask=None, **kwargs):
        refuse_caches(self, cache_params, cache)
        reader = adapter_for(self)
        return reader.output(self, reader.compute_terms(self, hidden_states, attention_mask))


def refuse_caches(mixer: Any, *caches: Any) -> None:
    """Raise ValueError if a cache is given to a mixer that fills none."""
    if any(cache is not None for cache in caches):
        raise ValueError(
            f"{type(mixer).__name__} fills no cache: call the model with use_cache=False, and continue a run with "
            "ssmscope's Model.run"
        )


def at_least_float32(t: Tensor) -> Tensor:
    """Return half-precision tensors as float32, in which recurrences are run, and others unchanged."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def mask_padding(t: Tensor, mask: Tensor | None) -> Tensor:
    """Return `t` (batch, length, …) with zeros where `mask` (batch, length) is False."""
    return t if mask is None else t.masked_fill(~mask.view(*mask.shape, *[1] * (t.ndim - 2)), 0)


def as_mask(mask: Tensor | None) -> Tensor | None:
    """Return an attention mask as booleans, or None if nothing is masked."""
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
    act: Activation | None = None,
) -> Float[Tensor, "batch length channels"]:
    """Compute a depthwise causal convolution, act(Σ_j weight_j x_{t − taps + 1 + j} + bias). `tail` holds the taps − 1
    inputs before the first position (default zeros), and `taps` says which inputs are read, x_t first (default all)."""
    kernel, bias = as_constant(weight)[:, 0].to(x.dtype), None if bias is None else as_constant(bias).to(x.dtype)
    if x.shape[1] == 1 and tail is not None and taps is None:  # A written token: few operations.
        y = (torch.cat([tail.to(x), x], dim=1) * kernel.mT).sum(1, keepdim=True)
        y = y if bias is None else y + bias
        return y if act is None else act(y)
    kernel = kernel.flip(-1)
    return convolved(x, kernel, tail, taps, bias) if act is None else _activated(act, x, kernel, tail, taps, bias)


@compilable
def _activated(act: Activation, *terms: Any) -> Tensor:
    return act(convolved(*terms))


def convolve(
    mixer: Any,
    x: Float[Tensor, "batch length channels"],
    kernel: tuple[Tensor, Tensor | None],
    mask: Bool[Tensor, "batch length"] | None,
    state: LayerState | None,
    act: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Float[Tensor, "batch length channels"], dict[str, Any]]:
    """Return act(conv1d(x)) with zeros at padding, continued from `state`, and the convolution's fields of a
    `LayerTrace`; `kernel` is the weight (channels, 1, taps) and bias (channels,), see `convolution`."""
    weight, bias = kernel
    x = edit_conv_input(mixer, mask_padding(x, mask))
    tail, taps = None if state is None else state.conv, conv_tap_mask(mixer, x, weight.shape[-1])
    y = causal_convolution(x, weight, bias, tail, taps, act)
    return mask_padding(y, mask), {"conv_input": x, "conv_tail": tail, "taps": taps, "reach": weight.shape[-1]}


def projection(mixer: Any, name: str, rows: slice | Tensor | None = None) -> Callable[[Tensor, bool], Tensor]:
    """Return a linear layer of a mixer, or the `rows` of its outputs, as a map (x, biased), without its bias if
    `biased` is False. Raise InputError if the layer is not linear, see `ssmscope.core.affine`."""
    return linear_map(getattr(mixer, name), _named(mixer, name), rows)


def convolution(
    mixer: Any, x: Float[Tensor, "batch length channels"], name: str = "conv1d", taps: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the weight (channels, 1, taps) and bias (channels,) of a mixer's convolution, which reads `x`. Raise
    InputError if it is not a depthwise convolution, or the library's mixer ignores its adapter."""
    return prepared(mixer, _convolution, x.shape[-1], name, taps)


def _convolution(mixer: Any, channels: int, name: str, taps: int | None) -> tuple[Tensor, Tensor | None]:
    _check_weight_is_all(mixer, name)
    taps = taps or (mixer.taps if hasattr(mixer, "taps") else mixer.conv_kernel_size)
    return depthwise(getattr(mixer, name), channels, taps, _named(mixer, name))


GATED_NORMS = (
    "MambaRMSNormGated",
    "BambaRMSNormGated",
    "GraniteMoeHybridRMSNormGated",
    "NemotronHRMSNormGated",
    "Zamba2RMSNormGated",
)
"""Norms in transformers that compute RMSNorm(y ⊙ SiLU(z))."""


def step_projection(mixer: Any, step: Tensor) -> Tensor:
    """Return Δ before its softplus for a Mamba's mixer. Raise InputError if that ignores an adapter of `dt_proj`."""
    prepared(mixer, _check_weight_is_all, "dt_proj")
    return mixer.dt_proj(step)


def activation(mixer: Any, otherwise: Activation | None = None) -> Activation:
    """Return the activation after a mixer's convolution, by default its `act`; transformers 5 looks it up by name."""
    return prepared(mixer, _named_activation) if _by_weight(mixer) else otherwise or mixer.act


def _named_activation(mixer: Any) -> Activation:
    return ACT2FN[mixer.activation]


def gate_activation(mixer: Any) -> Activation:
    """Return the activation of a Mamba mixer's gate."""
    return silu if _by_weight(mixer) else mixer.act


def _by_weight(mixer: Any) -> bool:
    """Return True if a mixer multiplies by the weights of its parts instead of calling the parts."""
    if not BY_WEIGHT or isinstance(mixer, ReadMixer):
        return False
    return any(kind.__module__.startswith("transformers.") for kind in type(mixer).__mro__)


def _check_weight_is_all(mixer: Any, name: str) -> None:
    """Raise InputError if transformers' mixer uses a part's weight alone and the part computes something else."""
    if _by_weight(mixer) and not agrees_with_weight(getattr(mixer, name)):
        raise InputError(
            f"transformers {transformers.__version__} reads the weight of {_named(mixer, name)} and leaves out what an "
            "adapter or hook adds to it: merge the adapter (peft's merge_and_unload()), or give it another target"
        )


def _named(mixer: Any, name: str) -> str:
    layer = getattr(mixer, "layer_idx", getattr(mixer, "layer_id", None))
    return f"{type(mixer).__name__}.{name}" + ("" if layer is None else f" of layer {layer}")


def norm_weight(mixer: Any, name: str, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Tensor:
    """Return the weight of a mixer's norm, in at least float32. Raise InputError if it is not a norm of this `kind`, or
    adds a bias."""
    norm = getattr(mixer, name)
    found = norm_terms(norm, kind, _named(mixer, name))
    if found.bias is not None:
        raise unreadable(norm, _named(mixer, name), "adds a bias, which this layer's norm has not")
    assert found.weight is not None
    return at_least_float32(found.weight)


def gated_norm_factor(mixer: Any, y: Tensor, gate: Tensor) -> Tensor:
    """Return w / rms(y ⊙ SiLU(z)) of a mixer's gated norm, in at least float32, at `y` and `gate` z (batch, length,
    channels). Raise InputError if a norm that is not of `GATED_NORMS` computes something else."""
    kind = type(innermost(mixer.norm))
    known = kind.__name__ in GATED_NORMS and kind.__module__.startswith("transformers.")
    opened = y * silu(at_least_float32(gate))
    size = getattr(mixer.norm, "group_size", None)  # transformers before 5 has one group.
    factor = rms_factor(opened, mixer.norm.variance_epsilon, size) * norm_weight(mixer, "norm", kind if known else ())
    if not known:
        found, expected = mixer.norm(y, gate).to(opened), opened * factor
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max())):
            raise InputError(f"{_named(mixer, 'norm')}, a {kind.__name__}, does not compute RMSNorm(y ⊙ SiLU(z))")
    return factor


def convolved_input_map(
    mixer: Any,
    layer: LayerTrace,
    act: Callable[[Tensor], Tensor] | None,
    enter: Callable[[Tensor, bool], Tensor],
    channels: slice = slice(None),
    kernel: tuple[Tensor, Tensor | None] | None = None,
) -> InputMap:
    """Return the input map of values act(conv1d(source)), the source being `channels` of the layer's `conv_input`;
    without `act` there is no activation; `kernel` is the convolution's weight and bias, by default `conv1d`'s."""
    assert layer.conv_input is not None
    source = at_least_float32(layer.conv_input[..., channels])
    weight, bias = kernel or convolution(mixer, layer.conv_input)
    weight, bias = weight[channels], None if bias is None else bias[channels]
    tail = None if layer.conv_tail is None else layer.conv_tail[..., channels]
    activation = None if layer.mask is None else layer.mask.unsqueeze(-1).to(source).expand_as(source)
    if act is not None:
        y = causal_convolution(source, weight, bias, tail, layer.taps)
        activation = mask_padding(as_diagonal(act, y), layer.mask)
    return InputMap(
        source=source,
        enter=lambda u, biased: mask_padding(enter(u, biased), layer.mask),
        kernel=at_least_float32(weight[:, 0].flip(-1)),
        bias=None if bias is None else at_least_float32(bias),
        tail=tail,
        taps=layer.taps,
        activation=activation,
    )


def one_path(
    mixer: Any,
    layer: LayerTrace,
    input_map: InputMap,
    gate: Tensor,
    out: str = "out_proj",
    added: Tensor | None = None,
    **frozen: Any,
) -> LinearizedLayer:
    """Return a layer of one recurrence as a linear map: the projection `out` of `gate` times the recurrence's output,
    plus that of `added`; `frozen` are further fields of `OutputMap`."""
    u, project = at_least_float32(layer.u), projection(mixer, out)
    output_map = OutputMap(lambda v: project(v, False), gate=gate, **frozen)
    rest = constant(mixer, out, u) if added is None else project(added, True)
    return LinearizedLayer(u, (Path(layer.recurrence, input_map, output_map),), rest=rest)


def gated_by(mixer: Any, layer: LayerTrace, factor: Tensor) -> dict[str, Any]:
    """Return the fields of an `OutputMap` for values times `factor` and, if the layer has a gate, SiLU(z_proj(u))."""
    if layer.z is None:
        return {"gate": factor}
    z = at_least_float32(layer.z)
    return {"gate": factor * silu(z), "gate_map": opened_by(projection(mixer, "z_proj"), silu, z), "factor": factor}


def opened_by(
    enter: Callable[[Tensor, bool], Tensor], act: Callable[[Tensor], Tensor], z: Tensor
) -> Callable[[Tensor, bool], Tensor]:
    """Return an output gate act(z), z = enter(u, True), as a linear map of u, act(z) / z frozen; see `OutputMap`."""
    return lambda u, biased: enter(u, biased) * as_diagonal(act, z)


def constant(mixer: Any, name: str, u: Tensor) -> Tensor | None:
    """Return a linear layer's bias at every position of `u` (batch, length, …); None without one."""
    bias = offset(getattr(mixer, name), _named(mixer, name))
    return None if bias is None else bias.to(u).expand(*u.shape[:2], -1)


def rms_factor(v: Tensor, eps: float, size: int | None = None) -> Tensor:
    """Return 1 / √(mean of v² + eps) over the last dimension, or over groups of `size` in it, in the shape of `v`."""
    groups = v.unflatten(-1, (-1, size or v.shape[-1]))
    return torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps).expand_as(groups).flatten(-2)


def delayed(t: Tensor, first: Tensor | None = None) -> Tensor:
    """Return `t` (batch, length, …) a step later, after `first` (batch, 1, …) or zeros."""
    first = torch.zeros_like(t[:, :1]) if first is None else first.to(t)
    return torch.cat([first, t[:, :-1]], dim=1)
