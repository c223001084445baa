"""Measures of fidelity by name: their names in the views, and the direction that is better."""

from __future__ import annotations

from ssmscope.interp.plausibility.measures import MEASURES as AGREEMENT

MEASURES = {
    "delta": ("ΔA", True),
    "morf": ("A_MoRF", False),
    "lerf": ("A_LeRF", True),
    "comprehensiveness": ("comprehensiveness", True),
    "sufficiency": ("sufficiency", False),
}
"""Measures by name, with their names in the views and True where more is better."""
INFIDELITY, SENSITIVITY = "captum:infidelity", "captum:sensitivity_max"
CAPTUM_MEASURES = {INFIDELITY: "infidelity", SENSITIVITY: "sensitivity"}
"""captum's measures by name, with their names in the views; the lower the better."""
KNOCKOUT = "knockout"
"""Name of the correlation with the exact effect of knocking tokens out in all layers; followed by a layer's number, in
that layer."""
MORF, LERF = 0, 1
LOGIT_SCALE = "ΔA depends on the scale of each model's logits"
"""Reason why no ΔA of two models are compared."""
RANDOM = "random"
"""Name of the random rankings."""


def more_is_better(measure: str) -> bool:
    return MEASURES[measure][1] if measure in MEASURES else measure not in CAPTUM_MEASURES


def layer_measure(layer: int) -> str:
    """Return the name of the correlation with the exact effect of knocking tokens out in one layer."""
    return f"{KNOCKOUT}-{layer}"


def layer_of(measure: str) -> int | None:
    """Return the layer in which a measure knocks tokens out; None for all other measures."""
    name, _, layer = measure.partition("-")
    return int(layer) if name == KNOCKOUT and layer else None


def display_name(measure: str) -> str:
    """Return the name of a measure in the views."""
    if (layer := layer_of(measure)) is not None:
        return f"layer {layer}"
    if measure == KNOCKOUT:
        return "ρ knockout"
    return MEASURES[measure][0] if measure in MEASURES else (AGREEMENT | CAPTUM_MEASURES)[measure]
