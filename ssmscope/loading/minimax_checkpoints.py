"""Checkpoints of MiniMax-Text-01 and MiniMax-M1 as published, whose code is on the hub, read without it.

The files have no decays, which transformers' layers hold as weights. Its slopes have an ε in another place than the
published code: these are written. The dimensions of a head that turn come first in both of its halves here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.minimax import modeling_minimax
from ssmscope.errors import InputError
from ssmscope.layers.lightning import slopes
from ssmscope.layers.minimax_m1 import MiniMaxM1Config, MiniMaxM1ForCausalLM
from ssmscope.loading.fields import refused
from ssmscope.loading.hub_checkpoints import checked_fields
from ssmscope.loading.stored import Contents, Plan

MODEL_TYPES = ("minimax_m1", "minimax_text_01")
EXPERTS_TOGETHER = hasattr(modeling_minimax, "MiniMaxExperts")
"""True if transformers, from 5 on, has a layer's experts in one tensor."""
COPIED_FIELDS = (
    "hidden_size", "num_hidden_layers", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rotary_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
FIELDS: dict[str, Any] = dict(
    hidden_size=6144, num_hidden_layers=80, rms_norm_eps=1e-5, num_attention_heads=64, num_key_value_heads=8,
    head_dim=128, rotary_dim=64, rope_theta=1e7, attn_type_list=[], intermediate_size=9216, num_local_experts=32,
    num_experts_per_tok=2, layernorm_full_attention_alpha=1.0, layernorm_full_attention_beta=1.0,
    layernorm_linear_attention_alpha=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_alpha=1.0,
    layernorm_mlp_beta=1.0,
)  # fmt: skip
"""Fields of a config.json that are read, with defaults."""
FIXED_OPTIONS: dict[str, Any] = dict(
    postnorm=True, hidden_act="silu", shared_intermediate_size=0, sliding_window=None, tie_word_embeddings=False
)
"""Options that can be read with these values alone: those of both published models."""


def is_minimax(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a config.json is of MiniMax's own models."""
    return config.get("model_type") in MODEL_TYPES


def plan_minimax(config: Mapping[str, Any], held: Contents, what: str) -> Plan:
    """Plan a MiniMax-Text-01 or -M1. Raises InputError as `checked_fields`, or if a layer is of no known type."""
    fields = checked_fields(config, FIELDS, FIXED_OPTIONS, what)
    kinds = fields["attn_type_list"]
    if len(kinds) != fields["num_hidden_layers"] or any(each not in (0, 1) for each in kinds):
        raise refused(what, "attn_type_list", kinds, "a list with 0 or 1 for each layer")
    for name, default in FIELDS.items():
        if isinstance(default, int) and (type(fields[name]) is not int or fields[name] < (name != "rotary_dim")):
            raise refused(what, name, fields[name], "a positive whole number")
    if fields["rotary_dim"] % 2 or fields["rotary_dim"] > fields["head_dim"]:
        raise refused(what, "rotary_dim", fields["rotary_dim"], f"an even number up to head_dim, {fields['head_dim']}")
    if not fields["rope_theta"] > 0:
        raise refused(what, "rope_theta", fields["rope_theta"], "a positive number")
    # Decays and the order of dimensions are made before the other shapes are checked.
    rows = {t.shape[:1] for name, t in held.tensors.items() if name.endswith((".output_gate.weight", ".q_proj.weight"))}
    if rows != {(fields["num_attention_heads"] * fields["head_dim"],)}:
        heads = f"{fields['num_attention_heads']} heads of {fields['head_dim']}"
        raise InputError(f"the weights of {what} do not fit its configuration: they have no {heads} in every layer")
    embeddings = held.tensors.get("model.embed_tokens.weight")
    fields["vocab_size"] = 1 if embeddings is None else embeddings.shape[0]
    return Plan(lambda: MiniMaxM1ForCausalLM(_config(fields)), partial(_translated, fields=fields))


def _config(fields: Mapping[str, Any], **sizes: int) -> MiniMaxM1Config:
    own = {name: fields[name] for name in COPIED_FIELDS}
    for ours, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        own |= {f"{ours}_{scale}_factor": fields[f"layernorm_{theirs}_{scale}"] for scale in ("alpha", "beta")}
    own["layer_types"] = ["full_attention" if each else "linear_attention" for each in fields["attn_type_list"]]
    own["rms_norm_eps"] = float(own["rms_norm_eps"])
    own |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    return MiniMaxM1Config(**{**own, **sizes}, rotary_base=fields["rope_theta"])


def _translated(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors with decays, in the order of a head's dimensions here, and with experts as the installed
    transformers has them."""
    found, attending = dict(tensors), fields["attn_type_list"]
    heads, head, half = fields["num_attention_heads"], fields["head_dim"], fields["rotary_dim"] // 2
    still = list(range(2 * half, head))
    order = [*range(half), *still[: head // 2 - half], *range(half, 2 * half), *still[head // 2 - half :]]
    layer_of = modeling_minimax.MiniMaxLightningAttention(
        _config(fields, hidden_size=heads, head_dim=1, rotary_dim=0), 0
    )
    for layer, attends in enumerate(attending):
        at = f"model.layers.{layer}.self_attn."
        if not attends:
            share = 1 - layer / max(1, len(attending) - 1) + 1e-5
            rate = share * torch.tensor(slopes(heads), dtype=torch.float64).view(-1, 1, 1)
            decays = dict(zip(("query_decay", "key_decay", "diagonal_decay"), layer_of.decay_factors(rate)))
            found |= {at + name: t.float() for name, t in {"slope_rate": rate, **decays}.items()}
        for name in (f"{at}q_proj.weight", f"{at}k_proj.weight"):
            if attends and name in found and not found[name].shape[0] % head:
                found[name] = found[name].unflatten(0, (-1, head))[:, order].flatten(0, 1)
    return _experts_together(found) if EXPERTS_TOGETHER else found


def _experts_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of a layer's experts in one, the first and third of each below each other."""
    found = {name.replace(".block_sparse_moe.gate.", ".mlp.gate."): tensor for name, tensor in tensors.items()}
    for first in [name for name in found if name.endswith(".block_sparse_moe.experts.0.w1.weight")]:
        stem = first.removesuffix("block_sparse_moe.experts.0.w1.weight")
        experts: list[list[Tensor]] = []
        while f"{stem}block_sparse_moe.experts.{len(experts)}.w1.weight" in found:
            names = [f"{stem}block_sparse_moe.experts.{len(experts)}.w{part}.weight" for part in (1, 2, 3)]
            if any(name not in found for name in names):
                return found  # The check of the weights names what is missing.
            experts.append([found.pop(name) for name in names])
        found[f"{stem}mlp.experts.gate_up_proj"] = torch.stack([torch.cat([w1, w3]) for w1, _, w3 in experts])
        found[f"{stem}mlp.experts.down_proj"] = torch.stack([w2 for _, w2, _ in experts])
    return found
