"""Models in mamba_ssm's layout: config.json with d_model and ssm_cfg, pytorch_model.bin or model.safetensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from ssmscope.errors import InputError
from ssmscope.layers.mamba2attn import Mamba2AttnConfig, Mamba2AttnForCausalLM
from ssmscope.layers.mamba3 import Mamba3Config, Mamba3ForCausalLM
from ssmscope.loading.fields import check_value, refused
from ssmscope.loading.stored import Contents, Plan, check_fit, headers_of, outline


def is_mamba_ssm(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a config.json is one of mamba_ssm's."""
    return "d_model" in config and "n_layer" in config and "model_type" not in config


FIELDS: dict[str, Any] = dict(
    d_model=1, n_layer=1, rms_norm=True, residual_in_fp32=True, tie_embeddings=True, norm_epsilon=1e-5,
    attn_layer_idx=[], d_intermediate=0,
)  # fmt: skip
SSM_FIELDS: dict[str, Any] = dict(
    layer="Mamba1", d_state=16, d_conv=4, expand=2, headdim=64, ngroups=1, chunk_size=256, dt_rank=1,
    dt_limit=(0.0, float("inf")), bias=False, conv_bias=True, rmsnorm=True, norm_before_gate=False, D_has_hdim=False,
    rope_fraction=0.5, A_floor=1e-4, is_outproj_norm=False, is_mimo=False, decay="heavy-tail",
    norm_eps=1e-5,
)  # fmt: skip
"""Fields of a config.json, and of its ssm_cfg, that are read, each with an allowed value."""
LAYER_KINDS = ("Mamba1", "Mamba2", "Mamba3")
MAMBA3_FIELDS = dict(
    rope_fraction="rope_fraction", A_floor="decay_floor", is_outproj_norm="head_norm", decay="decay",
    norm_eps="inner_norm_epsilon",
)  # fmt: skip
"""Fields of Mamba-3 alone, with our names; "decay", see `mamba3`, and "norm_eps" are not mamba_ssm's."""
MLP_MULTIPLE = 128


def of_mamba_ssm(model: nn.Module) -> PreTrainedModel:
    """Return mamba_ssm's language model in memory as transformers' model, with the same parameters, not copied. Raises
    InputError as `plan_mamba_ssm`, and for a model with hooks."""
    what, config = type(model).__name__, dict(vars(model.config))
    if any(part._forward_hooks or part._forward_pre_hooks for part in model.modules()):
        raise InputError(f"{what} has hooks, whose effect is unknown: remove them first")
    weights = _by_our_names(dict(model.named_parameters()))
    held = Contents(headers_of(model.state_dict()), sum(t.nbytes for t in weights.values()))
    third = [sys.modules.get(type(part).__module__) for part in model.modules() if type(part).__name__ == "Mamba3"]
    # Mamba-3's decays have another formula in mamba_ssm 2.3.2 than in later releases.
    if any(not hasattr(library, "heavy_tail_activation") for library in third):
        config["ssm_cfg"] = {**(config.get("ssm_cfg") or {}), "decay": "softplus"}
    plan = plan_mamba_ssm(config, held, what)
    module = outline(plan.build, held, what, "its config.json")
    check_fit(module, headers_of(weights), what)
    for name, weight in weights.items():
        place, _, last = name.rpartition(".")
        setattr(module.get_submodule(place), last, weight)
    return module


def plan_mamba_ssm(config: Mapping[str, Any], held: Contents, what: str) -> Plan:
    """Plan a language model of Mamba-1, 2 or 3: transformers', or ours for Mamba-3 and for Mamba-2 with attention or
    MLPs. Raises InputError if a field has a wrong type, or the model has a part that neither transformers' models nor
    ours have (attention that looks ahead, attention or MLPs with Mamba-1, Mamba-3 with several inputs per head,
    LayerNorm, a norm before the gate, a skip per channel)."""
    cfg, attention = (config.get(name) or {} for name in ("ssm_cfg", "attn_cfg"))
    for name, given in (("ssm_cfg", cfg), ("attn_cfg", attention)):
        if not isinstance(given, dict):
            raise refused(what, name, given, "an object")
    for given, known in ((config, FIELDS), (cfg, SSM_FIELDS)):
        for name in known.keys() & given.keys():
            check_value(name, given[name], known[name], what)
    kind = cfg.get("layer", "Mamba1")
    if kind not in LAYER_KINDS:
        raise InputError(f"{what} has layers {kind!r:.60}; {', '.join(LAYER_KINDS)} can be read from this layout")
    first = kind == "Mamba1"
    unsupported = {
        "attention layers (attn_layer_idx) with Mamba-1": config.get("attn_layer_idx") and first,
        "MLPs (d_intermediate) with Mamba-1": config.get("d_intermediate") and first,
        "several inputs and outputs per head (is_mimo)": cfg.get("is_mimo"),
        "LayerNorm (rms_norm false)": not config.get("rms_norm", True),
        "a norm before the gate (norm_before_gate)": cfg.get("norm_before_gate"),
        "no gated norm (rmsnorm false)": not cfg.get("rmsnorm", True),
        "a skip per channel (D_has_hdim)": cfg.get("D_has_hdim"),
    }
    present = [name for name, value in unsupported.items() if value]
    if present:
        raise InputError(f"{what} has {' and '.join(present)}, which cannot be read from this layout")
    if kind == "Mamba2":
        check_groups(cfg.get("ngroups", 1), what)
    embeddings = _by_our_names(held.tensors).get("backbone.embeddings.weight")
    if embeddings is None:
        raise InputError(f"{what} has no backbone.embedding.weight: these are not weights of mamba_ssm")
    vocabulary = embeddings.shape[0]  # The file pads it to a multiple of 8 or 16.
    tied = config.get("tie_embeddings", True)
    return Plan(lambda: _mamba_ssm_model(config, cfg, vocabulary), _by_our_names, tied)


def _by_our_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    found = {name.replace("backbone.embedding.weight", "backbone.embeddings.weight"): t for name, t in tensors.items()}
    if "backbone.embeddings.weight" in found:
        found.setdefault("lm_head.weight", found["backbone.embeddings.weight"])
    return found


def _mamba_ssm_model(config: Mapping[str, Any], cfg: Mapping[str, Any], vocabulary: int) -> PreTrainedModel:
    width, expand = config["d_model"], cfg.get("expand", 2)
    shared: dict[str, Any] = dict(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=config["n_layer"], expand=expand,
        conv_kernel=cfg.get("d_conv", 4), use_bias=cfg.get("bias", False), use_conv_bias=cfg.get("conv_bias", True),
        residual_in_fp32=config.get("residual_in_fp32", True), layer_norm_epsilon=config.get("norm_epsilon", 1e-5),
        tie_word_embeddings=config.get("tie_embeddings", True),
    )  # fmt: skip
    kind = cfg.get("layer", "Mamba1")
    if kind == "Mamba1":
        shared |= dict(state_size=cfg.get("d_state", 16), time_step_rank=cfg.get("dt_rank", "auto"))
        return MambaForCausalLM(MambaConfig(**shared))
    head = cfg.get("headdim", 64)
    low, high = map(float, cfg.get("dt_limit", (0.0, float("inf"))))
    shared |= dict(state_size=cfg.get("d_state", 128), head_dim=head, n_groups=cfg.get("ngroups", 1))
    attending, inner = config.get("attn_layer_idx") or [], config.get("d_intermediate") or 0
    inner = -(-inner // MLP_MULTIPLE) * MLP_MULTIPLE
    parts: dict[str, Any] = dict(attn_layer_idx=attending, attn_cfg=config.get("attn_cfg"), d_intermediate=inner)
    if kind == "Mamba3":
        third: dict[str, Any] = {ours: cfg[name] for name, ours in MAMBA3_FIELDS.items() if name in cfg}
        return Mamba3ForCausalLM(Mamba3Config(**shared, **parts, **third))
    shared |= dict(num_heads=expand * width // head, chunk_size=cfg.get("chunk_size", 256), time_step_limit=(low, high))
    if not attending and not inner:
        return Mamba2ForCausalLM(Mamba2Config(**shared))
    return Mamba2AttnForCausalLM(Mamba2AttnConfig(**shared, **parts))


def check_groups(groups: int, what: str) -> None:
    """Raise InputError for several groups of heads in a transformers whose norm is over all of them together."""
    if groups > 1 and "group_size" not in inspect.signature(MambaRMSNormGated).parameters:
        said = f"{what} has {groups} groups of heads, which transformers {transformers.__version__} norms otherwise"
        raise InputError(f"{said} than mamba_ssm does: install transformers 5.23 or newer")
