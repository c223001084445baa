"""GLA (Gated Linear Attention Transformers, Yang et al. 2023) and RetNet (Retentive Network, Sun et al. 2023).

Both are linear attention with a decay. Each of `num_heads` heads keeps a matrix of key × value size,

    H_t = α_t ⊙ H_{t−1} + k_t v_tᵀ,        o_t = H_tᵀ q_t / √(key size),

GLA with a decay per key dimension that the token chooses, α_t = σ(W₂ W₁ x_t + b)^{1/τ}; RetNet with one constant decay
per head, γ_h = 1 − 2^{−5−h}, on queries and keys that are rotated by their position. Each head's o_t is normalised
separately, gated by swish(W_z x_t), and projected. In `ops.Recurrence` the key dimensions are the state, the value
dimensions a head's width, b = k, c = q / √(key size), x = v.

Of RetNet's three normalisations of scores (its section 2.2) the first is the √(key size) above; the others scale an
o_t by a number, which the norm of the head undoes.

The backbone is Mamba's: x + mixer(RMSNorm(x)) per layer, a norm, a head that may be tied to the embedding. Both papers
add a feed-forward block to each layer; `intermediate_size=0` leaves it out, which is Mamba's backbone itself. Layers in
`attention` have softmax attention in place of the mixer, as in flash-linear-attention's hybrids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from ssmscope.core.forms import Form
from ssmscope.core.growth import GrowthLimit, gates_at_most_one
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers import parts
from ssmscope.layers.feed_forward import FeedForward, RoutedExperts
from ssmscope.layers.linear_layers import GatedLinearAttention, Retention
from ssmscope.layers.rotary_attention import QK_NORMS, RotaryAttention, score_mask
from ssmscope.networks.generation import MAMBA2_TIED, BlocksInTurn, HeadOnBackbone
from ssmscope.ops import Recurrence, Scan

# ---- the configurations

HEAD_NORMS = ("layer", "rms")
"""Norms of a head's output: the papers', or its root mean square with one weight for all heads."""
ATTENTION_DEFAULTS: dict[str, Any] = dict(
    num_kv_heads=None, qkv_bias=False, window_size=None, rope_theta=10000.0,
    head_dim=None, rotary_dim=None, qk_norm=None,
)  # fmt: skip
"""Options of softmax attention in addition to `layers` and `num_heads`, with defaults: the last three are a head's
width, by default its share of the layer's, the dimensions of a head that are rotated, by default all, and how queries
and keys are normed before (`QK_NORMS`), by default not."""


class LinearAttentionConfig(PretrainedConfig):
    """Base of the configurations. A subclass names its `mixer`, and whether its feed-forward blocks are SwiGLU or GELU.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_heads: tokens, width, layers, heads of a layer.
        intermediate_size: of the feed-forward blocks; by default 8/3 of the width, rounded up to a multiple of 8; 0
            leaves them out.
        layer_norm_epsilon: of every norm.
        initializer_range: the initial standard deviation of embeddings.
        head_norm: "layer", or "rms" (`HEAD_NORMS`).
        attention: layers of softmax attention, a list of options (`ATTENTION_DEFAULTS`), each with `num_heads` and its
            `layers`.
        sizes: the subclass's further sizes by their names.

    Raises:
        InputError: if a size is not a positive integer, or the heads cannot share it.
    """

    mixer: ClassVar[type[nn.Module]]
    swiglu: ClassVar[bool] = True
    head_norm = "layer"
    shared: ClassVar[tuple[str, ...]] = ("key_size", "value_size")
    """Fields with sizes that the heads share."""
    attention: Sequence[Mapping[str, Any]] = ()
    """Options of softmax attention for some `layers`, in place of the mixer, see `ATTENTION_DEFAULTS`."""

    def _set_attention(self, given: Any) -> None:
        width, taken = self.hidden_size, set[int]()
        if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
            raise InputError(f"attention {given!r:.60} must be a list of options, each for some layers")
        for each in given:
            unknown = sorted(each.keys() - {"layers", "num_heads", *ATTENTION_DEFAULTS})
            if unknown or not {"layers", "num_heads"} <= each.keys():
                known = ", ".join(("layers", "num_heads", *ATTENTION_DEFAULTS))
                raise InputError(f"attention has {unknown[0] if unknown else 'no layers or num_heads'}; give {known}")
            options, layers = {**ATTENTION_DEFAULTS, **each}, each["layers"]
            few = isinstance(layers, list) and len({*layers} - taken) == len(layers)
            if not few or any(type(at) is not int or not 0 <= at < self.num_hidden_layers for at in layers):
                last = self.num_hidden_layers - 1
                raise InputError(f"attention has the layers {layers!r:.60}: give a list, each once, from 0 to {last}")
            taken |= {*layers}
            heads, key_heads = (options[name] or options["num_heads"] for name in ("num_heads", "num_kv_heads"))
            head = options["head_dim"]
            sizes = (heads, key_heads, options["window_size"] or 1, 1 if head is None else head)
            fits = all(type(size) is int and size > 0 for size in sizes) and not heads % key_heads
            if not fits or (head is None and width % (2 * heads)):
                raise InputError(
                    f"attention has {heads!r:.60} heads, {key_heads!r:.60} of keys and a window of "
                    f"{options['window_size']!r:.60}: give numbers that share the width, {width}, in pairs"
                )
            if heads != given[0]["num_heads"]:
                raise InputError("attention has layers of several num_heads: give one for all")
            head = width // heads if head is None else head
            turned = head if options["rotary_dim"] is None else options["rotary_dim"]
            if type(turned) is not int or turned % 2 or not 0 <= turned <= head:
                raise InputError(f"attention turns {turned!r:.60} dimensions of a head's {head}: give an even number")
            if options["qk_norm"] not in (None, *QK_NORMS):
                raise InputError(f"attention has qk_norm {options['qk_norm']!r:.60}: give {' or '.join(QK_NORMS)}")
            theta = options["rope_theta"]
            if type(options["qkv_bias"]) is not bool or type(theta) not in (int, float) or not 0 < theta < math.inf:
                raise InputError("attention has qkv_bias, true or false, and rope_theta, a positive number")
        if given:
            self.attention, self.num_attention_heads = given, given[0]["num_heads"]

    def _set_unless_default(self, **fields: Any) -> None:
        """Set fields that differ from the class's defaults; the fingerprint is made from a configuration's own
        fields."""
        for name, value in fields.items():
            if value != getattr(type(self), name):
                setattr(self, name, value)

    def __init__(
        self,
        vocab_size: int = 50280,
        hidden_size: int = 768,
        num_hidden_layers: int = 24,
        num_heads: int = 4,
        intermediate_size: int | None = None,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.1,
        *,
        sizes: Mapping[str, int],
        **kwargs,
    ):
        self.layer_norm_epsilon, self.initializer_range = layer_norm_epsilon, initializer_range
        fields = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
        fields |= {"num_heads": num_heads, **sizes}
        fields["intermediate_size"] = 8 * math.ceil(hidden_size / 3) if intermediate_size is None else intermediate_size
        for name, value in fields.items():
            least = 0 if name == "intermediate_size" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} {value!r} must be an integer, {least} or more")
            setattr(self, name, value)
        head_norm = kwargs.pop("head_norm", "layer")
        if head_norm not in HEAD_NORMS:
            raise InputError(f"head_norm {head_norm!r} is unknown: choose one of {', '.join(HEAD_NORMS)}")
        self._set_unless_default(head_norm=head_norm)
        for name in self.shared:
            if fields[name] % num_heads:
                raise InputError(
                    f"{name} {fields[name]} cannot be shared by {num_heads} heads: give a multiple of {num_heads}"
                )
        self._set_attention(kwargs.pop("attention", []))
        kwargs.setdefault("pad_token_id", 0)
        kwargs.setdefault("bos_token_id", 0)
        kwargs.setdefault("eos_token_id", 0)
        kwargs.setdefault("tie_word_embeddings", True)
        kwargs["use_cache"] = False
        super().__init__(**kwargs)


class GLAConfig(LinearAttentionConfig):
    """Configuration of a GLA Transformer.

    Args (in addition to those of `LinearAttentionConfig`):
        key_size, value_size: of all heads together; by default half the width and the width (GLA, section 4.4).
        gate_rank: the width between W₁ and W₂.
        tau: τ, the root taken of the gate; 16 keeps initial decays near 1.
    """

    model_type = "ssm-gla"
    mixer = GatedLinearAttention

    def __init__(
        self,
        hidden_size: int = 768,
        key_size: int | None = None,
        value_size: int | None = None,
        gate_rank: int = 16,
        tau: float = 16.0,
        **kwargs,
    ):
        if not tau > 0:
            raise InputError(f"tau {tau!r} must be a positive number")
        self.tau = tau
        key_size = hidden_size // 2 if key_size is None else key_size
        value_size = hidden_size if value_size is None else value_size
        sizes = {"key_size": key_size, "value_size": value_size, "gate_rank": gate_rank}
        super().__init__(hidden_size=hidden_size, sizes=sizes, **kwargs)


class RetNetConfig(LinearAttentionConfig):
    """Configuration of a RetNet.

    Args (in addition to those of `LinearAttentionConfig`):
        key_size, value_size: of all heads together; by default the width and twice the width (RetNet, section 3.1).
        rotary: whether queries and keys are rotated by their position; a head's key size is then even.
        rotary_base: pair i of a head's key dimensions turns by base^{−2i / key size} a token.
        intermediate_size: by default twice the width.
        swiglu: whether feed-forward blocks are SwiGLU, else GELU.

    Raises:
        InputError: as `LinearAttentionConfig`, and if the number of dimensions to rotate is odd.
    """

    model_type = "ssm-retnet"
    mixer = Retention
    swiglu = False

    def __init__(
        self,
        hidden_size: int = 768,
        key_size: int | None = None,
        value_size: int | None = None,
        rotary: bool = True,
        rotary_base: float = 10000.0,
        intermediate_size: int | None = None,
        swiglu: bool = False,
        **kwargs,
    ):
        self._set_unless_default(swiglu=swiglu)
        self.rotary, self.rotary_base = rotary, rotary_base
        key_size = hidden_size if key_size is None else key_size
        sizes = {"key_size": key_size, "value_size": 2 * hidden_size if value_size is None else value_size}
        inner = 2 * hidden_size if intermediate_size is None else intermediate_size
        super().__init__(hidden_size=hidden_size, intermediate_size=inner, sizes=sizes, **kwargs)
        each = self.key_size // self.num_heads
        if rotary and each % 2:
            raise InputError(f"a head's key size {each} is odd: rotation needs pairs; change key_size or rotary=False")


# ---- how the mixers are read


@dataclass(frozen=True, eq=False)
class RetentionState(LayerState):
    """State from which a rotated layer continues, with the `position` (batch,) of every row's next token."""

    position: Tensor


RECORDABLE_TRAINING = ("ssm-gla",)


def growth_limit(mixer: nn.Module, layer: LayerTrace, recurrence: Recurrence) -> GrowthLimit:
    """Return the limit of gates, which are at most 1, or of a RetNet's constant decays."""
    if not isinstance(mixer, Retention):
        return gates_at_most_one(recurrence)
    assert recurrence.log_a is not None
    return GrowthLimit(recurrence.log_a[0, 0].double().amax(-1), "decays are constant")


def compute_terms(mixer: Any, u: Tensor, mask: Tensor | None = None, state: LayerState | None = None) -> LayerTrace:
    """Return the layer's terms. A rotated layer's `extras` have every token's `position` (batch, length)."""
    mask = parts.as_mask(mask)
    q, k, v = (mixer.heads(project(u)) for project in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    position = mixer.position(u, mask, state.position if isinstance(state, RetentionState) else None)
    q, k = mixer.rotate(q * mixer.scale, position), mixer.rotate(parts.mask_padding(k, mask), position)
    recurrence = Recurrence(x=v, b=k, c=q, log_a=parts.mask_padding(mixer.log_decay(u), mask))
    extras = {} if position is None else {"position": position}
    return LayerTrace(u, (recurrence,), mask=mask, z=mixer.z_proj(u), extras=extras)


FORM = Form(values="v_proj", norm="head_norm", gate="z_proj")


def state_after(mixer: Any, layer: LayerTrace, scans: tuple[Scan, ...]) -> LayerState:
    """Return the state from which a run continues after this layer."""
    found, position = layer.state_after(scans), layer.extras.get("position")
    return found if position is None else RetentionState(**vars(found), position=position[:, -1] + 1)


# ---- the models


def _attention(config: Any, number: int) -> RotaryAttention | None:
    """Return a layer's softmax attention; None if it has none."""
    found = next((each for each in getattr(config, "attention", ()) if number in each["layers"]), None)
    if found is None:
        return None
    options = {**ATTENTION_DEFAULTS, **found}
    head = options["head_dim"] or config.hidden_size // options["num_heads"]
    own: dict[str, Any] = {
        "num_heads": options["num_heads"],
        "num_heads_kv": options["num_kv_heads"],
        "head_dim": head,
        "qkv_proj_bias": options["qkv_bias"],
        "out_proj_bias": False,
        "rotary_emb_dim": head if options["rotary_dim"] is None else options["rotary_dim"],
        "rotary_emb_base": options["rope_theta"],
    }
    return RotaryAttention(config, number, own, options["window_size"], options["qk_norm"])


class Block(nn.Module):
    """Block x + mixer(norm(x)), then x + feed-forward(norm(x)) if it has one. What is added is normed first if the
    configuration has `post_norms`; layers in its `routed_layers` have experts as their feed-forward part."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.norm = nn.RMSNorm(width, eps)
        self.mixer = _attention(config, number) or config.mixer(config)
        self.mlp_norm: Any = nn.RMSNorm(width, eps) if config.intermediate_size else None
        self.mlp: Any = None
        if config.intermediate_size:
            routed = number in getattr(config, "routed_layers", ())
            self.mlp = RoutedExperts(config) if routed else FeedForward(config)
        self.post_norm: Any = nn.RMSNorm(width, eps) if getattr(config, "post_norms", False) else None
        self.mlp_post_norm: Any = None if self.post_norm is None or self.mlp is None else nn.RMSNorm(width, eps)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        hidden: Mapping[int | None, Tensor] | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the block; `hidden` is `score_mask` for each window of attention."""
        if isinstance(self.mixer, RotaryAttention):
            assert hidden is not None and position_ids is not None
            y = self.mixer(self.norm(x), hidden[self.mixer.sliding_window], position_ids, None)[0]
        else:
            y = self.mixer(self.norm(x), attention_mask=attention_mask)
        x = x + (y if self.post_norm is None else self.post_norm(y))
        if self.mlp is None:
            return x
        y = self.mlp(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))


class _LinearAttentionPreTrainedModel(PreTrainedModel):
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]
    _is_stateful = True
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise linear maps to keep their input's size, norms to 1, and GLA's decays to 2^{−1/τ}."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm | nn.GroupNorm):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.GroupNorm):
                nn.init.zeros_(module.bias)


class LinearAttentionModel(BlocksInTurn, _LinearAttentionPreTrainedModel):
    """Backbone of embedding, blocks and norm."""

    block_class = Block

    def block_arguments(self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> tuple[Any, ...]:
        attention = getattr(self.config, "attention", ())
        if not attention:
            return (attention_mask,)
        mask, steps = parts.as_mask(attention_mask), torch.arange(x.shape[1], device=x.device)
        windows = {options.get("window_size") for options in attention}
        hidden = {window: score_mask(x, mask, window) for window in windows}
        return attention_mask, hidden, steps.expand(len(x), -1) if position_ids is None else position_ids


class LinearAttentionForCausalLM(HeadOnBackbone, _LinearAttentionPreTrainedModel, GenerationMixin):
    """Language model of the backbone and a head on the vocabulary."""

    _tied_weights_keys = MAMBA2_TIED


def family(
    config: type[PretrainedConfig], *first: type, backbone: type[LinearAttentionModel] = LinearAttentionModel
) -> tuple[type[LinearAttentionModel], type[LinearAttentionForCausalLM]]:
    """Return NAMEModel, the backbone, and NAMEForCausalLM, the language model, of NAMEConfig; `first` are bases of
    both."""
    name, own = config.__name__.removesuffix("Config"), {"config_class": config, "__module__": config.__module__}
    model = type(f"{name}Model", (*first, backbone), own)
    return model, type(f"{name}ForCausalLM", (*first, LinearAttentionForCausalLM), {**own, "backbone_class": model})


GLAModel, GLAForCausalLM = family(GLAConfig)
RetNetModel, RetNetForCausalLM = family(RetNetConfig)
AUTO = (GLAModel, GLAForCausalLM, RetNetModel, RetNetForCausalLM)
