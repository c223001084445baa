"""Mixers of GLA (Yang et al. 2023) and RetNet (Sun et al. 2023); see `linear_attention`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from ssmscope.layers.parts import ReadMixer, at_least_float32


class LinearAttention(ReadMixer, nn.Module, ABC):
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

    def position(self, u: Tensor, mask: Tensor | None, start: Tensor | None) -> Tensor | None:
        """Return every token's position (batch, length); None if keys are not rotated."""
        return None

    def rotate(self, t: Tensor, position: Tensor | None) -> Tensor:
        """Return queries or keys rotated by their position, where the layer does so."""
        return t

    @abstractmethod
    def log_decay(self, u: Tensor) -> Tensor:
        """Return log α_t, (batch, length, heads, key) or (batch, length, heads, 1)."""


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
        self.rotary_base: Any = config.rotary_base if config.rotary else None

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
        return t if position is None else rotated(t, position, self.rotary_base)


def rotated(
    t: Float[Tensor, "batch length heads key"], position: Tensor, base: float = 10000.0
) -> Float[Tensor, "batch length heads key"]:
    """Return `t` e^{i n θ} at position n, neighbouring dimensions being complex numbers, θ_i = base^{−2i / key}. Angles
    are in float64: at ten thousand tokens float32 numbers are a thousandth of a radian apart."""
    key = t.shape[-1]
    theta = base ** (-torch.arange(0, key, 2, dtype=torch.float64, device=t.device) / key)
    angle = rearrange(position, "b t -> b t 1 1") * theta
    return turned(t, angle)


def turned(
    t: Float[Tensor, "batch length heads key"],
    angle: Float[Tensor, "#batch length #heads pairs"],
    interleaved: bool = True,
) -> Float[Tensor, "batch length heads key"]:
    """Turn the first dimensions of `t` by the angles, as complex numbers of neighbours or, if not `interleaved`, of
    their first and second halves; the others stay."""
    size, pattern = 2 * angle.shape[-1], "b t h (n part)" if interleaved else "b t h (part n)"
    cos, sin = angle.cos().to(t.dtype), angle.sin().to(t.dtype)
    real, imaginary = rearrange(t[..., :size], f"{pattern} -> part b t h n", part=2)
    parts = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos])
    return torch.cat([rearrange(parts, f"part b t h n -> {pattern}"), t[..., size:]], dim=-1)
