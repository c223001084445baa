"""Models as mamba_ssm stores and holds them, without the package."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from by_hand import below, normed
from examples import relative
from loud import TrueFloat64
from torch import Tensor, nn
from torch.nn.functional import silu
import ssmscope

IDS = [[5, 17, 3, 9, 22, 1, 40], [7, 8, 9]]
WIDTH, VOCABULARY = 24, 48


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


def stored(config: dict[str, Any], mixer: Callable[[int], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return random weights by mamba_ssm's names, with those that a layer's mixer has."""
    torch.manual_seed(0)
    weights = {"backbone.embedding.weight": torch.randn(VOCABULARY, WIDTH)}
    for layer in range(config["n_layer"]):
        at = f"backbone.layers.{layer}."
        weights[at + "norm.weight"] = 1 + torch.randn(WIDTH) / 3
        weights |= {f"{at}mixer.{name}": weight for name, weight in mixer(layer).items()}
        if config.get("d_intermediate"):
            inner = 128 * math.ceil(config["d_intermediate"] / 128)
            weights[at + "norm2.weight"] = 1 + torch.randn(WIDTH) / 3
            weights[at + "mlp.fc1.weight"] = torch.randn(2 * inner, WIDTH) / 4
            weights[at + "mlp.fc2.weight"] = torch.randn(WIDTH, inner) / 8
    weights["backbone.norm_f.weight"] = 1 + torch.randn(WIDTH) / 3
    tied = config.get("tie_embeddings", True)
    weights["lm_head.weight"] = weights["backbone.embedding.weight"] if tied else torch.randn(VOCABULARY, WIDTH)
    return weights


Mixer = Callable[[int, Tensor, dict[str, Tensor]], Tensor]


def reference(config: dict[str, Any], weights: dict[str, Tensor], ids: list[int], mixer: Mixer) -> Tensor:
    """Return logits (length, vocabulary) in float64, given a layer's mixer of its input and weights."""
    wide = {name: weight.double() for name, weight in weights.items()}
    x = wide["backbone.embedding.weight"][ids]
    for layer in range(config["n_layer"]):
        at = f"backbone.layers.{layer}."
        x = x + mixer(layer, normed(x, wide[at + "norm.weight"]), below(wide, at + "mixer."))
        if config.get("d_intermediate"):
            h, g = (normed(x, wide[at + "norm2.weight"]) @ wide[at + "mlp.fc1.weight"].T).chunk(2, dim=-1)
            x = x + (h * silu(g)) @ wide[at + "mlp.fc2.weight"].T
    return normed(x, wide["backbone.norm_f.weight"]) @ wide["lm_head.weight"].T


def check_logits(directory, config: dict[str, Any], weights: dict[str, Tensor], mixer: Mixer) -> None:
    """Check a model in memory, the same one from a directory, and its own pass, whose gated norm is in float32."""
    theirs = in_memory(config, weights)
    shared = ssmscope.load(theirs)
    assert {id(p) for p in shared.module.parameters()} == {id(p) for p in theirs.parameters()}
    read = ssmscope.load(written(directory, config, weights), dtype="float64")
    batch = read.encode(ids=IDS)
    single = shared.logits(batch)
    with TrueFloat64():
        found = read.logits(batch)
    for row, ids in enumerate(IDS):
        expected = reference(config, weights, ids, mixer)
        assert relative(found[row, : len(ids)], expected) < 1e-10
        assert relative(single[row, : len(ids)].double(), expected) < 1e-4
        with torch.no_grad():
            own = read.module(torch.tensor([ids])).logits[0]
        assert relative(own, expected) < 1e-5
