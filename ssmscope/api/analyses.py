"""Table of all analyses, each imported when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """An analysis, with names below `ssmscope`.

    Attributes:
        function: "package:function" of the function that declares it with `@analysis`.
        results: the module that defines each kind of its results.
    """

    function: str
    results: Mapping[str, str]


PAIR = {"pair": "interp.paired"}
"""Kind of the results that combine those of two models."""

ANALYSES: Mapping[str, Entry] = {
    "ablate": Entry("interp.ablate:ablate", {"ablate": "interp.ablate.result"}),
    "attention": Entry("interp.attention:implicit_attention", {"attention": "interp.attention.result", **PAIR}),
    "explain": Entry("interp.explain:explain", {"explain": "interp.explain.result", **PAIR}),
    "fidelity": Entry("interp.fidelity:fidelity_auc", {"fidelity": "interp.fidelity.result"}),
    "generate": Entry("interp.generate:generate", {"generate": "interp.generate.result"}),
    "heatmap": Entry(
        "interp.heatmap:selection_heatmap",
        {"heatmap": "interp.heatmap.result", "heatmap-data": "interp.heatmap.result", **PAIR},
    ),
    "knockout": Entry("interp.knockout:knockout", {"knockout": "interp.knockout.result"}),
    "patch": Entry("interp.patch:patch", {"patch": "interp.patch.result"}),
    "plausibility": Entry("interp.plausibility:plausibility", {"plausibility": "interp.plausibility.result"}),
    "sanity": Entry("interp.sanity:cascading_randomisation", {"sanity": "interp.sanity.result"}),
    "steer": Entry("interp.steer:steer", {"steer": "interp.steer.result"}),
    "bound": Entry("probes.bound:generalization_bound", {"bound": "probes.bound.result"}),
    "checkpoints": Entry("probes.checkpoints:stability_table", {"stability-table": "probes.checkpoints.result"}),
    "evaluate": Entry("probes.evaluate:evaluate", {"evaluate": "probes.evaluate.result"}),
    "influence": Entry("probes.influence:influence", {"influence": "probes.influence.result"}),
    "lens fit": Entry("probes.lens:fit_lens", {"lens-fit": "probes.lens.result"}),
    "lens show": Entry("probes.lens:trajectory", {"trajectory": "probes.lens.result"}),
    "loss": Entry("probes.loss:token_loss", {"loss": "probes.loss.result"}),
    "retrieval": Entry("probes.retrieval:retrieval", {"retrieval": "probes.retrieval.result"}),
    "snr": Entry("probes.snr:needle_snr", {"snr": "probes.snr.result"}),
    "stability": Entry("probes.stability:stability", {"stability": "probes.stability.result"}),
    "effect": Entry("attacks.effect:attack_effect", {"effect": "attacks.effect.result"}),
    "insertion": Entry("attacks.insertion:insertion_sweep", {"insertion": "attacks.insertion.result"}),
    "overflow": Entry("attacks.overflow:state_overflow", {"overflow": "attacks.overflow.result"}),
    "poison": Entry("attacks.poisoning:state_poisoning", {"poison": "attacks.poisoning.result"}),
    "position": Entry("attacks.position:position_bias", {"position": "attacks.position.result"}),
    "prompts": Entry("attacks.prompts:prompt_attack", {"prompts": "attacks.prompts.result"}),
    "words": Entry("attacks.words:word_attack", {"words": "attacks.words.result"}),
}
"""All analyses by name, in the order of the help."""
