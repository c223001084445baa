"""RWKV-7 ("Goose" with Expressive Dynamic State Evolution, Peng et al. 2025).

Each head keeps a matrix of value × key size and exchanges what it holds under a key (section 3):

    S_t = S_{t−1} (Diag(w_t) − κ̂_t (a_t ⊙ κ̂_t)ᵀ) + v_t k̃_tᵀ,    o_t = S_t r_t,

w_t the decay of each key dimension, exp(−e^{−1/2} σ(…)); κ̂_t = κ ⊙ ξ of length 1, the key under which the memory is
looked up; a_t the share of the value found there that is removed; k̃_t = k_t ⊙ (1 + (a_t − 1) ⊙ α) the key of the
write. In `ops.DeltaRecurrence` e = κ̂, r = a ⊙ κ̂, b = k̃, c = r_t, x = v, β = 1.

All of these come from the token's input mixed with the one before, through low-rank maps except for r, k and v. Later
layers give v_t a share ν_t of the first layer's values. A head's o_t is normalised, the current value added by
(r_t · ρ ⊙ k̃_t) v_t (the bonus), and all gated. The channel mixing is W_v relu(W_k x′)², its input token-shifted too.

The mixer that is read is the whole block, as RWKV-4's. It takes the first block's input before its own, (batch, length,
2 · width), and computes the first layer's values again: a layer is thereby a function of one input. With its own
input alone (batch, length, width) it has no others' values to mix in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import group_norm, normalize
from ssmscope.core.forms import norm_of
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path
from ssmscope.core.mixers import conv_tap_mask, edit_conv_input
from ssmscope.core.trace import LayerState, LayerTrace, last_inputs
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.layers.gated_delta import unit
from ssmscope.layers.linear_attention import LinearAttentionConfig, LinearAttentionModel, family
from ssmscope.layers.rwkv import frozen_layer_norm, mixed_with_before, shifted_map, token_before
from ssmscope.ops import DeltaRecurrence, Scan, skip_alone

MIN_LOG_DECAY = -math.exp(-0.5)
"""Smallest log w, which is this times σ: no decay is below 0.545."""


# ---- the configuration


class RWKV7Config(LinearAttentionConfig):
    """Configuration of an RWKV-7.

    Args (in addition to those of `LinearAttentionConfig`, without `attention`):
        decay_rank, rate_rank, value_rank, gate_rank: the inner widths of the low-rank maps of w, a, ν and the gate.
        intermediate_size: of the channel mixing; by default four times the width.
        norm_bias: whether the norms of blocks have biases.
        norm_first: whether the first block normalises the embeddings.
        unit_epsilon: ε under the root that normalises κ̂; 0 for exactly length 1.

    The norms of heads have `layer_norm_epsilon` times a head's number of dimensions.
    """

    model_type = "ssm-rwkv7"
    shared = ("hidden_size",)

    def __init__(
        self,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_heads: int = 12,
        decay_rank: int = 64,
        rate_rank: int = 64,
        value_rank: int = 16,
        gate_rank: int = 128,
        intermediate_size: int | None = None,
        norm_bias: bool = True,
        norm_first: bool = True,
        unit_epsilon: float = 0.0,
        **kwargs,
    ):
        self.norm_bias, self.norm_first, self.unit_epsilon = norm_bias, norm_first, unit_epsilon
        kwargs.setdefault("tie_word_embeddings", False)
        kwargs |= {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers, "num_heads": num_heads}
        kwargs["intermediate_size"] = 4 * hidden_size if intermediate_size is None else intermediate_size
        ranks = {"decay_rank": decay_rank, "rate_rank": rate_rank, "value_rank": value_rank, "gate_rank": gate_rank}
        super().__init__(sizes=ranks, **kwargs)
        if self.attention:
            raise InputError("attention: an RWKV-7's blocks have none besides their time mixing; leave it out")
        if not self.intermediate_size:
            raise InputError("intermediate_size 0: an RWKV-7 has a channel mixing in every layer; give 1 or more")


# ---- the block


class LowRank(nn.Module):
    """Low-rank map W₂ act(W₁ x) + bias."""

    def __init__(self, width: int, rank: int, act: Callable[[Tensor], Tensor] | None, bias: bool = True) -> None:
        super().__init__()
        self.into, self.act, self.out = nn.Linear(width, rank, bias=False), act, nn.Linear(rank, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x) if self.act is None else self.act(self.into(x)))


class TimeMixing(nn.Module):
    """Weights of a block's time mixing; the first layer's has no ν."""

    def __init__(self, config: RWKV7Config, first: bool) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.num_heads, self.unit_epsilon = heads, config.unit_epsilon
        for name in "rwkvag":  # The shares of the token before.
            setattr(self, f"x_{name}", nn.Parameter(torch.full((width,), 0.5)))
        self.k_k, self.k_a = (nn.Parameter(torch.ones(width)) for _ in range(2))  # ξ and α
        self.r_k = nn.Parameter(torch.empty(heads, width // heads))  # ρ
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w_lora = LowRank(width, config.decay_rank, torch.tanh)
        self.a_lora = LowRank(width, config.rate_rank, None)
        self.v_lora = None if first else LowRank(width, config.value_rank, None)
        self.g_lora = LowRank(width, config.gate_rank, torch.sigmoid, bias=False)
        self.g_norm = nn.GroupNorm(heads, width, config.layer_norm_epsilon * (width // heads))


class ChannelMixing(nn.Module):
    """Weights of a block's channel mixing."""

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.x_k = nn.Parameter(torch.full((width,), 0.5))
        self.key, self.value = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)


class RWKV7Mixer(parts.ReadMixer, nn.Module):
    """Mixer that is the whole block. The input is (batch, length, width), in later blocks after the first block's; the
    output is (batch, length, width). `before` has the first block's mixer, and is empty in that itself."""

    def __init__(self, config: RWKV7Config, before: tuple[RWKV7Mixer, ...]) -> None:
        super().__init__()

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon, bias=config.norm_bias)

        self.before = before  # In a tuple it is not part of this one.
        self.pre_norm = None if before or not config.norm_first else norm()
        self.attn_norm, self.attn = norm(), TimeMixing(config, not before)
        self.ffn_norm, self.ffn = norm(), ChannelMixing(config)


@dataclass(frozen=True, eq=False)
class RWKV7State(LayerState):
    """State from which a block continues. `conv` is the last input of the time mixing, `channel` (batch, 1, width) that
    of the channel mixing, and `first` that of the first layer's time mixing, in other layers."""

    channel: Tensor
    first: Tensor | None = None


class _Inputs(NamedTuple):
    """Inputs of a block: its own and, in later blocks, the first one's."""

    own: Tensor
    first: Tensor | None


def _inputs(mixer: RWKV7Mixer, u: Tensor) -> _Inputs:
    width = mixer.attn.v_proj.in_features
    if u.shape[-1] == width:
        return _Inputs(u, None)
    first, own = u.split(width, dim=-1)
    return _Inputs(own, first)


def _stream(mixer: RWKV7Mixer, x: Tensor) -> Tensor:
    """Return the residual stream that a block adds to."""
    return x if mixer.pre_norm is None else mixer.pre_norm(x)


def _shifted(x: Tensor, before: Tensor, mix: Tensor) -> Tensor:
    return mixed_with_before(x, before, 1 - mix)


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the block's terms from its input `u` (batch, length, width or 2 · width). `extras` has the `gate` (batch,
    length, width), the `bonus` (batch, length, heads), the share `mixed_in` of the first layer's values (batch, length,
    width), the last input of the first layer `first_input` and, in a run that continues, `channel_tail` and
    `first_tail`, the inputs before it."""
    if state is not None and not isinstance(state, RWKV7State):
        raise TypeError("an RWKV-7 block continues from an RWKV7State, which state_after gives")
    mask, part, (own, first) = parts.as_mask(mask), mixer.attn, _inputs(mixer, u)
    tail, first_tail = (state.conv, state.first) if isinstance(state, RWKV7State) else (None, None)
    x = edit_conv_input(mixer, parts.mask_padding(mixer.attn_norm(_stream(mixer, own)), mask))
    taps = conv_tap_mask(mixer, x, 2)
    before = token_before(x, tail, taps)
    r, w, k, v, a, g = (_shifted(x, before, getattr(part, f"x_{name}")) for name in "rwkvag")
    extras = {"gate": part.g_lora(g)}
    values = part.v_proj(v)
    if first is not None and part.v_lora is not None:
        (source,) = mixer.before
        extras["first_input"] = parts.mask_padding(source.attn_norm(_stream(source, first)), mask)
        earlier = token_before(extras["first_input"], first_tail, taps)
        mixed_in = extras["mixed_in"] = torch.sigmoid(part.v_lora(v))
        others = source.attn.v_proj(_shifted(extras["first_input"], earlier, source.attn.x_v))
        values = torch.lerp(values, others, mixed_in)
    rate, keys = torch.sigmoid(parts.at_least_float32(part.a_lora(a))), parts.at_least_float32(part.k_proj(k))
    log_w = parts.mask_padding(MIN_LOG_DECAY * torch.sigmoid(parts.at_least_float32(part.w_lora(w))), mask)
    written = parts.mask_padding(keys * (1 + (rate - 1) * parts.at_least_float32(part.k_a)), mask)
    r, log_w, written, v, rate, looked_up = (
        rearrange(parts.at_least_float32(t), "b t (h n) -> b t h n", h=part.num_heads)
        for t in (
            part.r_proj(r),
            log_w,
            written,
            parts.mask_padding(values, mask),
            rate,
            keys * parts.at_least_float32(part.k_k),
        )
    )
    looked_up = unit(looked_up, part.unit_epsilon) if part.unit_epsilon else normalize(looked_up, dim=-1)
    extras["bonus"] = (r * written * parts.at_least_float32(part.r_k)).sum(-1)
    recurrence = DeltaRecurrence(
        x=v,
        b=written,
        c=r,
        log_a=log_w,
        beta=torch.ones_like(extras["bonus"]),
        e=looked_up,
        r=parts.mask_padding(rate * looked_up, mask),
    )
    if isinstance(state, RWKV7State):
        extras |= {"channel_tail": state.channel} | ({} if first_tail is None else {"first_tail": first_tail})
    return LayerTrace(u, (recurrence,), mask=mask, conv_input=x, conv_tail=tail, taps=taps, reach=2, extras=extras)


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the output (batch, length, width) from the terms: x + W_o (gate ⊙ (norm(o) + bonus v)), then the channel
    mixing."""
    x = _after_time_mixing(mixer, layer, layer.scan() if scans is None else scans)
    shown = parts.mask_padding(mixer.ffn_norm(x), layer.mask)
    before = token_before(shown, layer.extras.get("channel_tail"), layer.taps)
    return x + mixer.ffn.value(torch.relu(mixer.ffn.key(_shifted(shown, before, mixer.ffn.x_k))).square())


def _after_time_mixing(mixer: RWKV7Mixer, layer: LayerTrace, scans: tuple[Scan, ...]) -> Tensor:
    (scanned,), norm, gate = scans, mixer.attn.g_norm, layer.extras["gate"]
    o = rearrange(scanned.y, "b t h p -> (b t) (h p)")
    o = group_norm(o, norm.num_groups, norm.weight.to(o.dtype), norm.bias.to(o.dtype), norm.eps)
    own = layer.extras["bonus"].unsqueeze(-1) * layer.recurrence.x
    mixed = rearrange(o, "(b t) c -> b t c", b=len(gate)) + rearrange(own, "b t h p -> b t (h p)")
    return _stream(mixer, _inputs(mixer, layer.u).own) + mixer.attn.o_proj(mixed.to(gate.dtype) * gate)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the time mixing as a linear map with all of the transition, r, k̃, ν, the gate and the norms' scales
    frozen: the memory, and the bonus of the token's own value. Residual stream and channel mixing are in the rest."""
    u, recurrence, norm = parts.at_least_float32(layer.u), layer.recurrence, mixer.attn.g_norm
    (scanned,), gate = layer.scan(), parts.at_least_float32(layer.extras["gate"])
    factor = norm_of(mixer.attn, "g_norm").factor(scanned.y.flatten(2))
    project = parts.projection(mixer.attn, "o_proj")
    input_map = InputMap(source=rearrange(recurrence.x, "b t h p -> b t (h p)"), enter=_values(mixer, layer))
    bonus = layer.extras["bonus"].repeat_interleave(recurrence.shape[3], dim=-1)
    itself = skip_alone(recurrence, recurrence.x.new_ones(recurrence.shape[2]))
    normed = OutputMap(lambda v: project(v, False), gate=gate * factor, centred=recurrence.shape[3])
    paths = (
        Path(recurrence, input_map, normed, "memory"),
        Path(itself, input_map, OutputMap(lambda v: project(v, False), gate=gate), "own", weight=bonus),
    )
    added = project(gate * parts.at_least_float32(norm.bias), True)
    mixed = parts.at_least_float32(_after_time_mixing(mixer, layer, (scanned,)))
    rest_map = _rest_map(mixer, layer, mixed, added)
    stream = parts.at_least_float32(_stream(mixer, _inputs(mixer, layer.u).own))
    return LinearizedLayer(u, paths, rest=rest_map(u, mixed - stream - added, True), rest_map=rest_map)


def _rest_map(
    mixer: RWKV7Mixer, layer: LayerTrace, x: Tensor, added: Tensor
) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Return the residual stream and the channel mixing as a map of the block's input and the time mixing's output
    without its norm's bias `added`, with the norms' scales and ReLU frozen at `x`, the stream after the time mixing:
    relu(k)² is k [relu(k)]."""
    u, tail, mix = (
        parts.at_least_float32(layer.u),
        layer.extras.get("channel_tail"),
        parts.at_least_float32(mixer.ffn.x_k),
    )
    first = None if mixer.pre_norm is None else frozen_layer_norm(mixer, "pre_norm", _inputs(mixer, u).own)
    second = frozen_layer_norm(mixer, "ffn_norm", x)
    key, value = (parts.projection(mixer.ffn, name) for name in ("key", "value"))

    def keys(x: Tensor, biased: bool) -> Tensor:
        shown = parts.mask_padding(second(x, biased), layer.mask)
        return key(_shifted(shown, token_before(shown, tail if biased else None, layer.taps), mix), biased)

    opened = torch.relu(keys(x, True))

    def rest_map(u: Tensor, mixed: Tensor, biased: bool) -> Tensor:
        own = _inputs(mixer, u).own
        x = own if first is None else first(own, biased)
        x = x + added if biased else x
        return x + value(opened * keys(x + mixed, biased), biased)

    return rest_map


def _values(mixer: RWKV7Mixer, layer: LayerTrace) -> Callable[[Tensor, bool], Tensor]:
    """Return the values v of the time mixing as a map of the block's input, with the norms' scales and ν frozen."""
    u, mixed_in = _inputs(mixer, parts.at_least_float32(layer.u)), layer.extras.get("mixed_in")
    own = _projected(mixer, u.own, layer, layer.conv_tail)
    others = None
    if u.first is not None and mixed_in is not None:
        mixed_in = parts.at_least_float32(mixed_in)
        others = _projected(mixer.before[0], u.first, layer, layer.extras.get("first_tail"))

    def enter(v: Tensor, biased: bool) -> Tensor:
        inputs = _inputs(mixer, v)
        values = own(inputs.own, biased)
        if others is not None and mixed_in is not None and inputs.first is not None:
            values = values * (1 - mixed_in) + others(inputs.first, biased) * mixed_in
        return parts.mask_padding(values, layer.mask)

    return enter


def _projected(
    mixer: RWKV7Mixer, x: Tensor, layer: LayerTrace, tail: Tensor | None
) -> Callable[[Tensor, bool], Tensor]:
    """Return W_v of a block's input, after its norms and the token shift, as a linear map."""
    norms = [name for name in ("pre_norm", "attn_norm") if getattr(mixer, name) is not None]
    value, mix = parts.projection(mixer.attn, "v_proj"), 1 - parts.at_least_float32(mixer.attn.x_v)
    return shifted_map(mixer, norms, x, layer, tail, mix, value)


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> RWKV7State:
    """Return the state from which a run continues after this block."""
    shown = parts.mask_padding(mixer.ffn_norm(_after_time_mixing(mixer, layer, scans)), layer.mask)
    first = layer.extras.get("first_input")
    return RWKV7State(
        **vars(layer.state_after(scans)),
        channel=last_inputs(shown, 2, layer.extras.get("channel_tail"), layer.mask),
        first=None if first is None else last_inputs(first, 2, layer.extras.get("first_tail"), layer.mask),
    )


# ---- the models


class RWKV7Block(nn.Module):
    """Block of a mixer, which is given the first block's input before its own."""

    def __init__(self, config: RWKV7Config, before: tuple[RWKV7Mixer, ...]) -> None:
        super().__init__()
        self.mixer = RWKV7Mixer(config, before)

    def forward(self, x: Tensor, attention_mask: Tensor | None, first: list[Tensor]) -> Tensor:
        """Run the block; `first` holds the first block's input, which that block stores. Raise InputError if blocks are
        on several devices."""
        if not self.mixer.before:
            first[:] = [x]
            return self.mixer(x, attention_mask=attention_mask)
        if not first or first[0].device != x.device:  # accelerate copies lists for other devices.
            raise InputError("the blocks of an RWKV-7 read the first one's values: load it on one device")
        return self.mixer(torch.cat([first[0], x], dim=-1), attention_mask=attention_mask)


class _RWKV7:
    """Initialisation of a new model."""

    def _init_weights(self, module):
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, TimeMixing):
            nn.init.constant_(module.r_k, -0.04)
            with torch.no_grad():
                module.w_lora.out.bias.copy_(torch.linspace(-6, 1, len(module.w_lora.out.bias)))


class RWKV7Backbone(LinearAttentionModel):
    """Backbone of an RWKV-7."""

    _no_split_modules = ["RWKV7Block"]

    def blocks(self, config: Any) -> list[nn.Module]:
        found: list[nn.Module] = []
        for _ in range(config.num_hidden_layers):
            found.append(RWKV7Block(config, tuple(block.mixer for block in found[:1])))
        return found

    def norm(self, config: Any) -> nn.Module:
        return nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon, bias=config.norm_bias)

    def block_arguments(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> tuple[Any, ...]:
        return attention_mask, []


RWKV7Model, RWKV7ForCausalLM = family(RWKV7Config, _RWKV7, backbone=RWKV7Backbone)
AUTO = (RWKV7Model, RWKV7ForCausalLM)
