"""Differential Mamba: layers that subtract one state-space mixer from another to cancel what both over-attend to.

N-Diff-Mamba (Differential Mamba, Eq. 21) adds (1 − λ_i) · RMSNorm(Mamba₁(n) − λ Mamba₂(n)) to the residual stream, with
two whole mixers of expansion 1. Diff-S6 (Eqs. 13 and 16) is its ablation: it subtracts two recurrences over the same
input inside one Mamba-2 block. The hybrid (section 4.4) makes layers 0, 2, 4, … differential and leaves the others
plain. The paper's experiments are all on Mamba-2 (`DiffMambaConfig`); its equations are also written for Mamba-1
(`DiffMamba1Config`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm

from ssmscope.architectures.own.base import base_of, variant
from ssmscope.architectures.own.diff_layers import LAMBDA_FORMS, DiffMambaMixer, DiffS6Mixer, Subtraction
from ssmscope.architectures.read.parts import (
    as_mask,
    at_least_float32,
    constant,
    convolution,
    convolve,
    convolved_input_map,
    mask_padding,
    norm_weight,
    opened_by,
    projection,
    rms_factor,
)
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError, did_you_mean
from ssmscope.ops import Recurrence, Scan

SCOPES = ("block", "s6")
LAYERS = ("full", "hybrid")


# ---- how to read them


def compute_terms(
    mixer: nn.Module, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None
) -> LayerTrace:
    """Return the layer's terms: two recurrences, first the one that is kept, then the one that is subtracted.

    `extras["lambda"]` is λ. With two whole mixers `conv_input`, `conv_tail`, `taps` and `z` are those of both mixers,
    concatenated along the last dimension, m₁'s first; Diff-S6 has one of each.
    """
    extras = {"lambda": mixer.current_lambda()}
    if isinstance(mixer, DiffS6Mixer):
        return _s6_terms(mixer, u, as_mask(mask), state, extras)
    first, second = (
        base_of(m).compute_terms(m, u, mask, part) for m, part in zip((mixer.m1, mixer.m2), _state_of_each(state))
    )
    return replace(
        first,
        recurrences=(first.recurrence, second.recurrence),
        conv_input=torch.cat([first.conv_input, second.conv_input], dim=-1),
        conv_tail=state.conv if state is not None else None,
        taps=None if first.taps is None else torch.cat([first.taps, second.taps], dim=-1),
        z=torch.cat([first.z, second.z], dim=-1),
        extras=extras,
    )


def _s6_terms(
    mixer: DiffS6Mixer, u: Tensor, mask: Tensor | None, state: LayerState | None, extras: dict[str, Tensor]
) -> LayerTrace:
    inner, heads = mixer.intermediate_size, mixer.num_heads
    z, conv_input, *steps = mixer.in_proj(u).split([inner, mixer.conv_dim, heads, heads], dim=-1)
    convolved, around = convolve(mixer, conv_input, convolution(mixer, conv_input), mask, state, mixer.act)
    x, *rest = at_least_float32(convolved).split([inner, *[mixer.n_groups * mixer.ssm_state_size] * 4], dim=-1)
    x = rearrange(x, "b t (h p) -> b t h p", h=heads)
    B1, C1, B2, C2 = (rearrange(t, "b t (g n) -> b t g n", g=mixer.n_groups) for t in rest)
    bias, A_log, D = (at_least_float32(t) for t in (mixer.dt_bias, mixer.A_log, mixer.D))
    deltas = (softplus(at_least_float32(t) + b).clamp(*mixer.sizes.time_step_limit) for t, b in zip(steps, bias))
    recurrences = tuple(
        Recurrence(x=x, b=B, c=C, delta=mask_padding(delta, mask), A=-A_log[i].exp().unsqueeze(-1), D=D[i])
        for i, (B, C, delta) in enumerate(zip((B1, B2), (C1, C2), deltas))
    )
    return LayerTrace(u, recurrences, mask=mask, z=z, extras=extras, **around)


def output(mixer: nn.Module, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the block's contribution to the residual stream, (batch, length, width) (Eqs. 16 and 21)."""
    scans = layer.scan() if scans is None else scans
    weight = layer.extras["lambda"]
    if isinstance(mixer, DiffS6Mixer):
        first, second = (s.y.flatten(2) for s in scans)
        y = mixer.norm(mixer.difference(first, second, weight) * mixer.act(layer.gate)).to(layer.gate.dtype)
        return (1 - mixer.lambda_init) * mixer.out_proj(y)
    first, second = (
        base_of(m).output(m, replace(layer, recurrences=(r,), z=z), (scan,))
        for m, r, z, scan in zip((mixer.m1, mixer.m2), layer.recurrences, layer.gate.chunk(2, dim=-1), scans)
    )
    return (1 - mixer.lambda_init) * mixer.difference(first, second, weight)


def linearized(mixer: nn.Module, layer: LayerTrace) -> LinearizedLayer:
    """Return (1 − λ_i) diag(w / rms) (M₁ − λ M₂) as a linear map, gates and norms frozen (Differential Mamba, Eqs. 13
    and 21).

    With two whole mixers the norm follows their projections: maps have its factor 1 / rms, without the weights of
    single channels.
    """
    u, weight = at_least_float32(layer.u), -layer.extras["lambda"]
    outside = 1 - mixer.lambda_init
    if isinstance(mixer, DiffS6Mixer):
        return _s6_linearized(mixer, layer, u, weight, outside)
    assert layer.conv_input is not None
    tails, taps = ((None, None) if each is None else each.chunk(2, dim=-1) for each in (layer.conv_tail, layer.taps))
    conv_inputs, gates = layer.conv_input.chunk(2, dim=-1), layer.gate.chunk(2, dim=-1)
    bases = [base_of(m).linearized for m in (mixer.m1, mixer.m2)]
    first, second = (
        each(m, replace(layer, recurrences=(r,), conv_input=x, conv_tail=tail, taps=read, z=z))
        for each, m, r, x, tail, read, z in zip(
            bases, (mixer.m1, mixer.m2), layer.recurrences, conv_inputs, tails, taps, gates
        )
    )
    of_both = first.matvec(u) + first.bias + weight * (second.matvec(u) + second.bias)
    scale, factor = _sub_norm(mixer, of_both)
    factor, scale = outside * factor, outside * scale
    paths = (
        _after_norm(first.paths[0], "kept", None, factor, scale),
        _after_norm(second.paths[0], "subtracted", weight, factor, scale),
    )
    biases = [torch.zeros_like(of_both) if b.rest is None else b.rest for b in (first, second)]
    return LinearizedLayer(u, paths, rest=factor * (biases[0] + weight * biases[1]), joined=False)


def _after_norm(path: Path, name: str, weight: Tensor | None, factor: Tensor, scale: Tensor) -> Path:
    project = path.output_map.project
    output_map = replace(path.output_map, project=lambda v: factor * project(v), scale=scale)
    return replace(path, name=name, weight=weight, output_map=output_map)


def _sub_norm(mixer: Subtraction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of the norm after the subtraction, (batch, length), and with its weights, shaped as `y`."""
    if mixer.sub_norm is None:
        return torch.ones_like(y[..., 0]), torch.ones_like(y)
    factor = rms_factor(y, mixer.sub_norm.variance_epsilon)
    return factor[..., 0], factor * norm_weight(mixer, "sub_norm", Mamba2RMSNorm)


def _s6_linearized(mixer: DiffS6Mixer, layer: LayerTrace, u: Tensor, weight: Tensor, outside: float) -> LinearizedLayer:
    inner, project = mixer.intermediate_size, projection(mixer, "out_proj")
    enter = projection(mixer, "in_proj", slice(inner, 2 * inner))
    input_map = convolved_input_map(mixer, layer, mixer.act, enter, slice(0, inner))
    first, second = (s.y.flatten(2) for s in layer.scan())
    _, subtracted = _sub_norm(mixer, first + weight * second)
    z = at_least_float32(layer.gate)
    opened, gate_map = mixer.act(z), opened_by(projection(mixer, "in_proj", slice(0, inner)), mixer.act, z)
    norm = rms_factor((first + weight * second) * subtracted * opened, mixer.norm.variance_epsilon)
    factor = subtracted * norm * norm_weight(mixer, "norm", Mamba2RMSNorm)
    output_map = OutputMap(
        lambda v: outside * project(v, False), gate=opened * factor, scale=outside, gate_map=gate_map, factor=factor
    )
    kept, removed = layer.recurrences
    paths = (
        Path(kept, input_map, output_map, "kept"),
        Path(removed, input_map, output_map, "subtracted", weight=weight),
    )
    rest = constant(mixer, "out_proj", u)
    return LinearizedLayer(u, paths, rest=None if rest is None else outside * rest)


def _state_of_each(state: LayerState | None) -> Sequence[LayerState | None]:
    if state is None:
        return (None, None)
    assert state.conv is not None
    return [LayerState(conv, (ssm,)) for conv, ssm in zip(state.conv.chunk(2, dim=-1), state.ssm)]


# ---- the models


class DifferentialFields:
    """A Differential Mamba on Mamba-2, the paper's, or on Mamba-1, with `scope="block"` only.

    Args (in addition to those of `Mamba2Config` or `MambaConfig`, which describe the plain layers; the two mixers of a
    differential layer have expansion 1 and as many heads, which are narrower):
        scope: `block` subtracts whole mixers (Diff-Mamba, Eq. 19), `s6` recurrences inside one block (Diff-S6, Eq. 13).
        differential_layers: `full`, `hybrid` (layers 0, 2, 4, …), or the indices of the differential layers.
        normalize: a root-mean-square norm after the subtraction (Eqs. 16 and 21).
        lambda_form: `sum` (Eq. 17), `scalar` or `exponential` (Eq. 11), see `Subtraction`.
        lambda_std: initial standard deviation of the parameters of λ. Default 0 for `sum` and `scalar`: the sum of
            D standard normal numbers (1, the authors' choice) saturates the sigmoid. Default 0.1 for `exponential`.
    """

    hidden_size: int
    num_hidden_layers: int

    def __init__(
        self, scope="block", differential_layers="full", normalize=True, lambda_form="sum", lambda_std=None, **kwargs
    ):
        super().__init__(**kwargs)
        layers = differential_layers
        for name, value, allowed in (("scope", scope, SCOPES), ("lambda_form", lambda_form, LAMBDA_FORMS)):
            if value not in allowed:
                raise InputError(f"{name} {value!r} is unknown: choose one of {', '.join(allowed)}")
        if isinstance(layers, str) and layers not in LAYERS:
            hint = did_you_mean(layers, LAYERS)
            raise InputError(f"differential_layers {layers!r} is unknown: choose full, hybrid or a list{hint}")
        if lambda_std is None:
            lambda_std = 0.1 if lambda_form == "exponential" else 0.0
        if lambda_form == "exponential" and lambda_std == 0:
            raise InputError("lambda_std 0 with lambda_form 'exponential' never moves: its gradient is 0")
        self.scope, self.normalize = scope, normalize
        self.differential_layers = layers if isinstance(layers, str) else sorted(layers)
        self.lambda_form, self.lambda_std = lambda_form, lambda_std
        self.use_cache = False
        outside = [i for i in self.differential_indices if not 0 <= i < self.num_hidden_layers]
        if outside or not self.differential_indices:
            raise InputError(
                f"differential_layers {layers!r}: give at least one layer, from 0 to {self.num_hidden_layers - 1}"
            )
        heads = getattr(self, "num_heads", None)
        if heads is None and scope != "block":
            raise InputError("scope 's6' is built on Mamba-2: use DiffMambaConfig (model type diff-mamba)")
        if heads is not None and scope == "block" and self.hidden_size % heads:
            raise InputError(f"{heads} heads do not divide the {self.hidden_size} channels of each mixer")

    @property
    def differential_indices(self) -> list[int]:
        """Indices of the differential layers, from 0."""
        if isinstance(self.differential_layers, str):
            return list(range(0, self.num_hidden_layers, 1 if self.differential_layers == "full" else 2))
        return self.differential_layers


class Differential:
    """Base of models with differential layers, which run whole sequences without a cache."""

    config: Any

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        try:
            self.config = getattr(module, "sizes", config)  # transformers 4 reads a mixer's sizes from here.
            super()._init_weights(module)  # type: ignore[misc]
        finally:
            self.config = config
        if isinstance(module, Subtraction):
            module.reset()

    def forward(self, *args, use_cache=False, **kwargs):
        return super().forward(*args, use_cache=False, **kwargs)  # type: ignore[misc]


class DifferentialBackbone(Differential):
    """Base of the backbones."""

    def __init__(self, config):
        super().__init__(config)  # type: ignore[call-arg]
        mixer = DiffMambaMixer if config.scope == "block" else DiffS6Mixer
        for index in config.differential_indices:
            self.layers[index].mixer = mixer(config, index)  # type: ignore[attr-defined]
        self.post_init()  # type: ignore[attr-defined]


class DifferentialLanguageModel(Differential):
    """Base of the language models."""

    backbone_class: Any

    def __init__(self, config):
        super().__init__(config)  # type: ignore[call-arg]
        self.backbone = self.backbone_class(config)
        self.post_init()  # type: ignore[attr-defined]


CLASSES = DifferentialFields, DifferentialBackbone, DifferentialLanguageModel
DiffMambaConfig, DiffMambaModel, DiffMambaForCausalLM = variant("Mamba2", "DiffMamba", "diff-mamba", *CLASSES)
DiffMamba1Config, DiffMamba1Model, DiffMamba1ForCausalLM = variant("Mamba", "DiffMamba1", "diff-mamba1", *CLASSES)
AUTO = (DiffMambaModel, DiffMambaForCausalLM, DiffMamba1Model, DiffMamba1ForCausalLM)


def lambdas(module: nn.Module) -> dict[int, float]:
    """Return λ of every differential layer of a model, by the layer's index from 0."""
    with torch.no_grad():
        return {m.layer_idx: m.current_lambda().item() for m in module.modules() if isinstance(m, Subtraction)}
