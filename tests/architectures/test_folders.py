"""Folders of adapters, of the Trainer and of llama.cpp: read, or refused in one line."""

import json
import re
import shutil

import pytest
import torch
from damaged import LAYOUTS, save
from examples import random_example, relative
from exhaustive import in_turns
from loud import loud
from refusals import refused
from safetensors.torch import load_file, save_file
import ssmscope
from ssmscope.loading.stored import read_tensors

peft = pytest.importorskip("peft", reason="peft is in the dev extra: pip install '.[dev]' in a checkout")

IDS = [5, 17, 3, 9, 22]


@pytest.fixture
def folders(tmp_path):
    """A model's folder, that of an adapter of it, and its logits with the adapter merged."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    module = loud(random_example("mamba"))
    module.save_pretrained(base)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=3, init_lora_weights=False, target_modules=["in_proj", "x_proj"])
    wrapped = peft.get_peft_model(module, lora)
    wrapped.peft_config["default"].base_model_name_or_path = "../base"
    wrapped.save_pretrained(adapter, save_embedding_layers=False)
    with torch.no_grad():
        merged = wrapped.merge_and_unload().eval()(torch.tensor([IDS])).logits
    return base, adapter, merged


def logits(path) -> torch.Tensor:
    model = ssmscope.load(path)
    return model.run(model.encode(ids=IDS)).logits


def test_an_adapter_is_read_with_its_model(folders, tmp_path, monkeypatch):
    base, adapter, merged = folders
    assert relative(logits(adapter), merged) < 1e-5 and relative(logits(base), merged) > 1e-2
    assert ssmscope.load(adapter).fingerprint != ssmscope.load(base).fingerprint
    named = json.loads((adapter / "adapter_config.json").read_text())
    for place in (str(base), "base"):  # by a whole path, or from where one stands
        monkeypatch.chdir(tmp_path)
        (adapter / "adapter_config.json").write_text(json.dumps({**named, "base_model_name_or_path": place}))
        assert relative(logits(adapter), merged) < 1e-5


def test_an_adapter_that_does_not_fit_is_refused(folders):
    base, adapter, _ = folders
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    held, fields = load_file(weights), json.loads(config.read_text())
    save_file({**held, min(held): torch.zeros(2, 2)}, weights)
    assert "is damaged, or of another model" in refused(ssmscope.load, adapter)
    weights.write_bytes(b"no tensors")
    assert "not a complete safetensors file" in refused(ssmscope.load, adapter)
    config.write_text(json.dumps({**fields, "base_model_name_or_path": None}))
    assert "names no model" in refused(ssmscope.load, adapter)


def test_an_adapter_that_changes_the_input_is_refused(folders, tmp_path):
    base, _, _ = folders
    module = ssmscope.load(base).module
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=2, token_dim=24)
    prompts.num_attention_heads = 2
    wrapped = peft.get_peft_model(module, prompts)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "prompts")
    assert "changes the model's input, not only its layers" in refused(ssmscope.load, tmp_path / "prompts")


def test_a_trainers_folder_names_its_checkpoint(folders, tmp_path):
    base, _, merged = folders
    for step in (9, 10, 100):
        shutil.copytree(base, tmp_path / "out" / f"checkpoint-{step}")
    (tmp_path / "out" / "checkpoint-999").mkdir()  # unfinished
    assert refused(ssmscope.load, tmp_path / "out").endswith(
        f"3 checkpoints and no model of its own: give {tmp_path / 'out' / 'checkpoint-100'}"
    )
    assert relative(logits(tmp_path / "out" / "checkpoint-9"), logits(base)) == 0
    shutil.copytree(base, tmp_path / "out", dirs_exist_ok=True)  # saved at the end too
    assert relative(logits(tmp_path / "out"), logits(base)) == 0


def test_gguf_is_refused(folders, tmp_path):
    base, _, _ = folders
    (tmp_path / "gguf").mkdir()
    file = tmp_path / "gguf" / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path / "gguf"):
        assert "holds weights in GGUF (of llama.cpp), which is not read" in refused(ssmscope.load, path)
    (base / "config.json").rename(tmp_path / "gguf" / "config.json")
    assert "in GGUF" in refused(ssmscope.load, tmp_path / "gguf")


WRAPPED = ("_orig_mod.", "module.", "module._orig_mod.")


@pytest.mark.parametrize(("layout", "prefix"), in_turns(LAYOUTS, WRAPPED))
def test_weights_that_were_saved_within_a_wrapper(tmp_path, layout, prefix):
    """Wrappers are torch.compile's, DataParallel's, and one within the other, in safetensors and pickled."""
    path = save(layout, tmp_path / "model")
    model = ssmscope.load(path)
    given = dict(values=torch.rand(4, 3)) if layout == "pixels" else dict(ids=IDS)
    own, before = model.logits(model.encode(**given)), model.fingerprint
    file = next(each for each in path.iterdir() if each.suffix in (".safetensors", ".bin"))
    held = {f"{prefix}{name}": tensor for name, tensor in read_tensors(file).items()}
    file.unlink()
    for suffix in ("safetensors", "bin") if layout != "diff-mamba" or prefix == "module." else ("safetensors",):
        saved = path / ("model.safetensors" if suffix == "safetensors" else "pytorch_model.bin")
        if suffix == "safetensors":
            save_file(held, saved, metadata={"format": "pt"})
        else:
            torch.save(held, saved)
        again = ssmscope.load(path)
        assert relative(again.logits(again.encode(**given)), own) < 1e-6 and again.fingerprint == before
        saved.unlink()


def test_parts_that_were_compiled_each_by_itself(tmp_path):
    path = save("mamba2", tmp_path / "model")
    own, held = logits(path), load_file(path / "model.safetensors")
    named = {re.sub(r"layers\.(\d+)\.", r"layers.\1._orig_mod.", name): tensor for name, tensor in held.items()}
    assert named.keys() != held.keys()
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    assert relative(logits(path), own) < 1e-6
    first = min(held)
    save_file({**named, first: held[first], f"module.{first}": held[first].clone()}, path / "model.safetensors")
    assert f"holds {first} twice" in refused(ssmscope.load, path)


def test_an_adapter_that_was_saved_within_a_wrapper_is_refused(folders):
    _, adapter, _ = folders
    file = adapter / "adapter_model.safetensors"
    save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}, file)
    assert "within the wrapper of torch.compile" in refused(ssmscope.load, adapter)
