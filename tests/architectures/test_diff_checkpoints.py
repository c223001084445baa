"""Differential Mamba's published layout: there and back, its meaning, how it is known, and damaged files."""

import json
import math

import pytest
import torch
from bases import IDS, MAMBA2
from differential import lambdas
from examples import relative
from loud import loud
from refusals import refuses
from safetensors.torch import load_file, save_file
from saving import write_diff_mamba2
from torch import nn
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from ssmscope.loading.load import load
from ssmscope.zoo import diff_mamba


def language_model(**options) -> nn.Module:
    torch.manual_seed(0)
    return loud(diff_mamba.DiffMambaForCausalLM(diff_mamba.DiffMambaConfig(**{**MAMBA2, **options})))


def rms(t: torch.Tensor) -> torch.Tensor:
    return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()


OF_A_LAYER = ["norm.weight", "subln.weight", "lambda_q1"] + [
    f"mixer_{i}.{part}"
    for i in (1, 2)
    for part in (
        "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "in_proj.weight", "norm.weight", "out_proj.weight"
    )
]  # fmt: skip


@pytest.mark.parametrize("layers, setting", [("full", "all"), ("hybrid", "alternate"), ([3], "quarter")])
@pytest.mark.parametrize("tied", [False, True])
def test_the_authors_layout_there_and_back(layers, setting, tied, tmp_path):
    model = language_model(
        num_hidden_layers=4, differential_layers=layers, tie_word_embeddings=tied, lambda_std=0.3, n_groups=2
    )
    write_diff_mamba2(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "mamba2" and config["diffmamba_settings"] == setting
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {f"backbone.layers.3.{n}" for n in OF_A_LAYER} <= names or setting == "alternate"
    assert not any(".m1." in n or "lambda_bar" in n or "sub_norm" in n for n in names)
    assert ("lm_head.weight" in names) != tied
    again = load(tmp_path)
    assert type(again.module) is diff_mamba.DiffMambaForCausalLM
    assert again.config.differential_layers == layers and again.config.tie_word_embeddings == tied
    with torch.no_grad():
        assert torch.equal(again.module(IDS).logits, model(IDS).logits)
    assert lambdas(again.module) == lambdas(model)


def test_the_authors_layout_means_what_their_model_computes(tmp_path):
    """Logits from the saved tensors by their names alone, with transformers' mixers of half the head width."""
    model = language_model(num_hidden_layers=3, differential_layers="hybrid", lambda_std=0.3)
    write_diff_mamba2(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    rules = {k: fields[k] for k in ("hidden_size", "state_size", "num_heads", "n_groups", "conv_kernel", "chunk_size")}
    sizes = {1: {"expand": 1, "head_dim": fields["head_dim"] // 2}, 2: {"expand": 2, "head_dim": fields["head_dim"]}}

    def run(prefix: str, expand: int, u: torch.Tensor) -> torch.Tensor:
        mixer = Mamba2Mixer(Mamba2Config(**rules, **sizes[expand]), 0)
        mixer.load_state_dict({k.removeprefix(prefix): t for k, t in weights.items() if k.startswith(prefix)})
        return mixer(u)

    with torch.no_grad():
        hidden = weights["backbone.embeddings.weight"][IDS]
        for i in range(3):
            layer = f"backbone.layers.{i}."
            n = weights[layer + "norm.weight"] * rms(hidden)
            if i == 1:
                hidden = hidden + run(layer + "mixer.", 2, n)
                continue
            lambda_i = 0.8 - 0.6 * math.exp(-0.3 * i)
            weight = weights[layer + "lambda_q1"].sum().sigmoid() + lambda_i
            y = run(layer + "mixer_1.", 1, n) - weight * run(layer + "mixer_2.", 1, n)
            hidden = hidden + (1 - lambda_i) * weights[layer + "subln.weight"] * rms(y)
        expected = (weights["backbone.norm_f.weight"] * rms(hidden)) @ weights["lm_head.weight"].T
        assert relative(load(tmp_path).module(IDS).logits, expected) < 1e-5


def test_the_authors_layout_is_known_by_its_tensors(tmp_path):
    write_diff_mamba2(language_model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for field in ("diffmamba", "diffmamba_settings", "architectures"):
        config.pop(field)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(lambdas(load(tmp_path).module)) == 2
    (tmp_path / "model.safetensors").rename(tmp_path / "published.safetensors")
    assert len(lambdas(load(tmp_path).module)) == 2
    weights = load_file(tmp_path / "published.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    (tmp_path / "published.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "diffmamba": True}))
    assert len(lambdas(load(tmp_path).module)) == 2


def test_a_damaged_checkpoint_of_the_authors_layout(tmp_path):
    write_diff_mamba2(language_model(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = {k: t for k, t in weights.items() if k != "backbone.layers.1.subln.weight"}
    save_file(lacking, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuses(r"do not fit.*sub_norm", load, tmp_path)
    plain = {k: t for k, t in weights.items() if "mixer_" not in k}
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refuses("none of its layers has a mixer_1", load, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refuses("has no weights", load, tmp_path)
