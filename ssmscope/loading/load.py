"""Loading of a `Model` from a name, a directory, a file or a model in memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn
from transformers import PreTrainedModel
from ssmscope.core.intercept import out_of_inference
from ssmscope.core.known_models import DTYPES, data_set_of, demos, training_data
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean
from ssmscope.loading import stored
from ssmscope.loading.code import is_import_string, model_of_code
from ssmscope.loading.device_map import check_split
from ssmscope.loading.fields import check_fields, read_object
from ssmscope.loading.host import Answer, Inputs, host
from ssmscope.loading.in_memory import cast, converted, of_library, readable, unwrapped
from ssmscope.loading.layouts import layout_of, read_state_dict
from ssmscope.loading.packed import quantisation_of, without_quantisation
from ssmscope.loading.pretrained import (
    base_of,
    headers_of,
    is_adapter,
    quiet,
    read_tokenizer,
    read_transformers,
    with_adapter,
)
from ssmscope.loading.seen_layers import check_in_library_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def trained_on(source: str | os.PathLike[str]) -> str | None:
    """Return the name of a model's training data; None if its directory has no record of a training of ours."""
    return data_set_of(training_data(_present(source)))


def trained_examples(source: str | os.PathLike[str]) -> int | None:
    """Return the number of examples of a model's training; None without a record of a training of ours."""
    try:
        return int(training_data(_present(source))["examples"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _present(source: str | os.PathLike[str]) -> Path:
    """Return the directory of a model, in the hub's cache for the id of one that was loaded. Nothing is fetched."""
    name = str(source)
    where = demos().get(name, Path(source))
    if name.count("/") == 1 and not os.path.exists(where):
        try:
            found = try_to_load_from_cache(name, "training.json")
        except HFValidationError:
            found = None
        where = Path(found).parent if isinstance(found, str) else where
    return where


@out_of_inference()
def load(
    source: str | os.PathLike[str] | nn.Module,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    backbone: str | None = None,
    embedding: str | None = None,
    head: str | None = None,
    inputs: Inputs | None = None,
    answer: Answer | None = None,
    at: int | None = None,
    example: Any = None,
    layers: str | None = None,
    labels: Sequence[str] | None = None,
) -> Model:
    """Load a trained state-space model for analysis.

    A model in memory is used itself and left unchanged, or a deep copy in another dtype or device, or with dequantised
    weights. A compiled or parallel model or a PeftModel is taken out of its wrapper (`torch.compile`, `DataParallel`,
    peft's); PEFT adapters stay active. Any module around a backbone, or around layers that can be read, loads too
    (those of a class of one's own once `adapt` says what they compute): its own forward pass, which takes token ids
    first or as `input_ids`, gives the logits, and each text's are those of the text alone, whatever its head does with
    padding. A backbone without a head loads for analyses of its layers.

    No code from a model's files is ever run: transformers' own classes and ours read them. Python code runs only if it
    is named as such, `path/to/file.py:NAME` or `package.module:NAME`: NAME is a module in memory, a loaded model, or a
    function without arguments that returns one of these.

    Args:
        source: `demo/NAME`; a directory in transformers' layout or one of `layouts.LAYOUTS`, or a PEFT adapter's, whose
            model is found by the name in its configuration; a file with the state dict of a selective SSM, a Vim or a
            MambaVision; an id on the Hugging Face hub; Python code, `FILE.py:NAME` or `package.module:NAME`; or a model
            in memory, transformers', mamba_ssm's or one's own.
        tokenizer: a tokenizer, or the directory or hub id of one, in place of the model's own.
        dtype: `float32`, `float64`, `bfloat16` or `float16`; `auto`, the default, is float32 on a CPU and the stored
            dtype on a GPU. A model in memory keeps its own unless one is given.
        device: `cpu`, `cuda`, …, or `auto` for a GPU if there is one; by default the CPU, or a loaded model's device.
        device_map: devices over which a directory in transformers' layout is split, in place of `device`: `auto` or a
            device for each part, as transformers reads it with accelerate. Parts on the CPU are computed there; weights
            on a disk are refused.
        backbone: path of the backbone in a model in memory, such as `encoder`; by default it is found.
        embedding: of a module of one's own without a transformers model in it, the path of the embedding that reads the
            ids; by default it is found.
        head: the path of such a module's linear layer that gives the logits; by default it is found.
        inputs: what such a module reads: `tokens`, or `floats`, numbers (batch, length, channels) such as time series,
            or images (batch, channels, height, width); or a function from these to what its forward pass is called
            with: one argument, a tuple, or a dictionary by name.
        answer: what such a module's logits are: `next` tokens, a `class`, `labels` of which several may be right, a
            `number`, or a class at every `position`; by default found by their shape. Where they are neither the
            module's output nor its `logits`, a function of the output, or of that and the input, that returns them,
            (batch, classes) or (batch, length, vocabulary).
        at: the position whose logits are the answer, where there are some at every position; −1 is the last. `Model.at`
            asks about another.
        example: an input on which adapted layers are checked: token ids (batch, length), by default some of the
            vocabulary; or numbers or images, which floats need.
        layers: the path of the part of such a module whose layers are read, where not all read as many positions.
        labels: names of a classifier's classes in the order of its logits, by which labels of data are matched, in
            place of its configuration's, which are often LABEL_0, LABEL_1, …

    Raises InputError if the name is unknown, the files are not what they claim, weights are missing, not finite or have
    no place in the model that the configuration describes, the model has no state-space layer that can be read, or it
    gives an answer per token. Pickled files are only ever read as plain tensors.
    """
    wanted, place = _dtype(dtype), _device(device)
    if isinstance(labels, str) or not isinstance(labels, Sequence | None):
        raise InputError(f"labels are {labels!r:.80}; give a list of names, one for each class")
    named = None if labels is None else tuple(labels)
    check_split(device_map, device, source)
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike) and not callable(tokenizer):
        kind = type(tokenizer).__name__
        raise InputError(f"tokenizer is a {kind}; give a tokenizer, or the directory or hub id of one")
    if isinstance(source, nn.Module):
        given = unwrapped(source)
        hosted: dict[str, Any] = {"embedding": embedding, "head": head, "inputs": inputs, "answer": answer, "at": at}
        hosted |= {"example": example, "layers": layers}
        asked = any(each is not None for each in hosted.values())
        if asked and backbone is not None:
            raise InputError("backbone is of a transformers model within the module; leave it out, or all the others")
        with quiet():
            module = host(given, **hosted) if asked or not (backbone or of_library(given)) else None
            if module is None:
                module = readable(source, backbone)
                check_in_library_model(module)
        name = getattr(getattr(given, "config", None), "_name_or_path", "") or type(given).__name__
        own = _tokenizer(tokenizer, None)
        if not isinstance(given, PreTrainedModel):
            _set_end_tokens(module, {}, own)
        return Model(converted(module, wanted, place), own, name, named)
    if backbone is not None:
        raise InputError("backbone is the name of a part of a model in memory; leave it out, or give a module")
    if any(each is not None for each in (embedding, head, inputs, answer, at, example, layers)):
        said = "embedding, head, inputs, answer, at, example and layers are about a module in memory"
        raise InputError(f"{said}; leave them out")
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise InputError(f"{kind} was given as a model; give a name, a directory, a file, or a module in memory")
    name = os.fspath(source)
    if is_import_string(name):
        return _of_code(name, tokenizer, wanted, place, named)
    where = locate(name)
    if wanted is None and device_map is None and (place is None or place.type == "cpu"):
        wanted = torch.float32
    kept = _kept.get() if isinstance(tokenizer, str | os.PathLike | None) and device_map is None else None
    key = (name, None if tokenizer is None else str(tokenizer), wanted, place or torch.device("cpu"), named)
    if kept is not None and (found := kept.recall(key)) is not None:
        return found
    with quiet():
        base = base_of(where, name, locate) if is_adapter(where) else where
        adapter = None if base is where else headers_of(where, name)
        module = _read(base, name if base is where else str(base), wanted, device_map, adapter)
        module = module if base is where else with_adapter(module, where, name)
    own = _tokenizer(tokenizer, where)
    own = own if own is not None or base is where else _tokenizer(tokenizer, base)
    if (fields := _fields_of_other_layout(base)) is not None:
        _set_end_tokens(module, fields, own)
    model = Model(module, own, name, named)
    if device_map is None:
        cast(module, wanted, place)
    _try(model)
    if kept is not None:
        kept.models[key] = model
    return model


def _of_code(name: str, tokenizer: Any, wanted: Any, place: Any, labels: tuple[str, ...] | None) -> Model:
    """Return the model that an import string gives, in another dtype or device, with a tokenizer or labels if given."""
    made = model_of_code(name)
    made = made if isinstance(made, Model) else load(made)
    own, named = _tokenizer(tokenizer, None) or made.tokenizer, labels or made.class_names
    return Model(converted(made.module, wanted, place), own, name, named)


def _fields_of_other_layout(where: Path) -> dict[str, Any] | None:
    """Return the fields of a model in another layout than transformers', with those of its generation settings; None
    for a model in transformers' layout."""
    files = [where / file for file in ("config.json", "generation_config.json") if (where / file).is_file()]
    fields = [read_object(file) for file in files]
    if where.is_dir() and layout_of(where, without_quantisation(fields[0])) is None:
        return None
    return {name: value for each in fields for name, value in each.items()}


def _set_end_tokens(module: Any, named: Mapping[str, Any], tokenizer: Any) -> None:
    """Have a converted model's texts end where its files say, or with the tokenizer's end token: the settings that its
    class starts with are not its own."""
    settings = getattr(module, "generation_config", None)
    if settings is not None:
        settings.eos_token_id = named.get("eos_token_id", getattr(tokenizer, "eos_token_id", None))


def _try(model: Model) -> None:
    """Raise InputError if a model cannot run: some fields of a configuration show in no weight's shape."""
    try:
        if model.gives == "nothing":
            return  # It has been run when it was read.
        if model.channels is not None:
            size = model.config.image_size if model.config.patch is not None else (2, 1)
            model.logits(model.encode(values=torch.zeros(size[0] * size[1], model.channels, dtype=torch.float32)))
        else:
            model.logits(model.encode(ids=[0, 0]))
    except InputError:
        raise
    except stored.DAMAGE_ERRORS as error:
        why = f"its first layers failed with {type(error).__name__} ({stored.reason(error)})"
        raise InputError(f"{model.name} cannot be run as its config.json describes it: {why}") from error


class ModelCache:
    """Cache of the `capacity` latest models that were loaded."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.models: OrderedDict[Any, Model] = OrderedDict()

    def recall(self, key: Any) -> Model | None:
        """Return the model under a key; if there is none, make room for it before it is loaded."""
        if key in self.models:
            self.models.move_to_end(key)
            return self.models[key]
        while len(self.models) >= self.capacity:
            self.models.popitem(last=False)
        return None


_kept: ContextVar[ModelCache | None] = ContextVar("kept", default=None)


@contextmanager
def cache_models(kept: ModelCache) -> Iterator[None]:
    """Have `load` return the same model again for the same name and other arguments within the context. The files are
    not read again: a model that is retrained in the meantime stays as it was."""
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    asked = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if asked not in DTYPES:
        hint = did_you_mean(str(asked), DTYPES)
        raise InputError(f"dtype {asked!r} is unknown: choose one of {', '.join(DTYPES)}{hint}")
    return getattr(torch, asked)


def chosen_device(device: str) -> str:
    """Return the name of a device; "auto" is the first CUDA device, else Apple's, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        place = torch.device(chosen_device(device) if isinstance(device, str) else device)
        torch.zeros(1, device=place)
    except stored.DAMAGE_ERRORS as error:
        raise InputError(f"device {str(device)!r} cannot be used here: {str(error).partition(chr(10))[0]}") from error
    if place.type == "meta":
        raise InputError("device 'meta' cannot be used: it holds no numbers; choose cpu or cuda")
    return place


LISTED = "ssmscope.models() or analyze models lists them"


def locate(name: str) -> Path:
    """Return the directory or file of a model, fetched for a hub id. Raises InputError if there is none."""
    if name.startswith("demo/"):
        known = demos()
        if name not in known:
            hint = f"{did_you_mean(name, known)} ({LISTED})"
            raise InputError(f"no demo is called {_short(name)}{hint}")
        return known[name]
    try:
        path = Path(name).expanduser()
        if path.exists() and name:
            return path
    except (OSError, RuntimeError, ValueError) as error:  # The name is too long or has a null character.
        raise InputError(f"no model {_short(name)}: {getattr(error, 'strerror', None) or error}") from error
    if is_import_string(name):
        raise InputError(f"{_short(name)} is Python code, and only verbs run that: give a directory or file of weights")
    beside = did_you_mean(name, [str(each.parent) for each in path.parent.glob("*/config.json")])
    hint = beside or did_you_mean(name if "/" in name else f"demo/{name}", demos())
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix in (".pth", ".pt", ".bin", ".tar"):
        why = f"it is no file or directory, no demo ({LISTED}) and no hub id owner/name"
        raise InputError(f"no model {_short(name)}: {why}{hint}")
    try:
        found = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
        if not list(found.glob("*.safetensors")):
            found = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.bin"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = "the hub has no such model" if getattr(error, "response", None) is not None else "the hub is out of reach"
        raise InputError(f"no model {_short(name)}: it is not a directory here, and {why}{hint}") from error
    return found


def _short(name: str) -> str:
    return repr(name) if len(name) <= 200 else f"{name[:100]!r}… ({len(name):,} characters)"


def _read(where: Path, name: str, dtype: torch.dtype | None, device_map: Any, adapter: Any = None) -> nn.Module:
    if where.is_file():
        stored.check_other_layouts(where, name)
        _check_whole(device_map, name)
        if where.suffix == ".safetensors":
            raise InputError(f"{name} is a file of weights without a configuration: give the directory that holds both")
        return read_state_dict(where, stored.read_tensors(where))
    if not where.is_dir():
        raise InputError(f"{name} is neither a directory nor a file: a model's directory holds config.json and weights")
    stored.check_finished(where, name)
    file = where / "config.json"
    if not file.is_file():
        stored.check_other_layouts(where, name)
        raise InputError(f"{name} has no config.json: a model's directory holds config.json and its weights")
    config = read_object(file)
    quantisation = quantisation_of(config)
    config = without_quantisation(config)
    if (layout := layout_of(where, config)) is not None:
        _check_whole(device_map, name)
        if quantisation is not None:
            raise InputError(f"{name} holds quantised weights in {layout.name}'s layout: give the model before that")
        return layout.read(where, config)
    check_fields(config, name)
    return read_transformers(where, name, config, dtype, device_map, adapter, quantisation)


def _check_whole(device_map: Any, name: str) -> None:
    if device_map is not None:
        raise InputError(f"{name} is not in transformers' layout, and only that is split by device_map: give a device")


def _tokenizer(tokenizer: Any, where: Path | None) -> Any:
    if tokenizer is None and where is not None:
        tokenizer = where if any((where / file).exists() for file in TOKENIZER_FILES) else None
    return read_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
