"""Weights of a model by part, their randomisation, and the similarity of scores."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from ssmscope.api.options import chosen_layers
from ssmscope.core.model import Model
from ssmscope.core.ties import spearman


def parts_of(model: Model, layers: str | Sequence[int] = "all") -> dict[str, dict[str, nn.Parameter]]:
    """Return the weights of every part by name, from the head down: "head", "norm" (between the layers and the head),
    "layer 3" …, "embeddings". A part without weights is left out; a head's that are the embeddings' count as these."""
    numbers, module = model.layer_numbers, model.module
    chosen = chosen_layers(layers, numbers)
    place = {id(mixer): number for number, mixer in zip(numbers, model.mixers)}
    blocks = {_block(name): place[id(part)] for name, part in module.named_modules() if id(part) in place}
    table = module.get_input_embeddings()
    inputs = set() if table is None else {id(parameter) for parameter in table.parameters()}
    below = getattr(module, "base_model", module)
    base = {id(parameter) for parameter in below.parameters()} if below is not module else set()
    names = ("head", "norm", *(f"layer {number}" for number in reversed(numbers)), "embeddings")
    found: dict[str, dict[str, nn.Parameter]] = {name: {} for name in names}
    for name, parameter in module.named_parameters():
        rest = "norm" if id(parameter) in base else "head"
        own = next((f"layer {number}" for block, number in blocks.items() if name.startswith(f"{block}.")), rest)
        found["embeddings" if id(parameter) in inputs else own][name] = parameter
    kept = {"head", "norm", *(f"layer {numbers[index]}" for index in chosen)}
    kept |= {"embeddings"} if isinstance(layers, str) else set()
    return {name: tensors for name, tensors in found.items() if tensors and name in kept}


def _block(name: str) -> str:
    """Name the module of a mixer's layer: the innermost numbered one that holds it, or the mixer itself."""
    numbered = re.match(r"(.*\.)?\d+(?=\.|$)", name)
    return numbered[0] if numbered else name


def randomise(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Draw every tensor anew, in place, from N(its mean, its deviation²), by its name and the seed alone."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            random = np.random.default_rng([seed, zlib.crc32(name.encode())])
            drawn = torch.from_numpy(np.asarray(random.standard_normal(tuple(tensor.shape)))).to(tensor.device)
            numbers = tensor.detach().double()
            tensor.copy_(numbers.mean() + numbers.std(correction=0) * drawn)


def similarities(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> tuple[float, float]:
    return spearman(a, b), spearman(np.abs(a), np.abs(b))
