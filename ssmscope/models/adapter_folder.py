"""Folders with an adapter alone, as peft writes them: the model that it was made for is read, and gets it unmerged."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import nn

from ssmscope.errors import InputError
from ssmscope.models.fields import read_object
from ssmscope.models.in_memory import readable
from ssmscope.models.stored import BROKEN, read_headers, reason

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")


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


def with_adapter(base: nn.Module, where: Path, name: str) -> nn.Module:
    """A model with the adapter of a folder, unmerged.

    Raises:
        InputError: without peft, for an adapter that is damaged or does not fit, or one that changes the model's input.
    """
    if importlib.util.find_spec("peft") is None:
        raise InputError(f"{name} holds an adapter, which is read by peft: pip install peft")
    file = next((where / each for each in WEIGHTS if (where / each).is_file()), None)
    if file is None:
        raise InputError(f"{name} holds an adapter without weights: neither {' nor '.join(WEIGHTS)}")
    whole = {f"base_model.model.{own}" for own in base.state_dict()}  # embeddings, which peft may store beside
    held = set(read_headers(file)) - whole
    import peft

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(base, str(where), low_cpu_mem_usage=True, local_files_only=True)
            wanted = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    except BROKEN as error:
        raise InputError(f"the adapter in {name} is damaged, or of another model: {reason(error)}") from error
    if wanted != held:
        odd = min(wanted ^ held)
        which = f"has no {odd}" if odd in wanted else f"holds {odd}, which has no place in the model"
        raise InputError(f"the adapter in {name} does not fit its model: {file.name} {which}")
    return readable(model)
