"""Checkpoints in flash-linear-attention's layout.

Gated DeltaNet, DeltaNet, KDA, Comba, GLA, RetNet, RWKV-7, HGRN, HGRN2, GSA and Mamba-3, with a softplus in its decays,
become our models, Mamba-2 becomes transformers'. A GatedDeltaProduct of one step a token and with a forget gate is a
Gated DeltaNet.

Our models have options for what differs from the papers: heads of GLA and RetNet are normalised by their root
mean square, with one weight; RetNet's feed-forward parts are SwiGLU; β may reach 2; q and k are divided by √(‖·‖² +
10⁻⁶). Its delta rules read o_t = S_t q_t / √d, which the norm of the head undoes but for its ε: ours is ε d. Its RetNet
rotates dimension i of a head with i + d/2, ours neighbours: the rows of its q and k are put in our order. Its RWKV-7
has 10⁻⁶ under the root of the length of κ where its norms are fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel
from ssmscope.core.affine import agree
from ssmscope.core.intercept import evaluating
from ssmscope.errors import InputError
from ssmscope.layers import hgrn
from ssmscope.layers.comba import CombaConfig, CombaForCausalLM
from ssmscope.layers.delta import DeltaNetConfig, DeltaNetForCausalLM
from ssmscope.layers.delta_product import DeltaProductConfig, DeltaProductForCausalLM
from ssmscope.layers.gated_delta import UNIT_EPSILON
from ssmscope.layers.kimi_delta import KimiDeltaConfig, KimiDeltaForCausalLM
from ssmscope.layers.linear_attention import GLAConfig, GLAForCausalLM, RetNetConfig, RetNetForCausalLM
from ssmscope.layers.rwkv7 import RWKV7Config, RWKV7ForCausalLM
from ssmscope.loading.fields import check_value, refused
from ssmscope.loading.mamba_checkpoints import plan_mamba_ssm
from ssmscope.loading.stored import Contents, Plan, built, headers_of

MODEL_TYPES = (
    *(
        "gated_deltanet",
        "gated_deltaproduct",
        "delta_net",
        "kda",
        "comba",
        "gla",
        "retnet",
        "rwkv7",
        "hgrn",
        "hgrn2",
        "gsa",
    ),
)
"""Model types that can be read, without Mamba-2 and 3."""
COMMON_FIELDS: dict[str, Any] = dict(
    hidden_size=2048, num_hidden_layers=24, num_heads=4, vocab_size=32000, hidden_ratio=4.0, norm_eps=1e-6,
    conv_size=4, tie_word_embeddings=False, expand_k=1.0, expand_v=1.0, allow_neg_eigval=False,
)  # fmt: skip
"""Fields of a config.json that are read, with their defaults."""
DELTA_TYPES = ("gated_deltanet", "gated_deltaproduct", "delta_net", "kda", "comba")
"""Types whose q, k and v have one projection in our models."""
GATED_TYPES = ("hgrn", "hgrn2", "gsa")
TYPE_DEFAULTS: dict[str, dict[str, Any]] = {
    "gated_deltanet": dict(num_hidden_layers=21, num_heads=6, head_dim=256, expand_v=2.0),
    "gated_deltaproduct": dict(
        num_hidden_layers=21, num_heads=6, head_dim=256, expand_v=2.0, use_forget_gate=False, num_householder=1
    ),
    "delta_net": dict(num_heads=16),
    "kda": dict(num_heads=16, head_dim=128),
    "comba": dict(
        num_hidden_layers=21, num_heads=6, head_dim=256, expand_v=2.0, use_inner_decay=True, use_output_correction=True
    ),
    "gla": dict(expand_k=0.5),
    "retnet": dict(expand_v=2.0, num_heads=8, hidden_ratio=2.0),
    "rwkv7": dict(
        head_dim=64, norm_eps=1e-5, norm_bias=True, norm_first=True, fuse_norm=True, decay_low_rank_dim=64,
        a_low_rank_dim=64, v_low_rank_dim=16, gate_low_rank_dim=128,
    ),
    "hgrn": dict(use_lower_bound=True),
    "hgrn2": dict(use_lower_bound=True, expand_ratio=128),
    "gsa": dict(num_slots=64, gate_logit_normalizer=8),
}  # fmt: skip
FIXED_OPTIONS: dict[str, dict[str, Any]] = {
    "gated_deltanet": dict(use_gate=True, use_short_conv=True, num_v_heads=None),
    "gated_deltaproduct": dict(use_output_gate=True, use_short_conv=True, num_v_heads=None),
    "kda": dict(use_short_conv=True, num_v_heads=None),
    "comba": dict(use_output_gate=True, use_short_conv=True, num_v_heads=None),
    "delta_net": dict(
        use_gate=False, use_short_conv=True, use_beta=True, use_output_norm=True, qk_norm="l2", qk_activation="silu"
    ),
    "gla": dict(
        use_output_gate=True, use_short_conv=False, num_kv_heads=None, feature_map=None, clamp_min=None, use_gk=True,
        use_gv=False, elementwise_affine=True,
    ),
    "retnet": dict(
        use_output_gate=True, use_short_conv=False, num_kv_heads=None, feature_map=None, elementwise_affine=True,
    ),
    "rwkv7": dict(hidden_act="sqrelu"),
    "hgrn": dict(use_short_conv=False, elementwise_affine=True, expand_ratio=1),
    "hgrn2": dict(use_short_conv=False, elementwise_affine=True),
    "gsa": dict(
        use_short_conv=False, elementwise_affine=True, num_kv_heads=None, feature_map="swish", expand_k=1, expand_v=1,
    ),
}  # fmt: skip
"""Options that can be read with these values alone: the library's defaults, unless `TYPE_DEFAULTS` has others."""
PART_NAMES = {
    r"^model\.": "backbone.",
    r"\.attn_norm\.": ".norm.",
    r"^backbone\.norm\.": "backbone.norm_f.",
    r"\.attn\.": ".mixer.",
    r"\.mixer\.(o_norm|g_norm_swish_gate|g_norm)\.": ".mixer.head_norm.",
    r"^backbone\.lower_bounds$": "backbone.lower_bounds.weight",
    r"\.mixer\.o_proj\.": ".mixer.out_proj.",
    r"\.mixer\.g_proj\.": ".mixer.z_proj.",
    r"\.mixer\.z_proj\.0\.": ".mixer.z_in.",
    r"\.mixer\.z_proj\.1\.": ".mixer.z_proj.",
    r"\.mixer\.f_proj\.0\.": ".mixer.decay_in.",
    r"\.mixer\.f_proj\.1\.": ".mixer.decay_proj.",
    r"\.mixer\.a_proj\.": ".mixer.decay_proj.",
    r"\.mixer\.b_proj\.": ".mixer.beta_proj.",
    r"\.mixer\.gk_proj\.0\.": ".mixer.decay_in.",
    r"\.mixer\.gk_proj\.1\.": ".mixer.decay_out.",
    r"\.mlp\.(gate|up|down)_proj\.": r".mlp.\1.",
}
"""Patterns of their names of parts, replaced one after the other, and our names."""

RWKV7_PART_NAMES = {
    r"^model\.": "backbone.",
    r"^backbone\.norm\.": "backbone.norm_f.",
    r"^(backbone\.layers\.\d+)\.": r"\1.mixer.",
    r"_lora\.lora\.0\.": "_lora.into.",
    r"_lora\.lora\.2\.": "_lora.out.",
}
RWKV7_SHIFTS = "rwkvag"
"""Token shifts of RWKV-7 in the order in which they were stored together before March 2025."""
MAMBA2_FIELDS: dict[str, Any] = dict(
    state_size=("d_state", 128), conv_kernel=("d_conv", 4), expand=("expand", 2), head_dim=("headdim", 64),
    n_groups=("ngroups", 1), chunk_size=("chunk_size", 256), dt_limit=("dt_limit", (0.0, float("inf"))),
    use_bias=("bias", False), use_conv_bias=("conv_bias", True), rmsnorm=("rmsnorm", True),
    norm_before_gate=("norm_before_gate", False), D_has_hdim=("D_has_hdim", False),
)  # fmt: skip
"""Fields of Mamba-2, with mamba_ssm's names in `ssm_cfg` and the defaults."""
MAMBA3_FIELDS: dict[str, Any] = dict(
    state_size=("d_state", 128), expand=("expand", 2), head_dim=("headdim", 64), n_groups=("ngroups", 1),
    rope_fraction=("rope_fraction", 0.5), A_floor=("A_floor", 1e-4), is_outproj_norm=("is_outproj_norm", False),
    is_mimo=("is_mimo", False), norm_eps=("norm_eps", 1e-5),
)  # fmt: skip
"""The same of Mamba-3."""


def is_fla(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a config.json is flash-linear-attention's; its Mamba-2 is recognised by the field `norm_eps`."""
    kind = config.get("model_type")
    second = kind == "mamba2" and "norm_eps" in config and "layer_norm_epsilon" not in config
    return second or kind in (*MODEL_TYPES, "mamba3")


def of_fla(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a language model in memory, of code that stores what flash-linear-attention does (rwkv7-hf), as ours with
    a copy of its weights; None for another. Raises InputError as `plan_fla`, and where both give other logits."""
    config, what = model.config.to_dict(), type(model).__name__
    if not is_fla(Path(), config) or not what.endswith("ForCausalLM"):
        return None
    tensors = {name: t.detach() for name, t in model.state_dict().items()}
    held = Contents(headers_of(tensors), sum(t.nbytes for t in tensors.values()))
    found = built(plan_fla(config, held, what), tensors, held, what, by="its configuration").to(model.device).eval()
    ids = torch.arange(1, 9, device=model.device).remainder(config["vocab_size"])[None]
    with torch.no_grad(), evaluating(model):
        try:
            own = model(input_ids=ids)
        except Exception:  # The library's own code may need a GPU, or a kernel.
            return found  # As its files are read, whose model is not run either.
        if not agree(found(input_ids=ids).logits, own.logits):
            raise InputError(f"{what} gives other logits than its weights do as they are read here: it cannot be read")
    return found


def plan_fla(config: Mapping[str, Any], held: Contents, what: str) -> Plan:
    """Plan a language model in flash-linear-attention's layout. Raises InputError if a field has a wrong type, or an
    option is one that our layers do not have (grouped heads, attention in an RWKV-7, a delta rule's gates, …)."""
    kind = config["model_type"]
    if kind in ("mamba2", "mamba3"):
        return plan_mamba_ssm(_as_mamba_ssm(config, what), held, what)
    known = {**COMMON_FIELDS, **TYPE_DEFAULTS[kind]}
    fields = {**known, **{name: value for name, value in config.items() if value is not None}}
    for name, default in known.items():
        check_value(name, fields[name], default, what)
    bound = fields.get("lower_bound")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not -80 < bound < 0):
        raise refused(what, "lower_bound", bound, "null, or a negative number above -80")
    fields["attention"] = _attention(config.get("attn"), kind, what)
    for name, default in {"attnres_block_size": None, "hidden_act": "swish", **FIXED_OPTIONS[kind]}.items():
        # As many value heads as heads are the default, also where they are written out.
        given = fields[name] if name in TYPE_DEFAULTS[kind] else config.get(name, default)
        if given not in (default, fields["num_heads"] if name.endswith("_heads") else default):
            raise refused(what, name, given, repr(default))
    sizes = config.get("value_dim")
    if kind == "rwkv7" and {*(sizes if isinstance(sizes, list) else [sizes])} - {None, fields["hidden_size"]}:
        raise refused(what, "value_dim", sizes, f"hidden_size, {fields['hidden_size']}, in every layer")
    build, translate = partial(_BUILDERS[kind], fields, kind), partial(_translated, fields=fields, kind=kind)
    return Plan(build, translate, fields["tie_word_embeddings"])


def _as_mamba_ssm(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return a Mamba-2's or Mamba-3's configuration as mamba_ssm's: its weights have our names."""
    third = config["model_type"] == "mamba3"
    if third and config.get("use_bias"):
        raise refused(what, "use_bias", config["use_bias"], "False")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise refused(what, "hidden_act", config["hidden_act"], "'silu'")
    fields, fixed = (MAMBA3_FIELDS, {"decay": "softplus"}) if third else (MAMBA2_FIELDS, {})
    cfg = {ours: config.get(name, default) for name, (ours, default) in fields.items()} | fixed
    return {
        "d_model": config.get("hidden_size", 2048),
        "n_layer": config.get("num_hidden_layers", 48),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "residual_in_fp32": config.get("residual_in_fp32", True),
        "norm_epsilon": config.get("norm_eps", 1e-5),
        "ssm_cfg": {"layer": "Mamba3" if third else "Mamba2", **cfg},
    }


def _attention(given: Any, kind: str, what: str) -> list[dict[str, Any]]:
    """Return the options of softmax attention that the library uses; it stores others without using them."""
    if given is None:
        return []
    found = [given] if isinstance(given, Mapping) else given
    if kind == "rwkv7" or not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        allowed = "None" if kind == "rwkv7" else "options of attention for some layers, or None"
        raise refused(what, "attn", given, allowed)
    names = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")
    return [{name: each[name] for name in names if each.get(name) is not None} for each in found]


def _size(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, inner = fields["hidden_size"], fields.get("intermediate_size")
    if inner is None:
        inner = 256 * -(-int(width * fields["hidden_ratio"] * 2 / 3) // 256)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "tie_word_embeddings")
    return {
        **{name: fields[name] for name in names},
        "intermediate_size": inner,
        "layer_norm_epsilon": fields["norm_eps"],
        "attention": fields["attention"],
    }


def _delta(fields: Mapping[str, Any], kind: str) -> PreTrainedModel:
    gated, heads, width = kind != "delta_net", fields["num_heads"], fields["hidden_size"]
    key = fields["head_dim"] * heads if gated else int(width * fields["expand_k"])
    value = heads * int(fields["head_dim"] * fields["expand_v"]) if gated else int(width * fields["expand_v"])
    own: dict[str, Any] = {}
    if kind == "kda":
        own["lower_bound"] = fields.get("lower_bound")
    elif kind == "comba":
        own = {name: fields[f"use_{name}"] for name in ("inner_decay", "output_correction")}
    elif kind == "gated_deltaproduct" and (fields["num_householder"] != 1 or not fields["use_forget_gate"]):
        own = {"householders": fields["num_householder"], "forget_gate": fields["use_forget_gate"]}
    plain = kind == "gated_deltaproduct" and not own
    configure, model = DELTA_MODELS["gated_deltanet" if plain else kind]
    config = configure(
        **_size(fields),
        **own,
        key_size=key,
        value_size=value,
        conv_kernel=fields["conv_size"],
        gated=gated,
        head_norm_epsilon=fields["norm_eps"] * (key // heads),
        unit_epsilon=UNIT_EPSILON,
        largest_beta=2.0 if fields["allow_neg_eigval"] else 1.0,
    )
    return model(config)


def _linear(fields: Mapping[str, Any], kind: str) -> PreTrainedModel:
    width = fields["hidden_size"]
    sizes: dict[str, Any] = {"key_size": int(width * fields["expand_k"]), "value_size": int(width * fields["expand_v"])}
    if kind == "retnet":
        return RetNetForCausalLM(RetNetConfig(**_size(fields), **sizes, swiglu=True, head_norm="rms"))
    return GLAForCausalLM(GLAConfig(**_size(fields), **sizes, gate_rank=16, tau=16.0, head_norm="rms"))


def _rwkv7(fields: Mapping[str, Any], kind: str) -> PreTrainedModel:
    width, inner, head = fields["hidden_size"], fields.get("intermediate_size"), fields["head_dim"]
    if width % head:
        raise InputError(f"head_dim {head} does not divide hidden_size {width}")
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "norm_bias", "norm_first")
    config = RWKV7Config(
        **{name: fields[name] for name in names},
        num_heads=width // head,
        **{ours: fields[f"{theirs}_low_rank_dim"] for ours, theirs in RWKV7_RANKS.items()},
        intermediate_size=32 * -(-int(width * fields["hidden_ratio"]) // 32) if inner is None else inner,
        layer_norm_epsilon=fields["norm_eps"],
        unit_epsilon=UNIT_EPSILON if fields["fuse_norm"] else 0.0,
    )
    return RWKV7ForCausalLM(config)


def _gated(fields: Mapping[str, Any], kind: str) -> PreTrainedModel:
    """Return an HGRN, HGRN2 or GSA; the last two keep ε = 10⁻⁵ in the norms within layers, whatever `norm_eps` is."""
    sizes = _size(fields)
    if kind == "gsa":
        slots, tau = fields["num_slots"], float(fields["gate_logit_normalizer"])
        return hgrn.GSAForCausalLM(hgrn.GSAConfig(**sizes, num_slots=slots, tau=tau, head_norm_epsilon=1e-5))
    sizes["lower_bounds"] = fields["use_lower_bound"]
    if kind == "hgrn":
        return hgrn.HGRNForCausalLM(hgrn.HGRNConfig(**sizes))
    width, each = fields["hidden_size"], fields["expand_ratio"]
    if width % each:
        raise InputError(f"expand_ratio {each} does not divide hidden_size {width}")
    return hgrn.HGRN2ForCausalLM(hgrn.HGRN2Config(**{**sizes, "num_heads": width // each, "head_norm_epsilon": 1e-5}))


DELTA_MODELS: dict[str, tuple[Any, Any]] = {
    "gated_deltanet": (DeltaNetConfig, DeltaNetForCausalLM),
    "delta_net": (DeltaNetConfig, DeltaNetForCausalLM),
    "gated_deltaproduct": (DeltaProductConfig, DeltaProductForCausalLM),
    "kda": (KimiDeltaConfig, KimiDeltaForCausalLM),
    "comba": (CombaConfig, CombaForCausalLM),
}
RWKV7_RANKS = {"decay_rank": "decay", "rate_rank": "a", "value_rank": "v", "gate_rank": "gate"}
"""Our names of the inner widths of RWKV-7's low-rank maps, with the prefixes of theirs."""
_BUILDERS: dict[str, Callable[[Mapping[str, Any], str], PreTrainedModel]] = {
    **dict.fromkeys(DELTA_TYPES, _delta),
    **dict.fromkeys(("gla", "retnet"), _linear),
    **dict.fromkeys(GATED_TYPES, _gated),
    "rwkv7": _rwkv7,
}


def _translated(tensors: Mapping[str, Tensor], fields: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
    """Return the tensors by our names and in our layout, in which a bias that only our gates have is zero. RWKV-7's
    token shifts, stored as (1, 1, width) or, before March 2025, six of them together, become (width,)."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, ours in (RWKV7_PART_NAMES if kind == "rwkv7" else PART_NAMES).items():
            name = re.sub(pattern, ours, name)
        if kind in GATED_TYPES:
            name = name.replace(".mixer.head_norm.", ".mixer.norm.")
        found[name] = tensor

    def named(pattern: str, *kinds: str) -> list[str]:
        return [name for name in found if (not kinds or kind in kinds) and re.search(pattern, name)]

    def joined(stems: list[str], theirs: str, ours: str) -> None:
        for stem in stems:
            parts = [f"{stem}{each}{theirs}" for each in "qkv"]
            if all(part in found for part in parts):
                found[stem + ours] = torch.cat([found.pop(part) for part in parts])

    for name in named(r"\.attn\.x_.$", "rwkv7"):
        shifts = found.pop(name)
        if not name.endswith("x_x"):
            found[name] = shifts.flatten()
        elif len(shifts) == len(RWKV7_SHIFTS):
            found |= {f"{name[:-1]}{letter}": each.clone() for letter, each in zip(RWKV7_SHIFTS, shifts)}
    for options in fields["attention"]:
        stems = [f"backbone.layers.{layer}.mixer." for layer in options.get("layers", [])]
        for part in ("weight", "bias"):
            joined(stems, f"_proj.{part}", f"in_proj.{part}")
    for name in named(r"\.mixer\.v_proj\.weight$", "gsa"):
        found[name.replace(".v_proj.", ".i_proj.")] = found.pop(name)
    for theirs, ours in (("_proj.weight", "qkv_proj.weight"), ("_conv1d.weight", "conv1d.weight")):
        joined([name.removesuffix("q" + theirs) for name in named(rf"\.q{theirs}$", *DELTA_TYPES)], theirs, ours)
    for name in named(r"\.mlp\.gate\.weight$"):
        up = name.replace(".gate.", ".up.")
        if up not in found:  # Before 2025 both were stored as one.
            found[name], found[up] = found[name].chunk(2)
    for name in named(r"\.mixer\.z_proj\.weight$", "gla"):
        found[name.replace("weight", "bias")] = found[name].new_zeros(found[name].shape[0])
    heads = fields["num_heads"]
    for name in named(r"\.mixer\.[qk]_proj\.weight$", "retnet"):
        if heads and not found[name].shape[0] % (2 * heads):  # Otherwise no model can be built from them.
            found[name] = rearrange(found[name], "(h part n) width -> (h n part) width", h=heads, part=2)
    if fields["tie_word_embeddings"] and "backbone.embeddings.weight" in found:
        found.setdefault("lm_head.weight", found["backbone.embeddings.weight"])
    return found
