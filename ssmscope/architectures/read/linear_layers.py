"""Mixers of GLA (Yang et al. 2023) and RetNet (Sun et al. 2023); see `linear_attention`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import group_norm, logsigmoid, rms_norm, silu

from ssmscope.architectures.read.parts import as_mask, at_least_float32, mask_padding

CHUNK_LENGTH = 16
"""Tokens computed as one masked product; a GLA layer holds as many decays per token and key dimension."""


class Terms(NamedTuple):
    """Terms of a layer: `q`, `k` (batch, length, heads, key), `v` (batch, length, heads, value), `log_a` as `k` or with
    one decay per head, the gate `z` (batch, length, value size), and `position` (batch, length) if keys are rotated."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_a: Tensor
    z: Tensor
    position: Tensor | None = None


def chunked(
    q: Float[Tensor, "batch length heads key"],
    k: Float[Tensor, "batch length heads key"],
    v: Float[Tensor, "batch length heads value"],
    log_a: Float[Tensor, "batch length heads decays"],
    chunk: int = CHUNK_LENGTH,
) -> Float[Tensor, "batch length heads value"]:
    """Compute o_t = Σ_{s≤t} (q_tᵀ (∏_{s<r≤t} α_r ⊙ k_s)) v_s; `decays` is the key size or 1 (GLA, section 4.2; RetNet,
    Eq. 7).

    Chunks of the parallel form are joined by the recurrent one. Products of decays are exponentials of sums that are
    masked first: the papers' quotients of cumulative products overflow. With one chunk it is the parallel form.
    """
    batch, length, heads, key = q.shape
    H = v.new_zeros(batch, heads, key, v.shape[-1])
    outputs = []
    for start in range(0, length, chunk):
        q_c, k_c, v_c, log_c = (t[:, start : start + chunk] for t in (q, k, v, log_a))
        total = log_c.cumsum(1)
        steps = total.shape[1]
        past = torch.ones(steps, steps, dtype=torch.bool, device=q.device).tril()
        between = rearrange(total, "b t h n -> b t 1 h n") - rearrange(total, "b s h n -> b 1 s h n")
        decay = between.masked_fill(~rearrange(past, "t s -> 1 t s 1 1"), -torch.inf).exp()
        if decay.shape[-1] == 1:
            scores = torch.einsum("bthn,bshn->btsh", q_c, k_c) * decay.squeeze(-1)
        else:
            scores = torch.einsum("bthn,btshn->btsh", q_c, decay * rearrange(k_c, "b s h n -> b 1 s h n"))
        within = torch.einsum("btsh,bshp->bthp", scores, v_c)
        outputs.append(within + torch.einsum("bthn,bhnp->bthp", q_c * total.exp(), H))
        written = k_c * (total[:, -1:] - total).exp()
        H = rearrange(total[:, -1].exp(), "b h n -> b h n 1") * H + torch.einsum("bshn,bshp->bhnp", written, v_c)
    return torch.cat(outputs, dim=1)


class LinearAttention(nn.Module, ABC):
    """Base of the two mixers; input and output are (batch, length, width)."""

    gate_bias = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_heads
        self.scale = (config.key_size // config.num_heads) ** -0.5
        self.q_proj = nn.Linear(width, config.key_size, bias=False)
        self.k_proj = nn.Linear(width, config.key_size, bias=False)
        self.v_proj = nn.Linear(width, config.value_size, bias=False)
        self.z_proj = nn.Linear(width, config.value_size, bias=self.gate_bias)
        each, eps = config.value_size // config.num_heads, config.layer_norm_epsilon
        centred = config.head_norm == "layer"
        self.head_norm = nn.GroupNorm(config.num_heads, config.value_size, eps) if centred else nn.RMSNorm(each, eps)
        self.out_proj = nn.Linear(config.value_size, width, bias=False)

    def heads(self, t: Tensor) -> Tensor:
        """Return `t` (batch, length, heads · n) by heads, in at least float32."""
        return rearrange(at_least_float32(t), "b t (h n) -> b t h n", h=self.num_heads)

    def terms(self, u: Tensor, mask: Tensor | None, start: Tensor | None = None) -> Terms:
        """Return the terms of the input, at positions from `start` (batch,) in a run that continues; where `mask`
        (batch, length) is False nothing is written and the state holds."""
        q, k, v = (self.heads(project(u)) for project in (self.q_proj, self.k_proj, self.v_proj))
        position = self.position(u, mask, start)
        q, k = self.rotate(q * self.scale, position), self.rotate(mask_padding(k, mask), position)
        return Terms(q, k, v, mask_padding(self.log_decay(u), mask), self.z_proj(u), position)

    def position(self, u: Tensor, mask: Tensor | None, start: Tensor | None) -> Tensor | None:
        """Return every token's position (batch, length); None if keys are not rotated."""
        return None

    def rotate(self, t: Tensor, position: Tensor | None) -> Tensor:
        """Return queries or keys rotated by their position, where the layer does so."""
        return t

    @abstractmethod
    def log_decay(self, u: Tensor) -> Tensor:
        """Return log α_t, (batch, length, heads, key) or (batch, length, heads, 1)."""

    def finish(self, o: Tensor, z: Tensor) -> Tensor:
        """Return the output from the heads' o (batch, length, heads, value) and the gate z: W_O (norm(o) ⊙
        swish(z))."""
        norm, weight = self.head_norm, self.head_norm.weight.to(o.dtype)
        if isinstance(norm, nn.RMSNorm):
            normed = rearrange(rms_norm(o, norm.normalized_shape, weight, norm.eps), "b t h p -> b t (h p)")
        else:
            flat = rearrange(o, "b t h p -> (b t) (h p)")
            flat = group_norm(flat, self.num_heads, weight, norm.bias.to(o.dtype), norm.eps)
            normed = rearrange(flat, "(b t) c -> b t c", b=len(o))
        return self.out_proj(normed.to(z.dtype) * silu(z))

    def forward(self, hidden_states: Tensor, cache_params: None = None, attention_mask: Tensor | None = None) -> Tensor:
        terms = self.terms(hidden_states, as_mask(attention_mask))
        return self.finish(chunked(terms.q, terms.k, terms.v, terms.log_a), terms.z)


class GatedLinearAttention(LinearAttention):
    """GLA's mixer (GLA, section 4.4)."""

    gate_bias = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tau = config.tau
        self.decay_in = nn.Linear(config.hidden_size, config.gate_rank, bias=False)
        self.decay_out = nn.Linear(config.gate_rank, config.key_size)

    def log_decay(self, u: Tensor) -> Tensor:
        """Return log σ(W₂ W₁ u + b) / τ."""
        return logsigmoid(self.heads(self.decay_out(self.decay_in(u)))) / self.tau


class Retention(LinearAttention):
    """RetNet's multi-scale retention (RetNet, Eq. 8)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rotary_base = config.rotary_base if config.rotary else None

    def log_decay(self, u: Tensor) -> Tensor:
        """Return log γ_h = log(1 − 2^{−5−h})."""
        log_gamma = [math.log1p(-(2.0 ** (-5 - head))) for head in range(self.num_heads)]
        decays = at_least_float32(u.new_empty(0)).new_tensor(log_gamma)
        return rearrange(decays, "h -> h 1").expand(*u.shape[:2], -1, -1)

    def position(self, u: Tensor, mask: Tensor | None, start: Tensor | None) -> Tensor | None:
        if self.rotary_base is None:
            return None
        real = mask if mask is not None else torch.ones(u.shape[:2], dtype=torch.bool, device=u.device)
        position = real.cumsum(1) - 1
        return position if start is None else position + start.unsqueeze(-1)

    def rotate(self, t: Tensor, position: Tensor | None) -> Tensor:
        return t if position is None or self.rotary_base is None else rotated(t, position, self.rotary_base)


def rotated(
    t: Float[Tensor, "batch length heads key"], position: Tensor, base: float = 10000.0
) -> Float[Tensor, "batch length heads key"]:
    """Return `t` e^{i n θ} at position n, neighbouring dimensions being complex numbers, θ_i = base^{−2i / key}.

    Angles are computed in float64: at ten thousand tokens float32 numbers are a thousandth of a radian apart.
    """
    key = t.shape[-1]
    theta = base ** (-torch.arange(0, key, 2, dtype=torch.float64, device=t.device) / key)
    angle = rearrange(position, "b t -> b t 1 1") * theta
    return turned(t, angle)


def turned(
    t: Float[Tensor, "batch length heads key"], angle: Float[Tensor, "#batch length #heads pairs"]
) -> Float[Tensor, "batch length heads key"]:
    """Turn the first dimensions of `t`, neighbours as complex numbers, by the angles; the others stay."""
    pairs = 2 * angle.shape[-1]
    cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
    real, imaginary = rearrange(t[..., :pairs], "b t h (n part) -> part b t h n", part=2)
    parts = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos])
    made = rearrange(parts, "part b t h n -> b t h (n part)")
    return made if pairs == t.shape[-1] else torch.cat([made, t[..., pairs:]], dim=-1)
