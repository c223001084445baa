"""From what a user has, a name, a directory, a file or a model in memory, to a `Model`."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn

from ssmscope.architectures.loading.adapter_folder import base_of, classes_of, is_adapter, with_adapter
from ssmscope.architectures.loading.checkpoints import is_mamba_ssm, read_mamba_ssm, read_selective
from ssmscope.architectures.loading.diff_checkpoints import is_diff_mamba2, read_diff_mamba2
from ssmscope.architectures.loading.fields import check_depth, check_fields, read_object
from ssmscope.architectures.loading.fla_checkpoints import is_fla, read_fla
from ssmscope.architectures.loading.in_memory import cast, converted, readable
from ssmscope.architectures.loading.quiet import quiet
from ssmscope.architectures.loading.stored import (
    BROKEN,
    check_finished,
    check_kinds,
    check_names,
    check_not_quantised,
    check_other_layouts,
    check_tied,
    contents,
    is_wrapped,
    outline,
    read_tensors,
    reason,
    weight_files,
)
from ssmscope.architectures.loading.tokenizers import read_tokenizer
from ssmscope.architectures.loading.user_modules import OwnModel
from ssmscope.architectures.loading.vim_checkpoints import is_vim, read_vim
from ssmscope.architectures.loading.words import check_generation
from ssmscope.architectures.own.split import check_split, placed, start_at_embeddings
from ssmscope.core.intercept import out_of_inference
from ssmscope.core.mixers import mixers
from ssmscope.core.model import Model
from ssmscope.core.shipped import DTYPES, data_set_of, demos, readable_types, training_data
from ssmscope.errors import InputError, did_you_mean

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def trained_on(source: str | os.PathLike[str]) -> str | None:
    """The name of the data set that a model was trained on, where its directory has our record of the training."""
    return data_set_of(_training(source))


def trained_examples(source: str | os.PathLike[str]) -> int | None:
    """How many examples a model was trained on, where its directory has our record of the training."""
    try:
        return int(_training(source)["examples"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _training(source: str | os.PathLike[str]) -> dict[str, Any]:
    return training_data(demos().get(str(source), Path(source)))


@out_of_inference()
def load(
    source: str | os.PathLike[str] | nn.Module,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    backbone: str | None = None,
) -> Model:
    """A trained state-space model, ready for analysis.

    Of a model in memory the module itself is used and left as it is: where another dtype or device is asked for than
    it has, a deep copy is converted. One that is compiled, parallel or has adapters is taken out of its wrapper
    (`torch.compile`, `DataParallel`, peft's); the adapters of a PeftModel stay active.

    Any module around a backbone loads, too: its own forward pass, which takes token ids first or as `input_ids`, gives
    the logits, and each text's are those of the text alone, whatever its head makes of padding. A backbone without a
    head loads for what is about its layers.

    Nothing of a model's code is ever run, and no question is asked: transformers' own classes and ours read the files.

    Args:
        source: `demo/NAME`; a directory in transformers' or mamba_ssm's layout, or with an adapter, whose model is
            found by the name in its configuration; a file with a selective SSM's state dict or a Vim's; a model's id on
            the Hugging Face hub; or a model in memory, transformers', mamba_ssm's or one's own.
        tokenizer: a tokenizer, or the directory or hub id of one, in place of the model's own.
        dtype: `float32`, `float64`, `bfloat16`, `float16`; by default, or as `auto`, float32 on a CPU, as stored on a
            GPU. A model in memory keeps its own unless one is given.
        device: `cpu`, `cuda`, …, or `auto`: a GPU where there is one; by default a CPU, or where a model in memory is.
        device_map: in place of `device`, over which devices a directory in transformers' layout is split as it is read,
            `auto` or a device for each part, as transformers reads it with accelerate. Parts on the CPU are computed
            there; weights on a disk are refused.
        backbone: of a model in memory the path of its backbone, such as `encoder`; by default it is found.

    Raises:
        InputError: when the name is unknown, the files are not what they claim, weights are missing, not finite or have
            no place in the model that the configuration describes, the model has no state-space layer that can be
            read, or it answers about tokens. Pickled files are only ever read as plain tensors.
    """
    wanted, place = _dtype(dtype), _device(device)
    check_split(device_map, device, source)
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike) and not callable(tokenizer):
        raise InputError(
            f"tokenizer is a {type(tokenizer).__name__}; give a tokenizer, or the directory or hub id of one"
        )
    if isinstance(source, nn.Module):
        with quiet():
            module = readable(source, backbone)
        own = module.module if isinstance(module, OwnModel) else module
        name = getattr(getattr(own, "config", None), "_name_or_path", "") or type(own).__name__
        return Model(converted(module, wanted, place), _tokenizer(tokenizer, None), name)
    if backbone is not None:
        raise InputError("backbone is the name of a part of a model in memory; leave it out, or give a module")
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"a {type(source).__name__} was given; a model is a name, a directory, a file, or a transformers model"
        )
    name = os.fspath(source)
    where = locate(name)
    if wanted is None and device_map is None and (place is None or place.type == "cpu"):
        wanted = torch.float32
    kept = _kept.get() if isinstance(tokenizer, str | os.PathLike | None) and device_map is None else None
    key = (name, None if tokenizer is None else str(tokenizer), wanted, place or torch.device("cpu"))
    if kept is not None and (found := kept.recall(key)) is not None:
        return found
    with quiet():
        base = base_of(where, name, locate) if is_adapter(where) else where
        classes = None if base is where else classes_of(where, name)
        module = _read(base, name if base is where else str(base), wanted, device_map, classes)
        module = module if base is where else with_adapter(module, where, name)
    own = _tokenizer(tokenizer, where)
    model = Model(module, own if own is not None or base is where else _tokenizer(tokenizer, base), name)
    if device_map is None:
        cast(module, wanted, place)
    _try(model)
    if kept is not None:
        kept.models[key] = model
    return model


def _try(model: Model) -> None:
    """Refuse a model that cannot run: some of what a configuration says shows in no weight's shape.

    Raises:
        InputError: as said.
    """
    try:
        if model.gives == "nothing":
            return  # it has been run when it was read
        if model.channels is not None:
            size = model.config.image_size if model.config.patch is not None else (2, 1)
            model.logits(model.encode(values=torch.zeros(size[0] * size[1], model.channels, dtype=torch.float32)))
        else:
            model.logits(model.encode(ids=[0, 0]))
    except InputError:
        raise
    except BROKEN as error:
        raise InputError(
            f"{model.name} cannot be run as its config.json describes it: its first layers failed with "
            f"{type(error).__name__} ({reason(error)})"
        ) from error


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
    if dtype is None or dtype == "auto":
        return None
    asked = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if asked not in DTYPES:
        raise InputError(
            f"dtype {asked!r} is unknown: choose one of {', '.join(DTYPES)}{did_you_mean(str(asked), DTYPES)}"
        )
    return getattr(torch, asked)


def chosen_device(device: str) -> str:
    """The device's name, of "auto" that of this machine: its first CUDA device, else Apple's, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def _device(device: str | torch.device | None) -> torch.device | None:
    if device is None:
        return None
    try:
        place = torch.device(chosen_device(device) if isinstance(device, str) else device)
        torch.zeros(1, device=place)
    except BROKEN as error:
        raise InputError(f"device {str(device)!r} cannot be used here: {str(error).partition(chr(10))[0]}") from error
    if place.type == "meta":
        raise InputError("device 'meta' cannot be used: it holds no numbers; choose cpu or cuda")
    return place


def locate(name: str) -> Path:
    """The directory or file of a model, fetched from the hub when it is a hub id.

    Raises:
        InputError: there is none.
    """
    if name.startswith("demo/"):
        known = demos()
        if name not in known:
            raise InputError(
                f"no demo is called {_short(name)}{did_you_mean(name, known)} (shipped: {', '.join(known)})"
            )
        return known[name]
    try:
        path = Path(name).expanduser()
        if path.exists() and name:
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, a user who is not there, a null character
        raise InputError(f"no model {_short(name)}: {getattr(error, 'strerror', None) or error}") from error
    hint = did_you_mean(name if "/" in name else f"demo/{name}", demos())
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or path.suffix in (".pth", ".pt", ".bin"):
        raise InputError(
            f"no model {_short(name)}: it is no file or directory, no demo ({', '.join(demos())}) "
            f"and no hub id owner/name{hint}"
        )
    try:
        found = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
        if not list(found.glob("*.safetensors")):
            found = Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.bin"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = "the hub has no such model" if getattr(error, "response", None) is not None else "the hub is out of reach"
        raise InputError(f"no model {_short(name)}: it is no directory here, and {why}{hint}") from error
    return found


def _short(name: str) -> str:
    return repr(name) if len(name) <= 200 else f"{name[:100]!r}… ({len(name):,} characters)"


def _read(where: Path, name: str, dtype: torch.dtype | None, device_map: Any, classes: int | None = None) -> nn.Module:
    """The model of a directory or file; `classes` are those of the head that an adapter of it brings."""
    if where.is_file():
        check_other_layouts(where, name)
        _whole(device_map, name)
        if where.suffix == ".safetensors":
            raise InputError(f"{name} is a file of weights without a configuration: give the directory that holds both")
        tensors = read_tensors(where)
        return read_vim(where, tensors) if is_vim(tensors) else read_selective(where, tensors)
    if not where.is_dir():
        raise InputError(f"{name} is neither a directory nor a file: a model's directory holds config.json and weights")
    check_finished(where, name)
    file = where / "config.json"
    if not file.is_file():
        check_other_layouts(where, name)
        raise InputError(f"{name} has no config.json: a model's directory holds config.json and its weights")
    config = read_object(file)
    check_not_quantised(config, name)
    if is_mamba_ssm(config):
        _whole(device_map, name)
        return read_mamba_ssm(where, config)
    if is_fla(config):
        _whole(device_map, name)
        return read_fla(where, config)
    check_fields(config, name)
    if is_diff_mamba2(config, where):
        _whole(device_map, name)
        return read_diff_mamba2(where, config)
    return _read_transformers(where, name, config, dtype, device_map, classes)


def _whole(device_map: Any, name: str) -> None:
    if device_map is not None:
        raise InputError(f"{name} is not in transformers' layout, and only that is split by device_map: give a device")


HEADS = ("lm_head.weight", "score.weight")
"""The head that a language model loses to an adapter for a classifier, and the one that it gets from it."""
UNUSED = re.compile(r"(?:^|\.)(?:position_ids|inv_freq|masked_bias)$")
"""Tensors that old versions of transformers stored and that newer ones compute."""


def _rescales(config: Any, asked: bool | None = None) -> bool:
    """Whether a configuration has projections divided by √layers as they are initialised; `asked` sets it.

    transformers 5 initialises weights that it has read once more, and would divide them again.
    """
    within: list[Any] = [config, getattr(config, "backbone", None)]
    parts = [part for part in within if hasattr(part, "rescale_prenorm_residual")]
    found = any(part.rescale_prenorm_residual for part in parts)
    for part in parts if asked is not None else ():
        part.rescale_prenorm_residual = asked
    return found


def _read_transformers(
    where: Path,
    name: str,
    fields: Mapping[str, Any],
    dtype: torch.dtype | None,
    device_map: Any,
    classes: int | None,
) -> nn.Module:
    kind = fields["model_type"]
    check_other_layouts(where, name)
    files = weight_files(where)
    held = contents(files)
    check_depth(fields, len(held.tensors), name)
    auto = _class_for(fields.get("architectures") or [], name)
    head_comes = classes is not None and auto is not transformers.AutoModelForSequenceClassification
    if head_comes:
        auto = transformers.AutoModelForSequenceClassification
    what = f"{name}: a model of type {kind!r}"
    if (where / "generation_config.json").is_file():
        check_generation(read_object(where / "generation_config.json"), name)
    try:
        # Not AutoConfig: it may read another file than the one that was checked (configuration_files).
        own = {key: value for key, value in fields.items() if key != "auto_map"}
        config = transformers.CONFIG_MAPPING[kind].from_dict(own, name_or_path=str(where))
        if head_comes:
            config.num_labels = classes
        for part in (config, getattr(config, "backbone", None)):
            limits = getattr(part, "time_step_limit", None)
            if part is not None and limits is not None:
                part.time_step_limit = tuple(map(float, limits))
    except InputError:
        raise
    except BROKEN as error:
        raise InputError(f"{what} cannot be built from its config.json ({reason(error)})") from error
    empty = outline(lambda: auto.from_config(config, trust_remote_code=False), held, what, "its config.json")
    if not mixers(empty):
        raise InputError(
            f"{name} is a {type(empty).__name__}, which has no state-space layer that can be read; "
            f"these types can: {', '.join(readable_types())}"
        )
    check_kinds(empty, held.tensors, name)
    try:
        rescales = _rescales(config, asked=False)
        where_to: dict[str, Any] = {} if device_map is None else {"device_map": placed(empty, device_map, dtype)}
        source: Path | None = where
        if is_wrapped(files):
            source, where_to["state_dict"] = None, {n: t for file in files for n, t in read_tensors(file).items()}
        module, info = type(empty).from_pretrained(
            source,
            config=config,
            dtype=dtype or "auto",
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            **where_to,
        )
        start_at_embeddings(module)
        if rescales:
            _rescales(module.config, asked=True)
    except InputError:
        raise
    except BROKEN as error:
        for file in files:
            read_tensors(file)  # says more clearly what is wrong with a file
        raise InputError(
            f"the weights of {name} cannot be read, they are damaged or do not fit: {reason(error)}"
        ) from error
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if not UNUSED.search(key))
    if head_comes:
        module.score.weight.data.zero_()
        missing, unexpected = ([each for each in names if each not in HEADS] for names in (missing, unexpected))
    check_names(missing, unexpected, config, name)
    _check_head(module, files, held.tensors, name)
    if dtype == torch.float64:
        _widen(module, files)
    return OwnModel(module, "") if auto is transformers.AutoModel else module


def _class_for(architectures: Sequence[str], name: str) -> Any:
    """The class of transformers that reads what a configuration names; a language model where it names nothing.

    Raises:
        InputError: for a head that answers about tokens.
    """
    for head in ("TokenClassification", "QuestionAnswering"):
        if any(head in each for each in architectures):
            raise InputError(
                f"{name} is a {architectures[0]}, which answers about tokens, and what is explained here is one answer "
                "for a text: load it with transformers, and give ssmscope a module around it whose forward pass "
                "returns the logits of the token that is asked about, or its backbone"
            )
    if any("SequenceClassification" in each for each in architectures):
        return transformers.AutoModelForSequenceClassification
    bare = architectures and all(each.endswith("Model") and not each.endswith("LMHeadModel") for each in architectures)
    return transformers.AutoModel if bare else transformers.AutoModelForCausalLM


def _widen(module: nn.Module, files: list[Path]) -> None:
    """Read those weights again that transformers has rounded: what a layer makes in float32 (Mamba's A_log) stays so,
    whatever is stored."""
    rounded = {name: t for name, t in module.named_parameters() if t.dtype == torch.float32}
    module.double()
    stored = {name: t for file in files if rounded for name, t in read_tensors(file).items()}
    with torch.no_grad():
        for name in rounded.keys() & stored.keys():
            module.get_parameter(name).copy_(stored[name])


def _check_head(module: Any, files: list[Path], held: Mapping[str, Any], name: str) -> None:
    """Refuse a stored head that transformers replaced with the embeddings, or the embeddings with it."""
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or not getattr(module.config, "tie_word_embeddings", False):
        return
    names = {id(part): f"{at}.weight" for at, part in module.named_modules() if part is head or part is embeddings}
    stored = [names[id(part)] for part in (head, embeddings)]
    if all(each in held for each in stored):
        tensors = {n: t for file in files for n, t in read_tensors(file).items() if n in stored}
        check_tied(tensors[stored[0]], tensors[stored[1]], name)


def _tokenizer(tokenizer: Any, where: Path | None) -> Any:
    if tokenizer is None:
        if where is None or not where.is_dir() or not any((where / f).exists() for f in TOKENIZER_FILES):
            return None
        tokenizer = where
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    return read_tokenizer(tokenizer)
