"""PLaMo 2 (Preferred Networks 2025): as in Samba (Ren et al. 2024) Mamba and softmax attention over a window in turn.

Each mixer reads a norm of the stream, and its output is normed before it is added, as are those of the SwiGLU parts.
The Mamba has Δ, B and C from the convolved input, normed, as Jamba's, and one decay exp(Δ_{t,h} A_h) per head, as
Mamba-2's; z and x of each head are contiguous in `in_proj`'s output. Queries and keys of attention are normed, with a
weight per head, and rotated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from ssmscope.core.forms import Form
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.core.weights import prepared
from ssmscope.layers import parts
from ssmscope.layers.linear_attention import LinearAttentionConfig, family
from ssmscope.ops import Recurrence


class Plamo2Mixer(parts.ReadMixer, nn.Module):
    """The layer, (batch, length, width) → (batch, length, width)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.taps = config.num_heads, config.head_dim, config.conv_kernel
        self.sizes = [config.state_size, config.state_size, config.time_step_rank]
        width, inner, eps = config.hidden_size, config.num_heads * config.head_dim, config.layer_norm_epsilon
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, self.taps, groups=inner, bias=False)
        self.bcdt_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.B_norm, self.C_norm, self.dt_norm = (nn.RMSNorm(size, eps) for size in self.sizes)
        self.dt_proj = nn.Linear(config.time_step_rank, config.num_heads, bias=False)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(config.num_heads)) for _ in range(3))
        self.out_proj = nn.Linear(inner, width, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise rates and steps as Mamba-2 does: A from −1 to −16, Δ from 0.001 to 0.1."""
        with torch.no_grad():
            self.A_log.uniform_(1, 16).log_()
            step = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            self.dt_bias.copy_(step.expm1().log())
            self.D.fill_(1.0)

    def rows(self, part: int) -> Tensor:
        """Return the places in `in_proj`'s output of z, part 0, or x, part 1."""
        return torch.arange(self.in_proj.out_features).view(self.num_heads, 2, -1)[:, part].flatten()


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms."""
    mask = parts.as_mask(mask)
    z, x = rearrange(mixer.in_proj(u), "b t (h two p) -> two b t (h p)", two=2, p=mixer.head_dim)
    x, around = parts.convolve(mixer, x, parts.convolution(mixer, x), mask, state, silu)
    B, C, step = mixer.bcdt_proj(x).split(mixer.sizes, dim=-1)
    bias, A, D = prepared(mixer, _rates)
    delta = softplus(parts.at_least_float32(mixer.dt_proj(mixer.dt_norm(step))) + bias)
    recurrence = Recurrence(
        x=rearrange(parts.at_least_float32(x), "b t (h p) -> b t h p", p=mixer.head_dim),
        b=parts.at_least_float32(mixer.B_norm(B)).unsqueeze(2),
        c=parts.at_least_float32(mixer.C_norm(C)).unsqueeze(2),
        delta=parts.mask_padding(delta, mask),
        A=A,
        D=D,
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=z, **around)


def _rates(mixer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return Δ's bias (heads,), A (heads, 1) and D (heads,)."""
    bias, A_log, D = (parts.at_least_float32(t) for t in (mixer.dt_bias, mixer.A_log, mixer.D))
    return bias, -A_log.exp().unsqueeze(-1), D


FORM = Form(
    values=lambda mixer, _: ("in_proj", mixer.rows(1)),
    convolution="conv1d",
    activation="silu",
    gate=lambda mixer, _: ("in_proj", mixer.rows(0)),
)


# ---- the models


class Plamo2Config(LinearAttentionConfig):
    """Configuration of a PLaMo 2.

    Args (in addition to those of `LinearAttentionConfig`; `num_heads` are those of the Mamba):
        head_dim: the width of a head.
        state_size: the states of each channel of a head.
        conv_kernel: the taps of the short convolution.
        time_step_rank: the width of Δ's low-rank input; by default a sixteenth of the width, 64 or more.
    """

    model_type = "ssm-plamo2"
    mixer = Plamo2Mixer
    shared = ()
    post_norms = True

    def __init__(
        self,
        hidden_size: int = 2048,
        head_dim: int = 128,
        state_size: int = 64,
        conv_kernel: int = 4,
        time_step_rank: int | None = None,
        layer_norm_epsilon: float = 1e-6,
        **kwargs,
    ):
        rank = max(64, hidden_size // 16) if time_step_rank is None else time_step_rank
        sizes = {"head_dim": head_dim, "state_size": state_size, "conv_kernel": conv_kernel, "time_step_rank": rank}
        super().__init__(hidden_size=hidden_size, layer_norm_epsilon=layer_norm_epsilon, sizes=sizes, **kwargs)


class _Plamo2:
    """Initialisation of a new model's mixers."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, nn.Conv1d):
            nn.init.uniform_(module.weight, -(module.kernel_size[0] ** -0.5), module.kernel_size[0] ** -0.5)
        elif isinstance(module, Plamo2Mixer):
            module.reset_parameters()


Plamo2Model, Plamo2ForCausalLM = family(Plamo2Config, _Plamo2)
AUTO = (Plamo2Model, Plamo2ForCausalLM)
