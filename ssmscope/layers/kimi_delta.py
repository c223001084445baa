"""Kimi's delta attention in flash-linear-attention's form (KDA; Kimi Linear, Zhang et al. 2025, section 3).

It is the gated delta rule of `delta` with a decay per channel of the keys,

    S_t = S_{t−1} Diag(α_t) (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t,

α_t = exp(−e^A softplus(W₂ W₁ u_t + b)), or exp(m σ(e^A (W₂ W₁ u_t + b))) with a lower bound m of ln α, and an output
gate σ(V₂ V₁ u_t + c).
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import softplus
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import delta, parts
from ssmscope.layers.gated_delta import unit
from ssmscope.layers.linear_attention import family
from ssmscope.ops import DeltaRecurrence


class KimiDeltaMixer(delta.DeltaMixer):
    """The layer, (batch, length, width) → (batch, length, width)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width, rank, key, value = config.hidden_size, config.value_size // config.num_heads, *self.sizes[1:]
        self.lower_bound = config.lower_bound
        self.decay_in, self.decay_proj = nn.Linear(width, rank, bias=False), nn.Linear(rank, key, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(key))
        self.z_in, self.z_proj = nn.Linear(width, rank, bias=False), nn.Linear(rank, value)
        self.reset_parameters()


def log_decay(mixer: Any, u: Tensor) -> Tensor:
    """Return ln α, (batch, length, heads, key)."""
    step = parts.at_least_float32(mixer.decay_proj(mixer.decay_in(u))) + parts.at_least_float32(mixer.dt_bias)
    step = rearrange(step, "b t (h n) -> b t h n", h=mixer.num_heads)
    rate = parts.at_least_float32(mixer.A_log).exp().unsqueeze(-1)
    return -rate * softplus(step) if mixer.lower_bound is None else mixer.lower_bound * torch.sigmoid(rate * step)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms. At padding keys are zero."""
    mask = parts.as_mask(mask)
    (q, k, v), around = delta.convolved_heads(mixer, u, mask, state)
    q, k = (unit(t, mixer.unit_epsilon) for t in (q, k))
    log_a = parts.mask_padding(log_decay(mixer, u), mask)
    recurrence = DeltaRecurrence(x=v, b=k, c=q, log_a=log_a, beta=delta.beta_of(mixer, u))
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.z_proj(mixer.z_in(u)), **around)


FORM = delta.SIGMOID_FORM


class KimiDeltaConfig(delta.DeltaNetConfig):
    """Configuration of a model of Kimi's delta attention.

    Args (in addition to those of `DeltaNetConfig`):
        lower_bound: smallest ln α, a negative number; by default there is none.
    """

    model_type = "ssm-kda"
    mixer = KimiDeltaMixer
    lower_bound = None
    unit_epsilon = 1e-6

    def __init__(self, lower_bound: float | None = None, unit_epsilon: float = 1e-6, **kwargs):
        self._set_unless_default(lower_bound=lower_bound)
        super().__init__(unit_epsilon=unit_epsilon, **kwargs)


KimiDeltaModel, KimiDeltaForCausalLM = family(KimiDeltaConfig, delta._DeltaNet)
AUTO = (KimiDeltaModel, KimiDeltaForCausalLM)
