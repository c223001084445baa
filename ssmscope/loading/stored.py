"""Tensors in a model's files: their names, shapes and types, and checks that a model fits them.

A configuration is compared with them before memory is allocated for the model that it describes.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import threading
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from ssmscope.errors import UNPICKLABLE, InputError
from ssmscope.loading.fields import read_object

DAMAGE_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, OSError,
    RuntimeError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
"""Exceptions that transformers raises if a model's files are damaged, from anywhere in its code."""

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"


class Stored(NamedTuple):
    """Shape and kind of a tensor in a file."""

    shape: tuple[int, ...]
    floating: bool


def reason(error: BaseException) -> str:
    """Return an error's message, at most 200 characters in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file or a pickled state dict, by their `plain_name`. Raises InputError if the
    file is not what it claims to be, or a pickle holds anything but tensors."""
    return _named(_stored_tensors(path), path)


def read_all(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors of several files."""
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def _stored_tensors(path: Path, device: str = "cpu") -> Mapping[str, Tensor]:
    with _says_what_is_wrong(path):
        if path.suffix == ".safetensors":
            return load_file(path, device)
        with torch.serialization.safe_globals([argparse.Namespace]):  # Options of a training are allowed and not read.
            found = torch.load(path, map_location=device, weights_only=True)
    for name in ("state_dict", "model"):
        found = found[name] if isinstance(found, Mapping) and isinstance(found.get(name), Mapping) else found
    named = isinstance(found, Mapping) and all(isinstance(n, str) and isinstance(t, Tensor) for n, t in found.items())
    if not named or not found:
        raise InputError(f"{path} holds no state dict: names with tensors were expected")
    if odd := next((name for name, value in found.items() if value.layout != torch.strided), None):
        raise InputError(f"{path} holds the sparse tensor {odd}; dense ones can be read")
    return found


@contextmanager
def _says_what_is_wrong(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise InputError(f"{path} is not a complete safetensors file ({reason(error)})") from error
    except pickle.UnpicklingError as error:
        raise InputError(f"{path} is not opened: a pickle may hold tensors only, and this one holds more") from error
    except (*DAMAGE_ERRORS, *UNPICKLABLE, zipfile.BadZipFile) as error:
        told = "" if isinstance(error, IndexError) else f" ({reason(error)})"  # It is about pickle.
        raise InputError(f"{path} is not a readable PyTorch checkpoint{told}; give a model (ssmscope.load)") from error


def plain_name(name: str) -> str:
    """Return a weight's name without the prefixes of DataParallel, torch.compile and FSDP."""
    name = re.sub(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module)\.", "", name)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def _named(tensors: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        if plain_name(name) in found:
            raise InputError(f"{path} holds {plain_name(name)} twice, the second time as {name}: save the model anew")
        found[plain_name(name)] = value
    return found


def read_headers(path: Path) -> dict[str, Stored]:
    """Return the shapes and kinds of a file's tensors, by the names, and with the errors, of `read_tensors`."""
    return _named(_stored_headers(path), path)


def _stored_headers(path: Path) -> dict[str, Stored]:
    if path.suffix != ".safetensors":
        return headers_of(_stored_tensors(path, "meta"))
    with _says_what_is_wrong(path), safe_open(path, "pt") as opened:
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is not a mapping
        floating = {name: part.get_dtype().startswith(("F", "BF")) for name, part in parts.items()}
        return {name: Stored(tuple(part.get_shape()), floating[name]) for name, part in parts.items()}


def is_wrapped(files: Collection[Path]) -> bool:
    """Return True if weights were saved within a wrapper."""
    return any(name != plain_name(name) for file in files for name in _stored_headers(file))


def weight_files(directory: Path) -> list[Path]:
    """Return the files with a model's weights, as transformers chooses them. Raises InputError if there is none, or an
    index is damaged or names a file that is missing or in another directory."""
    for whole in (SAFETENSORS, PICKLED):
        index = directory / f"{whole}.index.json"
        if (directory / whole).exists():
            return [directory / whole]
        if index.exists():
            shards = read_object(index).get("weight_map")
            if not isinstance(shards, dict) or not shards or not all(isinstance(v, str) for v in shards.values()):
                raise InputError(f"{index} is not an index of weights: it must say which file holds which tensor")
            # Links are allowed: all files in the hub's cache are links.
            if outside := [n for n in shards.values() if n in ("", ".", "..") or set(n) & {"/", "\\", ":", "\0"}]:
                raise InputError(f"{index} names {outside[0]!r:.100}; allowed are names of files in its directory")
            files = [directory / name for name in dict.fromkeys(shards.values())]
            if absent := [file for file in files if not file.is_file()]:
                raise InputError(f"{index} names {absent[0].name}, which is not there")
            return files
    raise InputError(f"{directory} has no weights: neither {SAFETENSORS} nor {PICKLED}")


def check_finished(where: Path, name: str) -> None:
    """Raise InputError if a training or the fit of a lens is unfinished: it left a checkpoint and no final record."""
    ended = any(os.path.isfile(where / record) for record in ("training.json", "lens.json"))
    planned, built = os.path.isfile(where / "checkpoint" / "plan.json"), os.path.isfile(where / "config.json")
    if os.path.isdir(where / "checkpoint") and not ended and (planned or not built):
        raise InputError(f"{name} is unfinished: its training or fit was stopped, and the same command continues it")


def check_other_layouts(where: Path, name: str) -> None:
    """Raise InputError for files of llama.cpp, and for a directory of checkpoints without a model of its own."""
    within = sorted(where.iterdir()) if where.is_dir() else [where]
    layouts = [SAFETENSORS, PICKLED, f"{SAFETENSORS}.index.json", f"{PICKLED}.index.json"]
    if any(each.name in layouts for each in within):
        return
    if any(each.suffix.lower() == ".gguf" for each in within):
        said = f"{name} holds weights in GGUF (of llama.cpp), which is not read; give the directory, with config.json"
        more = "or, in Python, the model that transformers loads from it (gguf_file)"
        raise InputError(f"{said} and safetensors, that they were made from, {more}")
    steps = {each: each.name.partition("checkpoint-")[2] for each in within if each.name.startswith("checkpoint-")}
    saved = [each for each, step in steps.items() if step.isdecimal() and (each / "config.json").is_file()]
    if saved:
        latest = max(saved, key=lambda each: int(steps[each]))
        many = f"{len(saved)} checkpoints" if len(saved) > 1 else "a checkpoint"
        raise InputError(f"{name} is a folder with {many} and no model of its own: give {latest}")


class Contents(NamedTuple):
    """Headers of a model's tensors, and the size of its files."""

    tensors: dict[str, Stored]
    size: int
    """Total size of the files in bytes."""


def contents(files: Collection[Path], tensors: Mapping[str, Tensor] | None = None) -> Contents:
    """Return the content of files by their headers, or by the tensors that they stand for. Raises InputError as
    `read_tensors`."""
    if tensors is None:
        headers = {name: stored for file in files for name, stored in read_headers(file).items()}
    else:
        headers = headers_of(tensors)
    return Contents(headers, sum(file.stat().st_size for file in files))


def outline(build: Callable[[], Any], held: Contents, what: str, by: str) -> Any:
    """Build a model on the meta device; errors call it `what` and its configuration `by`. Raises InputError if it is
    larger than its files can fill, or cannot be built."""
    try:
        with torch.device("meta"), _no_larger(held):
            return build()
    except DAMAGE_ERRORS as error:
        raise InputError(f"{what} cannot be built from {by} ({reason(error)})") from error


EXTRA_PARTS = 100
"""Number of modules and parameters that a model may have beyond those that its files explain."""


@contextmanager
def _no_larger(held: Contents) -> Iterator[None]:
    """Stop this thread, within the context, from creating more modules, parameters and numbers than the files can fill.
    Tied weights are stored once and made twice, and quantised ones hold two numbers in a byte."""
    thread = threading.get_ident()
    count = len(held.tensors)
    most = {"tensors": 2 * count + EXTRA_PARTS, "numbers": 4 * held.size, "modules": 20 * count + EXTRA_PARTS}
    left = dict(most)

    def take(kind: str, amount: int) -> None:
        left[kind] -= amount
        if left[kind] < 0:
            said = f"it describes a model of more than {most[kind]:,} {kind},"
            raise InputError(f"{said} and the weights hold {len(held.tensors):,} tensors in {held.size:,} bytes")

    def made(_: nn.Module, name: str, part: Any) -> None:
        if part is not None and threading.get_ident() == thread:
            take("modules" if isinstance(part, nn.Module) else "tensors", 1)
            take("numbers", part.numel() if isinstance(part, Tensor) else 0)

    with hooks.register_module_parameter_registration_hook(made), hooks.register_module_module_registration_hook(made):
        yield


def check_names(missing: Collection[str], unexpected: Collection[str], config: Any, what: str) -> None:
    """Raise InputError for weights that are missing or have no place in the model, with fields they may contradict."""
    problems = {"they lack": missing, "the model that it describes has no place for": unexpected}
    for problem, names in problems.items():
        if names:
            which = next(iter(names)) if len(names) == 1 else f"{len(names)} tensors, the first {next(iter(names))}"
            said = f"{problem} {which}{_says(names, config)}"
            raise InputError(f"the weights of {what} do not fit its configuration: {said}")


def check_fit(module: nn.Module, held: Mapping[str, Stored], what: str) -> None:
    """Raise InputError if the names, shapes or kinds of weights are not the model's."""
    config = getattr(module, "config", None)
    wanted = module.state_dict()
    check_names(sorted(wanted.keys() - held.keys()), sorted(held.keys() - wanted.keys()), config, what)
    for name, tensor in wanted.items():
        if held[name].shape != tuple(tensor.shape):
            stored, own = (" × ".join(map(str, each)) or "a single number" for each in (held[name].shape, tensor.shape))
            said = f"{name} is {stored}, and the model's is {own}"
            raise InputError(f"the weights of {what} do not fit its configuration: {said}")
    check_kinds(module, held, what)


def check_kinds(module: nn.Module, held: Mapping[str, Stored], what: str) -> None:
    """Raise InputError for integers in place of floating-point weights, which would be used unscaled."""
    base = getattr(module, "base_model_prefix", "")
    for name, tensor in module.state_dict().items():
        found = held.get(name) or held.get(name.removeprefix(f"{base}."))
        if found is not None and tensor.is_floating_point() and not found.floating:
            raise InputError(f"the weights of {what} are damaged: {name} holds no floating-point numbers")


def check_tied(head: Tensor, embeddings: Tensor, what: str) -> None:
    """Raise InputError if a stored head differs from the embeddings with which the configuration ties it."""
    if head.shape != embeddings.shape or not torch.equal(head, embeddings):
        raise InputError(
            f"the weights of {what} do not fit its configuration: they hold a head other than the embeddings, and "
            "config.json says that the two are one (tie_word_embeddings, in mamba_ssm's layout tie_embeddings)"
        )


def _says(names: Collection[str], config: Any) -> str:
    config = getattr(config, "backbone", None) or config
    patterns = {
        "num_hidden_layers": r"\.\d+\.", "use_conv_bias": "conv.*bias$", "use_bias": "proj.*bias$",
        "tie_word_embeddings": "head",
    }  # fmt: skip
    wanted = [field for field, pattern in patterns.items() if any(re.search(pattern, name) for name in names)]
    said = [f"{field} is {getattr(config, field)}" for field in wanted if hasattr(config, field)]
    return f" (in its config.json {', '.join(said)})" if said else ""


class Plan(NamedTuple):
    """Plan of a model: `build` makes it, `translate` renames its tensors, `tied` says that its head is the
    embeddings."""

    build: Callable[[], Any]
    translate: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    tied: bool = False


def built(plan: Plan, tensors: Mapping[str, Tensor], held: Contents, what: str, by: str = "its config.json") -> Any:
    """Return a plan's model with a checkpoint's tensors, whose files hold `held`, in the widest of their dtypes, so
    that none is rounded. Raises InputError as `outline`, `check_fit` and `check_tied`."""
    weights = plan.translate(tensors)
    check_fit(outline(plan.build, held, what, by), headers_of(weights), what)
    if plan.tied:
        check_tied(weights["lm_head.weight"], weights["backbone.embeddings.weight"], what)
    module = plan.build()
    dtypes = {t.dtype for t in weights.values() if t.is_floating_point()}
    if dtypes:
        module.to(reduce(torch.promote_types, dtypes))
    module.load_state_dict(weights)
    return module


def headers_of(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Return the shapes and kinds of tensors."""
    return {name: Stored(tuple(t.shape), t.is_floating_point()) for name, t in tensors.items()}
