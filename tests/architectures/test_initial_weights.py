"""Weights of new models: spreads, ends and constants of their initialisation."""

import math
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_models import language_model
from spreads import check_spread, check_uniform
from torch import nn
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM
from ssmscope.core.mixers import mixers
from ssmscope.layers.mambavision import MambaVisionConfig
from ssmscope.layers.rwkv7 import TimeMixing
from ssmscope.layers.vim import VimConfig
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.diff_mamba import DiffMambaConfig, DiffMambaMixer, DiffS6Mixer
from ssmscope.zoo.selective import SelectiveSSM

WIDTH = 96
SIZES = dict(vocab_size=300, hidden_size=WIDTH, num_hidden_layers=2, num_heads=4)


def made(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return language_model(kind, **{**SIZES, **options})


MODEL_TYPES = ["ssm-gla", "ssm-retnet", "ssm-deltanet", "ssm-rwkv7", "ssm-hgrn2", "ssm-gsa"]


def check_parts(module: nn.Module) -> None:
    tried = 0
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and part.weight.numel() >= 2000 and not name.endswith("lm_head"):
            check_spread(part.weight, part.in_features**-0.5)
            assert part.bias is None or name.endswith("w_lora.out") or not part.bias.any()
            tried += 1
        if isinstance(part, nn.RMSNorm | nn.LayerNorm | nn.GroupNorm):
            assert (part.weight == 1).all() and (getattr(part, "bias", None) is None or not part.bias.any())
    assert tried >= 4


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_linear_maps_keep_the_size_of_their_input(kind):
    module = made(kind)
    check_parts(module)
    check_spread(module.get_input_embeddings().weight, module.config.initializer_range)


@pytest.mark.parametrize("kind", ["ssm-gla", "ssm-deltanet", "ssm-rwkv7"])
def test_of_what_a_checkpoint_lacks(kind, tmp_path):
    module = made(kind)
    module.save_pretrained(tmp_path)
    embeddings = {"backbone.embeddings.weight": module.get_input_embeddings().weight + 1}
    save_file(embeddings, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    check_parts(again)
    assert torch.equal(again.get_input_embeddings().weight, embeddings["backbone.embeddings.weight"])
    if kind == "ssm-deltanet":
        for mixer in mixers(again):
            check_uniform(mixer.conv1d.weight, -0.5, 0.5)
            assert 0 <= mixer.A_log.min() and mixer.A_log.max() <= math.log(16)
    if kind == "ssm-rwkv7":
        for part in (each for each in again.modules() if isinstance(each, TimeMixing)):
            assert (part.r_k == torch.tensor(-0.04)).all()
            torch.testing.assert_close(part.w_lora.out.bias, torch.linspace(-6, 1, WIDTH))


def test_of_an_rwkv7():
    module = made("ssm-rwkv7")
    found = [part for part in module.modules() if isinstance(part, TimeMixing)]
    assert all((block.mixer.ffn.x_k == 0.5).all() for block in module.backbone.layers)
    for part in found:
        assert (part.r_k == torch.tensor(-0.04)).all() and part.r_k.shape == (4, WIDTH // 4)
        assert all((getattr(part, f"x_{name}") == 0.5).all() for name in "rwkvag")
        assert (part.k_k == 1).all() and (part.k_a == 1).all()
        torch.testing.assert_close(part.w_lora.out.bias, torch.linspace(-6, 1, WIDTH))
    assert len(found) == 2


def test_of_a_delta_rule():
    for mixer in mixers(made("ssm-deltanet", num_heads=32, key_size=64)):
        check_uniform(mixer.conv1d.weight, -0.5, 0.5)
        check_uniform(mixer.A_log, 0, math.log(16))
        check_uniform(softplus(mixer.dt_bias).log(), math.log(1e-3), math.log(1e-1))


def test_of_a_selective_ssm():
    torch.manual_seed(0)
    layer = SelectiveSSM(400, 25, spectral_abscissa=0.5)
    for weight in (layer.W_B, layer.W_C):
        check_spread(weight, 0.05)
        assert weight.shape == (25, 400)
    check_spread(layer.q_delta, 0.05)
    assert not layer.p_delta.any() and (layer.A[:, 0] == 0.5).all() and layer.spectral_abscissa == 0.5
    check_uniform(layer.A[:, 1:], -9.5, 0.5)
    assert SelectiveSSM(4, 3).spectral_abscissa == 0


def test_of_a_vision_mamba():
    torch.manual_seed(0)
    backbone = VimConfig(hidden_size=64, num_hidden_layers=1, positions=5, initializer_range=0.3)
    config = SSMClassifierConfig(backbone, channels=12, image_size=(2, 2), patch=(2, 2), num_labels=3)
    module = SSMForSequenceClassification(config)
    (mixer,) = mixers(module)
    for part in (mixer.in_proj, mixer.out_proj, mixer.x_proj, mixer.x_proj_b):
        check_spread(part.weight, part.in_features**-0.5 / 3)
    for part in (mixer.dt_proj, mixer.dt_proj_b):
        check_uniform(part.bias, -5, -2)
    check_spread(module.backbone.embeddings.weight, 0.3)


def test_of_a_groupmambas_attention():
    first, second = mixers(
        language_model("groupmamba", vocab_size=9, hidden_size=8, num_hidden_layers=2, state_size=48)
    )
    assert first.attention.W_Q is None and torch.equal(first.attention.W_V, torch.eye(48))
    for weight in (second.attention.W_Q, second.attention.W_K):
        check_spread(weight, 48**-0.5)


def test_of_the_parameters_of_a_difference():
    sizes: dict[str, Any] = dict(vocab_size=9, hidden_size=16, num_heads=4, head_dim=8, n_groups=1, lambda_std=0.3)
    torch.manual_seed(0)
    wide = dict(sizes, hidden_size=2000, head_dim=1000, state_size=1)
    with torch.device("meta"):
        mixer = DiffMambaMixer(DiffMambaConfig(**wide), 0)
    mixer.lambda_bar = nn.Parameter(torch.empty(2000))
    mixer.reset_lambda()
    check_spread(mixer.lambda_bar, 0.3)
    for kind in (DiffMambaMixer, DiffS6Mixer):
        mixer = kind(DiffMambaConfig(**sizes, state_size=2000, lambda_form="exponential"), 0)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            check_spread(getattr(mixer, name), 0.3)


def test_of_a_mamba_3_and_of_what_its_checkpoint_lacks(tmp_path):
    module = made("ssm-mamba3", state_size=16, head_dim=2, num_heads=96)
    module.save_pretrained(tmp_path)
    own = ("dt_bias", "mixer.D", "B_bias", "C_bias", "lm_head.weight")
    weights = {name: weight for name, weight in module.state_dict().items() if not name.endswith(own)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for mixer in (*mixers(module), *mixers(AutoModelForCausalLM.from_pretrained(tmp_path))):
        low, high, floor = mixer.steps
        check_uniform(softplus(mixer.dt_bias).log(), math.log(max(low, floor)) - 1e-5, math.log(high) + 1e-5)
        for ones in (mixer.D, mixer.B_bias, mixer.C_bias):
            assert (ones == 1).all()


def test_of_a_mambavision():
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=96, layer_scale=True)
    backbone = MambaVisionConfig(**sizes, vocab_size=50, time_step_rank=4, initializer_range=0.3)
    module = SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=3)).backbone
    (mixer,) = mixers(module)
    block = module.layers[1]
    for part in (mixer.in_proj, mixer.out_proj, mixer.x_proj, block.mixer.in_proj, block.mlp.down):
        check_spread(part.weight, part.in_features**-0.5 / 3)
    check_uniform(mixer.dt_proj.bias, -2.5, -1)
    check_spread(module.embeddings.weight, 0.3)
    assert not block.mlp.up.bias.any() and not block.mixer.out_proj.bias.any()
    assert all(bool((scale == 1).all()) for scale in (block.gamma_1, block.gamma_2, mixer.D))
    assert torch.equal(mixer.A_log.exp().round(), torch.arange(1.0, 9.0).expand(32, -1))
