"""Checkpoints of Vision Mamba's published code (hustvl/Vim): a `.pth` with {"model": state dict}.

Sizes are taken from the weights; options that no shape shows are those of all its published models: the sum of both
directions is halved, epsilons are 10⁻⁵, images are normalised by ImageNet's colours. That normalisation is folded into
the patch embedding: the model reads colours from 0 to 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel

from ssmscope.architectures.loading.stored import built, contents
from ssmscope.architectures.own.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.architectures.read.vim import VimConfig
from ssmscope.errors import InputError

FIRST_MIXER = "layers.0.mixer."
TENSOR_DIMENSIONS = {
    "cls_token": 3, "pos_embed": 3, "patch_embed.proj.weight": 4, "patch_embed.proj.bias": 1, "head.weight": 2,
    "head.bias": 1,
}  # fmt: skip
"""Tensors outside the layers, with their numbers of dimensions."""
MIXER_TENSOR_DIMENSIONS = {"A_log": 2, "conv1d.weight": 3, "dt_proj.weight": 2}
COLOR_MEANS, COLOR_DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's means and standard deviations, by which the published code normalises red, green and blue."""
IMAGE_WIDTHS = (224, 384)
"""Image widths of the published models, in pixels."""


def is_vim(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if a state dict is one of Vim's."""
    return f"{FIRST_MIXER}A_b_log" in tensors and "patch_embed.proj.weight" in tensors


def read_vim(path: Path, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return a Vim's state dict as a classifier of patches. Raises InputError if weights are missing or do not fit, or
    have another form than the published models' (class tokens at both ends, no positions, rotations, Vim's first
    version)."""
    sizes = TENSOR_DIMENSIONS | {FIRST_MIXER + name: number for name, number in MIXER_TENSOR_DIMENSIONS.items()}
    for name, dimensions in sizes.items():
        if name not in tensors:
            raise InputError(f"{path} is no Vim that can be read: it lacks {name}")
        if tensors[name].ndim != dimensions or not tensors[name].numel():
            raise InputError(f"{path} is no Vim that can be read: its {name} is {tuple(tensors[name].shape)}")
    shapes = {name: tuple(tensors[name].shape) for name in sizes}
    patch, positions, inner = shapes["patch_embed.proj.weight"], shapes["pos_embed"], shapes[FIRST_MIXER + "A_log"]
    grid = math.isqrt(positions[1] - 1)
    expected = (1, grid**2 + 1, patch[0]), (3, patch[2], patch[2]), patch[:1]
    if (positions, patch[1:], shapes["patch_embed.proj.bias"]) != expected or grid < 2:
        raise InputError(
            f"{path} is no Vim that can be read: its patches are {patch} and its positions {positions}; square patches "
            "of 3 colours, as many across as down, and a class token were expected"
        )
    size = patch[2]
    steps = [(width - size) // (grid - 1) for width in IMAGE_WIDTHS if (width - size) % (grid - 1) == 0]
    step = max((step for step in steps if 1 <= step <= size), default=size)
    depth = 1 + max(int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d{1,9})\.", name)))
    if depth > len(tensors):
        raise InputError(f"{path} is no Vim that can be read: it has a layer {depth - 1} and {len(tensors)} tensors")
    config = SSMClassifierConfig(
        backbone=VimConfig(
            hidden_size=patch[0],
            num_hidden_layers=depth,
            state_size=inner[1],
            expand=inner[0] // patch[0],
            conv_kernel=shapes[FIRST_MIXER + "conv1d.weight"][-1],
            time_step_rank=shapes[FIRST_MIXER + "dt_proj.weight"][-1],
            positions=grid**2 + 1,
        ),
        channels=3 * size**2,
        image_size=(grid, grid),
        patch=(size, step),
        num_labels=shapes["head.weight"][0],
    )
    build = partial(SSMForSequenceClassification, config)
    return built(build, _translated(tensors), contents([path]), str(path), by="its shapes")


def _translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by our names, with the class token's position last and colours from 0 to 1."""
    own = {f"backbone.{name}": t for name, t in tensors.items() if name.startswith(("layers.", "norm_f."))}
    rest = {name: t for name, t in tensors.items() if f"backbone.{name}" not in own and name not in TENSOR_DIMENSIONS}
    positions = tensors["pos_embed"]
    middle = (positions.shape[1] - 1) // 2
    kernel = tensors["patch_embed.proj.weight"].double()
    mean, spread = (torch.tensor(each, dtype=torch.float64).view(-1, 1, 1) for each in (COLOR_MEANS, COLOR_DEVIATIONS))
    shifted = tensors["patch_embed.proj.bias"].double() - (kernel * (mean / spread)).sum((1, 2, 3))
    return {
        **own,
        **rest,  # These have no place in the model, which the check of the weights reports.
        "backbone.embeddings.weight": rearrange(tensors["cls_token"], "one token width -> (one token) width"),
        "backbone.position": torch.cat(
            [positions[:, :middle], positions[:, middle + 1 :], positions[:, middle : middle + 1]], dim=1
        ),
        "embed.weight": rearrange(kernel / spread, "width c y x -> width (y x c)").to(positions),
        "embed.bias": shifted.to(positions),
        "head.weight": tensors["head.weight"],
        "head.bias": tensors["head.bias"],
    }
