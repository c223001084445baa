"""Names of the shipped trained models and the readable model types, found without importing a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssmscope.core.readable import OURS, TEXT_TYPES, THEIRS

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
    """Return the model types with readable layers, ours and those that the installed transformers has."""
    library = find_spec("transformers")
    families = Path(*(library.submodule_search_locations or [])) / "models" if library is not None else Path()
    theirs = {TEXT_TYPES.get(name, name) for name in THEIRS if (families / name).is_dir()}
    return tuple(sorted({"ssm-classifier", *OURS, *theirs}))
