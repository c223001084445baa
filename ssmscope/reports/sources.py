"""Checks, before anything runs, that the models, data and files of a plan can be read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssmscope.api.analysis import Call
from ssmscope.api.inputs import LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL, Texts
from ssmscope.api.options import Option
from ssmscope.core.known_models import PACKAGE, data_set_of, training_data
from ssmscope.data.columns import reading
from ssmscope.data.pairs import read_pairs
from ssmscope.errors import InputError, did_you_mean
from ssmscope.reports.plan import Plan, PlannedModel

MAX_BYTES_CHECKED = 64 * 2**20
"""Maximum size of data files that are read completely beforehand; larger ones only need to exist."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
WEIGHT_SUFFIXES = (".safetensors", ".bin")


def check_sources(plan: Plan) -> None:
    """Raise InputError, naming the analysis, for data and files of a plan that are missing or do not fit."""
    for planned in plan.calls:
        kinds = []
        for model in planned.models:
            place = _place(model.model)
            kinds.append(None if place is None else kind_of(place, tokenizer=model.tokenizer is not None))
        call = planned.call
        can = call.analysis.models if planned.kinds is None else planned.kinds
        if any(kind is not None and kind not in can for kind in kinds):
            continue
        try:
            check_files(call)
            reads = call.analysis.reads
            if reads is not None:
                for kind in kinds:
                    reads.check_kind(kind, {**call.options, **call.inputs})
            with reading(call.inputs.get("columns")):
                for option, value in call.option_values():
                    if option.reads is not None and option.reads.kind == "pairs":
                        _ = value is None or read_pairs(value)
                    elif option.name == "data" and (value is not None or not isinstance(call.analysis.reads, Texts)):
                        for model, kind in zip(planned.models, kinds):
                            _check_data_of(model, kind, call, option, value)
        except InputError as error:
            raise InputError(f"{planned.where}: {error}") from error


def _check_data_of(model: PlannedModel, kind: str | None, call: Call, option: Option, data: Any) -> None:
    """Check a call's data for a model; the training data of a hub model is unknown before it is downloaded."""
    place, reads = _place(model.model), call.analysis.reads
    if data is None and reads is not None and not reads.wants_data(kind):
        return
    if data is None:
        data = None if place is None else data_set_of(training_data(place))
    lines = option.reads is not None and option.reads.kind == "lines"
    lines = lines or (reads is not None and reads.reads_lines(kind))
    if data is not None or place is not None:
        split = {**call.options, **call.inputs}.get("split")
        check_data(None if data is None else str(data), split, kind, lines=lines)


def _place(name: str) -> Path | None:
    """Return the location of a model's files on this machine; None for hub ids and missing files."""
    place = PACKAGE / name if name.startswith("demo/") else Path(name)
    return place if place.exists() else None


def check_model(name: str, place: Path) -> None:
    """Refuse a model's directory that cannot be loaded, judged by its configuration and file names alone."""
    from ssmscope.core.known_models import readable_types
    from ssmscope.loading.layouts import layout_of

    file = place / "config.json"
    if place.is_file() or not file.is_file():  # It is a state dict, or a directory of checkpoints.
        return
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{name}: {file} is not valid JSON: {' '.join(str(error).split()):.80}") from error
    if not isinstance(config, dict):
        raise InputError(f"{name}: {file} is not a model configuration: a JSON object was expected")
    if not any(each.suffix in WEIGHT_SUFFIXES for each in place.iterdir()):
        suffixes = " or ".join(WEIGHT_SUFFIXES)
        raise InputError(f"{name} has no weights: a model's directory holds config.json and {suffixes}")
    kind = config.get("model_type")
    if layout_of(place, config) is None:
        from transformers import CONFIG_MAPPING

        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            if kind is None:
                raise InputError(f"{name}: {file} names no model_type; write its architecture's, such as 'mamba2'")
            raise InputError(f"{name}: model type {kind!r:.60} is unknown{did_you_mean(str(kind), readable_types())}")


def check_files(call: Call) -> None:
    """Raise InputError, naming the option, if a file or folder that a call reads does not exist."""
    for option, value in call.option_values():
        if option.reads is None or value is None or option.reads.kind not in ("file", "folder"):
            continue
        for name in value if isinstance(value, list | tuple) else [value]:
            name = os.fspath(name)
            if name in option.reads.besides:
                continue
            if option.reads.kind == "folder" and not os.path.isdir(name):
                raise InputError(
                    f"{option.name} {name!r:.200}: there is no such directory; fit one with analyze lens fit"
                )
            if option.reads.kind == "file" and not (os.path.isfile(name) and os.access(name, os.R_OK)):
                raise InputError(f"{option.name} {name!r:.200}: there is no such file that can be read")


def check_data(data: str | None, split: str | None, kind: str | None, *, lines: bool = False) -> None:
    """Refuse data, lines of text or labelled examples, that cannot be loaded for a model of the given kind. Neither the
    files of a known data set in `$SSMSCOPE_DATA` are read, nor is the hub contacted."""
    from ssmscope.data import pixels
    from ssmscope.data.hub import is_hub_id, part_of
    from ssmscope.data.language import load_lines
    from ssmscope.data.rows import SUFFIXES, check_split, checked_path
    from ssmscope.data.text import LINE_SOURCES, SOURCES, known_splits, load_text

    known: Mapping[str, Any] = LINE_SOURCES if lines else SOURCES
    if not lines and (kind == PIXEL_CLASSIFIER or (kind is None and data in pixels.KNOWN)):
        known = dict.fromkeys(pixels.KNOWN, pixels.CIFAR10)
    suffixes = () if kind == PIXEL_CLASSIFIER else (".txt", *SUFFIXES) if lines else SUFFIXES
    files = f", or a file ending in {', '.join(suffixes)}" if suffixes else ""
    if data is None:
        raise InputError(f"no data; give data, one of {', '.join(known)}{files}")
    if is_hub_id(data) and suffixes:
        return
    if data in known:
        if data != "digits":
            _check_split(data, part_of(split).split if split else known[data].default_split, known[data].splits)
        return
    path = Path(data)
    if not lines and suffixes and os.path.isdir(path):
        check_split(data, split or "test", known_splits(path))
        return
    if path.suffix.lower() not in suffixes:
        raise InputError(f"unknown data {data!r:.80}; give one of {', '.join(known)}{files}{did_you_mean(data, known)}")
    if not path.is_file():
        raise InputError(f"there is no file {data!r:.200}; give one of {', '.join(known)}{files}")
    checked_path(path, known, split, suffixes=suffixes)
    if path.stat().st_size <= MAX_BYTES_CHECKED:
        load_lines(path) if lines else load_text(path)


def _check_split(data: str, split: str, splits: Sequence[str]) -> None:
    from ssmscope.data.rows import check_split
    from ssmscope.data.text import split_file

    root = os.environ.get("SSMSCOPE_DATA")
    if root:
        split_file(Path(root, data), split)
    else:
        check_split(data, split, splits)


def kind_of(where: Path, *, tokenizer: bool = False) -> str | None:
    """Return the kind of the model in a directory or file, with a separate `tokenizer` or without; None if unknown, as
    for a directory of checkpoints."""
    from ssmscope.loading.layouts import layout_of, reads_pictures
    from ssmscope.loading.stored import read_headers

    if where.is_file():  # A single file is a classifier.
        with suppress(InputError):  # Loading reports a file that cannot be read.
            if reads_pictures(read_headers(where)):
                return PIXEL_CLASSIFIER
        return TEXT_CLASSIFIER if tokenizer else TOKEN_CLASSIFIER
    try:
        config = json.loads((where / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    if (layout := layout_of(where, config)) is not None and layout.pictures:
        return PIXEL_CLASSIFIER
    tokenizer = tokenizer or any((where / name).exists() for name in TOKENIZER_FILES)
    if any("SequenceClassification" in str(name) for name in config.get("architectures") or []):
        if config.get("channels") is not None:
            return PIXEL_CLASSIFIER
        return TEXT_CLASSIFIER if tokenizer else TOKEN_CLASSIFIER
    return LANGUAGE_MODEL if tokenizer else TOKEN_MODEL
