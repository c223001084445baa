"""Folders of adapters: logits are those of peft's own model, or the adapter is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from examples import random_example, relative
from loud import loud
from refusals import refused, refuses
from safetensors.torch import load_file, save_file
from small_models import language_model
from transformers import AutoModelForSequenceClassification
import ssmscope
from ssmscope.core.model import Model
from ssmscope.loading.pretrained import PEFT_TYPES

peft = pytest.importorskip("peft", reason="peft is in the dev extra: pip install '.[dev]' in a checkout")
pytestmark = pytest.mark.filterwarnings("ignore")

IDS = [5, 17, 3, 9, 22]
SIZE, SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2), dict(num_heads=4, head_dim=16, n_groups=1)


class Saved(NamedTuple):
    """Path of a saved adapter, logits of peft's model, and those of the model that it was made for."""

    folder: Path
    own: torch.Tensor
    plain: torch.Tensor


def saved(tmp_path: Path, module: Any, config: Any, **how: Any) -> Saved:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    if not base.exists():
        module.save_pretrained(base)
    with torch.no_grad():
        plain = module(torch.tensor([IDS])).logits[0]
    torch.manual_seed(0)
    adapted = peft.get_peft_model(module, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape) * 0.3)
        own = adapted.eval()(input_ids=torch.tensor([IDS])).logits[0]
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder, **how)
    return Saved(folder, own, plain)


def logits(path: Path) -> torch.Tensor:
    return logits_of(ssmscope.load(path))


def logits_of(model: Model) -> torch.Tensor:
    batch = model.encode(ids=[IDS])
    return model.logits(batch)[0] if model.is_classifier else model.run(batch).logits[0]


def check(found: Saved) -> None:
    model = ssmscope.load(found.folder)
    assert relative(found.own, found.plain) > 0.05 and relative(logits_of(model), found.own) < 1e-4
    assert model.fingerprint == ssmscope.load(found.folder).fingerprint


LORA: dict[str, dict[str, Any]] = {
    "plain": {}, "a language model's": dict(task_type="CAUSAL_LM"), "head": dict(modules_to_save=["lm_head"]),
    "norm": dict(modules_to_save=["norm_f"]), "embeddings": dict(modules_to_save=["embeddings"]),
    "embeddings and head": dict(modules_to_save=["embeddings", "lm_head"]),
    "tokens": dict(trainable_token_indices=[3, 5]),
    "tokens by their layer": dict(trainable_token_indices={"embeddings": [3, 5]}), "dora": dict(use_dora=True),
    "rslora": dict(use_rslora=True), "alphas": dict(alpha_pattern={"in_proj": 32}),
    "ranks": dict(rank_pattern={"layers.0.mixer.in_proj": 5}), "every bias": dict(bias="all"),
    "a bias of its own": dict(lora_bias=True), "transposed weights": dict(fan_in_fan_out=True),
    "LoRA on embeddings": dict(target_modules=["embeddings"]),
    "LoRA on embeddings and head": dict(target_modules=["embeddings", "lm_head"]),
    "one layer": dict(layers_to_transform=[1]), "an expression": dict(target_modules=r".*in_proj"),
    "out of the weights": dict(init_lora_weights="pissa"), "out of their directions": dict(init_lora_weights="olora"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "how"), [
    *(("mamba2", how) for how in LORA), ("mamba", "head"), ("mamba", "tokens"), ("gla-as-mamba", "embeddings and head"),
])  # fmt: skip
def test_lora_in_all_its_forms(tmp_path, name, how):
    config = peft.LoraConfig(r=2, **{"target_modules": ["in_proj", "q_proj"], **LORA[how]})
    check(saved(tmp_path, loud(random_example(name)), config))


def test_lora_on_outputs_and_convolutions(tmp_path):
    """peft makes such adapters of models that it does not call Mamba; those of convolutions mix channels."""
    module = loud(random_example("gated-deltanet"))
    check(saved(tmp_path / "outputs", module, peft.LoraConfig(r=2, target_modules=["out_proj"])))
    module = loud(random_example("gated-deltanet"))
    config = peft.LoraConfig(r=module.backbone.layers[0].mixer.conv1d.groups, target_modules=["conv1d"])
    refuses("is no convolution of every channel by itself", saved, tmp_path, module, config)


def test_lora_on_steps(tmp_path):
    """transformers 5 leaves the adapter of the steps out, and so it is refused there."""
    found = saved(tmp_path, loud(random_example("mamba")), peft.LoraConfig(r=2, target_modules=["dt_proj"]))
    if relative(found.own, found.plain) > 1e-6:
        return check(found)
    refuses("reads the weight of MambaMixer.dt_proj of layer 0 and leaves out", logits, found.folder)


OTHER_CONFIGS: dict[str, Callable[[], Any]] = {
    "ADALORA": lambda: peft.AdaLoraConfig(target_modules=["in_proj"], total_step=10, init_r=3, target_r=2),
    "BOFT": lambda: peft.BOFTConfig(target_modules=["in_proj"], boft_block_size=2),
    "C3A": lambda: peft.C3AConfig(target_modules=["out_proj", "in_proj"], block_size=2),
    "DELORA": lambda: peft.DeloraConfig(target_modules=["in_proj"], r=2),
    "FOURIERFT": lambda: peft.FourierFTConfig(target_modules=["in_proj"], n_frequency=20),
    "HIRA": lambda: peft.HiraConfig(target_modules=["in_proj"], r=2),
    "HRA": lambda: peft.HRAConfig(target_modules=["in_proj"], r=2),
    "IA3": lambda: peft.IA3Config(target_modules=["in_proj"], feedforward_modules=[]),
    "LN_TUNING": lambda: peft.LNTuningConfig(target_modules=["norm_f"]),
    "LOHA": lambda: peft.LoHaConfig(target_modules=["in_proj"], r=2),
    "LOKR": lambda: peft.LoKrConfig(target_modules=["in_proj"], r=2),
    "MISS": lambda: peft.MissConfig(target_modules=["in_proj"], r=2),
    "OFT": lambda: peft.OFTConfig(target_modules=["in_proj"], oft_block_size=2, r=0),
    "RANDLORA": lambda: peft.RandLoraConfig(target_modules=["in_proj"], r=2),
    "ROAD": lambda: peft.RoadConfig(target_modules=["in_proj"], group_size=2),
    "SHIRA": lambda: peft.ShiraConfig(target_modules=["in_proj"], r=2),
    "TRAINABLE_TOKENS": lambda: peft.TrainableTokensConfig(target_modules=["embeddings"], token_indices=[3, 5]),
    "VBLORA": lambda: peft.VBLoRAConfig(target_modules=["in_proj"], r=2, vector_length=2, num_vectors=8),
    "VERA": lambda: peft.VeraConfig(target_modules=["in_proj"], r=2),
}
assert {*OTHER_CONFIGS, "LORA"} == {*PEFT_TYPES}


@pytest.mark.parametrize("kind", OTHER_CONFIGS)
def test_other_kinds_of_adapters(tmp_path, kind):
    check(saved(tmp_path, loud(random_example("mamba2")), OTHER_CONFIGS[kind]()))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("saved_as", ["a language model", "a classifier"])
def test_a_classifiers_adapter_brings_its_head(tmp_path, saved_as, classes):
    """peft makes a classifier of a language model, whose new head is saved with the adapter alone."""
    module = loud(random_example("jamba"))
    module.save_pretrained(tmp_path / "base")
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=classes)
    torch.nn.init.normal_(module.score.weight)
    if saved_as == "a classifier":
        module.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "in_proj"], task_type="SEQ_CLS")
    found = saved(tmp_path, module, config)
    check(found)
    assert ssmscope.load(found.folder).labels == [f"LABEL_{i}" for i in range(classes)]


def test_a_classifier_of_our_own_with_a_trained_head(tmp_path):
    module = loud(random_example("mamba2"))
    from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

    classifier = loud(SSMForSequenceClassification(SSMClassifierConfig(module.config, num_labels=3)))
    config = peft.LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=["head"])
    check(saved(tmp_path, classifier, config))


MAY_NOT_SAY: list[tuple[str, Any, str]] = [
    ("megatron_core", "some.module", "megatron_core is 'some.module', which is not known"),
    ("megatron_config", {"hidden_size": 3}, "megatron_config is"),
    ("layer_replication", [[0, 2], [1, 2]], "layer_replication is"),
    ("corda_config", {"cache_file": "../x"}, "corda_config.cache_file is '../x', which is not known"),
    ("init_lora_weights", "eva", "init_lora_weights is 'eva', which is not known"),
    ("an_option_of_a_newer_peft", 3, "an_option_of_a_newer_peft is 3, which is not read with peft"),
    ("peft_type", "PEANUT", "of type 'PEANUT', which is not read"),
    ("peft_type", None, "of type null, which is not read"),
    ("r", "many", "r is 'many', which is not known"),
    ("r", [2], "damaged"),
]


def test_what_an_adapters_configuration_may_not_say(tmp_path):
    found = saved(tmp_path, loud(random_example("mamba2")), peft.LoraConfig(r=2, target_modules=["in_proj"]))
    file = found.folder / "adapter_config.json"
    fields = json.loads(file.read_text())
    named = {"auto_mapping": {"base_model_class": "Model", "parent_library": "some.module"}}
    file.write_text(json.dumps({**fields, **named, "an_option_that_is_off": False}))
    assert relative(logits(found.folder), found.own) < 1e-4
    for field, value, says in MAY_NOT_SAY:
        file.write_text(json.dumps({**fields, field: value}))
        assert says in refused(ssmscope.load, found.folder)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
@pytest.mark.parametrize("targets", [["in_proj"], ["in_proj", "embeddings"]])
def test_tokens_that_were_added_come_with_the_adapter(tmp_path, kind, targets):
    """Mamba's head is its embeddings, Mamba-2's its own."""
    sizes = SIZES if kind == "mamba2" else {}
    module = loud(language_model(kind, **SIZE, **sizes, tie_word_embeddings=kind == "mamba"))
    module.save_pretrained(tmp_path / "base")
    module.resize_token_embeddings(module.config.vocab_size + 3)
    found = saved(tmp_path, module, peft.LoraConfig(r=2, target_modules=targets), save_embedding_layers=True)
    check(found)
    assert ssmscope.load(found.folder).vocabulary == module.config.vocab_size


def test_added_tokens_without_a_head(tmp_path):
    module = loud(language_model("mamba2", **SIZE, **SIZES, tie_word_embeddings=False))
    module.save_pretrained(tmp_path / "base")
    module.resize_token_embeddings(module.config.vocab_size + 3)
    found = saved(tmp_path, module, peft.LoraConfig(r=2, target_modules=["in_proj"]), save_embedding_layers=True)
    file = found.folder / "adapter_model.safetensors"
    save_file({name: part for name, part in load_file(file).items() if "lm_head" not in name}, file)
    assert "lacks lm_head.weight; save it with save_embedding_layers=True" in refused(ssmscope.load, found.folder)
