"""Analyses by name: those of `ssmscope.api.analyses.ANALYSES`, and those that other code declares with `@analysis`.

A package of an analysis is imported when it is asked for. Its `__init__` declares the analysis and imports slow modules
only when it runs, so that all packages are imported in a fraction of a second.
"""

from __future__ import annotations

import importlib
from typing import Any

from ssmscope.api.analyses import ANALYSES
from ssmscope.errors import InputError, did_you_mean

_added: dict[str, Any] = {}
"""Analyses that are not in the table, by name."""


def add(analysis: Any) -> None:
    """Register an analysis. Raise TypeError if another module has one of the same name."""
    home, _ = _functions().get(analysis.name, (analysis.module, ""))
    if home != analysis.module:
        raise TypeError(f"the analysis {analysis.name!r} of {analysis.module} is already that of {home}")
    if analysis.name not in ANALYSES:
        _added[analysis.name] = analysis


def analysis_of(name: str) -> Any:
    """Return the analysis of a name, importing its package only; for others raise InputError, naming the nearest."""
    known = _functions()
    if name not in known:
        raise InputError(f"no analysis {name!r:.80}; there are {', '.join(known)}{did_you_mean(name, known)}")
    module, function = known[name]
    return _added[name] if name in _added else getattr(importlib.import_module(module), function).analysis


def analyses() -> dict[str, Any]:
    """Return all analyses by name, in the order of the table."""
    return {name: analysis_of(name) for name in _functions()}


def results() -> dict[str, str]:
    """Return the module that defines each kind of result of an analysis."""
    return {kind: f"ssmscope.{module}" for entry in ANALYSES.values() for kind, module in entry.results.items()}


def functions() -> dict[str, tuple[str, str]]:
    """Return module and name of each analysis's function, by its name."""
    return {function: (module, function) for module, function in _functions().values()}


def verbs() -> dict[str, tuple[str, str]]:
    """Return module and name of each analysis's function, by its verb as a Python name: "lens_show" for "lens show"."""
    return {name.replace(" ", "_").replace("-", "_"): place for name, place in _functions().items()}


def _functions() -> dict[str, tuple[str, str]]:
    """Return module and name of each analysis's function, by the analysis's name."""
    parts = {name: entry.function.partition(":") for name, entry in ANALYSES.items()}
    found = {name: (f"ssmscope.{package}", function) for name, (package, _, function) in parts.items()}
    return found | {name: (each.module, each.function.__name__) for name, each in _added.items()}
