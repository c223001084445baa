"""HGRN (Hierarchically Gated Recurrent Neural Network, Qin et al. 2023), HGRN2 (Qin et al. 2024) and GSA (Gated Slot
Attention, Zhang et al. 2024), as flash-linear-attention has them.

A write has the complement of the decay as its weight. HGRN's states are its channels, HGRN2's matrices of key ×
value size per head:

    HGRN:   h_t = f_t ⊙ h_{t−1} + (1 − f_t) ⊙ SiLU(W_i x_t),       y = RMSNorm(h_t) ⊙ SiLU(W_g x_t),
    HGRN2:  H_t = Diag(f_t) H_{t−1} + (1 − f_t) (W_i x_t)ᵀ,        y = RMSNorm(H_tᵀ SiLU(W_q x_t) / √(key size)),

f = γ + (1 − γ) σ(W_f x). γ is a lower bound that grows with the layers: the cumulative sum over layers of a softmax
over them, less the first's. GSA's heads have slots, with f = σ(W_f x)^{1/8}; a slot keeps a key and a value,

    K_t = Diag(f_t) K_{t−1} + (1 − f_t) k_tᵀ,   V_t = Diag(f_t) V_{t−1} + (1 − f_t) v_tᵀ,   o_t = V_tᵀ softmax(K_t q_t),

q, k and v after SiLU, and y = RMSNorm(SiLU(o_t)). The recurrence of a GSA layer is that of the values. The slots' keys
decay and are written in the same way; the softmax over them reads the values, and is frozen as queries are.

The backbone is that of `linear_attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu
from ssmscope import ops
from ssmscope.core.blocks import CONSTANT
from ssmscope.core.forms import Form
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.layers import parts
from ssmscope.layers.linear_attention import LinearAttentionConfig, LinearAttentionModel, family
from ssmscope.ops import Recurrence, Scan

# ---- the layers


class LowerBounds(nn.Module):
    """Lower bounds γ of all layers (HGRN, section 3.2)."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers, width))

    def forward(self) -> Tensor:
        """Return the bounds (layers, width); the first layer's are 0."""
        shares = parts.at_least_float32(self.weight).softmax(0)
        return shares.cumsum(0) - shares[0]


class GatedMixer(parts.ReadMixer, nn.Module, ABC):
    """Base of the three mixers; input and output are (batch, length, width)."""

    read = "q_proj"
    """Name of the third projection of the input, next to f and the values."""
    number = 0
    bounds: tuple[LowerBounds, ...] = ()
    """Lower bounds of the model, if it has them; in a tuple they are not part of the layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.num_heads, forget = config.hidden_size, config.num_heads, config.forget_size
        setattr(self, self.read, nn.Linear(width, width, bias=False))
        self.f_proj, self.i_proj = nn.Linear(width, forget, bias=False), nn.Linear(width, width, bias=False)
        eps = config.layer_norm_epsilon if config.head_norm_epsilon is None else config.head_norm_epsilon
        self.norm = nn.RMSNorm(width, eps)
        self.out_proj = nn.Linear(width, width, bias=False)

    def heads(self, t: Tensor) -> Tensor:
        """Return `t` (batch, length, heads · n) by heads, in at least float32."""
        return rearrange(parts.at_least_float32(t), "b t (h n) -> b t h n", h=self.num_heads)

    def log_f(self, u: Tensor) -> Tensor:
        """Return log f, (batch, length, heads, n)."""
        log_f = parts.at_least_float32(logsigmoid(parts.at_least_float32(self.f_proj(u))))
        for bounds in self.bounds if self.number else ():
            bound = bounds()[self.number].to(log_f.device)
            log_f = torch.logaddexp(bound.log(), torch.log1p(-bound) + log_f)
        return self.heads(log_f)

    def value(self, i: Tensor) -> Tensor:
        """Return the values for the output `i` of W_i."""
        return silu(i)

    @abstractmethod
    def reads(
        self, u: Tensor, written: Tensor, log_f: Tensor, state: LayerState | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the queries that read the state, shaped as log f, and `extras`."""


class HGRNMixer(GatedMixer):
    """HGRN's layer."""

    read = "z_proj"

    def reads(self, u, written, log_f, state):
        return torch.ones_like(written), {}


class HGRN2Mixer(GatedMixer):
    """HGRN2's layer."""

    def value(self, i: Tensor) -> Tensor:
        return i

    def reads(self, u, written, log_f, state):
        return silu(self.heads(self.q_proj(u))) * log_f.shape[-1] ** -0.5, {}


class SlotMixer(GatedMixer):
    """GSA's layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tau = config.tau
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def log_f(self, u: Tensor) -> Tensor:
        return super().log_f(u) / self.tau

    def reads(self, u, written, log_f, state):
        q, k = (silu(self.heads(project(u))) for project in (self.q_proj, self.k_proj))
        each_slot = Recurrence(  # Each slot of a head becomes a head with one decay.
            x=rearrange(written, "b t h m -> b t (h m) 1"), b=k, c=q, log_a=rearrange(log_f, "b t h m -> b t (h m) 1")
        )
        keys = ops.scan(each_slot, state.keys if isinstance(state, SlotState) else None)
        return rearrange(keys.y, "b t (h m) 1 -> b t h m", h=self.num_heads).softmax(-1), {"keys": keys.state}


@dataclass(frozen=True, eq=False)
class SlotState(LayerState):
    """State from which a GSA layer continues, with the slots' `keys` (batch, heads · slots, 1, key size)."""

    keys: Tensor


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms. A GSA layer's `extras` have the slots' `keys` after the last position."""
    mask = parts.as_mask(mask)
    log_f = parts.mask_padding(mixer.log_f(u), mask)
    written = -torch.expm1(log_f)
    reads, extras = mixer.reads(u, written, log_f, state)
    recurrence = Recurrence(x=mixer.heads(mixer.value(mixer.i_proj(u))), b=written, c=reads, log_a=log_f)
    z = mixer.z_proj(u) if isinstance(mixer, HGRNMixer) else None
    return LayerTrace(u, (recurrence,), mask=mask, z=z, extras=extras)


BLOCK_PARTS = {"LowerBounds": CONSTANT}
FORM = Form(
    values="i_proj",
    activation=lambda mixer, _: None if isinstance(mixer, HGRN2Mixer) else silu,
    read=lambda mixer, _: silu if isinstance(mixer, SlotMixer) else None,
    norm="norm",
    gate="z_proj",
)


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> LayerState:
    """Return the state from which a run continues after this layer."""
    found, keys = layer.state_after(scans), layer.extras.get("keys")
    return found if keys is None else SlotState(**vars(found), keys=keys)


# ---- the models


class GatedConfig(LinearAttentionConfig):
    """Base of the three configurations; HGRN has no heads.

    Args (in addition to those of `LinearAttentionConfig`):
        head_norm_epsilon: of the norms within layers; by default as of every norm.
        lower_bounds: whether there are lower bounds γ; GSA has none.
    """

    shared = ("hidden_size", "forget_size")
    head_norm_epsilon = None

    def __init__(
        self,
        hidden_size: int = 768,
        num_heads: int = 6,
        layer_norm_epsilon: float = 1e-6,
        head_norm_epsilon: float | None = None,
        lower_bounds: bool = True,
        **kwargs,
    ):
        self._set_unless_default(head_norm_epsilon=head_norm_epsilon)
        self.lower_bounds = bool(lower_bounds)
        sizes = {"forget_size": kwargs.pop("forget_size", hidden_size)}
        super().__init__(
            hidden_size=hidden_size, num_heads=num_heads, layer_norm_epsilon=layer_norm_epsilon, sizes=sizes, **kwargs
        )


class HGRNConfig(GatedConfig):
    """Configuration of an HGRN, see `GatedConfig`: each channel is a head."""

    model_type = "ssm-hgrn"
    mixer = HGRNMixer

    def __init__(self, hidden_size: int = 768, **kwargs):
        super().__init__(**{**kwargs, "hidden_size": hidden_size, "num_heads": hidden_size})


class HGRN2Config(GatedConfig):
    """Configuration of an HGRN2, see `GatedConfig`."""

    model_type = "ssm-hgrn2"
    mixer = HGRN2Mixer

    def __init__(self, num_heads: int = 6, **kwargs):  # transformers 5 generates an `__init__` for a class without one.
        super().__init__(**{**kwargs, "num_heads": num_heads})


class GSAConfig(GatedConfig):
    """Configuration of a GSA, see `GatedConfig`.

    Args (in addition to those of `GatedConfig`):
        num_slots: slots per head.
        tau: the root taken of the gate.
    """

    model_type = "ssm-gsa"
    mixer = SlotMixer

    def __init__(self, num_heads: int = 4, num_slots: int = 64, tau: float = 8.0, **kwargs):
        self.num_slots, self.tau = num_slots, tau
        super().__init__(
            **{**kwargs, "num_heads": num_heads, "forget_size": num_heads * num_slots, "lower_bounds": False}
        )


class GatedModel(LinearAttentionModel):
    """Backbone of embedding, blocks, norm, and the lower bounds of all layers."""

    def blocks(self, config: Any) -> list[nn.Module]:
        found = super().blocks(config)
        if config.lower_bounds:
            self.lower_bounds = LowerBounds(config.num_hidden_layers, config.hidden_size)
        for number, block in enumerate(found):
            if isinstance(block.mixer, GatedMixer):
                block.mixer.number = number
                block.mixer.bounds = (self.lower_bounds,) if config.lower_bounds else ()
        return found


HGRNModel, HGRNForCausalLM = family(HGRNConfig, backbone=GatedModel)
HGRN2Model, HGRN2ForCausalLM = family(HGRN2Config, backbone=GatedModel)
GSAModel, GSAForCausalLM = family(GSAConfig, backbone=GatedModel)
AUTO = (HGRNModel, HGRNForCausalLM, HGRN2Model, HGRN2ForCausalLM, GSAModel, GSAForCausalLM)
