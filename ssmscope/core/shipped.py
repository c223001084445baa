"""What there is, told without importing a model: the trained models that ship, and the types that can be read."""

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
"""In what models are loaded."""


def demos() -> dict[str, Path]:
    """The shipped trained models: `demo/NAME` and their directories."""
    return {f"demo/{path.parent.name}": path.parent for path in sorted((PACKAGE / "demo").glob("*/config.json"))}


def training_data(directory: Path) -> dict[str, Any]:
    """The data in the record of a model's training; empty without a record."""
    try:
        return dict(json.loads((directory / "training.json").read_bytes())["data"]["train"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def data_set_of(data: Mapping[str, Any]) -> str | None:
    """The name of the data set in a record of training; None for a file, which a record could place anywhere."""
    name = str(data.get("name", ""))
    return None if not name or set(name) & {".", "/", "\\"} else name


@cache
def readable_types() -> tuple[str, ...]:
    """The transformers model types with layers that can be read: of every architecture that the installed transformers
    has, the `MODEL_TYPES` that its file declares."""
    library = find_spec("transformers")
    families = Path(*(library.submodule_search_locations or [])) / "models" if library is not None else Path()
    later = _declared(PACKAGE / "architectures" / "__init__.py", "LATER")
    found = {"ssm-classifier"}
    for file in (file for room in ("read", "own") for file in (PACKAGE / "architectures" / room).glob("*.py")):
        if file.stem not in later or (families / file.stem).is_dir():
            found |= set(_declared(file, "MODEL_TYPES"))
    return tuple(sorted(found))


def _declared(file: Path, name: str) -> Any:
    """The literal that a module assigns to a name; nothing where it does not."""

    def literals() -> Iterator[Any]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                value = getattr(node, "value", None)
                yield () if value is None else ast.literal_eval(value)

    return next(literals(), ())
