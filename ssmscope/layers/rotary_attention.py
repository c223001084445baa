"""Softmax attention of our own hybrids: rotated queries and keys, grouped heads of keys, and optionally a short
convolution or a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from ssmscope.core.affine import depthwise
from ssmscope.core.trace import last_inputs
from ssmscope.layers.linear_layers import turned
from ssmscope.layers.parts import at_least_float32, causal_convolution, mask_padding

ATTENTION_OPTIONS: dict[str, Any] = dict(
    num_heads=1,
    num_heads_kv=None,
    head_dim=None,
    qkv_proj_bias=True,
    out_proj_bias=True,
    softmax_scale=None,
    causal=False,
    d_conv=0,
    rotary_emb_dim=0,
    rotary_emb_base=10000.0,
    rotary_emb_interleaved=False,
    mlp_dim=0,
)
"""Options of attention by mamba_ssm's names, with its defaults; it has none for `num_heads`."""


QK_NORMS = ("shared", "per head")
"""Norms of queries and keys by each head's root mean square: with one weight for all heads, or one for each."""


class HeadsNorm(nn.Module):
    """Root-mean-square norm of heads (batch, length, heads, width) with a weight (width,) or (heads, width)."""

    def __init__(self, eps: float, *shape: int) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


def rotated(x: Tensor, position: Tensor, size: int, base: float, interleaved: bool) -> Tensor:
    """Rotate pairs of the first `size` dimensions of heads (batch, length, heads, width): pair i by position (batch,
    length) × base^{−2i / size} (RoFormer, Eq. 15). A pair is dimensions i and i + size / 2, or `interleaved`, 2i and
    2i + 1."""
    exponent = torch.arange(0, size, 2, device=x.device, dtype=at_least_float32(x).dtype) / size
    angle = (position.to(exponent)[..., None] * base**-exponent)[:, :, None]
    return turned(x, angle, interleaved)


class RotaryAttention(nn.Module):
    """Softmax attention over queries, keys and values that may be convolved; queries and keys may then be normed, as
    `qk_norm` of `QK_NORMS` says, and are rotated. With a `window` a query reads that many keys, its own the last; the
    caller masks the others."""

    def __init__(
        self,
        config: PretrainedConfig,
        layer_idx: int,
        options: Mapping[str, Any],
        window: int | None = None,
        qk_norm: str | None = None,
    ) -> None:
        super().__init__()
        options = {**ATTENTION_OPTIONS, **options}
        self.config, self.layer_idx, self.sliding_window = config, layer_idx, window
        width, self.heads = config.hidden_size, options["num_heads"]
        self.key_heads, self.head_dim = (
            options["num_heads_kv"] or self.heads,
            options["head_dim"] or width // self.heads,
        )
        self.num_key_value_groups = self.heads // self.key_heads
        self.scale = options["softmax_scale"] or self.head_dim**-0.5
        self.rotary = tuple(options[f"rotary_emb_{name}"] for name in ("dim", "base", "interleaved"))
        channels, self.taps = (self.heads + 2 * self.key_heads) * self.head_dim, options["d_conv"]
        self.in_proj = nn.Linear(width, channels, bias=options["qkv_proj_bias"])
        if self.taps:
            self.conv1d = nn.Conv1d(channels, channels, self.taps, groups=channels)
        self.q_norm, self.k_norm = (
            None if qk_norm is None else HeadsNorm(config.layer_norm_epsilon, *heads, self.head_dim)
            for heads in (((self.heads,), (self.key_heads,)) if qk_norm == "per head" else ((), ()))
        )
        self.out_proj = nn.Linear(self.heads * self.head_dim, width, bias=options["out_proj_bias"])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        padding_mask: Tensor | None = None,
        past_key_values: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output (batch, length, width), and its weights (batch, heads, queries, keys) if it is
        `eager`. `attention_mask` (batch, 1 or heads, queries, keys) is 0 where a key is read, `padding_mask` (batch,
        length) True at tokens. `past_key_values` adds the keys and values before these, and has the convolution's last
        inputs."""
        q, k, v = self.heads_of(hidden_states, position_ids, padding_mask, past_key_values)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        mask = torch.zeros_like(attention_mask, dtype=q.dtype)
        mask = mask.masked_fill(attention_mask != 0, torch.finfo(q.dtype).min)
        kind = self.config._attn_implementation
        attend = softmax_attention if kind == "eager" else ALL_ATTENTION_FUNCTIONS[kind]
        y, weights = attend(self, q, k, v, mask, scaling=self.scale)
        return self.out_proj(rearrange(y, "b t h p -> b t (h p)")), weights

    def heads_of(
        self, x: Tensor, position_ids: Tensor, padding_mask: Tensor | None, past_key_values: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (batch, heads, length, width) of the layer's input."""
        qkv = self.in_proj(x)
        if self.taps:
            qkv = mask_padding(qkv, padding_mask)
            tail = None if past_key_values is None else past_key_values.tail
            if past_key_values is not None:
                past_key_values.tail = last_inputs(qkv, self.taps, tail, padding_mask)
            weight, bias = depthwise(self.conv1d, qkv.shape[-1], self.taps, f"{type(self).__name__}.conv1d")
            qkv = causal_convolution(qkv, weight, bias, tail)
        sizes = [self.heads, self.key_heads, self.key_heads]
        q, k, v = rearrange(qkv, "b t (h p) -> b t h p", p=self.head_dim).split(sizes, dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotated(each, position_ids, *self.rotary) for each in (q, k))
        q, k, v = (rearrange(each, "b t h p -> b h t p") for each in (q, k, v))
        return q, k, v


def softmax_attention(
    part: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ · scaling + mask) v (batch, length, heads, width), and the softmax."""
    k, v = (repeat(each, "b h t p -> b (h n) t p", n=part.num_key_value_groups) for each in (k, v))
    weights = (q @ k.mT * scaling + mask).softmax(-1)
    return rearrange(weights @ v, "b h t p -> b t h p"), weights


def score_mask(x: Tensor, mask: Tensor | None, window: int | None = None, *, causal: bool = True) -> Tensor:
    """Return the mask (batch, 1, queries, keys) that is added to the scores of a stream `x` (batch, length, …): 0 where
    a key is read, the most negative number where it is later, if `causal`, padding or before the window."""
    steps = torch.arange(x.shape[1], device=x.device)
    every = torch.ones(len(steps), len(steps), dtype=torch.bool, device=x.device)
    reads = (every.tril() if causal else every).expand(len(x), 1, -1, -1)
    reads = reads if mask is None else reads & mask[:, None, None]
    reads = reads if window is None else reads & (steps[:, None] - steps < window)
    return torch.zeros_like(reads, dtype=x.dtype).masked_fill(~reads, torch.finfo(x.dtype).min)
