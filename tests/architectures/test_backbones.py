"""Our backbones and models as functions of their arguments: ids or embeddings, hidden states, tuples, new weights."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import language_model
from spreads import check_spread, check_uniform
from torch import nn
from torch.nn.functional import softplus
from transformers import CONFIG_MAPPING, MambaConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from ssmscope.core.trace import LayerState
from ssmscope.errors import InputError
from ssmscope.layers import vim
from ssmscope.layers.delta import DeltaMixer, DeltaNetConfig
from ssmscope.layers.linear_attention import GLAConfig, GLAModel
from ssmscope.layers.mamba2attn import Mamba2AttnConfig, Mamba2AttnModel
from ssmscope.layers.mamba3 import Mamba3Config, Mamba3Mixer
from ssmscope.layers.vim import VimConfig, VimModel
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.diff_mamba import DiffMambaConfig, DiffMambaMixer, DiffS6Mixer, compute_terms
from ssmscope.zoo.gfssm import GFSSMConfig, Grouping
from ssmscope.zoo.groupmamba import StateAttention
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification

IDS = torch.tensor([[3, 9, 17, 4], [5, 1, 2, 8]])
MAMBA2 = dict(vocab_size=30, hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=2)
SIZES: dict[str, dict[str, Any]] = {
    "ssm-gla": dict(vocab_size=30, hidden_size=16, num_heads=4, num_hidden_layers=2),
    "ssm-rwkv7": dict(vocab_size=30, hidden_size=16, num_heads=4, num_hidden_layers=2),
    "selective-ssm": dict(vocab_size=30, hidden_size=16, state_size=3),
}


def language(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return language_model(kind, **SIZES[kind]).eval()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    backbone = MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, state_size=3, time_step_rank=2)
    return SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=3)).eval()


def of_the_paper() -> nn.Module:
    torch.manual_seed(0)
    return SelectiveSSMForSequenceClassification(SelectiveSSMConfig(**SIZES["selective-ssm"])).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind: lambda kind=kind: language(kind) for kind in SIZES},
    **{f"{kind}, alone": lambda kind=kind: language(kind).backbone for kind in SIZES},
    "classifier": classifier,
    "selective classifier": of_the_paper,
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tuples_are_asked_for(name):
    module = MODELS[name]()
    named = module(IDS)
    first = named[0]
    for asked in (None, True):
        found = module(IDS, return_dict=asked)
        assert isinstance(found, dict) and torch.equal(found[0], first)
    (alone,) = module(IDS, return_dict=False)
    assert torch.equal(alone, first)
    torch.testing.assert_close(module(inputs_embeds=module.get_input_embeddings()(IDS))[0], first)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "selective classifier"])
@torch.no_grad()
def test_hidden_states_are_asked_for_or_configured(name):
    module = MODELS[name]()
    layers = 1 if name.startswith("selective") else 3
    assert module(IDS).hidden_states is None and module(IDS, output_hidden_states=False).hidden_states is None
    found = module(IDS, output_hidden_states=True).hidden_states
    assert len(found) == layers and {each.shape for each in found} == {(2, 4, 16)}
    module.base_model.config.output_hidden_states = True
    for one, other in zip(module(IDS).hidden_states, found, strict=True):
        assert torch.equal(one, other)
    assert module(IDS, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_may_be_replaced(name):
    module, new = MODELS[name](), nn.Embedding(30, 16)
    before = module(IDS)[0]
    module.set_input_embeddings(new)
    assert module.get_input_embeddings() is new and not torch.allclose(module(IDS)[0], before)


def test_a_backbone_reads_ids_or_embeddings():
    backbone = language("ssm-gla").backbone
    for given in ({}, {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 4, 16)}):
        with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
            backbone(**given)


def test_a_backbone_alone_draws_its_weights():
    torch.manual_seed(0)
    for part in GLAModel(GLAConfig(hidden_size=96, num_heads=4, vocab_size=300, num_hidden_layers=1)).modules():
        if isinstance(part, nn.Linear) and part.weight.numel() > 2000:
            check_spread(part.weight, part.in_features**-0.5)
        elif isinstance(part, nn.Embedding):
            check_spread(part.weight, 0.1)


OWN_MODELS = (
    "baleen-mamba", "baleen-mamba2", "diff-mamba", "diff-mamba1", "gfssm", "gfssm-mamba", "groupmamba",
    "groupmamba-mamba2", "selective-ssm", "ssm-mambavision", "ssm-vim", "ssm-mamba3", "mamba2attn",
)  # fmt: skip


@pytest.mark.parametrize("kind", OWN_MODELS)
def test_configurations_never_ask_for_a_cache(kind):
    for given in ({}, {"use_cache": True}):
        assert not getattr(CONFIG_MAPPING[kind](**given), "use_cache", False)
    if kind == "selective-ssm":
        assert CONFIG_MAPPING[kind](tie_word_embeddings=True).tie_word_embeddings is False


def test_options_of_differential_layers_by_default():
    def made(**options):
        return DiffMambaConfig(**{**MAMBA2, **options})

    plain = made()
    assert (plain.scope, plain.differential_layers, plain.normalize, plain.lambda_form) == (
        "block", "full", True, "sum",
    )  # fmt: skip
    stds = {form: made(lambda_form=form).lambda_std for form in ("sum", "scalar", "exponential")}
    assert stds == {"sum": 0.0, "scalar": 0.0, "exponential": 0.1}
    assert made(lambda_form="exponential", lambda_std=0.3).lambda_std == 0.3 and made(lambda_std=0.2).lambda_std == 0.2
    assert made(differential_layers=[1, 0]).differential_layers == [0, 1]
    assert made(hidden_size=18, head_dim=9, scope="s6").scope == "s6"  # where the heads are of both at once


@pytest.mark.parametrize("rescaled", [True, False])
def test_of_a_new_diff_s6(rescaled):
    torch.manual_seed(0)
    steps = dict(time_step_min=0.01, time_step_max=0.08, time_step_floor=0.02)
    sizes = dict(vocab_size=30, hidden_size=64, state_size=4, num_heads=128, head_dim=1, n_groups=2, conv_kernel=5)
    config = DiffMambaConfig(**sizes, **steps, num_hidden_layers=9, rescale_prenorm_residual=rescaled, scope="s6")
    mixer = DiffS6Mixer(config, 3)
    delta = softplus(mixer.dt_bias.detach())
    assert delta.shape == (2, 128) and 0.0199 < delta.min() and delta.max() < 0.0801
    # A third of the logarithms is below log(0.02), and set to it; the others are even up to log(0.08).
    for row in delta:
        assert (row < 0.0201).double().mean() == pytest.approx(1 / 3, abs=0.12)
        assert (row < 0.04).double().mean() == pytest.approx(2 / 3, abs=0.12)
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 129).expand(2, -1))
    assert (mixer.D == 1).all() and mixer.D.shape == (2, 128) and not mixer.conv1d.bias.any()
    check_uniform(mixer.conv1d.weight, -(5**-0.5), 5**-0.5)
    bound = 128**-0.5 / (3 if rescaled else 1)
    check_uniform(mixer.out_proj.weight, -bound, bound)
    assert mixer.lambda_init == pytest.approx(0.8 - 0.6 * math.exp(-0.9)) and mixer.conv_dim == 128 + 4 * 2 * 4


def test_parts_alone_begin_as_in_a_model():
    torch.manual_seed(0)
    attention = StateAttention(9, averages=False)
    assert torch.equal(attention.W_V, torch.eye(9)) and 0.1 < attention.W_Q.std() < 0.6
    config = GFSSMConfig(**MAMBA2)
    grouping = Grouping(config, Mamba2Mixer(config, 0))
    assert torch.equal(grouping.fir, torch.eye(1, 4)) and not grouping.prompt.any()
    assert grouping.prompt.shape == (2, 4, 8, 4)
    third = Mamba3Mixer(Mamba3Config(hidden_size=16, num_hidden_layers=1, head_dim=8), 0)
    assert (third.D == 1).all() and (third.B_bias == 1).all() and 0.0009 < softplus(third.dt_bias).min()
    delta = DeltaMixer(DeltaNetConfig(hidden_size=16, num_hidden_layers=1))
    assert 0 <= delta.A_log.min() and delta.A_log.max() <= math.log(16) and 0.0009 < softplus(delta.dt_bias).min()
    mixer = DiffMambaMixer(DiffMambaConfig(**MAMBA2), 1)
    assert not mixer.lambda_bar.any() and mixer.current_lambda().item() == pytest.approx(0.5 + mixer.lambda_init)


@pytest.mark.parametrize("wide", [True, False])
def test_a_stream_of_half_precision_may_be_wide(wide):
    torch.manual_seed(0)
    options = {"causal": True, "num_heads": 4}
    config = Mamba2AttnConfig(**MAMBA2, attn_layer_idx=[1], attn_cfg=options, d_intermediate=128, residual_in_fp32=wide)
    model = Mamba2AttnModel(config).bfloat16().eval()
    with torch.no_grad():
        found = model(IDS, output_hidden_states=True)
    streams = {each.dtype for each in found.hidden_states[:-1]}
    assert streams == {torch.float32 if wide else torch.bfloat16} and found.last_hidden_state.dtype == torch.bfloat16


def test_a_vision_mamba_reads_whole_images():
    torch.manual_seed(0)
    model = VimModel(VimConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9, positions=5, time_step_rank=2))
    assert not model.position.any() and model.position.shape == (1, 5, 8)
    assert VimModel(VimConfig(hidden_size=8, num_hidden_layers=1)).position is None
    mixer, u = model.layers[0].mixer, torch.randn(2, 5, 8)
    mask = torch.tensor([[True] * 5, [True] * 4 + [False]])
    with pytest.raises(InputError, match="^Vim reads whole images: their class token is in the middle, and none can"):
        vim.compute_terms(mixer, u, mask)
    with pytest.raises(InputError, match="^Vim reads whole images in both directions: no run continues from its"):
        vim.compute_terms(mixer, u, None, LayerState(None, ()))
    layer = vim.compute_terms(mixer, u, torch.ones(2, 5, dtype=torch.bool))
    assert [r.order.tolist() for r in layer.recurrences] == [[0, 1, 4, 2, 3], [3, 2, 4, 1, 0]]
    assert (layer.at, layer.reach) == (4, 4)
    mixer.middle = False
    plain = vim.compute_terms(mixer, u, mask)
    assert [r.order.tolist() for r in plain.recurrences] == [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]] and plain.at is None
    assert not plain.recurrences[0].delta[1, 4].any() and plain.recurrences[1].delta[1, :4].all()


def test_steps_of_a_diff_s6_are_within_their_limits():
    torch.manual_seed(0)
    mixer = DiffS6Mixer(DiffMambaConfig(**MAMBA2, scope="s6"), 0)
    u, found = 3 * torch.randn(2, 20, 16), {}
    mixer.dt_bias.data.fill_(0.0)
    for limits in ((0.0, math.inf), (0.5, 0.9)):
        mixer.sizes.time_step_limit = limits
        with torch.no_grad():
            found[limits] = [r.delta for r in compute_terms(mixer, u).recurrences]
    for free, limited in zip(*found.values(), strict=True):
        assert torch.equal(limited, free.clamp(0.5, 0.9)) and free.min() < 0.5 and free.max() > 0.9
