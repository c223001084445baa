"""Checkpoints of Differential Mamba in the layout of its authors' published models, e.g. `nadavsc/diffmamba2-370M`.

Their config.json is Mamba-2's (`"model_type": "mamba2"`, expansion 2) with `diffmamba` and `diffmamba_settings`. A
differential layer i has `backbone.layers.i.mixer_1.*` and `mixer_2.*` (each a Mamba-2 mixer of expansion 1),
`lambda_q1` (λ̄ of Eq. 17) and `subln.weight` (the norm after the subtraction); everything else is named as in
transformers' Mamba-2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ssmscope.architectures.loading.fields import check_depth, check_fields
from ssmscope.architectures.loading.stored import built, contents, read_headers, read_tensors
from ssmscope.architectures.own.diff_mamba import DiffMambaConfig, DiffMambaForCausalLM
from ssmscope.errors import InputError

PART_NAMES = {
    "mixer_1.": "mixer.m1.",
    "mixer_2.": "mixer.m2.",
    "lambda_q1": "mixer.lambda_bar",
    "subln.weight": "mixer.sub_norm.weight",
}
"""Names of a layer's parts in the authors' model, and ours."""

FILE_FIELDS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version")
"""Fields of a config.json that say nothing about the model's shape."""
AUTHORS_FIELDS = ("diffmamba", "diffmamba_settings", "verbose")


def our_name(name: str) -> str:
    """Return the name in `DiffMambaForCausalLM` of a tensor of the authors' model."""
    for theirs, ours in PART_NAMES.items():
        name = re.sub(rf"^(backbone\.layers\.\d+\.){re.escape(theirs)}", rf"\g<1>{ours}", name)
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def is_diff_mamba2(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a directory holds a model in the authors' layout, by its config.json or its tensors' names."""
    if config.get("model_type") != "mamba2":
        return False
    architectures = config.get("architectures")
    if config.get("diffmamba") or (isinstance(architectures, list) and "DiffMamba2ForCausalLM" in architectures):
        return True
    return any(".mixer_1." in name for file in directory.glob("*.safetensors") for name in _names(file))


def _names(file: Path) -> list[str]:
    try:
        return list(read_headers(file))
    except InputError:
        return []  # The function that reads the weights reports the error.


def read_diff_mamba2(directory: Path, config: Mapping[str, Any]) -> PreTrainedModel:
    """Return the model that the authors' code saved, as `DiffMambaForCausalLM`; `config` is its config.json.

    The names of its tensors say which layers are differential. Raises InputError when no layer is differential, or
    weights are missing or do not fit the configuration.
    """
    what = str(directory)
    check_fields(config, what)
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))
    if not files:
        raise InputError(f"{directory} has no weights: neither *.safetensors nor pytorch_model*.bin")
    held = contents(files)
    stored = {our_name(name): tensor for name, tensor in held.tensors.items()}
    found = {int(m.group(1)) for name in stored if (m := re.match(r"backbone\.layers\.(\d+)\.mixer\.m1\.", name))}
    if not found:
        raise InputError(f"{directory} calls itself a Differential Mamba, but none of its layers has a mixer_1")
    embeddings = stored.get("backbone.embeddings.weight")
    if embeddings is None:
        raise InputError(f"the weights of {directory} lack backbone.embeddings.weight")
    tied = "lm_head.weight" not in stored or bool(config.get("tie_word_embeddings"))
    check_depth(config, len(held.tensors), what)
    base = {name: value for name, value in config.items() if name not in (*FILE_FIELDS, *AUTHORS_FIELDS)}
    base.update(vocab_size=embeddings.shape[0], tie_word_embeddings=tied)
    if "time_step_limit" in base:
        base["time_step_limit"] = tuple(map(float, base["time_step_limit"] or ()))

    def build() -> PreTrainedModel:
        return DiffMambaForCausalLM(DiffMambaConfig(**base, differential_layers=_as_setting(found, config)))

    weights = {our_name(name): tensor for file in files for name, tensor in read_tensors(file).items()}
    weights.setdefault("lm_head.weight", weights["backbone.embeddings.weight"])
    return built(build, weights, held, what, tied=tied)


def _as_setting(layers: set[int], fields: Mapping[str, Any]) -> str | list[int]:
    number = fields.get("num_hidden_layers", 0)
    named = {"full": set(range(number)), "hybrid": set(range(0, number, 2))}
    return next((name for name, those in named.items() if those == layers), sorted(layers))
