"""Interpretability and robustness of trained state-space models.

    import ssmscope

    model = ssmscope.load("demo/sst2-mamba2")
    trace = model.trace("A gripping, beautifully acted film.")
    ssmscope.selection_heatmap(trace)

A verb of the command line is a name for its function: `ssmscope.heatmap` is `selection_heatmap`.

Importing this package is quick: torch and transformers come with the first name that needs them. transformers' Auto
classes know our model types once `ssmscope.architectures` is imported, which `load` does; to read such a model's
directory with transformers alone, write `import ssmscope.architectures` first.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_NAMES = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: home for home, name in re.findall(r"^from (\S+) import (\w+)", _NAMES, re.MULTILINE)}
_VERBS = {
    "lens": ("ssmscope.probes.lens", "trajectory"),
    "models": ("ssmscope.core.known_models", "demos"),
    "push": ("ssmscope.reports.hub", "push"),
    "report": ("ssmscope.reports.running", "run_plan"),
    "serve": ("ssmscope.reports.serving", "serve"),
    "train": ("ssmscope.training", "train_model"),
}
"""Functions of verbs that no analysis declares; the verbs of analyses have their functions' names."""


def __getattr__(name: str) -> Any:
    if _HOMES.get(name) == "ssmscope":
        return importlib.import_module(f"ssmscope.{name}")
    home = (_HOMES[name], name) if name in _HOMES else _VERBS.get(name)
    if home is None and (name == "__all__" or not _is_module(name)):
        registry = importlib.import_module("ssmscope.api.registry")
        if name == "__all__":
            return ["__version__", *sorted({*_HOMES, *registry.functions()})]
        home = registry.functions().get(name) or registry.verbs().get(name)
    if home is None:
        raise AttributeError(f"module 'ssmscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(home[0]), home[1])
    globals()[name] = value
    return value


def _is_module(name: str) -> bool:
    """Return True if a module here has this name; the import system finds it, and no analysis is looked for."""
    place = Path(__file__).parent / name
    return name.startswith("_") or place.is_dir() or place.with_suffix(".py").is_file()


def __dir__() -> list[str]:
    return sorted({*__getattr__("__all__"), *_VERBS, *importlib.import_module("ssmscope.api.registry").verbs()})
