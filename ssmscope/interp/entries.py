"""Entries of `ssmscope.interp`, of the form of a package's entry points."""

ORDER = 1
"""Place of the room's analyses in the help."""
_HERE = "ssmscope.interp"
ENTRIES = {
    "ssmscope.analyses": {
        "ablate": f"{_HERE}.ablate:ablate",
        "attention": f"{_HERE}.attention:implicit_attention",
        "circuit": f"{_HERE}.circuit:circuit",
        "explain": f"{_HERE}.explain:explain",
        "fidelity": f"{_HERE}.fidelity:fidelity_auc",
        "generate": f"{_HERE}.generate:generate",
        "heatmap": f"{_HERE}.heatmap:selection_heatmap",
        "knockout": f"{_HERE}.knockout:knockout",
        "patch": f"{_HERE}.patch:patch",
        "plausibility": f"{_HERE}.plausibility:plausibility",
        "sanity": f"{_HERE}.sanity:cascading_randomisation",
        "steer": f"{_HERE}.steer:steer",
    },
    "ssmscope.methods": {
        "ig": f"{_HERE}.methods.integrated:ig",
        "gradxinput": f"{_HERE}.methods.gradients:gradxinput",
        "smoothgrad": f"{_HERE}.methods.gradients:smoothgrad",
        "gradcam": f"{_HERE}.methods.gradients:gradcam",
        "lrp": f"{_HERE}.methods.lrp:lrp",
        "occlusion": f"{_HERE}.methods.memory:occlusion",
        "attention-rollout": f"{_HERE}.methods.memory:attention_rollout",
        "attention-gradient": f"{_HERE}.methods.memory:attention_gradient",
        "survival": f"{_HERE}.methods.memory:survival",
        "self-retention": f"{_HERE}.methods.memory:self_retention",
        "self-write": f"{_HERE}.methods.memory:self_write",
        "random": f"{_HERE}.methods.memory:random",
    },
}
