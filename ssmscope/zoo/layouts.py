"""Checkpoints as the papers' authors keep them: a Differential Mamba's directories, a selective SSM's state dicts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from ssmscope.errors import InputError
from ssmscope.loading import stored
from ssmscope.loading.fields import check_fields
from ssmscope.loading.layouts import Layout
from ssmscope.zoo.diff_mamba import DiffMambaConfig, DiffMambaForCausalLM
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification

# ---- Differential Mamba, as its authors publish it, e.g. `nadavsc/diffmamba2-370M`: config.json is Mamba-2's with
# `diffmamba` and `diffmamba_settings`. A differential layer has two Mamba-2 mixers of expansion 1, λ̄ (Eq. 17) and the
# norm after the subtraction; everything else is named as in transformers' Mamba-2.

DIFF_PART_NAMES = {
    "mixer_1.": "mixer.m1.",
    "mixer_2.": "mixer.m2.",
    "lambda_q1": "mixer.lambda_bar",
    "subln.weight": "mixer.sub_norm.weight",
}
FILE_FIELDS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version")
"""Fields of a config.json that say nothing about the model's shape."""
DIFF_FIELDS = ("diffmamba", "diffmamba_settings", "verbose")


def is_diff_mamba2(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a directory holds a model in the authors' layout, by its config.json or its tensors' names."""
    if config.get("model_type") != "mamba2":
        return False
    architectures = config.get("architectures")
    if config.get("diffmamba") or (isinstance(architectures, list) and "DiffMamba2ForCausalLM" in architectures):
        return True
    try:
        headers = map(stored.read_headers, directory.glob("*.safetensors"))
        return any(".mixer_1." in name for names in headers for name in names)
    except InputError:
        return False  # The function that reads the weights reports the error.


def plan_diff_mamba2(config: Mapping[str, Any], held: stored.Contents, what: str) -> stored.Plan:
    """Plan a `DiffMambaForCausalLM`; the tensors' names say which layers are differential, and one must be."""
    check_fields(config, what)
    ours = _by_our_names(held.tensors)
    found = {int(m.group(1)) for name in ours if (m := re.match(r"backbone\.layers\.(\d+)\.mixer\.m1\.", name))}
    if not found:
        raise InputError(f"{what} calls itself a Differential Mamba, but none of its layers has a mixer_1")
    embeddings = ours.get("backbone.embeddings.weight")
    if embeddings is None:
        raise InputError(f"the weights of {what} lack backbone.embeddings.weight")
    tied = "lm_head.weight" not in ours or bool(config.get("tie_word_embeddings"))
    base = {name: value for name, value in config.items() if name not in (*FILE_FIELDS, *DIFF_FIELDS)}
    base |= {"vocab_size": embeddings.shape[0], "tie_word_embeddings": tied}
    if "time_step_limit" in base:
        base["time_step_limit"] = tuple(map(float, base["time_step_limit"] or ()))
    number = config.get("num_hidden_layers", 0)
    named = {"full": set(range(number)), "hybrid": set(range(0, number, 2))}
    layers = next((name for name, those in named.items() if those == found), sorted(found))

    def translate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights = _by_our_names(tensors)
        return {"lm_head.weight": weights["backbone.embeddings.weight"], **weights}

    base["differential_layers"] = layers
    return stored.Plan(lambda: DiffMambaForCausalLM(DiffMambaConfig(**base)), translate, tied)


def _by_our_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in tensors.items():
        for theirs, ours in DIFF_PART_NAMES.items():
            name = re.sub(rf"^(backbone\.layers\.\d+\.){re.escape(theirs)}", rf"\g<1>{ours}", name)
        found[name.replace("backbone.embedding.", "backbone.embeddings.")] = value
    return found


# ---- state dicts of selective SSMs: embedding.weight, [SSM.]ssm.{A, W_B, W_C, q_delta, p_delta}, SSM.w or W


def plan_selective(tensors: Mapping[str, Tensor], held: stored.Contents, what: str) -> stored.Plan | None:
    """Plan a selective SSM's classifier: binary with `SSM.w`, several classes with `W`. Raises InputError for one that
    lacks a part."""
    weights = {name.removeprefix("SSM."): tensor for name, tensor in tensors.items()}
    if not any(name.startswith("ssm.") for name in weights):
        return None
    head = weights.pop("w", None)
    binary = head is not None
    head = head.unsqueeze(0) if head is not None else weights.pop("W", None)
    expected = {"embedding.weight", *(f"ssm.{part}" for part in ("A", "W_B", "W_C", "q_delta", "p_delta"))}
    if head is None or set(weights) != expected:
        raise InputError(
            f"{what} is not a checkpoint that can be read: a selective SSM's state dict has "
            f"embedding.weight, ssm.A, ssm.W_B, ssm.W_C, ssm.q_delta, ssm.p_delta and w or W; it holds "
            f"{', '.join(sorted(weights)[:4])}, …; other models are given as directories"
        )
    for name, tensor in {"embedding.weight": weights["embedding.weight"], "ssm.A": weights["ssm.A"], "W": head}.items():
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise InputError(f"{what} is damaged: {name} is {tuple(tensor.shape)}; a matrix was expected")
    (vocabulary, width), state = weights["embedding.weight"].shape, weights["ssm.A"].shape[1]
    config = SelectiveSSMConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        state_size=state,
        binary=binary,
        num_labels=2 if binary else head.shape[0],
        spectral_abscissa=weights["ssm.A"].real.max().item(),  # Complex numbers are refused later.
    )
    build = partial(SelectiveSSMForSequenceClassification, config)
    return stored.Plan(build, lambda tensors: {**weights, "head.weight": head})


DIFFERENTIAL_MAMBA = Layout("Differential Mamba", is_diff_mamba2, plan_diff_mamba2, any_name=True)
SELECTIVE_SSM = Layout("selective SSM", plan_file=plan_selective)
