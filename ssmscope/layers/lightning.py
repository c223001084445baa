"""Lightning attention (Qin et al. 2024) as in Ring-linear (Every Attention Matters, Ling Team 2025).

Linear attention whose heads forget at a constant rate, smaller in later layers: with s_h the slopes of ALiBi (Press et
al. 2022) and l the number of the layer among L, counted from 0,

    H_t = γ_h H_{t−1} + k_t v_tᵀ,    o_t = H_tᵀ q_t / √(key size),    γ_h = exp(−s_h (1 − (l − 1) / (L − 1) + 10⁻⁵)).

That is the published code's: by it the first layer forgets at a higher rate than s_h, where a port takes l = 1.
Queries and keys are normed, with a weight for all heads, and the first `rotary_dim` dimensions of a head rotated by
their position. The o_t are normed in groups of heads, gated by σ(W_z u_t), and projected. One layer of every few has
softmax attention with the same norms and rotations, and all but the first have experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from ssmscope.core.forms import Form, Norm
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers import linear_attention, parts
from ssmscope.layers.feed_forward import ExpertRouter
from ssmscope.layers.linear_attention import LinearAttentionConfig, LinearAttentionModel, RetentionState, family
from ssmscope.layers.rotary_attention import HeadsNorm, rotated
from ssmscope.ops import Recurrence

state_after = linear_attention.state_after


def slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes: 2^{−8 (h + 1) / heads}, and where the heads are no power of 2, those of the largest power
    below and then every other one of the next."""
    power = 2 ** int(math.log2(heads))
    first, between = ([2.0 ** (-8 * (h + 1) / n) for h in range(n)] for n in (power, 2 * power))
    return [*first, *between[::2]][:heads]


class LightningMixer(parts.ReadMixer, nn.Module):
    """The layer, (batch, length, width) → (batch, length, width); the backbone sets its `number`."""

    number = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.depth, self.eps = config.num_heads, config.num_hidden_layers, config.layer_norm_epsilon
        self.rotary = (config.rotary_dim, config.rotary_base, False)
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        self.norm_size = inner // config.norm_groups
        self.qkv_proj = nn.Linear(width, 3 * inner, bias=False)
        self.q_norm, self.k_norm = (HeadsNorm(self.eps, config.head_dim) for _ in "qk")
        self.z_proj = nn.Linear(width, inner, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def log_decay(self) -> list[float]:
        """Return ln γ of each head."""
        share = 1 - (self.number - 1) / max(1, self.depth - 1) + 1e-5
        return [-share * slope for slope in slopes(self.num_heads)]


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms; `extras` have every token's `position` (batch, length)."""
    mask = parts.as_mask(mask)
    q, k, v = rearrange(mixer.qkv_proj(u), "b t (three h p) -> three b t h p", three=3, h=mixer.num_heads)
    real = mask if mask is not None else torch.ones(u.shape[:2], dtype=torch.bool, device=u.device)
    start = state.position.unsqueeze(-1) if isinstance(state, RetentionState) else 0
    position = real.cumsum(1) - 1 + start
    q, k = (
        rotated(parts.at_least_float32(norm(t)), position, *mixer.rotary)
        for norm, t in ((mixer.q_norm, q), (mixer.k_norm, k))
    )
    decays = k.new_tensor(mixer.log_decay()).unsqueeze(-1).expand(*u.shape[:2], -1, -1)
    recurrence = Recurrence(
        x=parts.at_least_float32(v),
        b=parts.mask_padding(k, mask),
        c=q * q.shape[-1] ** -0.5,
        log_a=parts.mask_padding(decays, mask),
    )
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.z_proj(u), extras={"position": position})


FORM = Form(
    values=lambda mixer, _: ("qkv_proj", slice(-mixer.out_proj.in_features, None)),
    norm=lambda mixer, _: Norm(mixer.norm_weight, eps=mixer.eps, size=mixer.norm_size),
    gate_activation="sigmoid",
)


# ---- the models


class LightningConfig(LinearAttentionConfig):
    """Configuration of a Ring-linear.

    Args (in addition to those of `LinearAttentionConfig`):
        head_dim: the width of a head; by default the heads share the layer's.
        norm_groups: the groups in which the output of the heads is normed.
        rotary_dim, rotary_base: the dimensions of a head that are rotated, by default all; pair i of them turns by
            base^{−2i / rotary_dim} a token.
        routed_layers: layers with experts in place of a feed-forward part.
        num_experts, experts_per_token, expert_groups, chosen_groups, expert_scale: see `ExpertRouter`.
        expert_size, shared_size: inner widths of an expert, and of the one that all tokens share; 0 leaves it out.

    Raises:
        InputError: as `LinearAttentionConfig`, or if the heads cannot share the groups, or the experts theirs.
    """

    model_type = "ssm-lightning"
    mixer = LightningMixer
    shared = ()

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 16,
        head_dim: int | None = None,
        norm_groups: int = 4,
        rotary_dim: int | None = None,
        rotary_base: float = 10000.0,
        routed_layers: Sequence[int] = (),
        num_experts: int = 1,
        experts_per_token: int = 1,
        expert_groups: int = 1,
        chosen_groups: int = 1,
        expert_scale: float = 1.0,
        expert_size: int = 1,
        shared_size: int = 0,
        layer_norm_epsilon: float = 1e-6,
        tie_word_embeddings: bool = False,
        **kwargs,
    ):
        head = hidden_size // num_heads if head_dim is None else head_dim
        sizes = {"head_dim": head, "norm_groups": norm_groups, "num_experts": num_experts, "expert_size": expert_size}
        sizes |= {"experts_per_token": experts_per_token, "expert_groups": expert_groups}
        sizes |= {"chosen_groups": chosen_groups}
        super().__init__(
            hidden_size=hidden_size,
            num_heads=num_heads,
            layer_norm_epsilon=layer_norm_epsilon,
            tie_word_embeddings=tie_word_embeddings,
            sizes=sizes,
            **kwargs,
        )
        turned = head if rotary_dim is None else rotary_dim
        self.rotary_dim, self.rotary_base, self.routed_layers = turned, rotary_base, list(routed_layers)
        self.expert_scale, self.shared_size = expert_scale, shared_size
        if type(turned) is not int or turned % 2 or not 0 <= turned <= head:
            raise InputError(f"rotary_dim {turned!r:.60} must be an even number up to the width of a head, {head}")
        if num_heads % norm_groups:
            raise InputError(f"norm_groups {norm_groups} must divide the {num_heads} heads")
        each = num_experts // expert_groups
        if each * expert_groups != num_experts or not experts_per_token <= each * chosen_groups <= num_experts:
            raise InputError(
                f"{num_experts} experts in {expert_groups} groups, of which {chosen_groups} are chosen, and "
                f"{experts_per_token} for a token do not fit together"
            )


class LightningBackbone(LinearAttentionModel):
    """Backbone of embedding, blocks and norm, whose mixers know their place."""

    def blocks(self, config: Any) -> list[nn.Module]:
        found = super().blocks(config)
        for number, block in enumerate(found):
            if isinstance(block.mixer, LightningMixer):
                block.mixer.number = number
        return found


class _Lightning:
    """Initialisation of a new model's routers."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, ExpertRouter):
            module.reset_parameters()


LightningModel, LightningForCausalLM = family(LightningConfig, _Lightning, backbone=LightningBackbone)
AUTO = (LightningModel, LightningForCausalLM)
