"""Registries of the readable layers and of our models, and the shipped models. A release of transformers need not have
every family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ssmscope.core.registry import Registry

LAYERS: Registry[Any] = Registry("layer", "ssmscope.layers")
"""Adapters of layers, by the full name of the layers' class."""
MODELS: Registry[Any] = Registry("model type", "ssmscope.models")
"""Modules of the model types that transformers lacks; they have their classes in `AUTO`."""
TEXT_TYPES: Registry[str] = Registry("model type", "ssmscope.text_types")
"""Folders in transformers of the model types that are not named as theirs."""
_TRANSFORMERS = "transformers.models."

PACKAGE = Path(__file__).parents[1]
DTYPES = ("float32", "float64", "bfloat16", "float16")


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


def of_transformers() -> dict[str, str]:
    """Return the folder of each readable family of transformers, of any release, by its model type."""
    folders = (name.split(".")[2] for name in LAYERS if name.startswith(_TRANSFORMERS))
    others = {folder: kind for kind, folder in TEXT_TYPES.places.items()}
    return {others.get(folder, folder): folder for folder in folders}


def import_family(kind: str) -> None:
    """Import what reads a model type of transformers: it may have a language model that the library lacks."""
    folder = of_transformers().get(kind, kind)
    for name in LAYERS:
        if name.startswith(f"{_TRANSFORMERS}{folder}."):
            LAYERS[name]


@cache
def readable_types() -> tuple[str, ...]:
    """Return the model types with readable layers, ours and those that the installed transformers has."""
    library = find_spec("transformers")
    families = Path(*(library.submodule_search_locations or [])) / "models" if library is not None else Path()
    theirs = {kind for kind, folder in of_transformers().items() if (families / folder).is_dir()}
    return tuple(sorted({*MODELS, *theirs}))
