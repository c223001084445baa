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
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssmscope import architectures as architectures
    from ssmscope import attacks as attacks
    from ssmscope import interp as interp
    from ssmscope import probes as probes
    from ssmscope.api.results import Result as Result
    from ssmscope.architectures.loading.load import load as load
    from ssmscope.attacks.effect import attack_effect as attack_effect
    from ssmscope.attacks.insertion import insertion_sweep as insertion_sweep
    from ssmscope.attacks.overflow import state_overflow as state_overflow
    from ssmscope.attacks.poisoning import state_poisoning as state_poisoning
    from ssmscope.attacks.position import position_bias as position_bias
    from ssmscope.attacks.prompts import prompt_attack as prompt_attack
    from ssmscope.attacks.words import word_attack as word_attack
    from ssmscope.core.edits import Edit as Edit
    from ssmscope.core.edits import edited as edited
    from ssmscope.core.mixers import fast_scan as fast_scan
    from ssmscope.core.model import Model as Model
    from ssmscope.core.trace import LayerTrace as LayerTrace
    from ssmscope.core.trace import Trace as Trace
    from ssmscope.errors import InputError as InputError
    from ssmscope.evaluation import Evaluator as Evaluator
    from ssmscope.interp.attention import attention_gradient as attention_gradient
    from ssmscope.interp.attention import implicit_attention as implicit_attention
    from ssmscope.interp.explain import explain as explain
    from ssmscope.interp.fidelity import fidelity_auc as fidelity_auc
    from ssmscope.interp.fidelity.result import fidelity_table as fidelity_table
    from ssmscope.interp.heatmap import selection_heatmap as selection_heatmap
    from ssmscope.interp.plausibility import plausibility as plausibility
    from ssmscope.interp.sanity import cascading_randomisation as cascading_randomisation
    from ssmscope.ops import Recurrence as Recurrence
    from ssmscope.probes.bound import generalization_bound as generalization_bound
    from ssmscope.probes.checkpoints import stability_table as stability_table
    from ssmscope.probes.influence import influence as influence
    from ssmscope.probes.lens import fit_lens as fit_lens
    from ssmscope.probes.lens import trajectory as trajectory
    from ssmscope.probes.lens.lenses import load_lens as load_lens
    from ssmscope.probes.lens.lenses import logit_lens as logit_lens
    from ssmscope.probes.loss import token_loss as token_loss
    from ssmscope.probes.retrieval import retrieval as retrieval
    from ssmscope.probes.snr import needle_snr as needle_snr
    from ssmscope.probes.stability import stability as stability

__version__ = "0.1.0"

_HOMES = {
    "Edit": "core.edits",
    "edited": "core.edits",
    "Evaluator": "evaluation",
    "InputError": "errors",
    "LayerTrace": "core.trace",
    "Model": "core.model",
    "Recurrence": "ops",
    "Result": "api.results",
    "Trace": "core.trace",
    "attention_gradient": "interp.attention",
    "fast_scan": "core.mixers",
    "fidelity_table": "interp.fidelity.result",
    "load": "architectures.loading.load",
    "load_lens": "probes.lens.lenses",
    "logit_lens": "probes.lens.lenses",
}
_VERBS = {
    "lens": ("ssmscope.probes.lens", "trajectory"),
    "models": ("ssmscope.core.shipped", "demos"),
    "report": ("ssmscope.reports.running", "run_plan"),
    "serve": ("ssmscope.reports.serving", "serve"),
    "train": ("ssmscope.training", "train_model"),
}
"""Functions of verbs that no analysis declares; the verbs of analyses have their functions' names."""
_PACKAGES = ("architectures", "attacks", "backends", "interp", "ops", "probes")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"ssmscope.{name}")
    home = (f"ssmscope.{_HOMES[name]}", name) if name in _HOMES else _VERBS.get(name)
    if home is None and (name == "__all__" or not _is_module(name)):
        registry = importlib.import_module("ssmscope.api.registry")
        if name == "__all__":
            return ["__version__", *sorted({*_HOMES, *_PACKAGES, *registry.functions()})]
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
