"""Table of the checkpoint layouts of other projects; directories that none recognises are in transformers'."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel
from ssmscope.core.registry import Registry
from ssmscope.errors import InputError
from ssmscope.layers.mambavision import COLOR_DEVIATIONS, COLOR_MEANS
from ssmscope.layers.vim import VimConfig
from ssmscope.loading import stored
from ssmscope.loading.fields import check_depth
from ssmscope.loading.fla_checkpoints import is_fla, plan_fla
from ssmscope.loading.hub_checkpoints import is_hub, plan_hub
from ssmscope.loading.mamba_checkpoints import is_mamba_ssm, plan_mamba_ssm
from ssmscope.loading.mambavision_checkpoints import is_mambavision, is_mambavision_file, plan_mambavision
from ssmscope.loading.minimax_checkpoints import is_minimax, plan_minimax
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

# ---- Vision Mamba's published code (hustvl/Vim): a `.pth` with {"model": state dict}. Sizes are those of the weights.
# Options that no shape shows are those of all its published models: the sum of both directions is halved, epsilons are
# 10⁻⁵, images are normalised by ImageNet's colours, which is folded into the patch embedding: the model reads colours
# from 0 to 1.

FIRST_MIXER = "layers.0.mixer."
TENSOR_DIMENSIONS = {
    "cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "patch_embed.proj.bias": 1, "head.weight": 2,
    "head.bias": 1,
}  # fmt: skip
"""Tensors outside the layers, with their numbers of dimensions."""
MIXER_TENSOR_DIMENSIONS = {"A_log": 2, "conv1d.weight": 3, "dt_proj.weight": 2}
IMAGE_WIDTHS = (224, 384)


def plan_vim(tensors: Mapping[str, Tensor], what: str) -> stored.Plan:
    """Plan a classifier of patches. Raises InputError for missing weights, or another form than the published models'
    (class tokens at both ends, no positions, rotations, Vim's first version)."""
    sizes = TENSOR_DIMENSIONS | {FIRST_MIXER + name: number for name, number in MIXER_TENSOR_DIMENSIONS.items()}
    for name, dimensions in sizes.items():
        if name not in tensors:
            raise InputError(f"{what} is not a Vim that can be read: it lacks {name}")
        if tensors[name].ndim != dimensions or not tensors[name].numel():
            raise InputError(f"{what} is not a Vim that can be read: its {name} is {tuple(tensors[name].shape)}")
    shapes = {name: tuple(tensors[name].shape) for name in sizes}
    patch, positions, inner = shapes["patch_embed.proj.weight"], shapes["pos_embed"], shapes[FIRST_MIXER + "A_log"]
    grid = math.isqrt(positions[1] - 1)
    expected = (1, grid**2 + 1, patch[0]), (3, patch[2], patch[2]), patch[:1]
    if (positions, patch[1:], shapes["patch_embed.proj.bias"]) != expected or grid < 2:
        said = f"{what} is not a Vim that can be read: its patches are {patch} and its positions {positions};"
        raise InputError(f"{said} square patches of 3 colours, as many across as down, and a class token were expected")
    size = patch[2]
    steps = [(width - size) // (grid - 1) for width in IMAGE_WIDTHS if (width - size) % (grid - 1) == 0]
    step = max((step for step in steps if 1 <= step <= size), default=size)
    depth = 1 + max(int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d{1,9})\.", name)))
    if depth > len(tensors):
        raise InputError(f"{what} is not a Vim that can be read: it has a layer {depth - 1} and {len(tensors)} tensors")
    backbone = VimConfig(
        hidden_size=patch[0],
        num_hidden_layers=depth,
        state_size=inner[1],
        expand=inner[0] // patch[0],
        conv_kernel=shapes[FIRST_MIXER + "conv1d.weight"][-1],
        time_step_rank=shapes[FIRST_MIXER + "dt_proj.weight"][-1],
        positions=grid**2 + 1,
    )
    form: dict[str, Any] = {"channels": 3 * size**2, "image_size": (grid, grid), "patch": (size, step)}
    config = SSMClassifierConfig(backbone=backbone, **form, num_labels=shapes["head.weight"][0])
    return stored.Plan(partial(SSMForSequenceClassification, config), _from_vim)


def _from_vim(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by our names, with the class token's position last and colours from 0 to 1."""
    own = {f"backbone.{name}": t for name, t in tensors.items() if name.startswith(("layers.", "norm_f."))}
    rest = {name: t for name, t in tensors.items() if f"backbone.{name}" not in own and name not in TENSOR_DIMENSIONS}
    positions = tensors["pos_embed"]
    middle = (positions.shape[1] - 1) // 2
    before, token, after = positions.tensor_split([middle, middle + 1], dim=1)
    kernel = tensors["patch_embed.proj.weight"].double()
    mean, spread = (torch.tensor(each, dtype=torch.float64).view(-1, 1, 1) for each in (COLOR_MEANS, COLOR_DEVIATIONS))
    shifted = tensors["patch_embed.proj.bias"].double() - (kernel * (mean / spread)).sum((1, 2, 3))
    return {
        **own,
        **rest,  # These have no place in the model, which the check of the weights reports.
        "backbone.embeddings.weight": rearrange(tensors["cls_token"], "one token width -> (one token) width"),
        "backbone.position": torch.cat([before, after, token], dim=1),
        "embed.weight": rearrange(kernel / spread, "width c y x -> width (y x c)").to(positions),
        "embed.bias": shifted.to(positions),
        "head.weight": tensors["head.weight"],
        "head.bias": tensors["head.bias"],
    }


# ---- the table


class Layout(NamedTuple):
    """Layout of directories, of single files or of both: its name, the test that recognises a directory by itself and
    its config.json, and the function that plans the model from config.json, the headers of the weights and the name."""

    name: str
    recognises: Callable[[Path, Mapping[str, Any]], bool] = lambda directory, config: False
    plan: Callable[[Mapping[str, Any], stored.Contents, str], stored.Plan] | None = None
    plan_file: Callable[[Mapping[str, Tensor], stored.Contents, str], stored.Plan | None] | None = None
    """Plans the model of a single file's state dict; None if it is of another layout."""
    any_name: bool = False
    """True where files of weights have no names of their own."""
    pictures: bool = False
    """True of classifiers of pictures."""

    def read(self, directory: Path, config: Mapping[str, Any]) -> PreTrainedModel:
        """Return the model of a directory. Raises InputError if weights or fields do not fit, or cannot be read."""
        any_name = sorted(directory.glob("*.safetensors")) if self.any_name else []
        what, files = str(directory), any_name or stored.weight_files(directory)
        held = stored.contents(files)
        check_depth(config, len(held.tensors), what)
        assert self.plan is not None
        plan = self.plan(config, held, what)
        return stored.built(plan, stored.read_all(files), held, what)


def plan_mambavision_file(tensors: Mapping[str, Tensor], held: stored.Contents, what: str) -> stored.Plan | None:
    """Plan the model of a file of MambaVision's."""
    return plan_mambavision({}, held, what) if is_mambavision_file(tensors) else None


def plan_vim_file(tensors: Mapping[str, Tensor], held: stored.Contents, what: str) -> stored.Plan | None:
    """Plan the model of a file of Vim's."""
    of_vim = f"{FIRST_MIXER}A_b_log" in tensors and "patch_embed.proj.weight" in tensors
    return plan_vim(tensors, what) if of_vim else None


LAYOUTS: Registry[Layout] = Registry("layout", "ssmscope.layouts")
"""Layouts of directories by name, in the order in which they are tried; installed packages add theirs."""
for each in (
    Layout("mamba_ssm", is_mamba_ssm, plan_mamba_ssm),
    Layout("flash-linear-attention", is_fla, plan_fla),
    Layout("PLaMo 2 and Ring-linear", is_hub, plan_hub),
    Layout("MambaVision", is_mambavision, plan_mambavision, plan_mambavision_file, pictures=True),
    Layout("MiniMax", is_minimax, plan_minimax),
    Layout("Vim", plan_file=plan_vim_file),
):
    LAYOUTS.add(each.name, each)


def layout_of(directory: Path, config: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a directory; None for transformers' own."""
    return next((found for name in LAYOUTS if (found := LAYOUTS[name]).recognises(directory, config)), None)


def reads_pictures(names: Collection[str]) -> bool:
    """Return True if these are the names of the tensors of a state dict that classifies pictures."""
    return any("patch_embed." in name for name in names)


def read_state_dict(path: Path, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return the model of a file's state dict. Raises InputError if no layout is of such files."""
    what, held = str(path), stored.contents([path])
    of_files = [LAYOUTS[name] for name in LAYOUTS if LAYOUTS[name].plan_file is not None]
    for layout in of_files:
        assert layout.plan_file is not None
        if (plan := layout.plan_file(tensors, held, what)) is not None:
            return stored.built(plan, tensors, held, what, by="its shapes")
    else_ = "other models are given as directories"
    if "mamba.layers.0.mixer.A_log" in tensors:
        else_ = (
            "load mambapy's module itself, or a directory with mamba_ssm's config.json and these weights as "
            "backbone.embedding for embedding, backbone.layers for mamba.layers and backbone.norm_f for norm_f"
        )
    raise InputError(
        f"{what} is not a checkpoint that can be read: a single file must be the state dict of a "
        f"{' or '.join(layout.name for layout in of_files)}; it holds {', '.join(sorted(tensors)[:4])}, …; {else_}"
    )
