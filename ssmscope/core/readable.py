"""Table of the layers that can be read, from which each one's architecture is imported with its first model.

Names of modules are below `ssmscope.architectures`, where an architecture is a module as `core.mixers.Architecture`
says. A release of transformers need not have every family.
"""

from __future__ import annotations

from collections.abc import Mapping

THEIRS: Mapping[str, tuple[str, str]] = {
    "mamba": ("MambaMixer", "read.mamba"),
    "falcon_mamba": ("FalconMambaMixer", "read.mamba"),
    "mamba2": ("Mamba2Mixer", "read.mamba2"),
    "rwkv": ("RwkvBlock", "read.rwkv"),
    "bamba": ("BambaMixer", "read.mamba2"),
    "falcon_h1": ("FalconH1Mixer", "read.falcon_h1"),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", "read.mamba2"),
    "jamba": ("JambaMambaMixer", "read.mamba"),
    "kimi_linear": ("KimiLinearDeltaAttention", "read.kimi_linear"),
    "lfm2": ("Lfm2ShortConv", "read.lfm2"),
    "lfm2_moe": ("Lfm2MoeShortConv", "read.lfm2"),
    "lfm3": ("Lfm3ShortConv", "read.lfm2"),
    "minimax": ("MiniMaxLightningAttention", "read.minimax"),
    "nemotron_h": ("NemotronHMamba2Mixer", "read.mamba2"),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", "read.gated_delta"),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", "read.gated_delta"),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", "read.gated_delta"),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "read.gated_delta"),
    "recurrent_gemma": ("RecurrentGemmaRecurrentBlock", "read.recurrent_gemma"),
    "xlstm": ("xLSTMLayer", "read.xlstm"),
    "zamba": ("ZambaMambaMixer", "read.mamba"),
    "zamba2": ("Zamba2MambaMixer", "read.mamba2"),
}
"""Class of layers of each of transformers' families, by folder, and the architecture that reads it."""
TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Model types of families that are not named as their folder."""
OURS: Mapping[str, tuple[str, ...]] = {
    "baleen-mamba": ("own.baleen", "own.baleen:BaleenMambaMixer"),
    "baleen-mamba2": ("own.baleen", "own.baleen:BaleenMamba2Mixer"),
    "diff-mamba": ("own.diff_mamba", "own.diff_layers:DiffMambaMixer", "own.diff_layers:DiffS6Mixer"),
    "diff-mamba1": ("own.diff_mamba",),
    "gfssm": ("own.gfssm", "own.gfssm:GFSSMMixer"),
    "gfssm-mamba": ("own.gfssm", "own.gfssm:GFSSMMambaMixer"),
    "groupmamba": ("own.groupmamba", "own.groupmamba:GroupMambaMixer"),
    "groupmamba-mamba2": ("own.groupmamba", "own.groupmamba:GroupMamba2Mixer"),
    "mamba2attn": ("read.mamba2attn",),
    "selective-ssm": ("own.selective", "own.selective:SelectiveSSM"),
    "ssm-deltanet": ("read.delta", "read.delta:DeltaMixer"),
    "ssm-gla": ("read.linear_attention", "read.linear_layers:GatedLinearAttention"),
    "ssm-gsa": ("read.hgrn", "read.hgrn:SlotMixer"),
    "ssm-hgrn": ("read.hgrn", "read.hgrn:HGRNMixer"),
    "ssm-hgrn2": ("read.hgrn", "read.hgrn:HGRN2Mixer"),
    "ssm-mamba3": ("read.mamba3", "read.mamba3:Mamba3Mixer"),
    "ssm-retnet": ("read.linear_attention", "read.linear_layers:Retention"),
    "ssm-rwkv7": ("read.rwkv7", "read.rwkv7:RWKV7Mixer"),
    "ssm-vim": ("read.vim", "read.vim:VimMixer"),
}
"""Modules with models and architecture of the types that transformers lacks, and the classes of layers they add."""
ROOT = "ssmscope.architectures."
READERS: Mapping[tuple[str, str], str] = {
    (f"transformers.models.{family}.modeling_{family}", layer): ROOT + reader
    for family, (layer, reader) in THEIRS.items()
} | {
    (f"{ROOT}{module}", layer): ROOT + reader
    for reader, *layers in OURS.values()
    for module, layer in (each.split(":") for each in layers)
}
"""Module that reads each class of layers, by the module and name of the class."""
