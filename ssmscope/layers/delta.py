"""Gated DeltaNet (Gated Delta Networks, Yang, Kautz & Hatamizadeh 2024) and, without its gates, DeltaNet.

Each of `num_heads` heads keeps a matrix of value × key size, and exchanges what it holds under a key:

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t.

q, k and v are projections after a short causal convolution and SiLU, q and k normalised to length 1; β_t = σ(W_β u_t)
is the share that is exchanged and α_t = exp(−e^A softplus(W_α u_t + b)) the share that is kept, one number per head
each. Each head's o_t is normalised by its root mean square, gated by SiLU(W_z u_t), and projected. DeltaNet has α_t = 1
and no W_z. In `ops.DeltaRecurrence` b = k, c = q, x = v.

The backbone is that of `linear_attention`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import normalize, silu, softplus
from ssmscope.core.forms import Form
from ssmscope.core.growth import GrowthLimit, gates_at_most_one
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import parts
from ssmscope.layers.gated_delta import unit
from ssmscope.layers.linear_attention import LinearAttentionConfig, family
from ssmscope.ops import DeltaRecurrence, Recurrence

# ---- the layer


class DeltaMixer(parts.ReadMixer, nn.Module):
    """Gated DeltaNet's or DeltaNet's mixer; input and output are (batch, length, width)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, key, value, heads = config.hidden_size, config.key_size, config.value_size, config.num_heads
        self.num_heads, self.sizes, self.taps = heads, [key, key, value], config.conv_kernel
        self.qkv_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv1d = nn.Conv1d(sum(self.sizes), sum(self.sizes), self.taps, groups=sum(self.sizes), bias=False)
        self.beta_proj = nn.Linear(width, heads, bias=False)
        self.decay_proj = self.z_proj = None
        if config.gated:
            self.decay_proj = nn.Linear(width, heads, bias=False)
            self.A_log = nn.Parameter(torch.empty(heads))
            self.dt_bias = nn.Parameter(torch.empty(heads))
            self.z_proj = nn.Linear(width, value, bias=False)
            self.reset_parameters()
        eps = config.layer_norm_epsilon if config.head_norm_epsilon is None else config.head_norm_epsilon
        self.head_norm = nn.RMSNorm(value // heads, eps)
        self.unit_epsilon, self.largest_beta = config.unit_epsilon, config.largest_beta
        self.out_proj = nn.Linear(value, width, bias=False)

    def reset_parameters(self) -> None:
        """Draw e^A from 1 to 16 and steps from about 0.001 to 0.1, both evenly on a logarithmic scale."""
        nn.init.uniform_(self.A_log, 0, math.log(16))
        nn.init.uniform_(self.dt_bias, math.log(math.expm1(1e-3)), math.log(math.expm1(1e-1)))


def convolved_heads(
    mixer: Any, u: Tensor, mask: Tensor | None, state: LayerState | None
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return q, k and v (batch, length, heads, width) after the convolution and SiLU, not normalised and zero at
    padding, and the convolution's fields of a `LayerTrace`."""
    qkv = mixer.qkv_proj(u)
    convolved, around = parts.convolve(mixer, qkv, parts.convolution(mixer, qkv), mask, state, silu)
    heads = [
        rearrange(parts.at_least_float32(t), "b t (h n) -> b t h n", h=mixer.num_heads)
        for t in convolved.split(mixer.sizes, dim=-1)
    ]
    return heads, around


def log_decay(mixer: Any, u: Tensor) -> Tensor:
    """Return ln α = −e^A softplus(W_α u + b), (batch, length, heads)."""
    step = softplus(parts.at_least_float32(mixer.decay_proj(u)) + parts.at_least_float32(mixer.dt_bias))
    return -parts.at_least_float32(mixer.A_log).exp() * step


def beta_of(mixer: Any, u: Tensor) -> Tensor:
    """Return β, (batch, length, heads)."""
    return mixer.largest_beta * torch.sigmoid(parts.at_least_float32(mixer.beta_proj(u)))


def growth_limit(mixer: nn.Module, layer: LayerTrace, recurrence: Recurrence) -> GrowthLimit:
    """Return the limit of the delta rule's transitions, which are at most 1."""
    return gates_at_most_one(recurrence)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms. At padding keys are zero, so that such a token exchanges nothing, whatever its β."""
    mask = parts.as_mask(mask)
    (q, k, v), around = convolved_heads(mixer, u, mask, state)
    beta = beta_of(mixer, u)
    log_a = torch.zeros_like(beta)
    if mixer.decay_proj is not None:
        log_a = parts.mask_padding(log_decay(mixer, u), mask)
    q, k = ((normalize(t, dim=-1) if not mixer.unit_epsilon else unit(t, mixer.unit_epsilon)) for t in (q, k))
    recurrence = DeltaRecurrence(x=v, b=k, c=q, log_a=log_a.unsqueeze(-1), beta=beta)
    z = mixer.z_proj(u) if mixer.z_proj is not None else None
    return LayerTrace(u, (recurrence,), mask=mask, z=z, **around)


def _values(mixer: Any) -> slice:
    return slice(sum(mixer.sizes[:2]), sum(mixer.sizes))


FORM = Form(
    values=lambda mixer, _: ("qkv_proj", _values(mixer)),
    convolution="conv1d",
    channels=lambda mixer, _: _values(mixer),
    activation="silu",
    norm="head_norm",
    gate="z_proj",
)
SIGMOID_FORM = replace(FORM, gate=None, gate_activation="sigmoid")
"""Form of layers with a sigmoid gate."""


# ---- the models


class DeltaNetConfig(LinearAttentionConfig):
    """Configuration of a Gated DeltaNet or DeltaNet.

    Args (in addition to those of `LinearAttentionConfig`):
        key_size, value_size: of all heads together; by default three quarters of the width, and twice that, which make
            six width² weights a layer.
        conv_kernel: the taps of the short convolution.
        gated: whether there are α and the output gate; without them it is DeltaNet.
        head_norm_epsilon: of the norms of heads; by default as of every norm.
        unit_epsilon: ε under the root that normalises q and k; 0 for exactly length 1.
        largest_beta: factor of σ in β; with 2 eigenvalues of the transition can be negative.
    """

    model_type = "ssm-deltanet"
    mixer = DeltaMixer
    head_norm_epsilon = None
    unit_epsilon = 0.0
    largest_beta = 1.0

    def __init__(
        self,
        hidden_size: int = 768,
        key_size: int | None = None,
        value_size: int | None = None,
        conv_kernel: int = 4,
        gated: bool = True,
        head_norm_epsilon: float | None = None,
        unit_epsilon: float = 0.0,
        largest_beta: float = 1.0,
        **kwargs,
    ):
        other: dict[str, Any] = {"unit_epsilon": unit_epsilon, "largest_beta": largest_beta}
        self._set_unless_default(head_norm_epsilon=head_norm_epsilon, **other)
        self.gated = gated
        key_size = 3 * hidden_size // 4 if key_size is None else key_size
        value_size = 2 * key_size if value_size is None else value_size
        sizes = {"key_size": key_size, "value_size": value_size, "conv_kernel": conv_kernel}
        super().__init__(hidden_size=hidden_size, sizes=sizes, **kwargs)


class _DeltaNet:
    """Initialisation of a new model's mixers."""

    def _init_weights(self, module):
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, nn.Conv1d):
            nn.init.uniform_(module.weight, -(module.kernel_size[0] ** -0.5), module.kernel_size[0] ** -0.5)
        elif isinstance(module, DeltaMixer) and module.decay_proj is not None:
            module.reset_parameters()


DeltaNetModel, DeltaNetForCausalLM = family(DeltaNetConfig, _DeltaNet)
AUTO = (DeltaNetModel, DeltaNetForCausalLM)
