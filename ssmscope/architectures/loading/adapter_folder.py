"""Folders with an adapter alone, as peft writes them: the model that it was made for is read, and gets it unmerged."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ssmscope.architectures.loading.fields import read_object
from ssmscope.architectures.loading.in_memory import readable
from ssmscope.architectures.loading.stored import BROKEN, is_wrapped, read_headers, reason
from ssmscope.architectures.loading.words import check_words, shown
from ssmscope.errors import InputError

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")

PEFT_TYPES = (
    "LORA", "ADALORA", "BOFT", "C3A", "DELORA", "FOURIERFT", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "MISS",
    "OFT", "RANDLORA", "ROAD", "SHIRA", "TRAINABLE_TOKENS", "VBLORA", "VERA",
)  # fmt: skip
"""peft's types that leave layers linear and their input as it is, each tried against peft's own model."""
TEXTS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "exclude_modules", "feedforward_modules",
    "lambda_pattern", "layers_pattern", "modules_to_save", "peft_version", "rank_pattern", "revision", "target_modules",
    "target_parameters", "trainable_token_indices",
})  # fmt: skip
"""Fields of its configuration with names of the model's parts, and with those of classes and models, which are not
looked up here."""
CLASSIFIES = "SEQ_CLS"
WORDS = frozenset({
    "CAUSAL_LM", "FEATURE_EXTRACTION", CLASSIFIES, "all", "gaussian", "lora_only", "megatron.core", "none", "olora",
    "orthogonal", "pissa", "random", "road_1", "road_2", "road_4", "xavier_uniform", *PEFT_TYPES,
})  # fmt: skip
"""Allowed values of the other fields: types, tasks, biases, initialisations."""
INTO_THE_MODEL = ("olora", "pissa")
"""Beginnings that take the adapter's out of the model's weights."""
NEVER = frozenset({"layer_replication", "megatron_config"})
"""Fields that give a model other layers, or those of a module that is imported for it."""
IGNORED = frozenset({"auto_mapping", "base_model_name_or_path", "loftq_config", "runtime_config"})
"""Fields about the class and model it was made for, and about its training; they change no output."""


def is_adapter(where: Path) -> bool:
    return (where / CONFIG).exists()


def base_of(where: Path, name: str, locate: Callable[[str], Path]) -> Path:
    """Where the model is that an adapter was made for: a folder beside it, or what `locate` finds.

    Raises:
        InputError: its configuration names none, one that is not there, or another adapter.
    """
    named = read_object(where / CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise InputError(f"{name} holds an adapter whose {CONFIG} names no model (base_model_name_or_path)")
    beside = where / named
    try:
        found = beside if beside.is_dir() else locate(named)
    except (InputError, OSError, ValueError) as error:
        raise InputError(f"{name} holds an adapter of {named!r:.100}, which is not there: {reason(error)}") from error
    if is_adapter(found):
        raise InputError(f"{name} holds an adapter of {named!r:.100}, which is an adapter too; merge that one first")
    return found


def classes_of(where: Path, name: str) -> int | None:
    """Return the number of classes of an adapter that makes a classifier of a language model; None for others.

    Raises:
        InputError: its weights cannot be read.
    """
    if read_object(where / CONFIG).get("task_type") != CLASSIFIES:
        return None
    heads = [t.shape for n, t in read_headers(_weights(where, name)).items() if n.endswith(".score.weight")]
    return heads[0][0] if heads and len(heads[0]) == 2 else None


def _weights(where: Path, name: str) -> Path:
    file = next((where / each for each in WEIGHTS if (where / each).is_file()), None)
    if file is None:
        raise InputError(f"{name} holds an adapter without weights: neither {' nor '.join(WEIGHTS)}")
    return file


def with_adapter(base: nn.Module, where: Path, name: str) -> nn.Module:
    """A model with the adapter of a folder, unmerged.

    Raises:
        InputError: without peft, for an adapter that is damaged or does not fit, one that changes the model's input, or
            one whose configuration says what is not known.
    """
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

    config = _config(read_object(where / CONFIG), name)
    initial = getattr(config, "init_lora_weights", True) in INTO_THE_MODEL  # its weights are needed, and changed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(
                base, str(where), config=config, low_cpu_mem_usage=not initial, local_files_only=True
            )
            wanted = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    except BROKEN as error:
        raise InputError(f"the adapter in {name} is damaged, or of another model: {reason(error)}") from error
    # peft may store embeddings of the model beside, and reads them again.
    odd = (wanted - held) | {each for each in held - wanted if each.replace(".base_layer.", ".") not in own}
    if odd:
        which = f"has no {min(odd)}" if min(odd) in wanted else f"holds {min(odd)}, which has no place in the model"
        raise InputError(f"the adapter in {name} does not fit its model: {file.name} {which}")
    return readable(model)


def _config(fields: Mapping[str, Any], name: str) -> Any:
    """The configuration of an adapter as peft's, of the fields that are known.

    Raises:
        InputError: as `with_adapter`.
    """
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = fields.get("peft_type")
    if kind not in PEFT_TYPES:
        raise InputError(
            f"{name} holds an adapter of type {shown(kind)}, which is not read: it changes the model's input, not only "
            f"its layers, or these by more than a linear map; {', '.join(PEFT_TYPES)} are read"
        )
    check_words(fields, TEXTS, WORDS, name, CONFIG)
    made = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(made)} - NEVER
    odd = [each for each, value in fields.items() if each not in known | IGNORED and value not in (None, False, [], {})]
    if odd:
        raise InputError(
            f"{name} holds an adapter whose {CONFIG} says {odd[0]} is {shown(fields[odd[0]])}, which is not read with "
            f"peft {peft.__version__}: merge it into its model (peft's merge_and_unload()), and give that"
        )
    try:
        return made(**{each: value for each, value in fields.items() if each in known - IGNORED})
    except BROKEN as error:
        raise InputError(f"{name} holds an adapter whose {CONFIG} is damaged: {reason(error)}") from error
