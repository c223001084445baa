"""Models as mamba_ssm stores and holds them, without the package."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def written(directory, config: dict[str, Any], weights: dict[str, Tensor]):
    (directory / "config.json").write_text(json.dumps(config))
    torch.save(weights, directory / "pytorch_model.bin")
    return directory


def in_memory(config: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module:
    """A model whose parts are named as mamba_ssm's."""
    theirs = type("MambaLMHeadModel", (nn.Module,), {"__module__": "mamba_ssm.models.mixer_seq_simple"})()
    theirs.config = SimpleNamespace(**config)
    parameters = {id(weight): nn.Parameter(weight) for weight in weights.values()}
    for name, weight in weights.items():
        *path, last = name.split(".")
        at: nn.Module = theirs
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, parameters[id(weight)])
    return theirs
