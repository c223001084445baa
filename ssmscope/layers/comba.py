"""Comba (Hu et al., Comba: Improving Bilinear RNNs with Closed-loop Control, 2025) in flash-linear-attention's form.

It is the gated delta rule of `delta` with a value looked up under another key p_t than the one written, and a query
corrected by it,

    S_t = S_{t−1} (α_t − β_t p_t k_tᵀ) + β_t v_t k_tᵀ,        o_t = S_t q_t,

p_t = σ(d) k_t, q_t − D p_t in place of q_t, each then divided by √(‖·‖² + ε), which leaves of σ(d) in p_t only its part
in ε: the paper's p_t keeps it, the library's kernels do not. They look up before the decay, in training too; its
`naive_recurrent_comba` decays first. The output gate is σ(W_z u_t).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import delta, parts
from ssmscope.layers.gated_delta import unit
from ssmscope.layers.linear_attention import family
from ssmscope.ops import DeltaRecurrence


class CombaMixer(delta.DeltaMixer):
    """The layer, (batch, length, width) → (batch, length, width)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        heads = config.num_heads
        self.decay = nn.Parameter(torch.ones(heads)) if config.inner_decay else None
        self.D = nn.Parameter(torch.ones(heads)) if config.output_correction else None


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms. At padding keys are zero."""
    mask = parts.as_mask(mask)
    (q, k, v), around = delta.convolved_heads(mixer, u, mask, state)
    p = k if mixer.decay is None else k * torch.sigmoid(parts.at_least_float32(mixer.decay)).unsqueeze(-1)
    q = q if mixer.D is None else q - parts.at_least_float32(mixer.D).unsqueeze(-1) * p
    q, k, p = (unit(t, mixer.unit_epsilon) for t in (q, k, p))
    log_a = parts.mask_padding(delta.log_decay(mixer, u), mask).unsqueeze(-1)
    recurrence = DeltaRecurrence(x=v, b=k, c=q, log_a=log_a, beta=delta.beta_of(mixer, u), e=p, r=k)
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.z_proj(u), **around)


FORM = delta.SIGMOID_FORM


class CombaConfig(delta.DeltaNetConfig):
    """Configuration of a Comba.

    Args (in addition to those of `DeltaNetConfig`):
        inner_decay: whether p has a factor σ(d) per head.
        output_correction: whether q is corrected by p.
    """

    model_type = "ssm-comba"
    mixer = CombaMixer
    inner_decay = True
    output_correction = True
    unit_epsilon = 1e-6

    def __init__(self, inner_decay: bool = True, output_correction: bool = True, unit_epsilon: float = 1e-6, **kwargs):
        self._set_unless_default(inner_decay=inner_decay, output_correction=output_correction)
        super().__init__(unit_epsilon=unit_epsilon, **kwargs)


CombaModel, CombaForCausalLM = family(CombaConfig, delta._DeltaNet)
AUTO = (CombaModel, CombaForCausalLM)
