"""Models with unmerged adapters are read as the merged ones are; unreadable ones are refused."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from examples import random_example
from exhaustive import few
from refusals import refuses
from saving import write_mamba_ssm
from torch import Tensor, nn
from torch.nn.utils import parametrize
import ssmscope
from ssmscope.core.affine import embedding_table
from ssmscope.core.mixers import adapter_for
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.fidelity.measure import replacement_vector
from ssmscope.interp.methods.lrp import lrp, propagated, relevance_rules
from ssmscope.interp.objective import objective
from ssmscope.layers import parts
from ssmscope.probes.bound.terms import theorem_model
from ssmscope.probes.influence import influence
from ssmscope.probes.lens.lenses import chosen_states, logit_lens
from ssmscope.probes.stability import stability
from ssmscope.zoo.baleen import convert

peft = pytest.importorskip("peft", reason="peft is in the dev extra: pip install '.[dev]' in a checkout")

IDS = [[5, 17, 3, 9, 22, 1], [7, 8, 9]]
REFUSED_BY_PEFT = {"mamba", "mamba2", "falcon_mamba"}  # LoRA on their out_proj

LORA = dict(r=3, lora_alpha=6, init_lora_weights=False)
PEFT_OPTIONS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora with dropout": {**LORA, "lora_dropout": 0.3},
    "dora": {**LORA, "use_dora": True},
    "copies that are trained": {**LORA, "modules_to_save": ["lm_head", "norm_f"]},
    "a copy of the embeddings": {**LORA, "modules_to_save": ["embeddings"]},
    "tokens that are trained": {**LORA, "target_modules": ["in_proj"], "trainable_token_indices": [5, 9, 17]},
}


def plain(name: str) -> Any:
    """Return an example in float64 whose head is not the embeddings."""
    module: Any = random_example(name).double().eval()
    head = module.get_output_embeddings()
    if head is not None:
        head.weight = nn.Parameter(torch.randn_like(head.weight) / 5)
        module.config.tie_word_embeddings = False
    return module


def targets(module: Any) -> list[str]:
    """Return names of the embeddings, the head and every linear layer that peft and the newest transformers can
    adapt."""
    kind = module.config.model_type
    names = {name.rpartition(".")[2] for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    names |= {name.rpartition(".")[2] for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    left_out = {"out_proj"} if kind in REFUSED_BY_PEFT else set()
    return sorted(names - left_out - ({"dt_proj"} if parts.BY_WEIGHT else set()))


@functools.cache
def pair(name: str, kind: str = "lora") -> tuple[Model, Model]:
    """Return a model with an unmerged adapter, and the merged one."""
    module = plain(name)
    chosen, options = targets(module), PEFT_OPTIONS.get(kind, LORA)
    torch.manual_seed(1)
    if kind == "loha":
        config = peft.LoHaConfig(r=2, target_modules=[*chosen, "out_proj"], init_weights=False)
        config.target_modules -= {"embeddings", "lm_head"}
    else:
        others = sorted({*chosen} - {*options.get("modules_to_save", ())})
        config = peft.LoraConfig(**{"target_modules": others, **options})
    adapted = peft.get_peft_model(module, config)
    if kind == "two":
        adapted.add_adapter("second", peft.LoraConfig(target_modules=chosen, **{**LORA, "r": 2}))
        adapted.base_model.set_adapter(["default", "second"])
    for part in adapted.modules():
        if type(part).__name__ == "ModulesToSaveWrapper":
            part.modules_to_save["default"].weight.data.mul_(1.5)
        if type(part).__name__ == "TrainableTokensLayer":
            part.trainable_tokens_delta["default"].data.mul_(-1.5)
    adapted = adapted.double().eval()
    merged = copy.deepcopy(adapted).merge_and_unload(adapter_names=["default", "second"] if kind == "two" else None)
    own = copy.deepcopy(adapted).unload()  # the adapter matters
    found = Model(adapted.base_model.model), Model(merged), Model(own)
    logits = [each.logits(each.encode(ids=IDS)) for each in found]
    assert apart(logits[2], logits[1]) > 1e-2 and apart(logits[0], logits[1]) < 1e-5
    return found[:2]


def apart(found: Any, expected: Any) -> float:
    """The largest difference, in units of the largest number."""
    found, expected = (t.detach().double().numpy() if isinstance(t, Tensor) else t for t in (found, expected))
    assert found.shape == expected.shape and np.isfinite(expected).all() and np.abs(expected).max() > 0
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def same(found: Any, expected: Any) -> None:
    assert apart(found, expected) < 1e-5


def same_maps(found: Any, expected: Any) -> None:
    """Check the maps of two attentions, text by text."""
    for one, other in zip(found, expected, strict=True):
        for map_, wanted in zip(one.maps, other.maps, strict=True):
            same(map_.values, wanted.values)
            assert (map_.sink is None) == (wanted.sink is None)


NAMES = few(
    [
        *("mamba", "mamba-with-biases", "falcon-mamba", "mamba2", "gated-deltanet", "gla", "retnet", "diff-mamba"),
        *("diff-s6", "groupmamba", "groupmamba-mamba2", "gfssm", "rwkv", "baleen-e-mamba2"),
    ],
    *("mamba", "mamba2", "gated-deltanet", "gla", "diff-mamba", "rwkv"),
)


@pytest.mark.parametrize("name", few(NAMES, "diff-mamba"))
def test_attention_is_that_of_the_merged_model(name):
    adapted, merged = pair(name)
    traces = [model.trace(model.encode(ids=IDS)) for model in (adapted, merged)]
    asked: list[dict[str, Any]] = [
        {"level": level, "heads": heads, "parts": True}
        for level in ("ssm", "block")
        for heads in ("mean", "abs", "all")
    ]
    asked += [{"rollout": True}, {"rollout": True, "heads": "abs"}, {"pool": 2}, {"rows": "last"}]
    for options in asked:
        same_maps(*(ssmscope.attention(trace, **options) for trace in traces))
    one, other = (ssmscope.heatmap(trace) for trace in traces)
    for text, expected in zip(one, other, strict=True):
        same(text.mean, expected.mean)
        same(text.scores, expected.scores)


@pytest.mark.parametrize("name", NAMES)
def test_linearized_layers_are_those_of_the_merged_model(name):
    adapted, merged = pair(name)
    traces = [model.trace(model.encode(ids=IDS)) for model in (adapted, merged)]
    torch.manual_seed(2)
    for index, mixer in enumerate(adapted.mixers):
        one, other = (trace.linearized[index] for trace in traces)
        u, w = torch.randn_like(other.u), torch.randn_like(other.bias)
        same(one.matvec(u), other.matvec(u))
        same(one.vecmat(w), other.vecmat(w))
        weighed = [layer.contributions(w).attention() for layer in (one, other)]
        same(*weighed)
        with torch.no_grad():
            layer = adapter_for(mixer).compute_terms(mixer, other.u, traces[0].mask)
            own = adapter_for(mixer).output(mixer, layer)
            linearized = adapter_for(mixer).linearized(mixer, layer)
            same(linearized.matvec(linearized.u) + linearized.bias, own)


@pytest.mark.parametrize("name", NAMES)
def test_relevance_and_gradients_are_those_of_the_merged_model(name):
    adapted, merged = pair(name)
    of = [objective(model, model.encode(ids=IDS), target=7) for model in (adapted, merged)]
    one, other = (lrp(each) for each in of)
    same(one.scores, other.scores)
    assert (one.delta < 1e-4).all() and one.converged.all()
    same(propagated(of[0])[1] + 1, propagated(of[1])[1] + 1)  # it may be nothing
    maps = [ssmscope.attention(model, model.encode(ids=IDS), gradient=True, target=7) for model in (adapted, merged)]
    same_maps(*maps)
    assert not any("forward" in vars(part) for part in adapted.module.modules())


@pytest.mark.parametrize("kind", [*list(PEFT_OPTIONS)[1:], "two", "loha"])
def test_every_kind_of_adapter(kind):
    adapted, merged = pair("mamba2", kind)
    of = [objective(model, model.encode(ids=IDS), target=7) for model in (adapted, merged)]
    same(lrp(of[0]).scores, lrp(of[1]).scores)
    traces = [model.trace(model.encode(ids=IDS)) for model in (adapted, merged)]
    for one, other in zip(traces[0].linearized, traces[1].linearized, strict=True):
        same(one.matvec(other.u) + one.bias, other.matvec(other.u) + other.bias)
        same(one.attention(), other.attention())


@pytest.mark.parametrize("name", ["mamba", "gla", "gated-deltanet", "rwkv"])
def test_a_bias_that_an_adapter_adds_is_a_constant(name):
    """Layers without a bias of their own get one: it is not part of any map, and has its relevance."""
    module = plain(name)
    wanted = {"out_proj", "output", "value", "v_proj", "z_proj", "qkv_proj", "in_proj", "up", "down"}
    for index, part in enumerate(module.modules()):
        for key, child in list(part.named_children()):
            if key in wanted and isinstance(child, nn.Linear):
                shift = torch.randn(
                    child.out_features, dtype=torch.float64, generator=torch.Generator().manual_seed(index)
                )
                child.register_forward_hook(lambda module, args, y, shift=shift: y + shift)
    model = Model(module)
    trace = model.trace(model.encode(ids=IDS))
    for index, mixer in enumerate(model.mixers):
        with torch.no_grad():
            layer = adapter_for(mixer).compute_terms(mixer, trace.layers[index].u, trace.mask)
            linearized = adapter_for(mixer).linearized(mixer, layer)
            same(linearized.matvec(linearized.u) + linearized.bias, adapter_for(mixer).output(mixer, layer))
    of = objective(model, model.encode(ids=IDS), target=7)
    assert (lrp(of).delta < 1e-4).all()


@pytest.mark.parametrize("name", ["mamba", "gated-deltanet"])
def test_probes_are_those_of_the_merged_model(name):
    adapted, merged = pair(name)
    same(replacement_vector(adapted, "mean"), replacement_vector(merged, "mean"))
    same(embedding_table(adapted.module), embedding_table(merged.module))
    found = [influence(model, model.encode(ids=IDS[:1]), exact=True) for model in (adapted, merged)]
    numbers = [result.to_frame().select_dtypes("number").to_numpy(float, na_value=0) for result in found]
    same(*(np.nan_to_num(each) for each in numbers))
    found = [stability(model, model.encode(ids=IDS)) for model in (adapted, merged)]
    numbers = [result.to_frame().select_dtypes("number").to_numpy(float, na_value=0) for result in found]
    same(*(np.nan_to_num(each, posinf=0, neginf=0) for each in numbers))
    lenses = [logit_lens(model) for model in (adapted, merged)]
    stream = chosen_states(merged, merged.encode(ids=IDS), "every")
    same(*(lens.log_probs(stream) for lens in lenses))
    same(*(lens.tuned.unembed.unembedding.weight for lens in lenses))


def test_the_bound_is_that_of_the_merged_model():
    module = plain("selective-ssm-language")
    adapted = peft.get_peft_model(module, peft.LoraConfig(target_modules=["lm_head", "embedding"], **LORA)).double()
    merged = copy.deepcopy(adapted).merge_and_unload()
    one, other = (theorem_model(Model(each)) for each in (adapted.base_model.model, merged))
    same(one.head, other.head)
    same(one.embeddings, other.embeddings)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def changed(name: str, way: str) -> tuple[Model, Model]:
    """A model with layers that compute something other than their weights say, and one with such weights."""
    one, other = plain(name), plain(name)
    for mixers in zip(Model(one).mixers, Model(other).mixers, strict=True):
        mine, theirs = mixers
        if way == "parametrised":
            for part in ("in_proj", "out_proj", "conv1d"):
                parametrize.register_parametrization(getattr(mine, part), "weight", Doubled())
                getattr(theirs, part).weight.data.mul_(2)
            for part in ("A_log", "D"):
                parametrize.register_parametrization(mine, part, Doubled())
                getattr(theirs, part).data.mul_(2)
        elif way == "subclass":
            mine.in_proj.__class__ = mine.out_proj.__class__ = Halved
            for part in (theirs.in_proj, theirs.out_proj):
                part.weight.data.div_(2)
        else:
            for part in ("in_proj", "out_proj", *(["norm"] if hasattr(mine, "norm") else [])):
                getattr(mine, part).register_forward_hook(lambda module, args, y: 3 * y)
                getattr(theirs, part).weight.data.mul_(3)
            if not parts.BY_WEIGHT:
                mine.conv1d.register_forward_hook(lambda module, args, y: y / 4)
                theirs.conv1d.weight.data.div_(4)
                theirs.conv1d.bias.data.div_(4)
    for module, scale in ((one, None), (other, 3)):
        for part in module.modules():
            if type(part).__name__.endswith("MambaRMSNorm") or type(part).__name__ == "Mamba2RMSNorm":
                if way == "hook" and scale:
                    part.weight.data.mul_(scale)
                elif way == "hook":
                    part.register_forward_hook(lambda module, args, y: 3 * y)
    return Model(one), Model(other)


@pytest.mark.parametrize("way", ["parametrised", "subclass", "hook"])
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_layers_are_read_by_what_they_compute(name, way):
    models = changed(name, way)
    assert [model.num_layers for model in models] == [2, 2]
    traces = [model.trace(model.encode(ids=IDS)) for model in models]
    same(traces[0].logits, traces[1].logits)
    same(np.nan_to_num(traces[0].retention), np.nan_to_num(traces[1].retention))
    for one, other in zip(traces[0].linearized, traces[1].linearized, strict=True):
        same(one.matvec(other.u) + one.bias, other.matvec(other.u) + other.bias)
        same(one.attention(), other.attention())
        same(one.attention("ssm"), other.attention("ssm"))
    of = [objective(model, model.encode(ids=IDS), target=7) for model in models]
    same(lrp(of[0]).scores, lrp(of[1]).scores)


def test_attention_gradient_asks_nothing_of_the_weights():
    model, expected = Model(plain("mamba")), Model(plain("mamba"))
    model.module.requires_grad_(False)
    maps = [ssmscope.attention(each, each.encode(ids=IDS), gradient=True, target=7) for each in (model, expected)]
    same_maps(*maps)


def test_the_dropout_of_an_adapter_in_training_is_not_drawn():
    module = plain("mamba2")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["in_proj"], **{**LORA, "lora_dropout": 0.5}), module)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model = Model(module.double().eval())
    of = objective(model, model.encode(ids=IDS), target=7)
    before = ssmscope.attention(model.trace(of.batch)), lrp(of).scores
    module.train()
    after = ssmscope.attention(model.trace(of.batch)), lrp(of).scores
    same_maps(before[0], after[0])
    same(after[1], before[1])
    assert all(part.training for part in module.modules())


@pytest.mark.filterwarnings("ignore")
def test_quantised_activations_are_refused():
    module = torch.ao.quantization.quantize_dynamic(plain("mamba2").float(), {nn.Linear}, dtype=torch.qint8)
    model = Model(module)
    with pytest.raises(
        InputError, match=r"0\.mixer\.in_proj is a Linear of torch.ao.nn.quantized.dynamic.* of a batch"
    ):
        model.logits(model.encode(ids=IDS))
    u = torch.randn(1, 5, model.config.hidden_size)
    mixer = model.mixers[0]
    with pytest.raises(InputError, match=r"Mamba2Mixer.*of layer 0, a Linear of torch.*quantized.*dequantise") as error:
        adapter_for(mixer).linearized(mixer, adapter_for(mixer).compute_terms(mixer, u))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="no linear map"), relevance_rules(module, torch.ones(1)):
        pass


@pytest.mark.parametrize("by_weight", [True, False])
def test_an_adapter_that_transformers_leaves_out_is_refused(monkeypatch, by_weight):
    monkeypatch.setattr(parts, "BY_WEIGHT", by_weight)
    module = plain("mamba")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["dt_proj"], **LORA), module)
    model = Model(module.double())
    if by_weight:
        refuses("reads the weight of MambaMixer.dt_proj of layer 0 and leaves out", model.logits, model.encode(ids=IDS))
    else:
        merged = copy.deepcopy(module)
        for mixer in Model(merged).mixers:
            mixer.dt_proj = mixer.dt_proj.merge() or mixer.dt_proj.base_layer
        same(model.logits(model.encode(ids=IDS)), Model(merged).logits(Model(merged).encode(ids=IDS)))


def test_an_adapter_on_weights_that_are_rescaled_is_refused():
    module = plain("rwkv-deeper")
    module.rwkv.config.rescale_every = 2
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["output"], **LORA), module)
    model = Model(module.double())
    refuses("powers of two, but not what a PEFT adapter", model.logits, model.encode(ids=IDS))


def test_an_adapter_of_a_mixers_own_parameters_is_refused():
    module = plain("mamba").float()
    config = peft.LoraConfig(target_modules=[], target_parameters=["mixer.A_log"], **LORA)
    peft.inject_adapter_in_model(config, module)
    refuses("a ParamWrapper of peft.* wraps a MambaMixer .*: merge it", Model, module)


def test_what_saves_or_converts_weights_refuses_adapters(tmp_path):
    module = plain("mamba")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["in_proj"], **LORA), module)
    for ask in (lambda: write_mamba_ssm(module, tmp_path / "out"), lambda: convert(module, "bernoulli")):
        refuses(r"MambaForCausalLM has PEFT adapters .*in_proj\.base_layer.*merge_and_unload", ask)
    assert not (tmp_path / "out").exists()


def test_half_precision():
    model, _ = pair("mamba2")
    module = copy.deepcopy(model.module).bfloat16()
    trace = Model(module).trace(ids=IDS)
    for mixer, one in zip(Model(module).mixers, trace.linearized, strict=True):
        with torch.no_grad():
            own = adapter_for(mixer).output(
                mixer, adapter_for(mixer).compute_terms(mixer, one.u.bfloat16(), trace.mask)
            )
        assert apart((one.matvec(one.u) + one.bias)[trace.mask], own[trace.mask]) < 0.05


def test_offloaded_weights_are_refused_by_lrp():
    model = Model(plain("mamba"))
    of = objective(model, model.encode(ids=IDS), target=7)
    mixer = model.mixers[1]
    mixer.A_log = nn.Parameter(mixer.A_log.to("meta"))
    refuses("offloaded: load the whole model", lrp, of)
