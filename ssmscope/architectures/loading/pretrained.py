"""Models in transformers' layout and tokenizers, read by its own classes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import nn

from ssmscope.architectures.loading.fields import check_depth, check_generation, check_tokenizer, read_object
from ssmscope.architectures.loading.in_memory import OwnModel
from ssmscope.architectures.loading.stored import (
    DAMAGE_ERRORS,
    check_kinds,
    check_names,
    check_other_layouts,
    check_tied,
    contents,
    is_wrapped,
    outline,
    read_tensors,
    reason,
    weight_files,
)
from ssmscope.architectures.own.split import device_of_parts, start_at_embeddings
from ssmscope.core.mixers import mixers
from ssmscope.core.shipped import readable_types
from ssmscope.errors import InputError

REPLACED_HEADS = ("lm_head.weight", "score.weight")
"""Heads that an adapter for a classifier removes from a language model, and gives it."""
OBSOLETE_TENSORS = re.compile(r"(?:^|\.)(?:position_ids|inv_freq|masked_bias)$")
"""Pattern of tensors that old versions of transformers stored and newer ones compute."""


def _rescales(config: Any, asked: bool | None = None) -> bool:
    """Return True if a configuration has projections divided by √layers at initialisation; `asked` sets it.
    transformers 5 initialises weights again after reading them, and would divide them a second time."""
    within: list[Any] = [config, getattr(config, "backbone", None)]
    parts = [part for part in within if hasattr(part, "rescale_prenorm_residual")]
    found = any(part.rescale_prenorm_residual for part in parts)
    for part in parts if asked is not None else ():
        part.rescale_prenorm_residual = asked
    return found


def read_transformers(
    where: Path, name: str, fields: Mapping[str, Any], dtype: torch.dtype | None, device_map: Any, classes: int | None
) -> nn.Module:
    """Return the model of a directory, with `fields` of its config.json, checked, and with `classes` of the head that
    an adapter gives it. Raises InputError if the files are damaged or do not fit, or the model has no state-space layer
    that can be read."""
    kind = fields["model_type"]
    check_other_layouts(where, name)
    files = weight_files(where)
    held = contents(files)
    check_depth(fields, len(held.tensors), name)
    auto = _class_for(fields.get("architectures") or [], name)
    head_comes = classes is not None and auto is not transformers.AutoModelForSequenceClassification
    auto = transformers.AutoModelForSequenceClassification if head_comes else auto
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
    except DAMAGE_ERRORS as error:
        raise InputError(f"{what} cannot be built from its config.json ({reason(error)})") from error
    empty = outline(lambda: auto.from_config(config, trust_remote_code=False), held, what, "its config.json")
    if not mixers(empty):
        said = f"{name} is a {type(empty).__name__}, which has no state-space layer that can be read;"
        raise InputError(f"{said} these types can: {', '.join(readable_types())}")
    check_kinds(empty, held.tensors, name)
    try:
        rescales = _rescales(config, asked=False)
        where_to: dict[str, Any] = {}
        if device_map is not None:
            where_to["device_map"] = device_of_parts(empty, device_map, dtype)
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
    except DAMAGE_ERRORS as error:
        for file in files:
            read_tensors(file)  # Its error says more clearly what is wrong with a file.
        what = f"the weights of {name} cannot be read, they are damaged or do not fit"
        raise InputError(f"{what}: {reason(error)}") from error
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if not OBSOLETE_TENSORS.search(key))
    if head_comes:
        module.score.weight.data.zero_()
        missing, unexpected = (sorted({*names} - {*REPLACED_HEADS}) for names in (missing, unexpected))
    check_names(missing, unexpected, config, name)
    _check_head(module, files, held.tensors, name)
    if dtype == torch.float64:
        _widen(module, files)
    return OwnModel(module, "") if auto is transformers.AutoModel else module


def _class_for(architectures: Sequence[str], name: str) -> Any:
    """Return transformers' class for the named architectures; a language model's if none is named."""
    if any(head in each for each in architectures for head in ("TokenClassification", "QuestionAnswering")):
        raise InputError(
            f"{name} is a {architectures[0]}, which gives an answer per token; ssmscope explains one answer per text: "
            "load it with transformers, and give ssmscope a module around it whose forward pass returns the logits of "
            "the token in question, or its backbone"
        )
    if any("SequenceClassification" in each for each in architectures):
        return transformers.AutoModelForSequenceClassification
    bare = architectures and all(each.endswith("Model") and not each.endswith("LMHeadModel") for each in architectures)
    return transformers.AutoModel if bare else transformers.AutoModelForCausalLM


def _widen(module: nn.Module, files: list[Path]) -> None:
    """Read the weights again that transformers has rounded to the float32 in which a layer creates them, as A_log."""
    rounded = {name: t for name, t in module.named_parameters() if t.dtype == torch.float32}
    module.double()
    stored = {name: t for file in files if rounded for name, t in read_tensors(file).items()}
    with torch.no_grad():
        for name in rounded.keys() & stored.keys():
            module.get_parameter(name).copy_(stored[name])


def _check_head(module: Any, files: list[Path], held: Mapping[str, Any], name: str) -> None:
    """Raise InputError if transformers replaced a stored head with the embeddings, or the reverse."""
    head, embeddings = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or not getattr(module.config, "tie_word_embeddings", False):
        return
    names = {id(part): f"{at}.weight" for at, part in module.named_modules() if part is head or part is embeddings}
    stored = [names[id(part)] for part in (head, embeddings)]
    if all(each in held for each in stored):
        tensors = {n: t for file in files for n, t in read_tensors(file).items() if n in stored}
        check_tied(tensors[stored[0]], tensors[stored[1]], name)


TOKENIZER_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")


def fetched(source: str | os.PathLike[str], files: Collection[str]) -> Path:
    """Return the directory of that name, or one with the hub's files of these patterns."""
    where = Path(source).expanduser()
    return where if where.is_dir() else Path(snapshot_download(str(source), allow_patterns=list(files)))


def read_tokenizer(source: str | os.PathLike[str]) -> Any:
    """Return transformers' tokenizer of a directory or hub id, without running or offering to run any of its code.
    Raises InputError if there is none, its files are damaged or name other files, or it needs code of its own."""
    what = f"the tokenizer {str(source)[:200]!r}"
    try:
        with quiet():
            where = fetched(source, TOKENIZER_PATTERNS)
            if (where / "tokenizer_config.json").is_file():
                check_tokenizer(read_object(where / "tokenizer_config.json"), what)
            if (where / "config.json").is_file() and "configuration_files" in read_object(where / "config.json"):
                raise InputError(f"{what} has a config.json that names others (configuration_files): give theirs alone")
            # Without trust_remote_code=False, transformers asks on stdout whether to run the directory's code.
            found = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=True)
            found("", verbose=False)  # Some damage only shows in use.
            return found
    except InputError:
        raise
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, DAMAGE_ERRORS):  # tokenizers raises this.
            raise
        raise InputError(f"{what} cannot be loaded: {reason(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' hints about kernels, which our scan does not use, and its progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
