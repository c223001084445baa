"""Names of the shipped trained models and the readable model types, found without importing a model."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Types in which models are loaded."""


def demos() -> dict[str, Path]:
    """Return the shipped trained models: `demo/NAME` and their directories."""
    return {f"demo/{path.parent.name}": path.parent for path in sorted((PACKAGE / "demo").glob("*/config.json"))}


def training_data(directory: Path) -> dict[str, Any]:
    """Return the data in the record of a model's training; empty without a record."""
    try:
        return dict(json.loads((directory / "training.json").read_bytes())["data"]["train"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def data_set_of(data: Mapping[str, Any]) -> str | None:
    """Return the data set's name in a record of training; None for a file, which may be anywhere."""
    name = str(data.get("name", ""))
    return None if not name or set(name) & {".", "/", "\\"} else name


@cache
def readable_types() -> tuple[str, ...]:
    """Return the model types with readable layers that the installed transformers has: `MODEL_TYPES` of
    architectures."""
    library = find_spec("transformers")
    families = Path(*(library.submodule_search_locations or [])) / "models" if library is not None else Path()
    later = _declared(PACKAGE / "architectures" / "__init__.py", "LAZY_FAMILIES")
    found = {"ssm-classifier"}
    for file in (file for room in ("read", "own") for file in (PACKAGE / "architectures" / room).glob("*.py")):
        if file.stem not in later or (families / file.stem).is_dir():
            found |= set(_declared(file, "MODEL_TYPES"))
    return tuple(sorted(found))


def _declared(file: Path, name: str) -> Any:
    """Return the literal that a module assigns to a name; nothing if it does not."""

    def literals() -> Iterator[Any]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value = getattr(node, "value", None)
                yield () if value is None else ast.literal_eval(value)

    return next(literals(), ())
