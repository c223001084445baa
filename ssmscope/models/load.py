"""From what a user has, a name, a directory, a file or a model in memory, to a `Model`."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from torch import nn

from ssmscope.errors import InputError, did_you_mean
from ssmscope.mixers import mixers
from ssmscope.model import Model
from ssmscope.models.checkpoints import is_mamba_ssm, read_mamba_ssm, read_selective, read_tensors
from ssmscope.models.diff_checkpoints import is_diff_mamba2, read_diff_mamba2
from ssmscope.models.quiet import quiet

DEMOS = Path(__file__).parent.parent / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def demos() -> dict[str, Path]:
    """The shipped trained models: `demo/NAME` and their directories."""
    return {f"demo/{path.parent.name}": path.parent for path in sorted(DEMOS.glob("*/config.json"))}


def trained_on(source: str | os.PathLike[str]) -> str | None:
    """The name of the data that a model was trained on, where its directory has our record of the training."""
    record = demos().get(str(source), Path(source)) / "training.json"
    try:
        return str(json.loads(record.read_bytes())["data"]["train"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load(
    source: str | os.PathLike[str] | nn.Module,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Model:
    """A trained state-space model, ready for analysis.

    Args:
        source: `demo/NAME`; a directory in transformers' or mamba_ssm's layout; a file with a selective SSM's state
            dict; a model's id on the Hugging Face hub; or a transformers model in memory.
        tokenizer: a tokenizer, or the directory or hub id of one, in place of the model's own.
        dtype: `float32`, `float64`, `bfloat16`, `float16`; by default float32 on a CPU, as stored on a GPU. A model in
            memory keeps its own unless one is given.
        device: `cpu`, `cuda`, …; by default a CPU, or where a model in memory is.

    Raises:
        InputError: when the name is unknown, the files are not what they claim, weights are missing, or the model has
            no state-space layer that can be read. Pickled files are only ever read as plain tensors.
    """
    wanted, place = _dtype(dtype), _device(device)
    if isinstance(source, nn.Module):
        module, name = source, getattr(source.config, "_name_or_path", "") or type(source).__name__
        where = None
    else:
        name = str(source)
        where = locate(name)
        if wanted is None and (place is None or place.type == "cpu"):
            wanted = torch.float32
        kept = _kept.get() if isinstance(tokenizer, str | os.PathLike | None) else None
        key = (name, None if tokenizer is None else str(tokenizer), wanted, place or torch.device("cpu"))
        if kept is not None and (found := kept.recall(key)) is not None:
            return found
        with quiet():
            module = _read(where, name)
        model = Model(module.to(device=place, dtype=wanted), _tokenizer(tokenizer, where), name)
        if kept is not None:
            kept.models[key] = model
        return model
    module = module.to(device=place, dtype=wanted)
    return Model(module, _tokenizer(tokenizer, where), name)


class Kept:
    """Loaded models that are kept for the next that asks for the same, the latest `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.models: OrderedDict[Any, Model] = OrderedDict()

    def recall(self, key: Any) -> Model | None:
        """The model that was kept under a key; where there is none, room is made for it before it is loaded."""
        if key in self.models:
            self.models.move_to_end(key)
            return self.models[key]
        while len(self.models) >= self.most:
            self.models.popitem(last=False)
        return None


_kept: ContextVar[Kept | None] = ContextVar("kept", default=None)


@contextmanager
def kept_loaded(kept: Kept) -> Iterator[None]:
    """Within the context `load` returns what it returned before for the same name, tokenizer, dtype and device.

    The files are not looked at again: a model that is trained anew in the meantime stays as it was.
    """
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    allowed = ("float32", "float64", "bfloat16", "float16")
    if dtype not in allowed:
        raise InputError(
            f"dtype {dtype!r} is unknown: choose one of {', '.join(allowed)}{did_you_mean(dtype, allowed)}"
        )
    return getattr(torch, dtype)


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        torch.empty(1, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error


def locate(name: str) -> Path:
    """The directory or file of a model, fetched from the hub when it is a hub id.

    Raises:
        InputError: there is none.
    """
    if name.startswith("demo/"):
        known = demos()
        if name not in known:
            raise InputError(f"no demo is called {name!r}{did_you_mean(name, known)} (shipped: {', '.join(known)})")
        return known[name]
    path = Path(name).expanduser()
    if path.exists():
        return path
    hint = did_you_mean(name if "/" in name else f"demo/{name}", demos())
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix in (".pth", ".pt", ".bin"):
        raise InputError(
            f"no model {name!r}: it is no file or directory, no demo ({', '.join(demos())}) "
            f"and no hub id owner/name{hint}"
        )
    try:
        found = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
        if not list(found.glob("*.safetensors")):
            found = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.bin"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (
            "the hub has no such model" if getattr(error, "response", None) is not None else "the hub is out of reach"
        )
        raise InputError(f"no model {name!r}: it is no directory here, and {reason}{hint}") from error
    return found


def _read(where: Path, name: str) -> nn.Module:
    if where.is_file():
        if where.suffix == ".safetensors":
            raise InputError(f"{name} is a file of weights without a configuration: give the directory that holds both")
        return read_selective(where)
    file = where / "config.json"
    if not file.is_file():
        raise InputError(f"{name} has no config.json: a model's directory holds config.json and its weights")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} is no model configuration: a JSON object was expected")
    if is_mamba_ssm(config):
        return read_mamba_ssm(where)
    if is_diff_mamba2(config, where):
        return read_diff_mamba2(where)
    return _read_transformers(where, name, config)


def _read_transformers(where: Path, name: str, fields: dict[str, Any]) -> nn.Module:
    kind = fields.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise InputError(f"{name}: model type {kind!r} is unknown{did_you_mean(str(kind), readable_types())}")
    classifies = any("SequenceClassification" in a for a in fields.get("architectures") or [])
    auto = transformers.AutoModelForSequenceClassification if classifies else transformers.AutoModelForCausalLM
    try:
        config = transformers.AutoConfig.from_pretrained(where)
        for part in (config, getattr(config, "backbone", None)):
            if part is not None and hasattr(part, "time_step_limit"):
                part.time_step_limit = tuple(map(_number, part.time_step_limit))
        with torch.device("meta"):
            outline = auto.from_config(config)
    except (
        ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError, StrictDataclassError
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{name}: a model of type {kind!r} cannot be built from its config.json ({reason})") from error
    if not mixers(outline):
        raise InputError(
            f"{name} is a {type(outline).__name__}, which has no state-space layer that can be read; "
            f"these types can: {', '.join(readable_types())}"
        )
    try:
        module, info = auto.from_pretrained(where, config=config, output_loading_info=True, local_files_only=True)
    except (
        SafetensorError,
        pickle.UnpicklingError,
        OSError,
        ValueError,
        RuntimeError,
        EOFError,
        KeyError,
    ) as error:
        for file in sorted([*where.glob("*.safetensors"), *where.glob("pytorch_model*.bin")]):
            read_tensors(file)  # says more clearly what is wrong with a file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"the weights of {name} cannot be read, they are damaged or do not fit: {reason}") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise InputError(f"the weights of {name} lack {len(missing)} tensors, the first {missing[0]}")
    return module


def _number(value: Any) -> float:
    """A number of a configuration; transformers 5 writes infinity as a dict that transformers 4 hands on."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


def readable_types() -> list[str]:
    """The transformers model types with layers that can be read."""
    from ssmscope.models import architectures

    return sorted({"ssm-classifier", *(kind for a in architectures().values() for kind in a.MODEL_TYPES)})


def _tokenizer(tokenizer: Any, where: Path | None) -> Any:
    if tokenizer is None:
        if where is None or not where.is_dir() or not any((where / f).exists() for f in TOKENIZER_FILES):
            return None
        tokenizer = where
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise InputError(f"the tokenizer {str(tokenizer)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
