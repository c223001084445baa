"""Mamba-3 (Lahoti et al. 2026, arXiv 2603.15569) with one input and one output per head, as mamba_ssm's models have it.

Each head keeps H_t by the trapezoidal rule, and turns its state by angles that the token chooses:

    H_t = a_t H_{t−1} + β_t b_{t−1} x_{t−1}ᵀ + γ_t b_t x_tᵀ,        y_t = c_tᵀ H_t + D x_t,
    a_t = exp(Δ_t A_t),  β_t = (1 − λ_t) Δ_t a_t,  γ_t = λ_t Δ_t,  λ_t = σ(·),

b and c being RMSNorm(B) and RMSNorm(C) with a bias per head. Their neighbouring dimensions are turned, as complex
numbers, by the sum of π tanh(θ_r) Δ_r over r ≤ t: the state is given in a frame that turns with it, which is exact.
There is no convolution. A step's write comes from two tokens and has rank two, so a layer is two recurrences with the
same decays: "now" writes γ_t b_t x_tᵀ, and "before" β_t b_{t−1} x_{t−1}ᵀ.

The rate A_t = −f(·) is chosen by the token too. In the package's release 2.3.2 f is the softplus; since June 2026, and
with it in all of its language models of these layers, f(x) is 1 + x from 0 on and 1 / (1 − x) below (`decay`).

The model may also have the attention and feed-forward parts of mamba_ssm's Mamba-2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import softplus
from ssmscope.core.forms import Form, Norm
from ssmscope.core.linearized import LinearizedLayer, Path
from ssmscope.core.trace import LayerState, LayerTrace, last_inputs
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.layers.linear_layers import turned
from ssmscope.layers.mamba2attn import Mamba2AttnConfig, Mamba2AttnForCausalLM, Mamba2AttnModel
from ssmscope.ops import Recurrence, Scan

DECAYS = ("heavy-tail", "softplus")
ROTATED_SHARES = (0.5, 1.0)
"""Allowed shares of a state's dimensions that are turned."""
NORM_EPSILON = 1e-5
"""Epsilon of the norms within a layer, unless the configuration has another."""


class Mamba3Mixer(parts.ReadMixer, nn.Module):
    """Mamba-3's mixer; its parameters have mamba_ssm's names."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.num_heads, self.n_groups = layer_idx, config.num_heads, config.n_groups
        self.head_dim, self.decay, self.decay_floor = config.head_dim, config.decay, config.decay_floor
        heads, state, inner = config.num_heads, config.state_size, config.num_heads * config.head_dim
        pairs = int(state * config.rope_fraction) // 2
        self.sizes = [inner, inner, *[config.n_groups * state] * 2, *[heads] * 3, pairs]
        self.in_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.dt_bias, self.D = nn.Parameter(torch.empty(heads)), nn.Parameter(torch.empty(heads))
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(heads, 1, state)) for _ in range(2))
        self.epsilon = config.inner_norm_epsilon
        self.B_norm, self.C_norm = nn.RMSNorm(state, self.epsilon), nn.RMSNorm(state, self.epsilon)
        self.norm = nn.RMSNorm(inner, self.epsilon) if config.head_norm else None
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.steps = config.time_step_min, config.time_step_max, config.time_step_floor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw steps between the configuration's bounds, evenly in their logarithm, and set D and the biases to 1."""
        low, high, floor = self.steps
        with torch.no_grad():
            delta = (torch.rand_like(self.dt_bias) * math.log(high / low)).exp().mul(low).clamp(min=floor)
            self.dt_bias.copy_(delta + torch.log(-torch.expm1(-delta)))
            for ones in (self.D, self.B_bias, self.C_bias):
                nn.init.ones_(ones)

    def turned_heads(self, norm: nn.Module, t: Tensor, bias: Tensor, angle: Tensor) -> Tensor:
        """Return B or C (batch, length, groups · state) of every head, normed, with its bias, and turned."""
        by_group = parts.at_least_float32(norm(rearrange(t, "b t (g n) -> b t g n", g=self.n_groups)))
        by_head = by_group.repeat_interleave(self.num_heads // self.n_groups, dim=2)
        return turned(by_head + parts.at_least_float32(bias).squeeze(1), angle)

    def rate(self, t: Tensor) -> Tensor:
        """Return f(t), which is positive; see the module's docstring."""
        return softplus(t) if self.decay == "softplus" else t.clamp(min=0) + 1 / (1 - t.clamp(max=0))


@dataclass(frozen=True, eq=False)
class Mamba3State(LayerState):
    """State from which a layer continues: in `ssm` the states of "now" and "before"; the last token's `x` (batch, 1,
    heads, width) and `b` (batch, 1, heads, state), and the `angle` (batch, heads, pairs) by which it was turned."""

    x: Tensor
    b: Tensor
    angle: Tensor


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms as two recurrences, "now" and "before"; `extras` has the `angle` of every pair of the
    state's dimensions, (batch, length, heads, pairs) in float64."""
    assert state is None or isinstance(state, Mamba3State)
    mask = parts.as_mask(mask)
    z, x, B, C, step, rate, share, theta = mixer.in_proj(u).split(mixer.sizes, dim=-1)
    delta = parts.mask_padding(softplus(parts.at_least_float32(step) + parts.at_least_float32(mixer.dt_bias)), mask)
    log_a = -mixer.rate(parts.at_least_float32(rate)).clamp(min=mixer.decay_floor) * delta
    angle = (math.pi * parts.at_least_float32(theta).tanh().unsqueeze(2) * delta.unsqueeze(-1)).double().cumsum(1)
    angle = angle if state is None else angle + state.angle.unsqueeze(1)
    x = rearrange(parts.at_least_float32(parts.mask_padding(x, mask)), "b t (h p) -> b t h p", p=mixer.head_dim)
    b, c = (
        mixer.turned_heads(norm, t, bias, angle)
        for norm, t, bias in ((mixer.B_norm, B, mixer.B_bias), (mixer.C_norm, C, mixer.C_bias))
    )
    share = parts.at_least_float32(share).sigmoid()  # λ, the share of the current input.
    decay = log_a.unsqueeze(-1)
    now = Recurrence(x=x, b=b, c=c, delta=share * delta, log_a=decay, D=parts.at_least_float32(mixer.D))
    before_x, before_b = (None, None) if state is None else (state.x, state.b)
    later = (1 - share) * delta * log_a.exp()
    delayed = parts.delayed(x, before_x), parts.delayed(b, before_b)
    before = Recurrence(*delayed, c=c, delta=later, log_a=decay, joins=True)
    initial = None if state is None else state.ssm
    return LayerTrace(u, (now, before), mask=mask, z=z, initial=initial, reach=2, extras={"angle": angle})


FORM = Form(
    values=lambda mixer, _: ("in_proj", slice(mixer.sizes[0], 2 * mixer.sizes[0])),
    norm=lambda mixer, _: None if mixer.norm is None else Norm(mixer.norm.weight, None, mixer.epsilon, mixer.head_dim),
    gate=lambda mixer, _: ("in_proj", slice(0, mixer.sizes[0])),
)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with Δ, λ, A, b, c, the gate and the norm frozen: a path for each recurrence,
    that of "before" after a shift by one token."""
    (now, before), input_map = layer.recurrences, FORM.input_map(mixer, layer)
    first, second = (None, None) if layer.initial is None else layer.initial
    tail = None if layer.initial is None else before.x[:, :1].flatten(2)
    shift: dict[str, Any] = {"filter": now.x.new_tensor([0, 1]), "filter_tail": tail}
    return FORM.linearized(
        mixer,
        layer,
        lambda output_map: (
            Path(now, input_map, output_map, name="now", initial=first),
            Path(before, input_map, output_map, name="before", initial=second, **shift),
        ),
    )


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> Mamba3State:
    """Return the state from which a run continues after this layer."""
    now, before = layer.recurrences
    x, b = (
        last_inputs(own.flatten(2), 2, later[:, :1].flatten(2), layer.mask).unflatten(2, own.shape[2:])
        for own, later in ((now.x, before.x), (now.b, before.b))
    )
    return Mamba3State(None, tuple(scan.state for scan in scans), x, b, layer.extras["angle"][:, -1])


# ---- the models


class Mamba3Config(Mamba2AttnConfig):
    """Configuration of Mamba-3, with attention and feed-forward parts where `Mamba2AttnConfig` says so.

    Args (in addition to those of `Mamba2AttnConfig`; there is no convolution, and expand · hidden_size / head_dim
    heads):
        rope_fraction: the share of a state's dimensions that are turned, 0.5 or 1.
        decay: the formula of the rate A, one of `DECAYS`.
        decay_floor: the smallest |A|.
        head_norm: whether every head's output is normed before the gate.
        inner_norm_epsilon: epsilon of the norms within a layer.

    Raises:
        InputError: as `Mamba2AttnConfig`; if head_dim or n_groups does not divide, or an option has another value.
    """

    model_type = "ssm-mamba3"
    mixer = Mamba3Mixer
    inner_norm_epsilon = NORM_EPSILON

    def __init__(
        self,
        hidden_size: int = 768,
        state_size: int = 128,
        expand: int = 2,
        head_dim: int = 64,
        n_groups: int = 1,
        rope_fraction: float = 0.5,
        decay: str = "heavy-tail",
        decay_floor: float = 1e-4,
        head_norm: bool = False,
        inner_norm_epsilon: float = NORM_EPSILON,
        **kwargs,
    ):
        inner = int(expand * hidden_size)
        heads = inner // head_dim if head_dim > 0 else 0
        if heads * head_dim != inner or n_groups < 1 or heads % n_groups:
            raise InputError(
                f"head_dim {head_dim} must divide the {inner} channels, and n_groups {n_groups} the heads that it makes"
            )
        if rope_fraction not in ROTATED_SHARES or int(state_size * rope_fraction) < 2:
            raise InputError(f"rope_fraction {rope_fraction!r} of a state of {state_size}: give 0.5 or 1, of 4 or more")
        if decay not in DECAYS:
            raise InputError(f"decay {decay!r} is unknown: choose one of {', '.join(DECAYS)}")
        if inner_norm_epsilon != NORM_EPSILON:  # By default it is no part of a model's fingerprint.
            self.inner_norm_epsilon = inner_norm_epsilon
        self.rope_fraction, self.decay, self.decay_floor, self.head_norm = rope_fraction, decay, decay_floor, head_norm
        sizes: dict[str, Any] = dict(hidden_size=hidden_size, state_size=state_size, expand=expand, head_dim=head_dim)
        super().__init__(**{**kwargs, **sizes, "n_groups": n_groups, "num_heads": heads})


class _Initialised:
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, Mamba3Mixer):
            module.reset_parameters()


class Mamba3Model(_Initialised, Mamba2AttnModel):
    """Backbone of embedding, blocks and norm."""

    config_class = Mamba3Config


class Mamba3ForCausalLM(_Initialised, Mamba2AttnForCausalLM):
    """Language model of the backbone and a head on the vocabulary."""

    config_class = Mamba3Config
    backbone_class = Mamba3Model


AUTO = (Mamba3Model, Mamba3ForCausalLM)
