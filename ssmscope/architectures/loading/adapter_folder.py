"""Directories with an adapter alone, as peft writes them, which is put unmerged on the model that it was made for."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ssmscope.architectures.loading.fields import check_words, read_object, shown
from ssmscope.architectures.loading.in_memory import readable
from ssmscope.architectures.loading.stored import DAMAGE_ERRORS, is_wrapped, read_headers, reason
from ssmscope.errors import InputError

CONFIG_FILE, WEIGHT_FILES = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")

PEFT_TYPES = (
    "LORA", "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "MISS",
    "OFT", "RANDLORA", "ROAD", "SHIRA", "TRAINABLE_TOKENS", "VBLORA", "VERA",
)  # fmt: skip
"""Types of peft's adapters that keep layers linear and leave their input as it is."""
FREE_TEXT_FIELDS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "feedforward_modules",
    "lambda_pattern", "layers_pattern", "modules_to_save", "peft_version", "rank_pattern", "revision", "target_modules",
    "target_parameters", "trainable_token_indices",
})  # fmt: skip
"""Fields of an adapter's configuration that name classes, models or parts of the model, and are not looked up here."""
CLASSIFIER_TASK = "SEQ_CLS"
ALLOWED_WORDS = frozenset({
    "CAUSAL_LM", "FEATURE_EXTRACTION", CLASSIFIER_TASK, "all", "gaussian", "lora_only", "megatron.core", "none",
    "olora", "orthogonal", "pissa", "random", "road_1", "road_2", "road_4", "xavier_uniform", *PEFT_TYPES,
})  # fmt: skip
"""Allowed values of the other fields: types, tasks, biases, initialisations."""
WEIGHT_CHANGING_INITS = ("olora", "pissa")
"""Initialisations that take the adapter's weights out of the model's."""
REFUSED_FIELDS = frozenset({"layer_replication", "megatron_config"})
"""Fields that change a model's layers, or import a module for them."""
IGNORED_FIELDS = frozenset({"auto_mapping", "base_model_name_or_path", "loftq_config", "runtime_config"})
"""Fields about the adapter's origin and training, which change no output."""


def is_adapter(where: Path) -> bool:
    """Return True if a directory holds an adapter."""
    return (where / CONFIG_FILE).exists()


def base_of(where: Path, name: str, locate: Callable[[str], Path]) -> Path:
    """Return the directory of an adapter's model: the one of that name within the adapter's, else what `locate` finds.
    Raises InputError if the configuration names no model, one that is not there, or another adapter."""
    named = read_object(where / CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise InputError(f"{name} holds an adapter whose {CONFIG_FILE} names no model (base_model_name_or_path)")
    beside = where / named
    try:
        found = beside if beside.is_dir() else locate(named)
    except (InputError, OSError, ValueError) as error:
        raise InputError(f"{name} holds an adapter of {named!r:.100}, which is not there: {reason(error)}") from error
    if is_adapter(found):
        raise InputError(f"{name} holds an adapter of {named!r:.100}, which is an adapter too; merge that one first")
    return found


def classes_of(where: Path, name: str) -> int | None:
    """Return the number of classes of an adapter that makes a classifier of a language model; None for others. Raises
    InputError if the adapter's weights cannot be read."""
    if read_object(where / CONFIG_FILE).get("task_type") != CLASSIFIER_TASK:
        return None
    heads = [t.shape for n, t in read_headers(_weights(where, name)).items() if n.endswith(".score.weight")]
    return heads[0][0] if heads and len(heads[0]) == 2 else None


def _weights(where: Path, name: str) -> Path:
    file = next((where / each for each in WEIGHT_FILES if (where / each).is_file()), None)
    if file is None:
        raise InputError(f"{name} holds an adapter without weights: neither {' nor '.join(WEIGHT_FILES)}")
    return file


def with_adapter(base: nn.Module, where: Path, name: str) -> nn.Module:
    """Put the adapter of a directory on its model, unmerged. Raises InputError if peft is missing, or the adapter is
    damaged, does not fit the model, changes the model's input or has an unknown field in its configuration."""
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{name} holds an adapter, which is read by peft: pip install peft")
    file = _weights(where, name)
    if is_wrapped([file]):
        raise InputError(
            f"the adapter in {name} was saved within the wrapper of torch.compile, DataParallel or FSDP: save it from "
            "the PeftModel within (model._orig_mod, model.module)"
        )
    own, held = {f"base_model.model.{each}" for each in base.state_dict()}, set(read_headers(file))
    import peft

    config = _config(read_object(where / CONFIG_FILE), name)
    initial = getattr(config, "init_lora_weights", True) in WEIGHT_CHANGING_INITS
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(
                base, str(where), config=config, low_cpu_mem_usage=not initial, local_files_only=True
            )
            wanted = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    except DAMAGE_ERRORS as error:
        raise InputError(f"the adapter in {name} is damaged, or of another model: {reason(error)}") from error
    # peft may store the model's embeddings with the adapter, and reads them again.
    odd = (wanted - held) | {each for each in held - wanted if each.replace(".base_layer.", ".") not in own}
    if odd:
        which = f"has no {min(odd)}" if min(odd) in wanted else f"holds {min(odd)}, which has no place in the model"
        raise InputError(f"the adapter in {name} does not fit its model: {file.name} {which}")
    return readable(model)


def _config(fields: Mapping[str, Any], name: str) -> Any:
    """Return an adapter's configuration as peft's."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = fields.get("peft_type")
    if kind not in PEFT_TYPES:
        raise InputError(
            f"{name} holds an adapter of type {shown(kind)}, which is not read: it changes the model's input, not only "
            f"its layers, or these by more than a linear map; {', '.join(PEFT_TYPES)} are read"
        )
    check_words(fields, FREE_TEXT_FIELDS, ALLOWED_WORDS, name, CONFIG_FILE)
    made = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(made)} - REFUSED_FIELDS
    allowed = known | IGNORED_FIELDS
    odd = [each for each, value in fields.items() if each not in allowed and value not in (None, False, [], {})]
    if odd:
        raise InputError(
            f"{name} holds an adapter whose {CONFIG_FILE} says {odd[0]} is {shown(fields[odd[0]])}, which is not read "
            f"with peft {peft.__version__}: merge it into its model (peft's merge_and_unload()), and give that"
        )
    try:
        return made(**{each: value for each, value in fields.items() if each in known - IGNORED_FIELDS})
    except DAMAGE_ERRORS as error:
        raise InputError(f"{name} holds an adapter whose {CONFIG_FILE} is damaged: {reason(error)}") from error
