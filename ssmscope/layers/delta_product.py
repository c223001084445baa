"""Gated DeltaProduct (Siems et al., DeltaProduct: Increasing the Expressivity of DeltaNet through Products of
Householders, 2025) in flash-linear-attention's form.

A token exchanges several values, one after the other, each under a key of its own, before the memory is read:

    S_t = α_t S_{t−1} ∏_i (I − β_ti k_ti k_tiᵀ) + Σ_j β_tj v_tj k_tjᵀ ∏_{i>j} (I − β_ti k_ti k_tiᵀ),     o_t = S_t q_t.

Everything else is as in `delta`; without a forget gate α_t = 1. A token's write has the rank of its steps, so a layer
is a recurrence for each of them, "step 1", …, with the same transitions: the j-th writes v_tj under what the token's
later steps leave of the key β_tj k_tj.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu
from ssmscope.core.linearized import LinearizedLayer, OutputMap, Path
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers import delta, parts
from ssmscope.layers.gated_delta import unit
from ssmscope.layers.linear_attention import family
from ssmscope.ops import DeltaRecurrence


class DeltaProductMixer(delta.DeltaMixer):
    """The layer, (batch, length, width) → (batch, length, width)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps, width = config.householders, config.hidden_size
        key, value = config.key_size, config.value_size
        self.sizes = [key, self.steps * key, self.steps * value]
        inner = sum(self.sizes)
        self.qkv_proj = nn.Linear(width, inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, self.taps, groups=inner, bias=False)
        self.beta_proj = nn.Linear(width, self.steps * self.num_heads, bias=False)
        if not config.forget_gate:
            self.decay_proj = None
            del self.A_log, self.dt_bias

    def values(self, step: int) -> slice:
        """Return the channels of the values of a step, from 0."""
        q, k, v = self.sizes
        return slice(q + k + step * v // self.steps, q + k + (step + 1) * v // self.steps)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms, a recurrence for each step. At padding keys are zero."""
    mask, qkv, heads = parts.as_mask(mask), mixer.qkv_proj(u), mixer.num_heads
    convolved, around = parts.convolve(mixer, qkv, parts.convolution(mixer, qkv), mask, state, silu)
    q, k, v = parts.at_least_float32(convolved).split(mixer.sizes, dim=-1)
    q = unit(rearrange(q, "b t (h d) -> b t h d", h=heads), mixer.unit_epsilon)
    k, v = (rearrange(t, "b t (n h d) -> b t h n d", n=mixer.steps, h=heads) for t in (k, v))
    k = unit(k, mixer.unit_epsilon)
    removed = k * rearrange(delta.beta_of(mixer, u), "b t (n h) -> b t h n 1", n=mixer.steps)
    log_a, looked_up = torch.zeros_like(q[..., :1]), removed
    if mixer.decay_proj is not None:
        log_a = parts.mask_padding(delta.log_decay(mixer, u), mask).unsqueeze(-1)
        first = removed[..., :1, :] * log_a.exp().unsqueeze(-1)  # Each looks up the decayed memory.
        looked_up = torch.cat([first, removed[..., 1:, :]], dim=-2)
    recurrences = []
    for step in range(mixer.steps):
        key = removed[..., step, :]
        for later in range(step + 1, mixer.steps):
            found = (key * removed[..., later, :]).sum(-1, keepdim=True)
            key = key - found * k[..., later, :]
        ones = torch.ones_like(log_a[..., 0])
        same: dict[str, Any] = dict(c=q, log_a=log_a, beta=ones, e=looked_up, r=k, joins=step > 0)
        recurrences.append(DeltaRecurrence(x=v[..., step, :], b=key, **same))
    return LayerTrace(u, tuple(recurrences), mask=mask, z=mixer.z_proj(u), **around)


FORM = delta.FORM


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the layer as a linear map with q, k, β, decays, SiLU, the gate and the norms of its heads frozen: a path
    for each step."""

    def paths(output_map: OutputMap) -> tuple[Path, ...]:
        found = []
        for step, recurrence in enumerate(layer.recurrences):
            form = replace(FORM, values=("qkv_proj", mixer.values(step)), channels=mixer.values(step))
            found.append(Path(recurrence, form.input_map(mixer, layer), output_map, name=f"step {step + 1}"))
        return tuple(found)

    return FORM.linearized(mixer, layer, paths)


class DeltaProductConfig(delta.DeltaNetConfig):
    """Configuration of a Gated DeltaProduct.

    Args (in addition to those of `DeltaNetConfig`):
        householders: number of values that a token exchanges.
        forget_gate: whether there is α.

    Raises:
        InputError: as `DeltaNetConfig`; if `householders` is not a positive integer.
    """

    model_type = "ssm-deltaproduct"
    mixer = DeltaProductMixer
    unit_epsilon = 1e-6

    def __init__(self, householders: int = 2, forget_gate: bool = True, unit_epsilon: float = 1e-6, **kwargs):
        if type(householders) is not int or householders < 1:
            raise InputError(f"householders {householders!r} must be a positive integer")
        self.householders, self.forget_gate = householders, forget_gate
        super().__init__(unit_epsilon=unit_epsilon, **{**kwargs, "gated": True})


DeltaProductModel, DeltaProductForCausalLM = family(DeltaProductConfig, delta._DeltaNet)
AUTO = (DeltaProductModel, DeltaProductForCausalLM)
