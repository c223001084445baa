"""xLSTM (Beck et al. 2024): layers of its mLSTM, whose heads have a matrix as state and exponential input gates.

    C_t = f_t C_{t−1} + i_t v_t k_tᵀ,   n_t = f_t n_{t−1} + i_t k_t,   f_t = σ(f̃_t),   i_t = e^{ĩ_t},
    h_t = C_t q_t / (max(|n_tᵀ q_t|, 1) + ε e^{m_t}),   m_t = max(log f_t + m_{t−1}, ĩ_t),   m_0 = 0,

with q divided by √(key size) (xLSTM, Eqs. 19 to 27 and 15; k is divided there, and there is no ε). The library holds
e^{−m_t} C_t and e^{−m_t} n_t, which keeps both from overflowing; here C and n themselves are read: f is the
decay of a head, and the stabiliser m occurs in ε e^{m_t} alone. Both gates are softly capped, so that e^ĩ stays small.
In `ops.Recurrence` x = v, b = i k and c = q / normaliser.

The normaliser is taken from a recurrence of its own, n, whose state and m_t a run continues from too. In implicit
attention, relevance (LRP) and cut edges it is a constant, as the denominator of a softmax is: its change without a
token is not considered. The norm of each head that follows undoes it but for that norm's ε.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad
from transformers.models.xlstm.modeling_xlstm import xLSTMModel, xLSTMMultiHeadLayerNorm, xLSTMOutput
from ssmscope import ops
from ssmscope.core.affine import norm_terms
from ssmscope.core.blocks import GATED
from ssmscope.core.forms import Form, Norm
from ssmscope.core.intercept import override_forward
from ssmscope.core.mixers import CACHES, arguments
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.ops import Recurrence, Scan

SOFT_CAP = "output_logit_soft_cap"
BLOCK_PARTS = {"xLSTMFeedForward": replace(GATED, out="proj_down")}
MAX_GATE_CAP = 40.0
"""Largest cap of a gate for which e^ĩ k, summed over a long text, is within float32."""


@dataclass(frozen=True, eq=False)
class MLSTMState(LayerState):
    """State from which a layer continues; `normalizer` (batch, heads, 1, state) is n, `stabilizer` (batch, heads) m."""

    normalizer: Tensor
    stabilizer: Tensor


def stabilizers(
    log_f: Float[Tensor, "batch length heads"],
    log_i: Float[Tensor, "batch length heads"],
    start: Float[Tensor, "batch heads"] | None = None,
) -> Float[Tensor, "batch length+1 heads"]:
    """Compute m_0 … m_length in float64, m_t = max(log f_t + m_{t−1}, log i_t) (xLSTM, Eq. 15), from m_0 = `start`, by
    default 0 as in transformers."""
    start = log_f.new_zeros(log_f.shape[0], log_f.shape[2]) if start is None else start
    kept = pad(log_f.double().cumsum(1), (0, 0, 1, 0))
    entered = torch.cat([start.double().unsqueeze(1), log_i.double() - kept[:, 1:]], dim=1)
    return kept + entered.cummax(1).values


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms. `extras` has the `normalizer` (batch, length, heads) by which q is divided, and the
    final `n` (batch, heads, 1, state) and `m` (batch, heads). Raise InputError if gates have no cap or one above
    `MAX_GATE_CAP`, or projections share one matrix."""
    if state is not None and not isinstance(state, MLSTMState):
        raise TypeError("an mLSTM continues from an MLSTMState, which state_after gives: it holds n and m too")
    cap, heads = mixer.config.gate_soft_cap, mixer.config.num_heads
    if cap is None or not 0 < cap <= MAX_GATE_CAP:
        raise InputError(
            f"gate_soft_cap is {cap}: only an xLSTM whose gates are capped at {MAX_GATE_CAP:g} or less can be read"
        )
    if mixer.config.weight_mode != "single":
        raise InputError(
            f"weight_mode is {mixer.config.weight_mode!r}: only an xLSTM with 'single' weights can be read"
        )
    mask = parts.as_mask(mask)
    i, f = (cap * torch.tanh(project(u) / cap) for project in (mixer.igate_preact, mixer.fgate_preact))
    q, k, v = (rearrange(project(u), "b t (h p) -> b t h p", h=heads) for project in (mixer.q, mixer.k, mixer.v))
    q, k, v = parts.at_least_float32(q), parts.at_least_float32(k), parts.at_least_float32(parts.mask_padding(v, mask))
    log_f, log_i = parts.mask_padding(logsigmoid(parts.at_least_float32(f)), mask), parts.at_least_float32(i)
    b, q = parts.mask_padding(log_i.exp().unsqueeze(-1) * k, mask), q * q.shape[-1] ** -0.5
    real = log_i if mask is None else log_i.masked_fill(~mask.unsqueeze(-1), -torch.inf)
    m = stabilizers(log_f, real, None if state is None else state.stabilizer)
    counted = Recurrence(x=torch.ones_like(v[..., :1]), b=b, c=q, log_a=log_f.unsqueeze(-1))
    n = ops.scan(counted, None if state is None else state.normalizer)
    normalizer = n.y.squeeze(-1).abs().clamp(min=1) + mixer.config.eps * m[:, 1:].exp().to(n.y)
    recurrence = Recurrence(x=v, b=b, c=q / normalizer.unsqueeze(-1), log_a=log_f.unsqueeze(-1))
    extras = {"normalizer": normalizer, "n": n.state, "m": m[:, -1]}
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.ogate_preact(u), extras=extras)


def _norm(mixer: Any, layer: LayerTrace) -> Norm:
    found = norm_terms(mixer.multihead_norm, xLSTMMultiHeadLayerNorm, "the norm of an xLSTM's heads")
    return Norm(*found, size=layer.recurrence.shape[3], centred=True)


FORM = Form(
    values="v",
    norm=_norm,
    gate_activation="ogate_act_fn",
    inner=lambda mixer, layer, y: mixer.ogate_act_fn(layer.gate) * mixer.multihead_norm(y.to(layer.gate.dtype)),
)


def returned(output: Tensor) -> tuple[Tensor, None]:
    """Return the output as the mixer's own forward pass does, whose state is read only where there is a cache."""
    return output, None


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> MLSTMState:
    """Return the state from which a run continues after this layer."""
    return MLSTMState(**vars(layer.state_after(scans)), normalizer=layer.extras["n"], stabilizer=layer.extras["m"])


# ---- the whole model while it is read


@contextmanager
def reading(module: nn.Module) -> Iterator[None]:
    """Run texts longer than `max_inference_chunksize`, which transformers cuts, without gradients and with a cache, in
    one piece, in this thread and within the context. Within it, raise InputError if gradients of such a text are asked
    for, which its head cuts off too."""
    found = [part for part in module.modules() if isinstance(part, xLSTMModel)]
    with override_forward([(part, partial(_backbone, part)) for part in found]):
        yield


def _backbone(model: Any, below: Any, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(arguments(model), args)) | kwargs
    embeds, wanted = given.get("inputs_embeds"), given.get("output_hidden_states")
    length = (given["input_ids"] if embeds is None else embeds).shape[1]
    wanted = model.config.output_hidden_states if wanted is None else wanted
    uncut = wanted or length <= model.config.max_inference_chunksize
    if uncut or given.get("use_cache") or any(given.get(name) is not None for name in CACHES):
        return below(**given)
    if torch.is_grad_enabled():
        raise InputError(
            f"transformers' xLSTM has no gradients of texts above {model.config.max_inference_chunksize:,} tokens (its "
            f"max_inference_chunksize), and this has {length:,}"
        )
    hidden = model.embeddings(given["input_ids"]) if embeds is None else embeds
    for block in model.blocks:
        hidden, _ = block(hidden)
    return xLSTMOutput(last_hidden_state=model.out_norm(hidden))
