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

from ssmscope.architectures.loading import stored
from ssmscope.architectures.loading.fields import check_depth, check_fields
from ssmscope.architectures.loading.fla_checkpoints import is_fla, plan_fla
from ssmscope.architectures.loading.hub_checkpoints import is_hub, plan_hub
from ssmscope.architectures.loading.mamba_checkpoints import is_mamba_ssm, plan_mamba_ssm
from ssmscope.architectures.loading.mambavision_checkpoints import (
    is_mambavision,
    is_mambavision_file,
    plan_mambavision,
)
from ssmscope.architectures.loading.minimax_checkpoints import is_minimax, plan_minimax
from ssmscope.architectures.own.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.architectures.own.diff_mamba import DiffMambaConfig, DiffMambaForCausalLM
from ssmscope.architectures.own.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification
from ssmscope.architectures.read.mambavision import COLOR_DEVIATIONS, COLOR_MEANS
from ssmscope.architectures.read.vim import VimConfig
from ssmscope.core.registry import Registry
from ssmscope.errors import InputError

# ---- Differential Mamba, as its authors publish it, e.g. `nadavsc/diffmamba2-370M`: config.json is Mamba-2's with
# `diffmamba` and `diffmamba_settings`. A differential layer has two Mamba-2 mixers of expansion 1, λ̄ (Eq. 17) and the
# norm after the subtraction; everything else is named as in transformers' Mamba-2.

DIFF_PART_NAMES = {
    "mixer_1.": "mixer.m1.",
    "mixer_2.": "mixer.m2.",
    "lambda_q1": "mixer.lambda_bar",
    "subln.weight": "mixer.sub_norm.weight",
}
FILE_FIELDS = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version")
"""Fields of a config.json that say nothing about the model's shape."""
DIFF_FIELDS = ("diffmamba", "diffmamba_settings", "verbose")


def is_diff_mamba2(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a directory holds a model in the authors' layout, by its config.json or its tensors' names."""
    if config.get("model_type") != "mamba2":
        return False
    architectures = config.get("architectures")
    if config.get("diffmamba") or (isinstance(architectures, list) and "DiffMamba2ForCausalLM" in architectures):
        return True
    try:
        headers = map(stored.read_headers, directory.glob("*.safetensors"))
        return any(".mixer_1." in name for names in headers for name in names)
    except InputError:
        return False  # The function that reads the weights reports the error.


def plan_diff_mamba2(config: Mapping[str, Any], held: stored.Contents, what: str) -> stored.Plan:
    """Plan a `DiffMambaForCausalLM`; the tensors' names say which layers are differential, and one must be."""
    check_fields(config, what)
    ours = _by_our_names(held.tensors)
    found = {int(m.group(1)) for name in ours if (m := re.match(r"backbone\.layers\.(\d+)\.mixer\.m1\.", name))}
    if not found:
        raise InputError(f"{what} calls itself a Differential Mamba, but none of its layers has a mixer_1")
    embeddings = ours.get("backbone.embeddings.weight")
    if embeddings is None:
        raise InputError(f"the weights of {what} lack backbone.embeddings.weight")
    tied = "lm_head.weight" not in ours or bool(config.get("tie_word_embeddings"))
    base = {name: value for name, value in config.items() if name not in (*FILE_FIELDS, *DIFF_FIELDS)}
    base |= {"vocab_size": embeddings.shape[0], "tie_word_embeddings": tied}
    if "time_step_limit" in base:
        base["time_step_limit"] = tuple(map(float, base["time_step_limit"] or ()))
    number = config.get("num_hidden_layers", 0)
    named = {"full": set(range(number)), "hybrid": set(range(0, number, 2))}
    layers = next((name for name, those in named.items() if those == found), sorted(found))

    def translate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights = _by_our_names(tensors)
        return {"lm_head.weight": weights["backbone.embeddings.weight"], **weights}

    base["differential_layers"] = layers
    return stored.Plan(lambda: DiffMambaForCausalLM(DiffMambaConfig(**base)), translate, tied)


def _by_our_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in tensors.items():
        for theirs, ours in DIFF_PART_NAMES.items():
            name = re.sub(rf"^(backbone\.layers\.\d+\.){re.escape(theirs)}", rf"\g<1>{ours}", name)
        found[name.replace("backbone.embedding.", "backbone.embeddings.")] = value
    return found


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


# ---- state dicts of selective SSMs: embedding.weight, [SSM.]ssm.{A, W_B, W_C, q_delta, p_delta}, SSM.w or W


def plan_selective(tensors: Mapping[str, Tensor], what: str) -> stored.Plan:
    """Plan a selective SSM's classifier: binary with `SSM.w`, several classes with `W`, else an InputError."""
    weights = {name.removeprefix("SSM."): tensor for name, tensor in tensors.items()}
    head = weights.pop("w", None)
    binary = head is not None
    head = head.unsqueeze(0) if head is not None else weights.pop("W", None)
    expected = {"embedding.weight", *(f"ssm.{part}" for part in ("A", "W_B", "W_C", "q_delta", "p_delta"))}
    if head is None or set(weights) != expected:
        raise InputError(
            f"{what} is not a checkpoint that can be read: a single file must be a selective SSM's state dict with "
            f"embedding.weight, ssm.A, ssm.W_B, ssm.W_C, ssm.q_delta, ssm.p_delta and w or W; it holds "
            f"{', '.join(sorted(weights)[:4])}, …; other models are given as directories"
        )
    for name, tensor in {"embedding.weight": weights["embedding.weight"], "ssm.A": weights["ssm.A"], "W": head}.items():
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise InputError(f"{what} is damaged: {name} is {tuple(tensor.shape)}; a matrix was expected")
    (vocabulary, width), state = weights["embedding.weight"].shape, weights["ssm.A"].shape[1]
    config = SelectiveSSMConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        state_size=state,
        binary=binary,
        num_labels=2 if binary else head.shape[0],
        spectral_abscissa=weights["ssm.A"].real.max().item(),  # Complex numbers are refused later.
    )
    build = partial(SelectiveSSMForSequenceClassification, config)
    return stored.Plan(build, lambda tensors: {**weights, "head.weight": head})


# ---- the table


class Layout(NamedTuple):
    """Layout of directories: its name, the test that recognises it by the directory and its config.json, and the
    function that plans the model from config.json, the headers of the weights and the directory's name."""

    name: str
    recognises: Callable[[Path, Mapping[str, Any]], bool]
    plan: Callable[[Mapping[str, Any], stored.Contents, str], stored.Plan]
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
        plan = self.plan(config, held, what)
        return stored.built(plan, stored.read_all(files), held, what)


LAYOUTS: Registry[Layout] = Registry("layout", "ssmscope.layouts")
"""Layouts of directories by name, in the order in which they are tried; installed packages add theirs."""
for each in (
    Layout("mamba_ssm", is_mamba_ssm, plan_mamba_ssm),
    Layout("flash-linear-attention", is_fla, plan_fla),
    Layout("PLaMo 2 and Ring-linear", is_hub, plan_hub),
    Layout("MambaVision", is_mambavision, plan_mambavision, pictures=True),
    Layout("MiniMax", is_minimax, plan_minimax),
    Layout("Differential Mamba", is_diff_mamba2, plan_diff_mamba2, any_name=True),
):
    LAYOUTS.add(each.name, each)


def layout_of(directory: Path, config: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a directory; None for transformers' own."""
    return next((found for name in LAYOUTS if (found := LAYOUTS[name]).recognises(directory, config)), None)


def reads_pictures(names: Collection[str]) -> bool:
    """Return True if these are the names of the tensors of a state dict that classifies pictures."""
    return any("patch_embed." in name for name in names)


def read_state_dict(path: Path, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return the model of a file's state dict, a MambaVision's, a Vim's or a selective SSM's. Raises InputError if it
    is none of theirs."""
    what, held = str(path), stored.contents([path])
    if is_mambavision_file(tensors):
        plan = plan_mambavision({}, held, what)
    else:
        of_vim = f"{FIRST_MIXER}A_b_log" in tensors and "patch_embed.proj.weight" in tensors
        plan = (plan_vim if of_vim else plan_selective)(tensors, what)
    return stored.built(plan, tensors, held, what, by="its shapes")
