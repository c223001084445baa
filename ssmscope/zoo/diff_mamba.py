"""Differential Mamba: layers that subtract one state-space mixer from another to cancel what both over-attend to.

N-Diff-Mamba (Differential Mamba, Eq. 21) adds (1 − λ_i) · RMSNorm(Mamba₁(n) − λ Mamba₂(n)) to the residual stream, with
two whole mixers of expansion 1. Diff-S6 (Eqs. 13 and 16) is its ablation: it subtracts two recurrences over the same
input inside one Mamba-2 block. The hybrid (section 4.4) makes layers 0, 2, 4, … differential and leaves the others
plain. The paper's experiments are all on Mamba-2 (`DiffMambaConfig`); its equations are also written for Mamba-1
(`DiffMamba1Config`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer, Mamba2RMSNorm
from ssmscope.core.forms import norm_of, opened_by
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError, did_you_mean
from ssmscope.layers import mamba2, parts
from ssmscope.ops import Recurrence, Scan
from ssmscope.zoo.variants import base_of, variant

SCOPES = ("block", "s6")
LAYERS = ("full", "hybrid")


LAMBDA_FORMS = ("sum", "scalar", "exponential")
SUB_NORM_EPSILON = 1e-5


def lambda_init(layer: int) -> float:
    """Return λ_i = 0.8 − 0.6 exp(−0.3 (i − 1)) with i = `layer` + 1, from layer 0 (Differential Mamba, A.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class Subtraction(nn.Module):
    """Base of both differential layers: λ, the norm after the subtraction, and the factor 1 − λ_i.

    λ by `lambda_form`. (Table 2 compares λ̄ ∈ R^D with its "reparameterization to a scalar" and gives no second
    formula; the authors' code has all three of these.)
        sum: σ(Σ λ̄) + λ_i, λ̄ ∈ R^D (Eq. 17).
        scalar: σ(λ̄) + λ_i, λ̄ ∈ R.
        exponential: exp(λ_q1 · λ_k1) − exp(λ_q2 · λ_k2) + λ_i, vectors in R^N. Eq. 11 is printed with − λ_i, which
            would start at a negative λ and add the second mixer; Differential Transformer (Ye et al. 2024), which the
            equation quotes, and the authors' code have + λ_i.
    """

    def __init__(self, config: Any, layer_idx: int, width: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.lambda_init = lambda_init(layer_idx)
        self.lambda_form = config.lambda_form
        self.lambda_std = config.lambda_std
        if self.lambda_form == "exponential":
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                self.register_parameter(name, nn.Parameter(torch.empty(config.state_size)))
        else:
            self.lambda_bar = nn.Parameter(torch.empty(config.hidden_size if self.lambda_form == "sum" else 1))
        self.sub_norm = Mamba2RMSNorm(width, eps=SUB_NORM_EPSILON) if config.normalize else None
        self.reset_lambda()

    def reset_lambda(self) -> None:
        """Draw the parameters of λ from N(0, `lambda_std`²)."""
        for name, parameter in self.named_parameters():
            if name.startswith("lambda_"):
                nn.init.normal_(parameter, std=self.lambda_std) if self.lambda_std else nn.init.zeros_(parameter)

    def reset(self) -> None:
        """Initialise the parameters that transformers' models do not."""
        self.reset_lambda()

    def current_lambda(self) -> Tensor:
        """Return λ, a number in at least float32, with its gradient."""
        if self.lambda_form == "exponential":
            q1, k1, q2, k2 = map(
                parts.at_least_float32, (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
            )
            return torch.exp(torch.dot(q1, k1)) - torch.exp(torch.dot(q2, k2)) + self.lambda_init
        return torch.sigmoid(parts.at_least_float32(self.lambda_bar).sum()) + self.lambda_init

    def difference(self, first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
        """Return N(first − λ second), all (batch, length, channels)."""
        return self.normed(first - weight.to(first.dtype) * second)

    def normed(self, y: Tensor) -> Tensor:
        """Return N(y), which is y without `normalize`."""
        return y if self.sub_norm is None else self.sub_norm(y)


class DiffMambaMixer(Subtraction):
    """Mixer (1 − λ_i) N(m₁(u) − λ m₂(u)) of two transformers mixers, of Mamba-1 or Mamba-2, of expansion 1 (Eq. 21)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.hidden_size)
        mixer = MambaMixer if isinstance(config, MambaConfig) else Mamba2Mixer
        half = _of_expansion_one(config)
        self.m1, self.m2 = mixer(half, layer_idx), mixer(half, layer_idx)
        self.m1.sizes = self.m2.sizes = half

    def forward(self, hidden_states, cache_params=None, *args, cache=None, attention_mask=None, **kwargs):
        parts.refuse_caches(self, cache_params, cache)
        first, second = (m(hidden_states, attention_mask=attention_mask) for m in (self.m1, self.m2))
        return (1 - self.lambda_init) * self.difference(first, second, self.current_lambda())


class DiffS6Mixer(parts.ReadMixer, Subtraction):
    """Mamba-2 block with two recurrences over the same x and gate z, subtracted before the gate (Eqs. 13 and 16).

    (1 − λ_i) · out_proj(RMSNorm(N(S6₁(x) − λ S6₂(x)) ⊙ SiLU(z))); B, C, Δ, A and D are the recurrences' own. The factor
    1 − λ_i stands at the end, where the gated norm cannot cancel it. (The authors' code gives each recurrence its own x
    and z as well; Eqs. 13 and 14 have one.)
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        inner = int(config.expand * config.hidden_size)
        super().__init__(config, layer_idx, inner)
        self.sizes = config
        self.num_heads, self.n_groups, self.ssm_state_size = config.num_heads, config.n_groups, config.state_size
        self.intermediate_size, self.conv_kernel_size = inner, config.conv_kernel
        self.conv_dim = inner + 4 * config.n_groups * config.state_size  # x, B₁, C₁, B₂, C₂
        self.act = nn.SiLU()
        self.in_proj = nn.Linear(config.hidden_size, inner + self.conv_dim + 2 * config.num_heads, bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, config.conv_kernel, groups=self.conv_dim, bias=config.use_conv_bias
        )
        self.dt_bias = nn.Parameter(torch.empty(2, config.num_heads))
        self.A_log = nn.Parameter(torch.empty(2, config.num_heads))
        self.D = nn.Parameter(torch.empty(2, config.num_heads))
        self.norm = Mamba2RMSNorm(inner, eps=config.layer_norm_epsilon)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise each of the two recurrences as transformers does Mamba-2's mixer."""
        self.reset_lambda()
        low, high = math.log(self.sizes.time_step_min), math.log(self.sizes.time_step_max)
        step = torch.empty_like(self.dt_bias).uniform_(low, high).exp().clamp(min=self.sizes.time_step_floor)
        _start(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # This inverts softplus.
        _start(self.A_log, torch.arange(1.0, self.num_heads + 1).log().expand(2, -1))
        nn.init.ones_(self.D)
        nn.init.kaiming_uniform_(self.conv1d.weight, a=math.sqrt(5))
        if self.conv1d.bias is not None:
            nn.init.zeros_(self.conv1d.bias)
        drawn = torch.empty_like(self.out_proj.weight)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # It returns None while transformers 4 opens a checkpoint.
        depth = self.sizes.num_hidden_layers if self.sizes.rescale_prenorm_residual else 1
        _start(self.out_proj.weight, drawn / math.sqrt(depth))


def _start(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter, unless transformers 5 marks it as read from a checkpoint (as its own `nn.init` does)."""
    if not getattr(parameter, "_is_hf_initialized", False):
        parameter.copy_(value)


def _of_expansion_one(config: Any) -> Any:
    half = copy.deepcopy(config)
    half.expand = 1
    if isinstance(config, MambaConfig):
        half.intermediate_size = config.hidden_size
    else:
        half.head_dim = config.hidden_size // config.num_heads
    return half


# ---- how to read them

RECORDABLE_TRAINING = ("diff-mamba",)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms: two recurrences, first the one that is kept, then the one that is subtracted.

    `extras["lambda"]` is λ. With two whole mixers `conv_input`, `conv_tail`, `taps` and `z` are those of both mixers,
    concatenated along the last dimension, m₁'s first; Diff-S6 has one of each.
    """
    extras = {"lambda": mixer.current_lambda()}
    if isinstance(mixer, DiffS6Mixer):
        return _s6_terms(mixer, u, parts.as_mask(mask), state, extras)
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
    convolved, around = parts.convolve(mixer, conv_input, parts.convolution(mixer, conv_input), mask, state, mixer.act)
    x, *rest = parts.at_least_float32(convolved).split([inner, *[mixer.n_groups * mixer.ssm_state_size] * 4], dim=-1)
    x = rearrange(x, "b t (h p) -> b t h p", h=heads)
    B1, C1, B2, C2 = (rearrange(t, "b t (g n) -> b t g n", g=mixer.n_groups) for t in rest)
    bias, A_log, D = (parts.at_least_float32(t) for t in (mixer.dt_bias, mixer.A_log, mixer.D))
    deltas = (softplus(parts.at_least_float32(t) + b).clamp(*mixer.sizes.time_step_limit) for t, b in zip(steps, bias))
    recurrences = tuple(
        Recurrence(x=x, b=B, c=C, delta=parts.mask_padding(delta, mask), A=-A_log[i].exp().unsqueeze(-1), D=D[i])
        for i, (B, C, delta) in enumerate(zip((B1, B2), (C1, C2), deltas))
    )
    return LayerTrace(u, recurrences, mask=mask, z=z, extras=extras, **around)


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the block's contribution to the residual stream, (batch, length, width) (Eqs. 16 and 21)."""
    scans = layer.scan() if scans is None else scans
    weight = layer.extras["lambda"]
    if isinstance(mixer, DiffS6Mixer):
        first, second = (s.y.flatten(2) for s in scans)
        y = mixer.norm(mixer.difference(first, second, weight) * mixer.act(layer.gate)).to(layer.gate.dtype)
        return (1 - mixer.lambda_init) * mixer.out_proj(y)
    first, second = (
        base_of(m).FORM.output(m, replace(layer, recurrences=(r,), z=z), (scan,))
        for m, r, z, scan in zip((mixer.m1, mixer.m2), layer.recurrences, layer.gate.chunk(2, dim=-1), scans)
    )
    return (1 - mixer.lambda_init) * mixer.difference(first, second, weight)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return (1 − λ_i) diag(w / rms) (M₁ − λ M₂) as a linear map, gates and norms frozen (Differential Mamba, Eqs. 13
    and 21).

    With two whole mixers the norm follows their projections: maps have its factor 1 / rms, without the weights of
    single channels.
    """
    u, weight = parts.at_least_float32(layer.u), -layer.extras["lambda"]
    outside = 1 - mixer.lambda_init
    if isinstance(mixer, DiffS6Mixer):
        return _s6_linearized(mixer, layer, u, weight, outside)
    assert layer.conv_input is not None
    tails, taps = ((None, None) if each is None else each.chunk(2, dim=-1) for each in (layer.conv_tail, layer.taps))
    conv_inputs, gates = layer.conv_input.chunk(2, dim=-1), layer.gate.chunk(2, dim=-1)
    bases = [base_of(m).FORM.linearized for m in (mixer.m1, mixer.m2)]
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
    norm = norm_of(mixer, "sub_norm")
    return parts.rms_factor(y, norm.eps)[..., 0], norm.factor(y)


def _s6_linearized(mixer: DiffS6Mixer, layer: LayerTrace, u: Tensor, weight: Tensor, outside: float) -> LinearizedLayer:
    inner, project = mixer.intermediate_size, parts.projection(mixer, "out_proj")
    input_map = mamba2.FORM.input_map(mixer, layer)
    first, second = (s.y.flatten(2) for s in layer.scan())
    _, subtracted = _sub_norm(mixer, first + weight * second)
    z = parts.at_least_float32(layer.gate)
    opened, gate_map = mixer.act(z), opened_by(parts.projection(mixer, "in_proj", slice(0, inner)), mixer.act, z)
    factor = subtracted * norm_of(mixer, "norm").factor((first + weight * second) * subtracted * opened)
    output_map = OutputMap(
        lambda v: outside * project(v, False), gate=opened * factor, scale=outside, gate_map=gate_map, factor=factor
    )
    kept, removed = layer.recurrences
    paths = (
        Path(kept, input_map, output_map, "kept"),
        Path(removed, input_map, output_map, "subtracted", weight=weight),
    )
    rest = parts.constant(mixer, "out_proj", u)
    return LinearizedLayer(u, paths, rest=None if rest is None else outside * rest)


def _state_of_each(state: LayerState | None) -> Sequence[LayerState | None]:
    if state is None:
        return (None, None)
    assert state.conv is not None
    return [LayerState(conv, (ssm,)) for conv, ssm in zip(state.conv.chunk(2, dim=-1), state.ssm)]


# ---- the models


class DifferentialFields:
    """Configuration fields of a Differential Mamba on Mamba-2, the paper's, or on Mamba-1, with `scope="block"` only.

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
