"""Analyses by name: our own, those of installed packages (entry points `ssmscope.analyses`), and those that code
declares with `@analysis` as it runs.

The `__init__` of an analysis's package declares it and imports slow modules only when it runs, so that all packages are
imported in a fraction of a second. The kinds of its results are defined in that package, in its module `result` if it
has one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ssmscope.api.verbs import VERBS
from ssmscope.core.registry import Registry

ANALYSES: Registry[Callable[..., Any]] = Registry(
    "analysis",
    "ssmscope.analyses",
    {
        name: f"ssmscope.{place}"
        for name, place in {
            "ablate": "interp.ablate:ablate",
            "attention": "interp.attention:implicit_attention",
            "explain": "interp.explain:explain",
            "fidelity": "interp.fidelity:fidelity_auc",
            "generate": "interp.generate:generate",
            "heatmap": "interp.heatmap:selection_heatmap",
            "knockout": "interp.knockout:knockout",
            "patch": "interp.patch:patch",
            "plausibility": "interp.plausibility:plausibility",
            "sanity": "interp.sanity:cascading_randomisation",
            "steer": "interp.steer:steer",
            "bound": "probes.bound:generalization_bound",
            "checkpoints": "probes.checkpoints:stability_table",
            "evaluate": "probes.evaluate:evaluate",
            "influence": "probes.influence:influence",
            "lens fit": "probes.lens:fit_lens",
            "lens show": "probes.lens:trajectory",
            "loss": "probes.loss:token_loss",
            "parity": "probes.parity:parity",
            "precision": "probes.precision:precision",
            "retrieval": "probes.retrieval:retrieval",
            "snr": "probes.snr:needle_snr",
            "stability": "probes.stability:stability",
            "states": "probes.states:states",
            "effect": "attacks.effect:attack_effect",
            "insertion": "attacks.insertion:insertion_sweep",
            "noise": "attacks.noise:character_noise",
            "overflow": "attacks.overflow:state_overflow",
            "poison": "attacks.poisoning:state_poisoning",
            "position": "attacks.position:position_bias",
            "prompts": "attacks.prompts:prompt_attack",
            "words": "attacks.words:word_attack",
        }.items()
    },
)
"""Functions declared with `@analysis`, by the names of their verbs, in the order of the help."""


def analysis_of(name: str) -> Any:
    """Return the declaration of an analysis, importing its package only; raise InputError for other names."""
    return ANALYSES[name].analysis  # type: ignore[attr-defined]


def analyses() -> dict[str, Any]:
    """Return the declarations of all analyses by name."""
    return {name: analysis_of(name) for name in ANALYSES}


def result_homes() -> dict[str, str]:
    """Return the module that defines each kind of result of an analysis: its package's `result` if there is one."""
    homes: dict[str, str] = {}
    for name, place in ANALYSES.places.items():
        package, declared = place.partition(":")[0], analysis_of(name)
        own = f"{package}.result"
        homes |= dict.fromkeys(declared.kinds, own if _is_there(own) else package)
        homes |= {} if declared.pair is None else {"pair": f"ssmscope.{declared.pair.partition(':')[0]}"}
    return homes


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # The parent is a module, no package.
        return False


def names() -> dict[str, str]:
    """Return the places of all analyses' functions, and of the verbs from elsewhere, by their Python names, the verbs'
    ("lens_show" for "lens show")."""
    places = {**ANALYSES.places, **VERBS.places}
    return {name.replace(" ", "_").replace("-", "_"): place for name, place in places.items()}
