"""Jobs of a plan: its calls, each with a key of everything its result depends on, and checks that its models, data and
files can be read."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ssmscope.api.analysis import Call
from ssmscope.api.inputs import LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL, Texts
from ssmscope.api.options import Option, plain
from ssmscope.core.readable import PACKAGE, data_set_of, training_data
from ssmscope.errors import InputError, did_you_mean
from ssmscope.reports.plan import Plan, PlannedCall, PlannedModel


@dataclass(frozen=True)
class Job:
    """One call to run: its key (16 hex digits of the SHA-256 of everything the result depends on), its models'
    shown names, the CPUs and GPUs that it needs of a cluster, and torch's `threads`, None for the default."""

    key: str
    heading: str
    call: Call
    models: tuple[str, ...]
    cpus: float
    gpus: float
    threads: int | None

    @property
    def verb(self) -> str:
        return self.call.name

    @property
    def command(self) -> str:
        return self.call.command

    @property
    def options(self) -> dict[str, Any]:
        return json_options(self.call)


@dataclass(frozen=True)
class Jobs:
    """Jobs of a plan in its order; `models` has each model's id, kind and fingerprint by name."""

    every: tuple[Job, ...]
    models: Mapping[str, Mapping[str, Any]]

    def to_run(self) -> list[Job]:
        """Return one job per key, ordered by model so that each model is loaded once."""
        once = {job.key: job for job in self.every}
        order = {names: i for i, names in enumerate(dict.fromkeys(job.call.models for job in once.values()))}
        return sorted(once.values(), key=lambda job: order[job.call.models])


def make_jobs(plan: Plan) -> Jobs:
    """Make the jobs of a plan; models, data and files are checked, but nothing is loaded or run. Raise InputError for a
    model, data or file that cannot be found or read, a verb that does not support a model and is not restricted by
    `for`, or a plan without any job."""
    check_sources(plan)

    from ssmscope.architectures.loading.load import locate, trained_on

    prints = Fingerprints()
    places = {model.name: locate(model.model) for model in plan.models}
    known = {model.name: _known(model, places[model.name], prints) for model in plan.models}
    jobs = []
    for planned in plan.calls:
        models = [model for model in planned.models if _wanted(planned, known[model.name]["kind"])]
        if len(models) < len(planned.models):
            continue
        call = _with_data(planned.call, trained_on)
        jobs.append(_job(key_of(call, [known[model.name] for model in models], prints), planned, call))
    if not jobs:
        kinds = ", ".join(f"{name} is a {each['kind'] or 'model of no known kind'}" for name, each in known.items())
        raise InputError(f"no analysis of the plan is for these models: {kinds}")
    return Jobs(tuple(jobs), known)


def _known(model: PlannedModel, place: Path, prints: Fingerprints) -> dict[str, Any]:
    from ssmscope.architectures.loading.load import locate
    from ssmscope.architectures.loading.pretrained import base_of, is_adapter

    check_model(model.model, place)
    try:
        files = prints.of_model(place)
        if is_adapter(place):
            files += prints.of_model(base_of(place, model.model, locate))
    except OSError as error:
        raise InputError(f"the files of {model.model} cannot be read: {error.strerror or error}") from error
    return {"model": model.model, "kind": kind_of(place, tokenizer=model.tokenizer is not None), "files": files}


def _wanted(planned: PlannedCall, kind: str | None) -> bool:
    if planned.kinds is not None:
        return kind in planned.kinds
    can = planned.call.analysis.models
    if kind is None or kind in can:
        return True
    names = ", ".join(model.name for model in planned.models)
    raise InputError(
        f"{planned.where} does not support {names}, of kind {kind}; it supports {', '.join(can)}: list its models, or "
        f"add 'for: [{', '.join(can)}]'"
    )


def _with_data(call: Call, trained_on: Callable[[str], str | None]) -> Call:
    """Fill in the default data of a call: the data that its model was trained on."""
    if isinstance(call.analysis.reads, Texts) or call.inputs.get("data", "") is not None:
        return call
    return replace(call, inputs={**call.inputs, "data": trained_on(call.models[0])})


def _contents(call: Call, prints: Fingerprints) -> dict[str, list[str | None]]:
    """Return the fingerprints of the files and data sets that a call reads, by option."""
    named = [(each.name, value) for each, value in call.option_values() if each.reads is not None]
    found: dict[str, list[str | None]] = {}
    for name, value in [*named, ("tokenizer", call.tokenizer)]:
        if value is None:
            continue
        try:
            each = value if isinstance(value, list | tuple) else [value]
            found[name] = [prints.of_data(str(one)) for one in each]
        except OSError as error:
            raise InputError(f"{name} {value} cannot be read: {error.strerror or error}") from error
    return found


def key_of(call: Call, models: Iterable[Mapping[str, Any]], prints: Fingerprints) -> str:
    """Return the key of a call's job: a hash of all options with an effect and of the content of all that it reads;
    `models` have their id as "model" and their files' fingerprint as "files"."""
    without = {option.name for option, _ in call.option_values() if option.no_effect}
    essence = {
        "analysis": call.name,
        "options": {name: value for name, value in json_options(call).items() if name not in without},
        "models": [[model["model"], model["files"]] for model in models],
        "contents": _contents(call, prints),
        "code": code_of(call.analysis.function),
    }
    return hashlib.sha256(json.dumps(essence, sort_keys=True).encode()).hexdigest()[:16]


def _job(key: str, planned: PlannedCall, call: Call) -> Job:
    from ssmscope.architectures.loading.load import chosen_device

    cpus, names = planned.resources.get("cpus"), tuple(model.name for model in planned.models)
    gpus = planned.resources.get("gpus", float(chosen_device(call.device).startswith("cuda")))
    threads = None if cpus is None else max(1, int(cpus))
    return Job(key, planned.heading, call, names, 1.0 if cpus is None else cpus, gpus, threads)


def json_options(call: Call) -> dict[str, Any]:
    """Return a call's inputs, options and loading options as JSON values."""
    every = {option.name: plain(value) for option, value in call.option_values()}
    return {**every, "tokenizer": call.tokenizer, "device": call.device, "dtype": call.dtype}


# ---- models, data and files that can be read

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
            for option, value in call.option_values():
                if option.name == "data" and (value is not None or not isinstance(call.analysis.reads, Texts)):
                    for model, kind in zip(planned.models, kinds):
                        _check_data_of(model, kind, call, option, value)
        except InputError as error:
            raise InputError(f"{planned.where}: {error}") from error


def _check_data_of(model: PlannedModel, kind: str | None, call: Call, option: Option, data: Any) -> None:
    """Check a call's data for a model; the training data of a hub model is unknown before it is downloaded."""
    place, reads = _place(model.model), call.analysis.reads
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
    from ssmscope.architectures.loading.layouts import layout_of
    from ssmscope.core.readable import readable_types

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
    from ssmscope.data.language import load_lines
    from ssmscope.data.rows import SUFFIXES, checked_path
    from ssmscope.data.text import LINE_SOURCES, SOURCES, load_text

    known: Mapping[str, Any] = LINE_SOURCES if lines else SOURCES
    if not lines and (kind == PIXEL_CLASSIFIER or (kind is None and data in pixels.KNOWN)):
        known = dict.fromkeys(pixels.KNOWN, pixels.CIFAR10)
    suffixes = () if kind == PIXEL_CLASSIFIER else (".txt", *SUFFIXES) if lines else SUFFIXES
    files = f", or a file ending in {', '.join(suffixes)}" if suffixes else ""
    if data is None:
        raise InputError(f"no data; give data, one of {', '.join(known)}{files}")
    if data in known:
        if data != "digits":
            _check_split(data, split or known[data].default_split, known[data].splits)
        return
    path = Path(data)
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
    if where.is_file():  # A single file is a selective SSM, a classifier.
        return TEXT_CLASSIFIER if tokenizer else TOKEN_CLASSIFIER
    try:
        config = json.loads((where / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    tokenizer = tokenizer or any((where / name).exists() for name in TOKENIZER_FILES)
    if any("SequenceClassification" in str(name) for name in config.get("architectures") or []):
        if config.get("channels") is not None:
            return PIXEL_CLASSIFIER
        return TEXT_CLASSIFIER if tokenizer else TOKEN_CLASSIFIER
    return LANGUAGE_MODEL if tokenizer else TOKEN_MODEL


# ---- fingerprints of code and files
# The code that a job depends on is all source files in the folder of the verb's function and in the folders that these
# import, directly or indirectly. It is read, not run, and does not depend on machine or installation.

DESCRIPTIVE_SUFFIXES = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf")
"""Suffixes of files that only describe a model, such as its card and pictures."""
ROOT = PACKAGE
SUFFIXES = (".py", ".c", ".h", ".cu", ".json", ".txt")
BYTES_PER_READ = 2**20
IMPORT = re.compile(r"^ *(?:from|import) ssmscope\.([\w.]+)(?: import (\w+))?", re.MULTILINE)
BY_NAME = ("api", "architectures/own", "architectures/read", "backends", "backends/c", "backends/triton")
"""Folders that every call uses, some of whose modules are imported by name."""
UNUSED = ("api/analyses.py", "__init__.py", "__main__.py")
"""Files that change no number: the table of analyses and the package's own names."""


@cache
def code_of(function: Callable[..., Any]) -> str:
    """Return 16 hex digits of the SHA-256 of all code that a function may run."""
    home = Path(inspect.getfile(inspect.unwrap(function))).parent
    home = ROOT / home.relative_to(PACKAGE) if home.is_relative_to(PACKAGE) else home
    found, left = {home}, [home, *(ROOT / name for name in BY_NAME)]
    while left:
        folder = left.pop()
        left += imported(folder) - found
        found |= {folder, *left}
    digests = [f"{os.path.relpath(folder, ROOT)}\0{digest(folder)}" for folder in found - {home}]
    return hashlib.sha256("\0".join([digest(home), *sorted(digests)]).encode()).hexdigest()[:16]


def _sources(folder: Path) -> list[Path]:
    unused = [ROOT / name for name in UNUSED]
    return sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file not in unused)


@cache
def digest(folder: Path) -> str:
    """Return a hash of the names and texts of a folder's source files."""
    texts = [f"{file.name}\0{file.read_text(encoding='utf-8')}" for file in _sources(folder)]
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()


@cache
def imported(folder: Path) -> frozenset[Path]:
    """Return the folders of the package from which a folder's modules import."""
    found = set()
    for file in _sources(folder):
        for module, name in IMPORT.findall(file.read_text(encoding="utf-8") if file.suffix == ".py" else ""):
            place = ROOT.joinpath(*module.split("."), name)
            while not place.is_dir():
                place = place.parent
            found.add(place)
    return frozenset(found)


class Fingerprints:
    """Hashes of files, each computed once."""

    def __init__(self) -> None:
        self._known: dict[Path, str] = {}

    def of_model(self, where: Path) -> str:
        """Return the fingerprint of a weights file, of a model's directory, or of a directory of checkpoints."""
        if where.is_file():
            return self._of_file(where)
        inside = where.glob("*") if (where / "config.json").is_file() else where.rglob("*")
        return self._of_files(where, (file for file in inside if file.suffix not in DESCRIPTIVE_SUFFIXES))

    def of_data(self, name: str) -> str | None:
        """Return the fingerprint of a file, a directory, or a known data set in `$SSMSCOPE_DATA`; None for others."""
        if not name.strip():
            return None
        if os.path.isfile(name):
            return self._of_file(Path(name))
        if os.path.isdir(name):
            return self._of_files(Path(name), Path(name).rglob("*"))
        root = os.environ.get("SSMSCOPE_DATA")
        if root and Path(name).name == name and os.path.isdir(os.path.join(root, name)):
            return self._of_files(Path(root, name), Path(root, name).glob("*.parquet"))
        return None

    def _of_files(self, root: Path, files: Iterable[Path]) -> str:
        digest = hashlib.sha256()
        for file in sorted(files):
            inside = file.relative_to(root)
            if file.is_file() and not any(part.startswith(".") for part in inside.parts):
                digest.update(f"{inside.as_posix()}\0{self._of_file(file)}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]

    def _of_file(self, file: Path) -> str:
        place = file.resolve()
        if place not in self._known:
            digest = hashlib.sha256()
            with place.open("rb") as stream:
                while block := stream.read(BYTES_PER_READ):
                    digest.update(block)
            self._known[place] = digest.hexdigest()[:16]
        return self._known[place]
