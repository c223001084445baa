"""Interpretability and robustness of trained state-space models.

    import ssmscope

    model = ssmscope.load("demo/sst2-baleen-e")
    trace = model.trace("A gripping, beautifully acted film.")
    ssmscope.selection_heatmap(trace)

Importing this package is quick: torch and transformers come with the first name that needs them. transformers' Auto
classes know our model types once `ssmscope.models` is imported, which `load` does; to read such a model's directory
with transformers alone, write `import ssmscope.models` first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssmscope import attacks as attacks
    from ssmscope import interp as interp
    from ssmscope import models as models
    from ssmscope import probes as probes
    from ssmscope.attacks.effect import attack_effect as attack_effect
    from ssmscope.attacks.insertion import insertion_sweep as insertion_sweep
    from ssmscope.attacks.overflow import state_overflow as state_overflow
    from ssmscope.attacks.position import position_bias as position_bias
    from ssmscope.attacks.prompts import prompt_attack as prompt_attack
    from ssmscope.attacks.words import word_attack as word_attack
    from ssmscope.errors import InputError as InputError
    from ssmscope.evaluation import Evaluator as Evaluator
    from ssmscope.interp.attending import attention_gradient as attention_gradient
    from ssmscope.interp.attending import implicit_attention as implicit_attention
    from ssmscope.interp.explaining import explain as explain
    from ssmscope.interp.fidelity import fidelity_auc as fidelity_auc
    from ssmscope.interp.fidelity_result import fidelity_table as fidelity_table
    from ssmscope.interp.sanity import cascading_randomisation as cascading_randomisation
    from ssmscope.interp.selection import selection_heatmap as selection_heatmap
    from ssmscope.mixers import fast_scan as fast_scan
    from ssmscope.model import Model as Model
    from ssmscope.models.load import load as load
    from ssmscope.probes.generalization import generalization_bound as generalization_bound
    from ssmscope.probes.influence import influence as influence
    from ssmscope.probes.lens import load_lens as load_lens
    from ssmscope.probes.lens import logit_lens as logit_lens
    from ssmscope.probes.lens_training import fit_lens as fit_lens
    from ssmscope.probes.retrieval import retrieval as retrieval
    from ssmscope.probes.snr import needle_snr as needle_snr
    from ssmscope.probes.stability import stability as stability
    from ssmscope.probes.stability_table import stability_table as stability_table
    from ssmscope.probes.token_loss import token_loss as token_loss
    from ssmscope.probes.trajectory import trajectory as trajectory
    from ssmscope.results import Result as Result
    from ssmscope.ssm import Recurrence as Recurrence
    from ssmscope.trace import LayerTrace as LayerTrace
    from ssmscope.trace import Trace as Trace

__version__ = "0.1.0"

_HOMES = {
    "Evaluator": "evaluation",
    "InputError": "errors",
    "LayerTrace": "trace",
    "Model": "model",
    "Recurrence": "ssm",
    "Result": "results",
    "Trace": "trace",
    "attack_effect": "attacks.effect",
    "attention_gradient": "interp.attending",
    "cascading_randomisation": "interp.sanity",
    "explain": "interp.explaining",
    "fast_scan": "mixers",
    "fidelity_auc": "interp.fidelity",
    "fidelity_table": "interp.fidelity_result",
    "fit_lens": "probes.lens_training",
    "generalization_bound": "probes.generalization",
    "implicit_attention": "interp.attending",
    "influence": "probes.influence",
    "insertion_sweep": "attacks.insertion",
    "load": "models.load",
    "load_lens": "probes.lens",
    "logit_lens": "probes.lens",
    "needle_snr": "probes.snr",
    "position_bias": "attacks.position",
    "prompt_attack": "attacks.prompts",
    "retrieval": "probes.retrieval",
    "selection_heatmap": "interp.selection",
    "stability": "probes.stability",
    "stability_table": "probes.stability_table",
    "state_overflow": "attacks.overflow",
    "token_loss": "probes.token_loss",
    "trajectory": "probes.trajectory",
    "word_attack": "attacks.words",
}
_PACKAGES = ("attacks", "interp", "models", "probes")

__all__ = ["__version__", *sorted((*_HOMES, *_PACKAGES))]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"ssmscope.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'ssmscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ssmscope.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
