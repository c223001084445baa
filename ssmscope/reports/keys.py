"""Keys of jobs: hashes of a call's options, and of the code, models, data and files that its result depends on.

The code is all source files in the folder of the verb's function and in the folders that these import, directly or
indirectly. It is read, not run, and does not depend on machine or installation.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ssmscope.api.analysis import LOADING_OPTIONS, Call
from ssmscope.api.options import plain
from ssmscope.core.known_models import PACKAGE
from ssmscope.errors import InputError

DESCRIPTIVE_SUFFIXES = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf")
"""Suffixes of files that only describe a model, such as its card and pictures."""
ROOT = PACKAGE
BYTES_PER_READ = 2**20
SUFFIXES = (".py", ".c", ".h", ".cu", ".json", ".txt")
IMPORT = re.compile(r"^ *(?:from|import) ssmscope\.([\w.]+)(?: import (\w+))?", re.MULTILINE)
BY_NAME = (
    *("api", "backends", "backends/c", "backends/triton"),
    *sorted(file.parent.name for file in PACKAGE.glob("*/entries.py")),
)
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


def json_options(call: Call) -> dict[str, Any]:
    """Return a call's inputs, options and loading options as JSON values."""
    every = {option.name: plain(value) for option, value in call.option_values()}
    return {**every, **{name: plain(getattr(call, name)) for name in LOADING_OPTIONS}}


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
