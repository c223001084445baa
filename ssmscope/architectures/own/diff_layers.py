"""Layers of Differential Mamba.

`DiffMambaMixer` subtracts whole mixers (Differential Mamba, Eq. 21), `DiffS6Mixer` recurrences (Eqs. 13 and 16).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer, Mamba2RMSNorm

from ssmscope.architectures.read.parts import ReadMixer, at_least_float32, refuse_caches

LAMBDA_FORMS = ("sum", "scalar", "exponential")
SUB_NORM_EPSILON = 1e-5


def lambda_init(layer: int) -> float:
    """λ_i = 0.8 − 0.6 exp(−0.3 (i − 1)) with i = `layer` + 1, layers counted from 0 (Differential Mamba, A.1)."""
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
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("lambda_"):
                nn.init.normal_(parameter, std=self.lambda_std) if self.lambda_std else nn.init.zeros_(parameter)

    def reset(self) -> None:
        """Initialise the parameters that transformers' models do not."""
        self.reset_lambda()

    def current_lambda(self) -> Tensor:
        """Return λ, a number in at least float32, with its gradient."""
        if self.lambda_form == "exponential":
            q1, k1, q2, k2 = map(at_least_float32, (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2))
            return torch.exp(torch.dot(q1, k1)) - torch.exp(torch.dot(q2, k2)) + self.lambda_init
        return torch.sigmoid(at_least_float32(self.lambda_bar).sum()) + self.lambda_init

    def difference(self, first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
        """Return N(first − λ second), all (batch, length, channels)."""
        return self.normed(first - weight.to(first.dtype) * second)

    def normed(self, y: Tensor) -> Tensor:
        """Return N(y), which is y without `normalize`."""
        return y if self.sub_norm is None else self.sub_norm(y)


class DiffMambaMixer(Subtraction):
    """(1 − λ_i) N(m₁(u) − λ m₂(u)) with two mixers of transformers, of Mamba-1 or Mamba-2, of expansion 1 (Eq. 21)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.hidden_size)
        mixer = MambaMixer if isinstance(config, MambaConfig) else Mamba2Mixer
        half = _of_expansion_one(config)
        self.m1, self.m2 = mixer(half, layer_idx), mixer(half, layer_idx)
        self.m1.sizes = self.m2.sizes = half

    def forward(self, hidden_states, cache_params=None, *args, cache=None, attention_mask=None, **kwargs):
        refuse_caches(self, cache_params, cache)
        first, second = (m(hidden_states, attention_mask=attention_mask) for m in (self.m1, self.m2))
        return (1 - self.lambda_init) * self.difference(first, second, self.current_lambda())


class DiffS6Mixer(ReadMixer, Subtraction):
    """A Mamba-2 block with two recurrences over the same x and gate z, subtracted before the gate (Eqs. 13 and 16).

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
            self.conv_dim,
            self.conv_dim,
            config.conv_kernel,
            groups=self.conv_dim,
            padding=config.conv_kernel - 1,
            bias=config.use_conv_bias,
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
        projection = torch.empty_like(self.out_proj.weight)
        nn.init.kaiming_uniform_(projection, a=math.sqrt(5))  # It returns None while transformers 4 opens a checkpoint.
        depth = self.sizes.num_hidden_layers if self.sizes.rescale_prenorm_residual else 1
        _start(self.out_proj.weight, projection / math.sqrt(depth))


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
