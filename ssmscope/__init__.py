"""Interpretability and robustness of trained state-space models.

    import ssmscope

    model = ssmscope.load("demo/sst2-mamba2")
    trace = model.trace("A gripping, beautifully acted film.")
    ssmscope.heatmap(trace)

A verb of the command line is the name of its function.

Importing this package is quick: torch and transformers come with the first name that needs them. transformers' Auto
classes know our model types once `ssmscope.loading` is imported, which `load` does; to read such a model's directory
with transformers alone, write `import ssmscope.loading` first.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    name: home
    for home, names in {
        "api.results": "Result",
        "loading.load": "load",
        "core.edits": "Edit edited",
        "core.known_models:demos": "models",
        "core.lasting_edits": "clamped_state frozen_decays held_state while_writing",
        "core.forms": "Form",
        "core.adapted": "Terms adapt",
        "core.mixers": "fast_scan",
        "core.model": "Model",
        "core.trace": "LayerTrace Trace",
        "data.series": "labelled_series",
        "data.text": "load_text",
        "errors": "InputError",
        "evaluation": "Evaluator",
        "interp.fidelity.result": "fidelity_table",
        "ops": "Recurrence",
        "probes.lens.lenses": "load_lens logit_lens",
        "probes.stability.training": "state_numbers training_callback",
        "probes.states.files": "load_states save_states",
        "reports.hub": "push",
        "reports.running:run_plan": "report",
        "reports.serving": "serve",
    }.items()
    for name in names.split()
}
"""Modules of names that are no analyses, below `ssmscope`; "module:name" where the name there is another."""
_ROOMS = ("attacks", "backends", "interp", "loading", "ops", "probes")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"ssmscope.{name}")
    place = f"ssmscope.{_HOMES[name]}" if name in _HOMES else None
    if place is None and (name == "__all__" or not _is_module(name)):
        analyses = importlib.import_module("ssmscope.api.analyses")
        if name == "__all__":
            return ["__version__", *sorted({*_HOMES, *_ROOMS, *analyses.names()})]
        place = analyses.names().get(name)
    if place is None:
        from ssmscope.errors import did_you_mean

        near = "" if name.startswith("_") else did_you_mean(name, __getattr__("__all__"))
        raise AttributeError(f"module 'ssmscope' has no attribute {name!r}{near}")
    module, _, own = place.partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), own or name)
    return value


def _is_module(name: str) -> bool:
    """Return True if a module here has this name; the import system finds it, and no analysis is looked for."""
    place = Path(__file__).parent / name
    return name.startswith("_") or place.is_dir() or place.with_suffix(".py").is_file()


def __dir__() -> list[str]:
    return __getattr__("__all__")
