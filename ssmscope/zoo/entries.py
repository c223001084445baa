"""Entries of the zoo, of the form of a package's entry points."""

ENTRIES = {
    "ssmscope.layers": {
        "ssmscope.zoo.baleen.BaleenMambaMixer": "ssmscope.zoo.baleen",
        "ssmscope.zoo.baleen.BaleenMamba2Mixer": "ssmscope.zoo.baleen",
        "ssmscope.zoo.diff_mamba.DiffMambaMixer": "ssmscope.zoo.diff_mamba",
        "ssmscope.zoo.diff_mamba.DiffS6Mixer": "ssmscope.zoo.diff_mamba",
        "ssmscope.zoo.gfssm.GFSSMMixer": "ssmscope.zoo.gfssm",
        "ssmscope.zoo.gfssm.GFSSMMambaMixer": "ssmscope.zoo.gfssm",
        "ssmscope.zoo.groupmamba.GroupMambaMixer": "ssmscope.zoo.groupmamba",
        "ssmscope.zoo.groupmamba.GroupMamba2Mixer": "ssmscope.zoo.groupmamba",
        "ssmscope.zoo.selective.SelectiveSSM": "ssmscope.zoo.selective",
    },
    "ssmscope.models": {
        "baleen-mamba": "ssmscope.zoo.baleen",
        "baleen-mamba2": "ssmscope.zoo.baleen",
        "diff-mamba": "ssmscope.zoo.diff_mamba",
        "diff-mamba1": "ssmscope.zoo.diff_mamba",
        "gfssm": "ssmscope.zoo.gfssm",
        "gfssm-mamba": "ssmscope.zoo.gfssm",
        "groupmamba": "ssmscope.zoo.groupmamba",
        "groupmamba-mamba2": "ssmscope.zoo.groupmamba",
        "selective-ssm": "ssmscope.zoo.selective",
    },
    "ssmscope.layouts": {
        "Differential Mamba": "ssmscope.zoo.layouts:DIFFERENTIAL_MAMBA",
        "selective SSM": "ssmscope.zoo.layouts:SELECTIVE_SSM",
    },
    "ssmscope.compiled": {
        "induction": "ssmscope.zoo.compiled.tasks:INDUCTION",
        "recall": "ssmscope.zoo.compiled.tasks:RECALL",
        "flip-flop": "ssmscope.zoo.compiled.tasks:FLIP_FLOP",
        "two-hop": "ssmscope.zoo.compiled.tasks:TWO_HOP",
    },
    "ssmscope.pairs": {
        "induction": "ssmscope.zoo.compiled:induction",
        "recall": "ssmscope.zoo.compiled:recall",
        "flip-flop": "ssmscope.zoo.compiled:flip_flop",
        "two-hop": "ssmscope.zoo.compiled:two_hop",
    },
    "ssmscope.verbs": {"train": "ssmscope.zoo.training:train_model"},
}
