"""Checkpoints of MambaVision: the published `.pth.tar` files, and the hub's directories, read without their code.

Sizes are those of the weights. The heads of attention and the trained size show in no shape: a directory's config.json
says them, and of a file they are those of the published model with its sizes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from ssmscope.errors import InputError
from ssmscope.layers.mambavision import PATCH, MambaVisionConfig
from ssmscope.loading.fields import refused
from ssmscope.loading.stored import Contents, Plan
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

FIRST_BLOCK = "levels.2.blocks.0."
FIRST = f"{FIRST_BLOCK}mixer.conv1d_x.weight"
"""Tensor by which a MambaVision is recognised, after the prefix of a module around it."""
TENSOR_DIMENSIONS = {
    FIRST: 3, f"{FIRST_BLOCK}mixer.A_log": 2, f"{FIRST_BLOCK}mixer.dt_proj.weight": 2,
    f"{FIRST_BLOCK}mlp.fc1.weight": 2, "patch_embed.conv_down.0.weight": 4, "head.weight": 2,
}  # fmt: skip
"""Tensors from whose shapes sizes are read, with their numbers of dimensions."""


class Form(NamedTuple):
    """Heads of attention in stages 3 and 4, and the positions of stage 3 across."""

    heads: int
    last_heads: int
    across: int


PUBLISHED: Mapping[tuple[int, int, int], Form] = {
    (320, 8, 4): Form(8, 16, 14),
    (320, 11, 4): Form(8, 16, 14),
    (384, 7, 5): Form(8, 16, 14),
    (512, 10, 5): Form(8, 16, 14),
    (784, 10, 5): Form(16, 32, 14),
}
"""Published models T, T2, S, B and L by the width and blocks of stage 3 and the blocks of stage 4. L2 and L3 are
published for pictures of two sizes each."""
PART_NAMES = {
    r"^patch_embed\.conv_down\.": "embed.patches.",
    r"^levels\.([01])\.blocks\.": r"embed.stages.\1.",
    r"^levels\.2\.blocks\.": "backbone.layers.",
    r"^levels\.2\.downsample\.reduction\.0\.": "head.reduction.",
    r"^levels\.3\.blocks\.": "head.blocks.",
    r"^norm\.": "head.norm.",
    r"^head\.(weight|bias)$": r"head.out.\1",
    r"\.mixer\.qkv\.": ".mixer.in_proj.",
    r"\.mixer\.proj\.": ".mixer.out_proj.",
    r"\.mlp\.fc1\.": ".mlp.up.",
    r"\.mlp\.fc2\.": ".mlp.down.",
}
"""Patterns of their names of parts, replaced one after the other, and our names."""


def is_mambavision(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a config.json is a MambaVision's."""
    return config.get("model_type") == "mambavision"


def is_mambavision_file(names: Collection[str]) -> bool:
    """Return True if these are the names of a MambaVision's tensors."""
    return any(name.endswith(FIRST) for name in names)


def plan_mambavision(config: Mapping[str, Any], held: Contents, what: str) -> Plan:
    """Plan a classifier of pictures; `config` is empty for a file without one. Raises InputError for missing weights, a
    file that is no published model's, and a config.json of other sizes or whose windows do not cover the picture."""
    tensors = without_prefix(held.tensors)
    for name, dimensions in TENSOR_DIMENSIONS.items():
        if name not in tensors:
            raise InputError(f"{what} is not a MambaVision that can be read: it lacks {name}")
        if len(shape := tensors[name].shape) != dimensions or 0 in shape:
            raise InputError(f"{what} is not a MambaVision that can be read: its {name} is {tuple(shape)}")
    shapes = {name.removeprefix(FIRST_BLOCK): tensors[name].shape for name in TENSOR_DIMENSIONS}
    depths = [_blocks(tensors, stage) for stage in range(4)]
    width = 2 * shapes["mixer.conv1d_x.weight"][0]
    if config:
        form = _described(config, width, depths, what)
    elif (width, *depths[2:]) in PUBLISHED:
        form = PUBLISHED[width, depths[2], depths[3]]
    else:
        said = f"{what} has {depths[2]} and {depths[3]} blocks of width {width} in stages 3 and 4, as none of the"
        advice = "published T, T2, S, B and L: give the hub's directory, whose config.json has num_heads and"
        raise InputError(f"{said} {advice} window_size")
    backbone = MambaVisionConfig(
        hidden_size=width,
        num_hidden_layers=depths[2],
        num_attention_heads=form.heads,
        intermediate_size=shapes["mlp.fc1.weight"][0],
        state_size=shapes["mixer.A_log"][1],
        conv_kernel=shapes["mixer.conv1d_x.weight"][2],
        time_step_rank=shapes["mixer.dt_proj.weight"][1],
        layer_scale=f"{FIRST_BLOCK}gamma_1" in tensors,
        stem_size=shapes["patch_embed.conv_down.0.weight"][0],
        early_layers=depths[:2],
        last_layers=depths[3],
        last_heads=form.last_heads,
    )
    labels = shapes["head.weight"][0]
    ours = SSMClassifierConfig(
        backbone=backbone,
        channels=3 * PATCH**2,
        image_size=(form.across, form.across),
        patch=(PATCH, PATCH),
        **_named(config, labels),
    )
    return Plan(partial(SSMForSequenceClassification, ours), partial(_translated, width=width, depths=depths))


def without_prefix(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by their names without the prefix of a module around the model, such as `model.` on the hub."""
    prefix = next((name.removesuffix(FIRST) for name in tensors if name.endswith(FIRST)), "")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _blocks(tensors: Collection[str], stage: int) -> int:
    """Return the number of a stage's blocks."""
    pattern = rf"levels\.{stage}\.blocks\.(\d+)\."
    return len({found[1] for name in tensors if (found := re.match(pattern, name))})


def _described(config: Mapping[str, Any], width: int, depths: list[int], what: str) -> Form:
    """Return what a config.json says that no weight shows."""
    heads, windows = (_four(config, name, what) for name in ("num_heads", "window_size"))
    if _four({"depths": depths, **config}, "depths", what) != depths:
        raise refused(what, "depths", config["depths"], f"{depths}, as the weights have")
    across = windows[2]
    if across % 2 or windows[3] != across // 2:
        raise refused(what, "window_size", config["window_size"], "windows of stages 3 and 4 that cover the picture")
    if config.get("resolution", PATCH * across) != PATCH * across:
        raise refused(what, "resolution", config["resolution"], f"{PATCH * across}, which its windows cover")
    if width % heads[2] or 2 * width % heads[3]:
        raise refused(what, "num_heads", config["num_heads"], f"heads that share the width, {width} in stage 3")
    return Form(heads[2], heads[3], across)


def _four(config: Mapping[str, Any], name: str, what: str) -> list[int]:
    """Return a field with a number for each stage."""
    found = config.get(name)
    if not isinstance(found, list) or len(found) != 4 or any(type(each) is not int or each < 1 for each in found):
        raise refused(what, name, found, "a number for each of the four stages")
    return found


def _named(config: Mapping[str, Any], labels: int) -> dict[str, Any]:
    """Return the names of the classes, where a config.json has one for each."""
    names = config.get("id2label")
    if not isinstance(names, Mapping) or names.keys() != {str(at) for at in range(labels)}:
        return {"num_labels": labels}
    found = {at: str(names[str(at)]) for at in range(labels)}
    return {"id2label": found, "label2id": {name: at for at, name in found.items()}}


def _translated(tensors: Mapping[str, Tensor], width: int, depths: list[int]) -> dict[str, Tensor]:
    """Return the tensors by our names, with an embedding that nothing reads."""
    found = {}
    for name, tensor in without_prefix(tensors).items():
        for theirs, ours in PART_NAMES.items():
            name = re.sub(theirs, ours, name)
        if down := re.match(r"levels\.([01])\.downsample\.reduction\.0\.", name):
            stage = int(down[1])
            name = f"embed.stages.{stage}.{depths[stage]}.{name.removeprefix(down[0])}"
        found[name] = tensor
    counts = {name.replace("running_mean", "num_batches_tracked") for name in found if name.endswith("running_mean")}
    own = {name: torch.zeros((), dtype=torch.long) for name in counts}
    return {"backbone.embeddings.weight": found["head.out.weight"].new_zeros(1, width), **own, **found}
