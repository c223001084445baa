"""A word in a model's JSON files that is not known is refused before a library reads it; families' own are known."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from damaged import save
from examples import EXAMPLES, random_example
from exhaustive import in_turns
from refusals import refused
from safetensors.torch import load_file, save_file
from tiny_bert import save_bert
import ssmscope
from ssmscope.attacks.resources import Encoder, MaskedLM
from ssmscope.loading.fields import check_config, check_fields, check_generation, check_tokenizer, read_object
from ssmscope.loading.pretrained import read_tokenizer

KERNEL = "someone/kernel"


@pytest.fixture
def fetched(monkeypatch) -> list[Any]:
    """Record the kernels asked of a hub, with an installed package `kernels`."""
    asked: list[Any] = []

    def get_kernel(*args: Any, **kwargs: Any) -> ModuleType:
        asked.append(args)
        return ModuleType("kernel")

    for module in ("transformers.integrations.hub_kernels", "transformers.modeling_utils"):
        __import__(module)
        for name in ("get_kernel", "get_kernel_hub", "load_and_register_kernel"):
            if hasattr(sys.modules[module], name):
                monkeypatch.setattr(sys.modules[module], name, get_kernel)
    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    return asked


def set_field(file: Path, field: tuple[str, ...], value: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    inner = content
    for name in field[:-1]:
        inner = inner.setdefault(name, {})
    inner[field[-1]] = value
    file.write_text(json.dumps(content))


def small_jamba(path: Path) -> Path:
    """Return a Jamba with attention, which uses kernels."""
    random_example("jamba").save_pretrained(path)
    return path


UNKNOWN = [
    (("_attn_implementation",), KERNEL),
    (("_attn_implementation",), {"": KERNEL}),
    (("_attn_implementation",), {"": "eager", "text_config": KERNEL}),
    (("_attn_implementation_internal",), KERNEL),
    (("attn_implementation",), {"": KERNEL}),
    (("attn_implementation",), "flash_attention_2"),  # fetched from a hub where it is not installed
    (("_attn_implementation",), "local_kernel"),
    (("_experts_implementation_internal",), KERNEL),
    (("experts_implementation",), {"": KERNEL}),
    (("text_config", "_attn_implementation"), {"": KERNEL}),
    (("id2label",), {"0": "a", "1": {"_attn_implementation": KERNEL}}),
    (("hidden_act",), KERNEL),
    (("kernel_config",), {"kernel_mapping": {"RMSNorm": KERNEL}}),
    (("configuration_files",), ["config.1.0.json"]),
    (("quantization_config",), {"quant_method": "gptq"}),
    (("text_config",), {"quantization_config": {"quant_method": "gptq"}}),
    (("compression_config",), {"quant_method": "compressed-tensors"}),
    (("backbone",), "microsoft/resnet-50"),
    (("rope_scaling",), {"rope_type": KERNEL}),
    (("layer_types",), [KERNEL] * 3),
    (("sliding_window",), "wide"),
    (("__class__",), "Config"),
]


@pytest.mark.parametrize("layout, asked", in_turns([small_jamba, lambda path: save("mamba2", path)], UNKNOWN))
def test_a_config_that_names_what_is_not_known(tmp_path, fetched, layout, asked):
    path = layout(tmp_path / "model")
    set_field(path / "config.json", *asked)
    (path / "config.1.0.json").write_text(json.dumps({"model_type": "mamba2", "_attn_implementation": KERNEL}))
    assert re.search("config.json|quantised", refused(ssmscope.load, path)) and fetched == []


@pytest.mark.parametrize("field", ["_attn_implementation", "_attn_implementation_internal", "configuration_files"])
def test_a_config_within_a_config(tmp_path, fetched, field):
    path = save("classifier", tmp_path / "model")
    set_field(path / "config.json", ("backbone", field), {"": KERNEL})
    assert field in refused(ssmscope.load, path) and fetched == []


@pytest.mark.parametrize("implementation", ["eager", "sdpa", {"": "sdpa"}, None])
def test_implementations_that_transformers_has(tmp_path, implementation):
    path = small_jamba(tmp_path / "model")
    own = ssmscope.load(path).trace(ids=[[5, 17, 3]]).logits
    set_field(path / "config.json", ("_attn_implementation",), implementation)
    set_field(path / "config.json", ("auto_map",), {"AutoConfig": "own.Config"})
    set_field(path / "config.json", ("unsloth_version",), "2025.1")
    torch.testing.assert_close(
        torch.as_tensor(ssmscope.load(path).trace(ids=[[5, 17, 3]]).logits), torch.as_tensor(own)
    )


def test_generation_that_names_what_is_not_known(tmp_path):
    path = save("mamba2", tmp_path / "model")
    file = path / "generation_config.json"
    set_field(file, ("cache_implementation",), "static")
    ssmscope.load(path)
    for field, value in ((("cache_implementation",), KERNEL), (("compile_config",), {"backend": KERNEL})):
        before = file.read_text()
        set_field(file, field, value)
        assert f"generation_config.json that {field[0]}" in refused(ssmscope.load, path)
        file.write_text(before)


FILES = ("tokenizer_file", "vocab_file", "merges_file", "spm_file")
OUTSIDE = ("/etc/passwd", "../other/tokenizer.json", "vocab.txt")

NAMED = [
    *(((name,), value) for name in FILES for value in OUTSIDE),
    (("fast_tokenizer_files",), ["../tokenizer.4.0.0.json"]),
    (("sp_model_kwargs",), {"model_file": "/etc/passwd"}),
    (("tokenizer",), {"file": "../tokenizer.json"}),
]


def test_a_tokenizer_that_names_a_file(tmp_path):
    path = save("classifier", tmp_path / "model")
    file = path / "tokenizer_config.json"
    set_field(file, ("special_tokens_map_file",), "/elsewhere/special_tokens_map.json")
    ssmscope.load(path)  # that one is never read
    before = file.read_text()
    for field, value in NAMED:
        file.write_text(before)
        set_field(file, field, value)
        for call in (ssmscope.load, read_tokenizer):
            assert f"tokenizer_config.json that {field[0]}" in refused(call, path)


def test_a_tokenizers_folder_is_read_by_its_own_config_alone(tmp_path, fetched):
    path = save("classifier", tmp_path / "model")
    set_field(path / "config.json", ("configuration_files",), ["config.1.0.json"])
    assert "configuration_files" in refused(read_tokenizer, path)


@pytest.mark.parametrize("reads", [Encoder, MaskedLM])
def test_models_that_attacks_use(tmp_path, fetched, reads):
    for number, (name, field, value) in enumerate(
        (
            ("config.json", ("_attn_implementation",), {"": KERNEL}),
            ("config.json", ("configuration_files",), ["config.1.0.json"]),
            ("tokenizer_config.json", ("tokenizer_file",), "../tokenizer.json"),
            ("adapter_config.json", ("base_model_name_or_path",), "someone/else"),
        )
    ):
        path = save_bert(tmp_path / str(number))
        reads(path)
        set_field(path / name, field, value)
        refused(reads, path)
    assert fetched == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_every_family_writes_is_known(tmp_path, name):
    module = random_example(name)
    module.config.save_pretrained(tmp_path)
    check_fields(read_object(tmp_path / "config.json"), name)
    if module.can_generate():
        module.generation_config.save_pretrained(tmp_path)
        check_generation(read_object(tmp_path / "generation_config.json"), name)


def test_what_published_models_say_is_known():
    """Fields are those of published config.json and tokenizer_config.json files, shortened."""
    for fields in (
        {"model_type": "mamba", "ssm_cfg": {}, "torch_dtype": "float32", "time_step_init_scheme": "random"},
        {"model_type": "bamba", "attn_rotary_emb": 64, "rope_scaling": None, "hidden_act": "silu"},
        {"model_type": "recurrent_gemma", "_block_types": ["recurrent", "recurrent", "attention"]},
        {"model_type": "granitemoehybrid", "init_method": "mup", "normalization_function": "rmsnorm",
         "position_embedding_type": "nope", "layer_types": ["mamba", "attention"]},
        {"model_type": "jamba", "auto_map": {"AutoConfig": "configuration_jamba.JambaConfig"}},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "mamba_ssm_cache_dtype": "float32"},
        {"model_type": "qwen3_next", "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    ):  # fmt: skip
        check_config(fields, "it", {})
    check_tokenizer(
        {"name_or_path": "EleutherAI/gpt-neox-20b", "special_tokens_map_file": "/admin/x.json", "unk_token": "<|end|>",
         "tokenizer_class": "GPTNeoXTokenizer", "bos_token": {"content": "<s>", "__type": "AddedToken"},
         "added_tokens_decoder": {"0": {"content": "<|padding|>"}}, "chat_template": "{{ messages }}"},
        "it",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", ""])
@pytest.mark.parametrize("layout", ["mamba", "mamba_ssm"])
def test_an_index_that_names_a_file_elsewhere(tmp_path, name, layout):
    path = save(layout, tmp_path / "model")
    held = load_file(path / "model.safetensors")
    for place in (tmp_path, path / "sub"):
        place.mkdir(exist_ok=True)
        save_file(held, place / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors").unlink()
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(held, name)}))
    assert f"names {name!r}; allowed are names of files in its directory" in refused(ssmscope.load, path)
    index.write_text(json.dumps({"weight_map": {**dict.fromkeys(held, "x.safetensors"), min(held): name}}))
    assert f"names {name!r}" in refused(ssmscope.load, path)


def test_the_hubs_cache_is_of_links(tmp_path):
    """Its snapshots hold links to files elsewhere, the shards among them."""
    path, blobs = save("mamba", tmp_path / "model"), tmp_path / "blobs"
    own = ssmscope.load(path).trace(ids=[[5, 17, 3]]).logits
    held = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {n: f"model-{i % 2}.safetensors" for i, n in enumerate(held)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in set(index["weight_map"].values()):
        part = {name: held[name] for name, file in index["weight_map"].items() if file == shard}
        save_file(part, path / shard, metadata={"format": "pt"})
    blobs.mkdir()
    for number, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../blobs/{number}")
    found = ssmscope.load(path).trace(ids=[[5, 17, 3]]).logits
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(own), rtol=1e-4, atol=1e-4)


def test_transformers_is_given_what_was_checked(tmp_path, monkeypatch):
    """config.json is not read a second time, when a file could answer otherwise."""

    def reads(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("config.json was read by transformers")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", reads)
    assert ssmscope.load(save("mamba", tmp_path / "model")).num_layers == 2
