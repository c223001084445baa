"""Functions that the layers of several architecture families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import silu
from transformers.activations import ACT2FN
from transformers.models.mamba.modeling_mamba import MambaMixer
from ssmscope.core.affine import agrees_with_weight, convolved, depthwise
from ssmscope.core.forms import Norm, named
from ssmscope.core.forms import at_least_float32 as at_least_float32
from ssmscope.core.forms import constant as constant
from ssmscope.core.forms import mask_padding as mask_padding
from ssmscope.core.forms import projection as projection
from ssmscope.core.mixers import adapter_for, conv_tap_mask, edit_conv_input
from ssmscope.core.trace import LayerState
from ssmscope.core.weights import as_constant, prepared
from ssmscope.errors import InputError
from ssmscope.ops.compiling import compilable

BY_WEIGHT = not hasattr(MambaMixer, "slow_forward")
"""True if transformers' mixers multiply by the weights of `conv1d` and `dt_proj` instead of calling them."""

Activation = Callable[[Tensor], Tensor]


class ReadMixer:
    """Mixin before a mixer that computes its output as its architecture is read: terms, scan, output."""

    def forward(self, hidden_states, cache_params=None, *args, cache=None, attention_mask=None, **kwargs):
        refuse_caches(self, cache_params, cache)
        adapter = adapter_for(self)
        return adapter.output(self, adapter.compute_terms(self, hidden_states, attention_mask))


def refuse_caches(mixer: Any, *caches: Any) -> None:
    """Raise ValueError if a cache is given to a mixer that fills none."""
    if any(cache is not None for cache in caches):
        raise ValueError(
            f"{type(mixer).__name__} fills no cache: call the model with use_cache=False, and continue a run with "
            "ssmscope's Model.run"
        )


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


def convolution(
    mixer: Any, x: Float[Tensor, "batch length channels"], name: str = "conv1d", taps: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the weight (channels, 1, taps) and bias (channels,) of a mixer's convolution, which reads `x`. Raise
    InputError if it is not a depthwise convolution, or the library's mixer ignores its PEFT adapter."""
    return prepared(mixer, _convolution, x.shape[-1], name, taps)


def _convolution(mixer: Any, channels: int, name: str, taps: int | None) -> tuple[Tensor, Tensor | None]:
    _check_weight_is_all(mixer, name)
    taps = taps or (mixer.taps if hasattr(mixer, "taps") else mixer.conv_kernel_size)
    return depthwise(getattr(mixer, name), channels, taps, named(mixer, name))


def step_projection(mixer: Any, step: Tensor) -> Tensor:
    """Return Δ before its softplus for a Mamba's mixer. Raise InputError if it ignores a PEFT adapter of `dt_proj`."""
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
            f"transformers {transformers.__version__} reads the weight of {named(mixer, name)} and leaves out what a "
            "PEFT adapter or hook adds to it: merge the former (peft's merge_and_unload()), or give it another target"
        )


def rms_factor(v: Tensor, eps: float | None, size: int | None = None) -> Tensor:
    """Return 1 / √(mean of v² + eps) over the last dimension, or over groups of `size` in it, in the shape of `v`."""
    return Norm(None, eps=eps, size=size).factor(v)


def delayed(t: Tensor, first: Tensor | None = None) -> Tensor:
    """Return `t` (batch, length, …) a step later, after `first` (batch, 1, …) or zeros."""
    first = torch.zeros_like(t[:, :1]) if first is None else first.to(t)
    return torch.cat([first, t[:, :-1]], dim=1)
