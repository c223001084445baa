"""The measures of fidelity by name: how the views call them, and which way is better."""

from __future__ import annotations

from ssmscope.interp.plausibility.measures import MEASURES as AGREEMENT

MEASURES = {
    "delta": ("ΔA", True),
    "morf": ("A_MoRF", False),
    "lerf": ("A_LeRF", True),
    "comprehensiveness": ("comprehensiveness", True),
    "sufficiency": ("sufficiency", False),
}
"""The measures by name, how the views call them, and whether more is better."""

KNOCKOUT = "knockout"
"""The name of the correlation with the exact effect of knocking tokens out in all layers, and of that in one layer with
the layer's number behind it."""

MORF, LERF = 0, 1

RANDOM = "random"
"""The name of the random rankings beside the methods'."""


def more_is_better(measure: str) -> bool:
    return MEASURES[measure][1] if measure in MEASURES else True


def in_layer(layer: int) -> str:
    """The name of the correlation with the exact effect of knocking tokens out in one layer."""
    return f"{KNOCKOUT}-{layer}"


def layer_of(measure: str) -> int | None:
    """The layer in which a measure knocks tokens out; None of all others."""
    name, _, layer = measure.partition("-")
    return int(layer) if name == KNOCKOUT and layer else None


def name_of(measure: str) -> str:
    """How the views call a measure."""
    if (layer := layer_of(measure)) is not None:
        return f"layer {layer}"
    if measure == KNOCKOUT:
        return "ρ knockout"
    return MEASURES[measure][0] if measure in MEASURES else AGREEMENT[measure]
