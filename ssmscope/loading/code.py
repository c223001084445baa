"""Models that a user's own Python code makes, by an import string: `path/to/file.py:name` or `package.module:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean

IMPORT_STRING = re.compile(r"(?P<where>.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)", re.DOTALL)


def is_import_string(name: str) -> bool:
    """Return True for an import string, unless a file or directory has this name."""
    return IMPORT_STRING.fullmatch(name) is not None and not os.path.exists(name)


def model_of_code(name: str) -> Model | nn.Module:
    """Import the code that an import string names, and return its model: what it names, or what that returns when it is
    called without arguments. The code runs, with all that it may do.

    Raises InputError if the code cannot be found or fails, or gives something else; an InputError of its own passes.
    """
    found = IMPORT_STRING.fullmatch(name)
    assert found is not None, name
    where, attribute = found["where"], found["name"]
    try:
        module = _of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        if not hasattr(module, attribute):
            said = f"{where} has no {attribute!r}; give the name of a model, or of a function that returns one"
            near = did_you_mean(attribute, [each for each, value in vars(module).items() if callable(value)])
            raise InputError(said + near)
        made: Any = getattr(module, attribute)
        made = made if isinstance(made, Model | nn.Module) else made() if callable(made) else made
    except InputError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if at.filename.startswith("<") else f" (line {at.lineno} of {at.filename})"
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise InputError(f"the code of {name} failed with {said}{where}") from error
    if not isinstance(made, Model | nn.Module):
        said = f"{name} gives a {type(made).__name__}; it has to give a torch module, or what ssmscope.load returns"
        raise InputError(said)
    return made


def _of_file(path: Path) -> ModuleType:
    """Import a file, once, with its directory among those that it can import from."""
    if not path.is_file():
        raise InputError(f"there is no file {path}; give path/to/file.py:NAME, or package.module:NAME")
    path = path.resolve()
    name = f"{path.stem}_{zlib.crc32(os.fsencode(path)):x}"  # The file may be called as a module that is in use.
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
