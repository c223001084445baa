"""Differential Mamba: the subtraction, λ, the hybrid, Diff-S6, sizes, training, saving, generation."""

import copy
import math

import pytest
import torch
from bases import IDS, MAMBA, MAMBA2
from differential import lambdas
from examples import random_example, relative
from loud import loud
from refusals import refuses
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import silu, softplus
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from ssmscope.core.mixers import adapter_for, fast_scan, mixers
from ssmscope.core.model import Model
from ssmscope.layers import mamba2
from ssmscope.zoo import diff_mamba
from ssmscope.zoo.diff_mamba import DiffMambaForCausalLM, DiffMambaMixer, DiffS6Mixer, lambda_init


def language_model(**options) -> nn.Module:
    torch.manual_seed(0)
    return loud(diff_mamba.DiffMambaForCausalLM(diff_mamba.DiffMambaConfig(**{**MAMBA2, **options})))


def rms(t: torch.Tensor) -> torch.Tensor:
    return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("index", [0, 1])
def test_equation_21(index):
    """res + (1 − λ_i) · RMSNorm(m₁(n) − λ m₂(n)), λ = σ(Σ λ̄) + λ_i."""
    model = language_model().double()
    block = model.backbone.layers[index]
    torch.manual_seed(1)
    with torch.no_grad():
        block.mixer.lambda_bar.normal_(std=0.3)
        block.mixer.sub_norm.weight.normal_()
        block.norm.weight.normal_()
        res = torch.randn(1, 9, 16).double()
        n = block.norm.weight * rms(res[0])
        weights = {name: t.double() for name, t in block.mixer.state_dict().items()}
        first, second = (m(n[None])[0] for m in (block.mixer.m1, block.mixer.m2))
        lambda_i = 0.8 - 0.6 * math.exp(-0.3 * index)
        weight = torch.sigmoid(weights["lambda_bar"].sum()) + lambda_i
        scale = (1 - lambda_i) * weights["sub_norm.weight"]
        expected = res[0] + scale * rms(first - weight * second)
        assert relative(block(res)[0], expected) < 1e-5
        with fast_scan(model):
            assert relative(block(res)[0], expected) < 1e-5


@pytest.mark.parametrize("name", ["diff-mamba", "diff-mamba1", "diff-mamba-not-normalized"])
def test_the_second_is_subtracted_whatever_the_mixers_are(name):
    module = loud(random_example(name))
    for mixer in mixers(module):
        u = torch.randn(2, 7, module.config.hidden_size)
        with torch.no_grad():
            layer = adapter_for(mixer).compute_terms(mixer, u)
            weight = layer.extras["lambda"]
            y = mixer.m1(u) - weight * mixer.m2(u)
            expected = (1 - mixer.lambda_init) * (y if name.endswith("not-normalized") else mixer.normed(y))
            torch.testing.assert_close(adapter_for(mixer).output(mixer, layer), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mixer(u), expected, rtol=1e-4, atol=1e-5)


def test_initial_lambda_of_the_layers():
    assert lambda_init(0) == pytest.approx(0.2)
    assert [round(lambda_init(i), 4) for i in (1, 5, 47)] == [0.3555, 0.6661, 0.8]
    found = lambdas(language_model(num_hidden_layers=4))
    assert found == pytest.approx({i: 0.5 + 0.8 - 0.6 * math.exp(-0.3 * i) for i in range(4)}, abs=1e-6)


@pytest.mark.parametrize("scope", ["block", "s6"])
def test_forms_of_lambda(scope):
    torch.manual_seed(3)
    (mixer,) = mixers(language_model(num_hidden_layers=1, scope=scope))
    assert mixer.lambda_bar.shape == (16,)
    with torch.no_grad():
        mixer.lambda_bar.copy_(torch.linspace(-1, 1.2, 16))
    assert mixer.current_lambda().item() == pytest.approx(1 / (1 + math.exp(-1.6)) + 0.2, abs=1e-6)
    (mixer,) = mixers(language_model(num_hidden_layers=1, scope=scope, lambda_form="scalar"))
    assert mixer.lambda_bar.shape == (1,)
    with torch.no_grad():
        mixer.lambda_bar.fill_(-0.7)
    assert mixer.current_lambda().item() == pytest.approx(1 / (1 + math.exp(0.7)) + 0.2, abs=1e-6)
    (mixer,) = mixers(language_model(num_hidden_layers=1, scope=scope, lambda_form="exponential"))
    q1, k1, q2, k2 = (getattr(mixer, f"lambda_{n}") for n in ("q1", "k1", "q2", "k2"))
    assert {t.shape for t in (q1, k1, q2, k2)} == {(4,)} and all(0 < t.std() < 0.5 for t in (q1, k1, q2, k2))
    with torch.no_grad():
        for t, value in ((q1, 0.5), (k1, 0.25), (q2, -0.5), (k2, 0.125)):
            t.fill_(value)
    assert mixer.current_lambda().item() == pytest.approx(math.exp(0.5) - math.exp(-0.25) + 0.2, abs=1e-6)
    assert lambdas(mixer) == {0: mixer.current_lambda().item()}


@pytest.mark.parametrize("normalize", [True, False])
def test_diff_s6_with_an_empty_second_recurrence_is_mamba2(normalize):
    """With C₂ = D₂ = 0 the second recurrence reads nothing: the rest is a Mamba-2 mixer, scaled by 1 − λ_i."""
    (mixer,) = mixers(language_model(num_hidden_layers=1, scope="s6", normalize=normalize))
    plain = Mamba2Mixer(Mamba2Config(**{**MAMBA2, "num_hidden_layers": 1}), 0)
    inner, n, heads = 32, 4, 4
    with torch.no_grad():
        mixer.D[1] = 0
        rows = torch.arange(inner + inner + 4 * n + 2 * heads)
        z, xBC1, _, C2, step, _ = rows.split([inner, inner + 2 * n, n, n, heads, heads])
        mixer.in_proj.weight[C2] = 0
        mixer.conv1d.bias[C2 - inner] = 0
        plain.in_proj.weight.copy_(mixer.in_proj.weight[torch.cat([z, xBC1, step])])
        plain.conv1d.weight.copy_(mixer.conv1d.weight[xBC1 - inner])
        plain.conv1d.bias.copy_(mixer.conv1d.bias[xBC1 - inner])
        for name in ("dt_bias", "A_log", "D"):
            getattr(plain, name).copy_(getattr(mixer, name)[0])
        plain.out_proj.weight.copy_(mixer.out_proj.weight)
        u = torch.randn(2, 9, 16)
        if normalize:  # undo the norm where the recurrence's output is read
            y = plain_recurrence(plain, u)
            inverse = (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            gate = silu(plain.in_proj(u)[..., :inner])
            expected = plain.out_proj(rms(y / inverse * gate))
        else:
            expected = plain(u)
        torch.testing.assert_close(mixer(u), 0.8 * expected, rtol=1e-3, atol=1e-4)


def plain_recurrence(mixer: nn.Module, u: torch.Tensor) -> torch.Tensor:
    return mamba2.compute_terms(mixer, u).scan()[0].y.flatten(2)


def test_diff_s6_subtracts_over_the_same_input():
    """N(S6₁(x) − λ S6₂(x)): both recurrences have one x (Eq. 14)."""
    (mixer,) = mixers(language_model(num_hidden_layers=1, scope="s6", normalize=False))
    assert type(mixer) is DiffS6Mixer
    u = torch.randn(2, 9, 16)
    with torch.no_grad():
        layer = diff_mamba.compute_terms(mixer, u)
        assert layer.recurrences[0].x is layer.recurrences[1].x
        first, second = (s.y.flatten(2) for s in layer.scan())
        expected = 0.8 * mixer.out_proj(rms((first - 0.7 * second) * silu(layer.z)))
        torch.testing.assert_close(mixer(u), expected, rtol=1e-3, atol=1e-4)


def test_hybrid_layout():
    model = language_model(num_hidden_layers=5, differential_layers="hybrid")
    assert [type(m) for m in mixers(model)] == [DiffMambaMixer, Mamba2Mixer] * 2 + [DiffMambaMixer]
    assert list(lambdas(model)) == [0, 2, 4] and lambdas(model)[4] == pytest.approx(0.5 + lambda_init(4))
    chosen = language_model(num_hidden_layers=3, differential_layers=[2])
    assert [type(m) for m in mixers(chosen)] == [Mamba2Mixer, Mamba2Mixer, DiffMambaMixer]
    assert mixers(model)[1].intermediate_size == 32


@pytest.mark.parametrize("layers, millions", [(None, 368), ("hybrid", 375), ("full", 382)])
def test_parameter_counts_of_the_370m_models(layers, millions):
    """Differential Mamba, A.4: 368M, 375M and 382M, cut to whole millions (375.5 and 382.7 are printed so)."""
    sizes = dict(vocab_size=50288, hidden_size=1024, num_hidden_layers=48, state_size=128, expand=2, num_heads=32)
    sizes.update(head_dim=64, n_groups=1, tie_word_embeddings=True)
    with torch.device("meta"):
        if layers is None:
            model = Mamba2ForCausalLM(Mamba2Config(**sizes))
        else:
            model = diff_mamba.DiffMambaForCausalLM(diff_mamba.DiffMambaConfig(**sizes, differential_layers=layers))
    model.tie_weights()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) // 10**6 == millions


@pytest.mark.parametrize("options, words", [
    ({"scope": "mixer"}, "scope 'mixer' is unknown"),
    ({"lambda_form": "softmax"}, "lambda_form 'softmax' is unknown"),
    ({"differential_layers": "hybird"}, "did you mean 'hybrid'"),
    ({"differential_layers": [2]}, "from 0 to 1"),
    ({"differential_layers": []}, "at least one layer"),
    ({"lambda_form": "exponential", "lambda_std": 0.0}, "never moves"),
    ({"hidden_size": 18, "num_heads": 4, "head_dim": 9}, "4 heads do not divide"),
])  # fmt: skip
def test_wrong_configurations(options, words):
    refuses(words, diff_mamba.DiffMambaConfig, **{**MAMBA2, **options})


def test_diff_s6_is_built_on_mamba2():
    refuses("DiffMambaConfig", diff_mamba.DiffMamba1Config, **MAMBA, scope="s6")


def test_a_cache_is_refused():
    mixer = mixers(language_model())[0]
    with pytest.raises(ValueError, match="fills no cache"):
        mixer(torch.randn(1, 3, 16), object())
    with pytest.raises(ValueError, match="fills no cache"):
        mixer(torch.randn(1, 3, 16), cache=object())
    output = language_model().backbone(IDS, use_cache=True)
    assert output.get("cache_params") is None and output.get("cache") is None


def test_what_a_checkpoint_lacks_starts_anew_and_nothing_else(tmp_path):
    lacking = "backbone.layers.1.mixer.lambda_bar"
    for scope in ("block", "s6"):
        model = language_model(scope=scope, lambda_std=0.5)
        weights = {name: tensor + 0.37 for name, tensor in model.state_dict().items()}
        model.load_state_dict(weights)
        model.save_pretrained(tmp_path / scope)
        del weights[lacking]
        save_file(weights, tmp_path / scope / "model.safetensors", metadata={"format": "pt"})
        again = diff_mamba.DiffMambaForCausalLM.from_pretrained(tmp_path / scope).state_dict()
        assert [name for name in weights if not torch.equal(weights[name], again[name])] == []
        assert 0 < again[lacking].std() < 1.5


def test_layers_start_as_transformers_starts_them():
    torch.manual_seed(0)
    for mixer in mixers(diff_mamba.DiffMambaForCausalLM(diff_mamba.DiffMambaConfig(**MAMBA2))):
        for m in (mixer.m1, mixer.m2):
            assert ((softplus(m.dt_bias) >= 1e-4) & (softplus(m.dt_bias) <= 0.1)).all()
            torch.testing.assert_close(m.A_log.exp(), torch.arange(1.0, 5))
            assert m.in_proj.weight.std().item() == pytest.approx(0.1, rel=0.2)
    for mixer in mixers(diff_mamba.DiffMamba1ForCausalLM(diff_mamba.DiffMamba1Config(**MAMBA))):
        for m in (mixer.m1, mixer.m2):
            assert ((softplus(m.dt_proj.bias) >= 1e-4) & (softplus(m.dt_proj.bias) <= 0.1)).all()
            assert m.intermediate_size == 16 and m.A_log.shape == (16, 4)


def test_biases_of_both_outputs_are_in_the_map() -> None:
    """The second mixer's bias has the factor λ, as its output does."""
    config = copy.deepcopy(random_example("diff-mamba").config)
    config.use_bias = True
    model = Model(loud(DiffMambaForCausalLM(config)), name="biased")
    trace = model.trace(ids=[[3, 9, 17, 2, 40, 5]])
    for mixer, layer, linearized in zip(model.mixers, trace.layers, trace.linearized, strict=True):
        for part in (mixer.m1, mixer.m2):
            assert part.out_proj.bias.abs().max() > 0.01
        found = linearized.matvec(linearized.u) + linearized.bias
        torch.testing.assert_close(found, diff_mamba.output(mixer, layer), rtol=1e-4, atol=1e-4)
