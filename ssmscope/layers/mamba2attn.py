"""Mamba-2 with layers of softmax attention and gated feed-forward parts, as mamba_ssm's models have them (mamba2attn;
An Empirical Study of Mamba-based Language Models, Waleffe et al. 2024, and Mamba-2, section 9.2.3).

Layer i of `attn_layer_idx` has attention where the others have a Mamba-2 mixer. Its queries, keys and values are
convolved over a few tokens, without an activation; then queries and keys are rotated. With `d_intermediate` every layer
has a part W₂ (h ⊙ SiLU(g)) after its mixer, [h, g] = W₁ x. Each part reads a norm of the stream and adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import GenerationMixin, Mamba2Config, PretrainedConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer, Mamba2PreTrainedModel
from ssmscope.errors import InputError
from ssmscope.layers.feed_forward import FeedForward
from ssmscope.layers.parts import as_mask, at_least_float32
from ssmscope.layers.rotary_attention import ATTENTION_OPTIONS, RotaryAttention, score_mask
from ssmscope.networks.generation import MAMBA2_TIED, BlocksInTurn, HeadOnBackbone


class Mamba2AttnConfig(Mamba2Config):
    """Configuration of Mamba-2 with attention and feed-forward parts.

    Args (in addition to those of `Mamba2Config`):
        attn_layer_idx: indices of the layers with attention, from 0.
        attn_cfg: their options, see `ATTENTION_OPTIONS`.
        d_intermediate: width of the feed-forward parts; 0 leaves them out.

    Raises:
        InputError: if a layer does not exist, options are unknown or do not fit, attention looks ahead or has a
            feed-forward part within it (mlp_dim).
    """

    model_type = "mamba2attn"
    mixer: ClassVar[type[nn.Module]] = Mamba2Mixer

    def __init__(
        self,
        attn_layer_idx: Sequence[int] = (),
        attn_cfg: Mapping[str, Any] | None = None,
        d_intermediate: int = 0,
        **kwargs,
    ):
        super().__init__(**{**kwargs, "use_cache": False})
        self.attn_layer_idx, self.d_intermediate = list(attn_layer_idx), d_intermediate
        self.attn_cfg = dict(attn_cfg or {})
        outside = [i for i in self.attn_layer_idx if type(i) is not int or not 0 <= i < self.num_hidden_layers]
        if outside:
            raise InputError(
                f"attn_layer_idx has {outside[0]!r:.60}: give layers, from 0 to {self.num_hidden_layers - 1}"
            )
        if type(d_intermediate) is not int or d_intermediate < 0:
            raise InputError(f"d_intermediate {d_intermediate!r:.60} must be an integer, 0 or more")
        if self.attn_layer_idx:
            _check_attention(self.attn_cfg, self.hidden_size)
            self.num_attention_heads = self.attn_cfg["num_heads"]


def _check_attention(options: Mapping[str, Any], width: int) -> None:
    unknown = sorted(options.keys() - ATTENTION_OPTIONS.keys())
    if unknown or "num_heads" not in options:
        wrong = f"{unknown[0]}, which is unknown" if unknown else "no num_heads"
        raise InputError(f"attn_cfg has {wrong}; its options are {', '.join(ATTENTION_OPTIONS)}")
    o = {**ATTENTION_OPTIONS, **options}
    if not o["causal"]:
        raise InputError("attn_cfg has causal false: attention that looks ahead cannot be read")
    if o["mlp_dim"]:
        raise InputError("attn_cfg has mlp_dim: a feed-forward part within attention cannot be read")
    for name in ("num_heads", "num_heads_kv", "head_dim"):
        if o[name] is not None and (type(o[name]) is not int or o[name] < 1):
            raise InputError(f"attn_cfg has {name} {o[name]!r:.60}: give an integer, 1 or more")
    for name in ("d_conv", "rotary_emb_dim"):
        if type(o[name]) is not int or o[name] < 0:
            raise InputError(f"attn_cfg has {name} {o[name]!r:.60}: give an integer, 0 or more")
    for name in ("qkv_proj_bias", "out_proj_bias", "rotary_emb_interleaved"):
        if type(o[name]) is not bool:
            raise InputError(f"attn_cfg has {name} {o[name]!r:.60}: give true or false")
    for name in ("rotary_emb_base", "softmax_scale"):
        if o[name] is not None and (type(o[name]) not in (int, float) or not 0 < o[name] < math.inf):
            raise InputError(f"attn_cfg has {name} {o[name]!r:.60}: give a positive number")
    heads, keys, turned = o["num_heads"], o["num_heads_kv"] or o["num_heads"], o["rotary_emb_dim"]
    if heads % keys or (o["head_dim"] is None and width % heads):
        raise InputError(f"attn_cfg has {heads} heads, which {keys} heads of keys or a width of {width} do not fit")
    if turned % 2 or turned > (o["head_dim"] or width // heads):
        raise InputError(f"attn_cfg has rotary_emb_dim {turned}: give an even number of a head's dimensions")


class Mamba2AttnFeedForward(FeedForward):
    """Feed-forward part W₂ (h ⊙ SiLU(g)), [h, g] = W₁ x."""

    def __init__(self, config: Mamba2AttnConfig) -> None:
        nn.Module.__init__(self)
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.d_intermediate, bias=False)
        self.fc2 = nn.Linear(config.d_intermediate, config.hidden_size, bias=False)

    def up(self, x: Tensor) -> Tensor:
        return self.fc1(x).chunk(2, dim=-1)[0]

    def gate(self, x: Tensor) -> Tensor:
        return self.fc1(x).chunk(2, dim=-1)[1]

    def down(self, y: Tensor) -> Tensor:
        return self.fc2(y)

    def forward(self, x: Tensor) -> Tensor:
        h, g = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(h * silu(g))


class Mamba2AttnBlock(nn.Module):
    """Block x + mixer(norm(x)), then x + feed-forward(norm(x)) if it has one; the stream may be float32."""

    def __init__(self, config: Mamba2AttnConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon), config.residual_in_fp32
        self.attends = layer_idx in config.attn_layer_idx
        self.mixer = (
            RotaryAttention(config, layer_idx, config.attn_cfg) if self.attends else config.mixer(config, layer_idx)
        )
        self.norm2: Any = None
        self.mlp: Any = None
        if config.d_intermediate:
            self.norm2 = nn.RMSNorm(config.hidden_size, config.layer_norm_epsilon)
            self.mlp = Mamba2AttnFeedForward(config)

    def forward(self, x: Tensor, mask: Tensor | None, reads: Tensor, position_ids: Tensor) -> Tensor:
        normed = self.norm(x.to(self.norm.weight.dtype))
        if self.attends:
            mixed = self.mixer(normed, reads, position_ids, mask)[0]
        else:
            mixed = self.mixer(normed, attention_mask=mask)
        x = (at_least_float32(x) if self.wide else x) + mixed
        return x if self.mlp is None else x + self.mlp(self.norm2(x.to(self.norm2.weight.dtype)))


class _Mamba2AttnPreTrainedModel(Mamba2PreTrainedModel):
    config_class: type[PretrainedConfig] = Mamba2AttnConfig
    main_input_name = "input_ids"
    _no_split_modules = ["Mamba2AttnBlock"]
    _supports_sdpa = True


class Mamba2AttnModel(BlocksInTurn, _Mamba2AttnPreTrainedModel):
    """Backbone of embedding, blocks and norm."""

    block_class = Mamba2AttnBlock

    def block_arguments(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        mask, steps = as_mask(attention_mask), torch.arange(x.shape[1], device=x.device)
        return mask, score_mask(x, mask), steps.expand(len(x), -1) if position_ids is None else position_ids


class Mamba2AttnForCausalLM(HeadOnBackbone, _Mamba2AttnPreTrainedModel, GenerationMixin):
    """Language model of the backbone and a head on the vocabulary."""

    _tied_weights_keys = MAMBA2_TIED
    backbone_class = Mamba2AttnModel


AUTO = (Mamba2AttnModel, Mamba2AttnForCausalLM)
