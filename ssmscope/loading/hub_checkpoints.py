"""Checkpoints of PLaMo 2 and Ring-linear, whose code is on the hub alone, read without it.

Of PLaMo 2's norms the files hold the difference of the weights from 1, 1/5 or 5^{−3/2}. The sum is stored in float32:
in half precision it would be rounded. A window of w tokens reads w + 1, the token's own the last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from ssmscope.layers.lightning import LightningConfig, LightningForCausalLM
from ssmscope.layers.parts import at_least_float32
from ssmscope.layers.plamo2 import Plamo2Config, Plamo2ForCausalLM
from ssmscope.loading.fields import check_value, refused
from ssmscope.loading.stored import Contents, Plan

FIELDS: dict[str, dict[str, Any]] = {
    "plamo2": dict(
        hidden_size=4096, num_hidden_layers=32, rms_norm_eps=1e-6, tie_word_embeddings=True, num_attention_heads=32,
        num_key_value_heads=4, hidden_size_per_head=128, attention_window_size=2048, full_attention_idx=[],
        rope_theta=1e4, rope_local_theta=1e4, mamba_d_state=64, mamba_d_conv=4, mamba_num_heads=64, mamba_step=2,
        intermediate_size=13312,
    ),
    "bailing_moe_linear": dict(
        hidden_size=2048, num_hidden_layers=20, rms_norm_eps=1e-6, tie_word_embeddings=False, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, partial_rotary_factor=0.5, rope_theta=6e5, layer_group_size=5,
        group_norm_size=4, intermediate_size=5120, first_k_dense_replace=1, num_experts=256, num_experts_per_tok=8,
        n_group=8, topk_group=4, routed_scaling_factor=2.5, moe_intermediate_size=512, num_shared_experts=1,
        moe_shared_expert_intermediate_size=512,
    ),
}  # fmt: skip
"""Fields of a config.json that are read, with an allowed value, which is the default."""
FIXED_OPTIONS: dict[str, dict[str, Any]] = {
    "plamo2": dict(mamba_enabled=True, rms_norm_eps=1e-6),
    "bailing_moe_linear": dict(
        use_qk_norm=True, use_bias=False, use_qkv_bias=False, linear_silu=False, score_function="sigmoid",
        hidden_act="silu", rope_scaling=None, moe_router_enable_expert_bias=True, norm_topk_prob=True,
        num_nextn_predict_layers=0, norm_head=False,
    ),
}  # fmt: skip
"""Options that can be read with these values alone: those of all published models."""
PART_NAMES: dict[str, dict[str, str]] = {
    "plamo2": {
        r"^model\.layers\.layers\.": "backbone.layers.",
        r"^model\.embed_tokens\.": "backbone.embeddings.",
        r"^model\.norm\.": "backbone.norm_f.",
        r"\.pre_mixer_norm\.": ".norm.",
        r"\.post_mixer_norm\.": ".post_norm.",
        r"\.pre_mlp_norm\.": ".mlp_norm.",
        r"\.post_mlp_norm\.": ".mlp_post_norm.",
        r"\.mixer\.(B|C|dt)_norm_weight$": r".mixer.\1_norm.weight",
        r"\.mixer\.qkv_proj\.": ".mixer.in_proj.",
        r"\.mixer\.(q|k)_weight$": r".mixer.\1_norm.weight",
        r"\.mixer\.o_proj\.": ".mixer.out_proj.",
        r"\.mlp\.down_proj\.": ".mlp.down.",
    },
    "bailing_moe_linear": {
        r"^model\.word_embeddings\.": "backbone.embeddings.",
        r"^model\.layers\.": "backbone.layers.",
        r"^model\.norm\.": "backbone.norm_f.",
        r"\.input_layernorm\.": ".norm.",
        r"\.post_attention_layernorm\.": ".mlp_norm.",
        r"\.attention\.": ".mixer.",
        r"\.mixer\.dense\.": ".mixer.out_proj.",
        r"\.mixer\.query_layernorm\.": ".mixer.q_norm.",
        r"\.mixer\.key_layernorm\.": ".mixer.k_norm.",
        r"\.mixer\.g_proj\.": ".mixer.z_proj.",
        r"\.mixer\.g_norm\.weight$": ".mixer.norm_weight",
        r"\.mlp\.gate\.weight$": ".mlp.router.weight",
        r"\.mlp\.gate\.expert_bias$": ".mlp.router.bias",
        r"\.mlp\.shared_experts\.": ".mlp.shared.",
        r"\.(gate|up|down)_proj\.weight$": r".\1.weight",
    },
}
"""Patterns of their names of parts, replaced one after the other, and our names."""
PLAMO2_OFFSETS = {"norm": 1.0, "norm_f": 1.0, "mlp_norm": 1.0, "post_norm": 1 / 5, "mlp_post_norm": 5**-1.5}
"""Offsets added to the stored weights of norms, by our names."""


def is_hub(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a config.json is of a type that only code on the hub runs."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in FIELDS


def plan_hub(config: Mapping[str, Any], held: Contents, what: str) -> Plan:
    """Plan a PLaMo 2 or a Ring-linear. Raises InputError as `checked_fields`."""
    kind = config["model_type"]
    fields = checked_fields(config, FIELDS[kind], FIXED_OPTIONS[kind], what)
    for name in ("mamba_step", "layer_group_size", "num_attention_heads"):
        if fields.get(name, 1) < 1:
            raise refused(what, name, fields[name], "a positive number")
    embeddings = _renamed(held.tensors, kind).get("backbone.embeddings.weight")
    fields["vocab_size"] = 1 if embeddings is None else embeddings.shape[0]
    build = partial(_plamo2 if kind == "plamo2" else _ring, fields)
    return Plan(build, partial(_translated, fields=fields, kind=kind), fields["tie_word_embeddings"])


def checked_fields(
    config: Mapping[str, Any], defaults: Mapping[str, Any], fixed: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Return a config.json's fields with defaults. Raises InputError if one has another type than its default, or an
    option another value than the `fixed` one."""
    fields = {**defaults, **{name: value for name, value in config.items() if value is not None}}
    for name, default in defaults.items():
        check_value(name, fields[name], default, what)
    for name, allowed in fixed.items():
        if config.get(name, allowed) != allowed:
            raise refused(what, name, config[name], repr(allowed))
    return fields


def _size(fields: Mapping[str, Any], attending: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "tie_word_embeddings")
    own = {"layer_norm_epsilon": fields["rms_norm_eps"], "attention": [each for each in attending if each["layers"]]}
    return {**{name: fields[name] for name in names}, **own}


def _plamo2(fields: Mapping[str, Any]) -> PreTrainedModel:
    depth, step, head = fields["num_hidden_layers"], fields["mamba_step"], fields["hidden_size_per_head"]
    attends = [layer for layer in range(depth) if layer % step == step // 2] if depth > step // 2 else [depth - 1]
    common = {"num_heads": fields["num_attention_heads"], "num_kv_heads": fields["num_key_value_heads"]}
    common |= {"head_dim": head, "qk_norm": "per head"}
    whole = [layer for layer in attends if layer in fields["full_attention_idx"]]
    near = {"layers": [layer for layer in attends if layer not in whole], "rope_theta": fields["rope_local_theta"]}
    near["window_size"] = fields["attention_window_size"] + 1
    config = Plamo2Config(
        **_size(fields, [{**common, **near}, {**common, "layers": whole, "rope_theta": fields["rope_theta"]}]),
        num_heads=fields["mamba_num_heads"],
        head_dim=head,
        state_size=fields["mamba_d_state"],
        conv_kernel=fields["mamba_d_conv"],
    )
    return Plamo2ForCausalLM(config)


def _ring(fields: Mapping[str, Any]) -> PreTrainedModel:
    depth, group, heads, head = (
        fields[name] for name in ("num_hidden_layers", "layer_group_size", "num_attention_heads", "head_dim")
    )
    turned: dict[str, Any] = {"rotary_dim": int(head * fields["partial_rotary_factor"])}
    attends = [layer for layer in range(depth) if (layer + 1) % group == 0 or layer >= depth // group * group]
    attention = {"layers": attends, "num_heads": heads, "num_kv_heads": fields["num_key_value_heads"]}
    attention |= {"head_dim": head, "rope_theta": fields["rope_theta"], "qk_norm": "shared", **turned}
    config = LightningConfig(
        **_size(fields, [attention]),
        **turned,
        num_heads=heads,
        head_dim=head,
        norm_groups=fields["group_norm_size"],
        rotary_base=fields["rope_theta"],
        routed_layers=range(fields["first_k_dense_replace"], depth),
        num_experts=fields["num_experts"],
        experts_per_token=fields["num_experts_per_tok"],
        expert_groups=fields["n_group"],
        chosen_groups=fields["topk_group"],
        expert_scale=fields["routed_scaling_factor"],
        expert_size=fields["moe_intermediate_size"],
        shared_size=fields["num_shared_experts"] * fields["moe_shared_expert_intermediate_size"],
    )
    return LightningForCausalLM(config)


def _renamed(tensors: Mapping[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for pattern, ours in PART_NAMES[kind].items():
            name = re.sub(pattern, ours, name)
        found[name] = tensor
    return found


def _translated(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """Return the tensors by our names and in our layout."""
    found = _renamed(tensors, kind)
    for name in [*found]:
        if kind == "plamo2" and name.endswith(".mlp.gate_up_proj.weight"):
            both = found.pop(name)
            stem = name.removesuffix("gate_up_proj.weight")
            found[f"{stem}gate.weight"], found[f"{stem}up.weight"] = both.tensor_split(2)
        elif kind == "plamo2" and ".mixer." not in name and (norm := name.split(".")[-2:][0]) in PLAMO2_OFFSETS:
            found[name] = at_least_float32(found[name]) + PLAMO2_OFFSETS[norm]
        elif kind != "plamo2" and name.endswith(".mixer.query_key_value.weight"):
            linear = name.replace("query_key_value.weight", "norm_weight") in found
            found[name.replace("query_key_value", "qkv_proj" if linear else "in_proj")] = found.pop(name)
    if fields["tie_word_embeddings"] and "backbone.embeddings.weight" in found:
        found.setdefault("lm_head.weight", found["backbone.embeddings.weight"])
    return found
