"""RWKV-4 (Peng et al. 2023): the blocks of transformers' models.

A channel of the time mixing averages the values of the tokens before, the bonus u added to the current key (RWKV,
Eq. 16):

    wkv_t = (Σ_{s<t} e^{k_s − (t−1−s) w} v_s + e^{k_t + u} v_t) / (Σ_{s<t} e^{k_s − (t−1−s) w} + e^{k_t + u}),

w = e^{time_decay}. Numerator and denominator grow and fall with e^k; a channel's memory, all that is ever read of it,
is their ratio without the bonus, the mean p_t of the values so far. With e^{ℓ_t} the denominator,

    p_t = a_t p_{t−1} + (1 − a_t) v_t,    a_t = e^{ℓ_{t−1} − w − ℓ_t},    ℓ_t = log(e^{ℓ_{t−1} − w} + e^{k_t}),

which is the same function at any magnitude of k, and the linear recurrence of one number per channel that a layer's
trace holds (b_t = 1 − a_t, c_t = 1). A token reads the memory before it is written to:

    wkv_t = g_t p_{t−1} + (1 − g_t) v_t,  g_t = σ(ℓ_{t−1} − u − k_t).

Retention is a_t, the share of the memory that token t leaves: 0 at the first token, which fills an empty one, and close
to 0 where e^{k_t} outweighs all before it. The bare decays e^{−w}, alike at every token, are in the layer's `extras`.

The mixer that is read is the whole block: its channel mixing, too, reads the previous token.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.nn.utils.parametrize import is_parametrized
from transformers.models.rwkv.modeling_rwkv import RwkvBlock, RwkvForCausalLM, RwkvModel, RwkvOutput
from ssmscope.core.affine import agrees_with_weight, norm_terms
from ssmscope.core.growth import GrowthLimit, gates_at_most_one
from ssmscope.core.intercept import observe, override_forward
from ssmscope.core.linearized import InputMap, LinearizedLayer, OutputMap, Path
from ssmscope.core.mixers import conv_tap_mask, edit_conv_input
from ssmscope.core.trace import LayerState, LayerTrace, last_inputs
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.ops import Recurrence, Scan, skip_alone

EMPTY_LOG_WEIGHT = -1e30
"""Log-weight of an empty memory, and of a key at padding."""


@dataclass(frozen=True, eq=False)
class RwkvState(LayerState):
    """State from which a block continues. `conv` is the last input of the time mixing, `channel` (batch, 1, width) that
    of the channel mixing, `log_weight` (batch, channels) float64 the ℓ of the mean in `ssm`, and `late` (batch, 1,
    channels) the change of the last output by edits of the scan, which the next token reads."""

    channel: Tensor
    log_weight: Tensor
    late: Tensor


def log_weights(
    k: Float[Tensor, "batch length channels"],
    w: Float[Tensor, " channels"],
    mask: Tensor | None = None,
    start: Float[Tensor, "batch channels"] | None = None,
) -> Float[Tensor, "batch length+1 channels"]:
    """Compute ℓ_0 … ℓ_length in float64: log Σ_{s≤t} e^{k_s − (t−s) w}, from ℓ_0 = `start` (default: an empty memory).
    Where `mask` (batch, length) is False ℓ holds. As e^{ℓ_t + t w} is a cumulative sum, all steps are computed at once;
    t w becomes large, for which float64 has enough digits."""
    batch, length, channels = k.shape
    real = torch.ones(batch, length, dtype=torch.bool, device=k.device) if mask is None else mask
    k, w = k.double().masked_fill(~real.unsqueeze(-1), EMPTY_LOG_WEIGHT), w.double()
    start = k.new_full((batch, channels), EMPTY_LOG_WEIGHT) if start is None else start.double()
    grown = torch.cat([start.unsqueeze(1), k + rearrange(real.cumsum(1), "b t -> b t 1") * w], dim=1)
    past = torch.cat([real.new_zeros(batch, 1), real], dim=1).cumsum(1)
    return grown.logcumsumexp(1) - rearrange(past, "b t -> b t 1") * w


RECORDABLE_TRAINING = ("rwkv",)


def growth_limit(mixer: nn.Module, layer: LayerTrace, recurrence: Recurrence) -> GrowthLimit:
    """Return the limit of a mean's gate, which is at most 1, and the decays of its parts."""
    return gates_at_most_one(recurrence, bare=layer.extras["decay"].double())


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the block's terms. `extras` has the mean's log-weights `log_weight` (batch, length + 1, channels), from
    ℓ_0; `bonus`, the log-odds ℓ_{t−1} − u − k_t of reading the memory (batch, length, channels); the bare decays
    `decay` (channels,), e^{−w}; and in a run that continues `channel_tail`, the last input of the channel mixing."""
    if state is not None and not isinstance(state, RwkvState):
        raise TypeError("an RWKV block continues from an RwkvState, which state_after gives: it holds log-weights too")
    attention = mixer.attention
    mask = parts.as_mask(mask)
    tail = state.conv if state is not None else None
    x = edit_conv_input(mixer, parts.mask_padding(mixer.ln1(_stream(mixer, u)), mask))
    taps = conv_tap_mask(mixer, x, 2)
    before = token_before(x, tail, taps)
    k, v, z = (
        project(mixed_with_before(x, before, mix))
        for project, mix in (
            (attention.key, attention.time_mix_key),
            (attention.value, attention.time_mix_value),
            (attention.receptance, attention.time_mix_receptance),
        )
    )
    k, v, w, bonus = (parts.at_least_float32(t) for t in (k, v, attention.time_decay.exp(), attention.time_first))
    log_weight = log_weights(k, w, mask, state.log_weight if isinstance(state, RwkvState) else None)
    odds = parts.mask_padding((k + w - log_weight[:, :-1]).to(v.dtype), mask)  # Of the write against the memory.
    share = parts.mask_padding(torch.sigmoid(odds), mask)
    recurrence = Recurrence(
        x=v.unsqueeze(-1),
        b=share.unsqueeze(-1),
        c=torch.ones_like(share).unsqueeze(-1),
        log_a=parts.mask_padding(logsigmoid(-odds), mask).unsqueeze(-1),
    )
    extras = {"log_weight": log_weight, "bonus": (log_weight[:, :-1] - bonus - k).to(v.dtype), "decay": torch.exp(-w)}
    if isinstance(state, RwkvState):
        extras |= {"channel_tail": state.channel, "late": state.late}
    initial = state.ssm if state is not None else None
    around = {"conv_input": x, "conv_tail": tail, "taps": taps, "z": z, "initial": initial, "extras": extras}
    return LayerTrace(u, (recurrence,), mask, reach=2, **around)


def output(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...] | None = None) -> Tensor:
    """Return the output (batch, length, width) from the terms: x + W_o (σ(z) ⊙ wkv), then the channel mixing."""
    x = _after_time_mixing(mixer, layer, layer.scan() if scans is None else scans)
    return x + _channel_mixing(mixer, layer, x)


def without(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...], part: Any) -> tuple[Scan, ...]:
    """Return the scan without the `part` of its recurrence: a token reads the memory that the token before it left."""
    return (scans[0]._replace(y=scans[0].y - part(0, layer.recurrence, late=1)),)


def _channel_mixing(mixer: Any, layer: LayerTrace, x: Tensor) -> Tensor:
    mixing = mixer.feed_forward
    shown = parts.mask_padding(mixer.ln2(x), layer.mask)
    before = token_before(shown, layer.extras.get("channel_tail"), layer.taps)
    k = torch.relu(mixing.key(mixed_with_before(shown, before, mixing.time_mix_key))).square()
    r = torch.sigmoid(mixing.receptance(mixed_with_before(shown, before, mixing.time_mix_receptance)))
    return r * mixing.value(k) * _rescaling(mixer)


def linearized(mixer: Any, layer: LayerTrace) -> LinearizedLayer:
    """Return the time mixing as a linear map with keys, receptance and the norms' scales frozen; the residual stream
    and the channel mixing are in the rest.

    wkv_t = g_t p_{t−1} + (1 − g_t) v_t is two paths: the memory one step before, a recurrence of shifted terms, and the
    token's own value. Maps act on the values v, which the token shift has already mixed with those of the token before.
    """
    attention, u = mixer.attention, parts.at_least_float32(layer.u)
    recurrence = layer.recurrence
    assert recurrence.log_a is not None
    read = torch.sigmoid(layer.extras["bonus"])
    project, rescaling = parts.projection(attention, "output"), _rescaling(mixer)
    output_map = OutputMap(
        lambda v: project(v, False) * rescaling, gate=torch.sigmoid(parts.at_least_float32(layer.gate))
    )
    input_map = InputMap(source=rearrange(recurrence.x, "b t c 1 -> b t c"), enter=_values(mixer, layer))
    memory = replace(recurrence, b=parts.delayed(recurrence.b), log_a=parts.delayed(recurrence.log_a))
    shift = read.new_tensor([0.0, 1.0])
    start = None if layer.initial is None else layer.initial[0]
    paths = (
        Path(memory, input_map, output_map, "memory", filter=shift, initial=start, weight=read),
        Path(skip_alone(recurrence, read.new_ones(read.shape[-1])), input_map, output_map, "own", weight=1 - read),
    )
    mixed = _after_time_mixing(mixer, layer, layer.scan())
    rest = parts.at_least_float32(_stream(mixer, layer.u) + _channel_mixing(mixer, layer, mixed))
    added = parts.constant(attention, "output", u)
    rest = rest if added is None else rest + added
    return LinearizedLayer(u, paths, rest=rest, rest_map=_rest_map(mixer, layer, parts.at_least_float32(mixed), added))


def _rest_map(
    mixer: Any, layer: LayerTrace, x: Tensor, added: Tensor | None
) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Return the residual stream and the channel mixing as a map of the block's input and the time mixing's output
    without its bias `added`, with the norms' scales, the receptance and ReLU frozen at `x`, the stream after the time
    mixing: relu(k)² is k [relu(k)]."""
    mixing, tail = mixer.feed_forward, layer.extras.get("channel_tail")
    u = parts.at_least_float32(layer.u)
    first = frozen_layer_norm(mixer, "pre_ln", u) if mixer.layer_id == 0 else None
    second = frozen_layer_norm(mixer, "ln2", x)
    key, value, receptance = (parts.projection(mixing, name) for name in ("key", "value", "receptance"))
    rescaling = _rescaling(mixer)

    def shifted(x: Tensor, mix: Tensor, biased: bool) -> Tensor:
        shown = parts.mask_padding(second(x, biased), layer.mask)
        return mixed_with_before(shown, token_before(shown, tail if biased else None, layer.taps), mix.to(shown))

    k = torch.relu(key(shifted(x, mixing.time_mix_key, True), True))
    r = torch.sigmoid(receptance(shifted(x, mixing.time_mix_receptance, True), True))

    def rest_map(u: Tensor, mixed: Tensor, biased: bool) -> Tensor:
        x = u if first is None else first(u, biased)
        x = x + added if biased and added is not None else x
        return x + r * value(k * key(shifted(x + mixed, mixing.time_mix_key, biased), biased), biased) * rescaling

    return rest_map


def _values(mixer: Any, layer: LayerTrace) -> Callable[[Tensor, bool], Tensor]:
    """Return the values v of the time mixing as a map of the block's input, with the norms' scales at `layer.u`."""
    norms = (["pre_ln"] if mixer.layer_id == 0 else []) + ["ln1"]
    value, mix = parts.projection(mixer.attention, "value"), parts.at_least_float32(mixer.attention.time_mix_value)
    return shifted_map(mixer, norms, parts.at_least_float32(layer.u), layer, layer.conv_tail, mix, value)


def shifted_map(
    mixer: Any,
    norms: Sequence[str],
    x: Tensor,
    layer: LayerTrace,
    tail: Tensor | None,
    mix: Tensor,
    project: Callable[[Tensor, bool], Tensor],
) -> Callable[[Tensor, bool], Tensor]:
    """Return the map of a block's input through its `norms`, the token shift and a projection, linear and biased or
    not, with the norms' scales frozen at the input `x`."""
    frozen: list[Callable[[Tensor, bool], Tensor]] = []
    for name in norms:
        frozen.append(frozen_layer_norm(mixer, name, x))
        x = frozen[-1](x, True)

    def enter(v: Tensor, biased: bool) -> Tensor:
        for norm in frozen:
            v = norm(v, biased)
        v = parts.mask_padding(v, layer.mask)
        before = token_before(v, tail if biased else None, layer.taps)
        return project(mixed_with_before(v, before, mix.to(v)), biased)

    return enter


def frozen_layer_norm(part: nn.Module, name: str, x: Tensor) -> Callable[[Tensor, bool], Tensor]:
    """Return a layer norm of a block as a linear map with its factor frozen at `x`, biased or not."""
    weight, bias, eps = norm_terms(getattr(part, name), nn.LayerNorm, f"{name} of a {type(part).__name__}")
    assert weight is not None and eps is not None
    scale = parts.rms_factor(x - x.mean(-1, keepdim=True), eps) * weight.to(x)

    def scaled(v: Tensor, biased: bool) -> Tensor:
        v = (v - v.mean(-1, keepdim=True)) * scale
        return v + bias.to(v) if biased and bias is not None else v

    return scaled


def returned(output: Tensor) -> tuple[Tensor, None, None]:
    """Return the output in the form of a block's own forward pass: with neither cache nor attention."""
    return output, None, None


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> RwkvState:
    """Return the state from which a run continues after this block."""
    shown = parts.mask_padding(mixer.ln2(_after_time_mixing(mixer, layer, scans)), layer.mask)
    channel = last_inputs(shown, 2, layer.extras.get("channel_tail"), layer.mask)
    late = last_inputs(scans[0].y.squeeze(-1), 2, _read_first(layer), layer.mask)
    late = late - rearrange(scans[0].state, "b c 1 1 -> b 1 c")
    log_weight = layer.extras["log_weight"][:, -1]
    return RwkvState(**vars(layer.state_after(scans)), channel=channel, log_weight=log_weight, late=late)


def _read_first(layer: LayerTrace) -> Tensor | None:
    """Return the memory that the first token reads, (batch, 1, channels), None if it is empty."""
    if layer.initial is None:
        return None
    return rearrange(layer.initial[0], "b c 1 1 -> b 1 c") + layer.extras["late"]


def _stream(mixer: Any, u: Tensor) -> Tensor:
    return mixer.pre_ln(u) if mixer.layer_id == 0 else u


def token_before(x: Tensor, tail: Tensor | None, taps: Tensor | None) -> Tensor:
    """Return the input one token earlier, 0 where `taps` (batch, length, 2) bool leaves it out."""
    before = parts.delayed(x, tail)
    return before if taps is None else before * taps[..., 1:]


def mixed_with_before(x: Tensor, before: Tensor, mix: Tensor) -> Tensor:
    """Return the token shift: `mix` (width,) of each input and 1 − `mix` of the token before."""
    return x * mix + before * (1 - mix)


def _after_time_mixing(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> Tensor:
    (scanned,) = scans
    p, v = scanned.y.squeeze(-1), layer.recurrence.x.squeeze(-1)
    wkv = torch.lerp(v, parts.delayed(p, _read_first(layer)), torch.sigmoid(layer.extras["bonus"]))
    gated = torch.sigmoid(layer.gate) * wkv.to(layer.gate.dtype)
    return _stream(mixer, layer.u) + mixer.attention.output(gated) * _rescaling(mixer)


# ---- the whole model while it is read

_backbones: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Backbone of every block that was read."""


def _rescaling(block: nn.Module) -> float:
    """Return the factor that gives a block's projections the outputs of the stored weights: when it first runs in
    evaluation, transformers' backbone divides the weights of later blocks by powers of two, in place, and the residual
    stream with them, so that float16 does not overflow."""
    found = _backbones.get(block)
    backbone = None if found is None else found()
    if backbone is None or not backbone.layers_are_rescaled or backbone.config.rescale_every <= 0:
        return 1.0
    return 2.0 ** (block.layer_id // backbone.config.rescale_every)


def stored(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model, or of one block, as they were before transformers rescaled them."""
    _remember(module)
    weights = module.state_dict()
    for path, part in module.named_modules():
        if type(part) is RwkvBlock and (factor := _rescaling(part)) != 1:
            for name in ("attention.output.weight", "feed_forward.value.weight"):
                name = f"{path}.{name}" if path else name
                weights[name] = weights[name] * factor
    return weights


def _remember(module: nn.Module) -> list[RwkvModel]:
    found = [part for part in module.modules() if type(part) is RwkvModel]
    for part in found:
        for block in part.blocks:
            _backbones[block] = weakref.ref(part)
    return found


@contextmanager
def reading(module: nn.Module) -> Iterator[None]:
    """Have the backbones of `module` pass the padding mask to their blocks and rescale nothing, in this thread and
    within the context; rescaled weights are read as stored. Outputs change by no more than the ε of the norms, and no
    weight changes.

    Raises:
        InputError: if a float16 model relies on rescaling, one with PEFT adapters would be rescaled, or its first
            forward pass, in another thread, rescaled the weights in between."""
    found = _remember(module)
    for part in found:
        every = part.config.rescale_every
        if part.ln_out.weight.dtype == torch.float16 and 0 < every < len(part.blocks):
            raise InputError(f"an RWKV of {len(part.blocks)} layers overflows in float16: use bfloat16 or float32")
        divided = [m for block in part.blocks for m in (block.attention.output, block.feed_forward.value)]
        if 0 < every < len(part.blocks) and any(is_parametrized(m) or not agrees_with_weight(m) for m in divided):
            raise InputError(
                "transformers divides the weights of an RWKV's later layers by powers of two, but not what a PEFT "
                "adapter or hook adds: merge the former (peft's merge_and_unload()), or set rescale_every=0 before"
            )
    rescaled = {part: part.layers_are_rescaled for part in found}
    masks: dict[nn.Module, Tensor | None] = {}

    def remember(model: nn.Module, args: tuple, kwargs: dict) -> None:
        masks[model.rwkv] = args[1] if len(args) > 1 else kwargs.get("attention_mask")

    # transformers' language model gets a mask and drops it.
    speaking = [(part, remember) for part in module.modules() if type(part) is RwkvForCausalLM]
    taken = [(part, partial(_backbone, part, masks, rescaled)) for part in found]
    with observe(before=speaking), override_forward(taken):
        yield
    if any(part.layers_are_rescaled != was for part, was in rescaled.items()):
        raise InputError(
            "another thread ran this model for the first time meanwhile, which rescaled its weights; run it again"
        )


def _backbone(
    model, masks, rescaled, below, input_ids=None, attention_mask=None, inputs_embeds=None, state=None, **kwargs
):
    """Run the backbone on whole sequences without rescaling."""
    if state is not None or kwargs.get("use_cache"):
        run = below(input_ids, attention_mask, inputs_embeds, state, **kwargs)
        rescaled[model] = model.layers_are_rescaled
        return run
    attention_mask = masks.get(model) if attention_mask is None else attention_mask
    hidden = model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
    seen = [hidden]
    for block in model.blocks:
        hidden, *_ = block(hidden, attention_mask=attention_mask)
        seen.append(hidden)
    last = model.ln_out(hidden)
    wanted = kwargs.get("output_hidden_states")
    wanted = model.config.output_hidden_states if wanted is None else wanted
    run = RwkvOutput(last_hidden_state=last, hidden_states=(*seen[1:], last) if wanted else None)
    return run if kwargs.get("return_dict") in (None, True) else run.to_tuple()
