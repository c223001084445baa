"""Table of the readable layers, whose architectures are imported with their first model, and of the shipped models.

Names of modules are below `ssmscope.architectures`, where an architecture is a module as `core.mixers.LayerAdapter`
says. A release of transformers need not have every family.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssmscope.core.registry import Registry

TRANSFORMERS_FAMILIES: Mapping[str, tuple[str, str]] = {
    "mamba": ("read.mamba", "MambaMixer"),
    "falcon_mamba": ("read.mamba", "FalconMambaMixer"),
    "mamba2": ("read.mamba2", "Mamba2Mixer"),
    "rwkv": ("read.rwkv", "RwkvBlock"),
    "bailing_hybrid": ("read.gated_delta", "BailingHybridDeltaAttention"),
    "bamba": ("read.mamba2", "BambaMixer"),
    "falcon_h1": ("read.falcon_h1", "FalconH1Mixer"),
    "glm5_next": ("read.glm5_next", "Glm5NextTextLinearAttention"),
    "granitemoehybrid": ("read.mamba2", "GraniteMoeHybridMambaLayer"),
    "jamba": ("read.mamba", "JambaMambaMixer"),
    "kimi_linear": ("read.gated_delta", "KimiLinearDeltaAttention"),
    "lara_mini": ("read.gated_delta", "LaraMiniGatedDeltaNet"),
    "lfm2": ("read.lfm2", "Lfm2ShortConv"),
    "lfm2_moe": ("read.lfm2", "Lfm2MoeShortConv"),
    "lfm3": ("read.lfm2", "Lfm3ShortConv"),
    "minimax": ("read.minimax", "MiniMaxLightningAttention"),
    "nemotron_h": ("read.mamba2", "NemotronHMamba2Mixer"),
    "olmo_hybrid": ("read.gated_delta", "OlmoHybridGatedDeltaNet"),
    "qwen3_5": ("read.gated_delta", "Qwen3_5GatedDeltaNet"),
    "qwen3_5_moe": ("read.gated_delta", "Qwen3_5MoeGatedDeltaNet"),
    "qwen3_next": ("read.gated_delta", "Qwen3NextGatedDeltaNet"),
    "qwen4_exp": ("read.gated_delta", "Qwen4ExpTextGatedDeltaNet"),
    "recurrent_gemma": ("read.recurrent_gemma", "RecurrentGemmaRecurrentBlock"),
    "xlstm": ("read.xlstm", "xLSTMLayer"),
    "zamba": ("read.mamba", "ZambaMambaMixer"),
    "zamba2": ("read.mamba2", "Zamba2MambaMixer"),
}
"""Architecture that reads each of transformers' families, by folder, and the class of the family's layers."""
TEXT_TYPES = {name: f"{name}_text" for name in ("glm5_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")}
"""Model types of families that are not named as their folder."""
ADDED_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "baleen-mamba": ("own.baleen", "own.baleen:BaleenMambaMixer"),
    "baleen-mamba2": ("own.baleen", "own.baleen:BaleenMamba2Mixer"),
    "diff-mamba": ("own.diff_mamba", "own.diff_mamba:DiffMambaMixer", "own.diff_mamba:DiffS6Mixer"),
    "diff-mamba1": ("own.diff_mamba",),
    "gfssm": ("own.gfssm", "own.gfssm:GFSSMMixer"),
    "gfssm-mamba": ("own.gfssm", "own.gfssm:GFSSMMambaMixer"),
    "groupmamba": ("own.groupmamba", "own.groupmamba:GroupMambaMixer"),
    "groupmamba-mamba2": ("own.groupmamba", "own.groupmamba:GroupMamba2Mixer"),
    "mamba2attn": ("read.mamba2attn",),
    "selective-ssm": ("own.selective", "own.selective:SelectiveSSM"),
    "ssm-comba": ("read.comba", "read.comba:CombaMixer"),
    "ssm-deltanet": ("read.delta", "read.delta:DeltaMixer"),
    "ssm-deltaproduct": ("read.delta_product", "read.delta_product:DeltaProductMixer"),
    "ssm-gla": ("read.linear_attention", "read.linear_layers:GatedLinearAttention"),
    "ssm-gsa": ("read.hgrn", "read.hgrn:SlotMixer"),
    "ssm-hgrn": ("read.hgrn", "read.hgrn:HGRNMixer"),
    "ssm-hgrn2": ("read.hgrn", "read.hgrn:HGRN2Mixer"),
    "ssm-kda": ("read.kimi_delta", "read.kimi_delta:KimiDeltaMixer"),
    "ssm-lightning": ("read.lightning", "read.lightning:LightningMixer"),
    "ssm-mamba3": ("read.mamba3", "read.mamba3:Mamba3Mixer"),
    "ssm-mambavision": ("read.mambavision", "read.mambavision:MambaVisionMixer"),
    "ssm-minimax": ("read.minimax_m1",),
    "ssm-plamo2": ("read.plamo2", "read.plamo2:Plamo2Mixer"),
    "ssm-retnet": ("read.linear_attention", "read.linear_layers:Retention"),
    "ssm-rwkv7": ("read.rwkv7", "read.rwkv7:RWKV7Mixer"),
    "ssm-vim": ("read.vim", "read.vim:VimMixer"),
}
"""Architecture, with the models, of each model type that transformers lacks, and the classes of its layers, if new."""
ROOT = "ssmscope.architectures."
LAYERS: Registry[Any] = Registry(
    "layer",
    "ssmscope.layers",
    {
        f"transformers.models.{family}.modeling_{family}.{layer}": ROOT + reader
        for family, (reader, layer) in TRANSFORMERS_FAMILIES.items()
    }
    | {
        ROOT + layer.replace(":", "."): ROOT + reader for reader, *layers in ADDED_FAMILIES.values() for layer in layers
    },
)
"""Adapters of layers, by the full name of the layers' class; installed packages add theirs."""

PACKAGE = Path(__file__).parents[1]
DTYPES = ("float32", "float64", "bfloat16", "float16")


def demos() -> dict[str, Path]:
    """Return the shipped trained models: `demo/NAME` and their directories."""
    return {f"demo/{path.parent.name}": path.parent for path in sorted((PACKAGE / "demo").glob("*/config.json"))}


def training_data(directory: Path) -> dict[str, Any]:
    """Return the data in the record of a model's training; empty without a record."""
    try:
        return dict(json.loads((directory / "training.json").read_bytes())["data"]["train"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def data_set_of(data: Mapping[str, Any]) -> str | None:
    """Return the data set's name in a record of training; None for a file, which may be anywhere."""
    name = str(data.get("name", ""))
    return None if not name or set(name) & {".", "/", "\\"} else name


def import_family(kind: str) -> None:
    """Import what reads a model type of transformers: it may have a language model that the library lacks."""
    for name, (reader, _) in TRANSFORMERS_FAMILIES.items():
        if kind in (name, TEXT_TYPES.get(name)):
            importlib.import_module(ROOT + reader)


def known_families() -> frozenset[str]:
    """Return the model types of transformers with readable layers, those that the installed release lacks too."""
    return frozenset(TEXT_TYPES.get(name, name) for name in TRANSFORMERS_FAMILIES)


@cache
def readable_types() -> tuple[str, ...]:
    """Return the model types with readable layers, ours and those that the installed transformers has."""
    library = find_spec("transformers")
    families = Path(*(library.submodule_search_locations or [])) / "models" if library is not None else Path()
    theirs = {TEXT_TYPES.get(name, name) for name in TRANSFORMERS_FAMILIES if (families / name).is_dir()}
    return tuple(sorted({"ssm-classifier", *ADDED_FAMILIES, *theirs}))
