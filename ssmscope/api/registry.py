"""The analyses by name: packages of `interp`, `probes` and `attacks` whose function is decorated with `@analysis`.

Nothing lists them: a package is found because it is there, and imported when it is asked for. Its `__init__` declares
the analysis and imports what is heavy when it runs, so that all of them are read in a fraction of a second.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from ssmscope.errors import InputError, did_you_mean

ROOMS = ("interp", "probes", "attacks")
"""Where packages of analyses are, in the order of the help."""

Analysis = Any
"""An `ssmscope.api.analysis.Analysis`, whose module is above this one."""

PAIR, PAIRED = "pair", "ssmscope.interp.paired"
"""The kind of what two models give side by side, and the module that defines it."""

_analyses: dict[str, Analysis] = {}


def add(analysis: Analysis) -> None:
    """Register an analysis.

    Raises:
        TypeError: another module has one of the same name.
    """
    known = _analyses.get(analysis.name)
    if known is not None and known.module != analysis.module:
        raise TypeError(f"the analysis {analysis.name!r} of {analysis.module} is already that of {known.module}")
    _analyses[analysis.name] = analysis


@cache
def packages() -> dict[str, str]:
    """Every package that declares an analysis, by its own name: {"heatmap": "ssmscope.interp.heatmap"}."""
    root = Path(__file__).parents[1]
    found = {}
    for room in ROOMS:
        for file in sorted(root.glob(f"{room}/*/__init__.py")):
            if re.search(r"^@analysis\(", file.read_text(encoding="utf-8"), re.MULTILINE):
                found[file.parent.name] = f"ssmscope.{room}.{file.parent.name}"
    return found


def analyses() -> dict[str, Analysis]:
    """All analyses by name, room by room."""
    for module in packages().values():
        importlib.import_module(module)
    order = {module: number for number, module in enumerate(packages().values())}
    return dict(sorted(_analyses.items(), key=lambda item: order.get(item[1].module, len(order))))


def find(name: str) -> Analysis | None:
    """The analysis of a name; None where there is none. Only its own package is imported."""
    module = packages().get(name.partition(" ")[0].replace("-", "_"))
    if module is not None:
        importlib.import_module(module)
    return _analyses.get(name)


def analysis_of(name: str) -> Analysis:
    """The analysis of a name.

    Raises:
        InputError: there is none; with the nearest name.
    """
    found = find(name)
    if found is None:
        known = list(analyses())
        raise InputError(f"no analysis {name!r:.80}; there are {', '.join(known)}{did_you_mean(name, known)}")
    return found


def home_of(kind: str) -> str | None:
    """The module that defines a kind of result, so that reading one imports nothing else; None for an unknown kind."""
    likely = find(kind)
    for analysis in [likely] if likely is not None and kind in likely.kinds else analyses().values():
        if kind in analysis.kinds:
            return PAIRED if kind == PAIR else f"{analysis.module}.result"
    return None


def kinds() -> list[str]:
    """The kinds of results that analyses give."""
    return list(dict.fromkeys(kind for analysis in analyses().values() for kind in analysis.kinds))


def functions() -> dict[str, str]:
    """The functions of analyses by name, and the packages that they are in."""
    return {analysis.function.__name__: analysis.module for analysis in analyses().values()}


def verbs() -> dict[str, tuple[str, str]]:
    """The names of analyses on the command line, as Python writes them, with the package and the name of the function:
    {"heatmap": ("ssmscope.interp.heatmap", "selection_heatmap")}."""
    return {
        name.replace(" ", "_").replace("-", "_"): (analysis.module, analysis.function.__name__)
        for name, analysis in analyses().items()
    }
