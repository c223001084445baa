"""Quantised directories: read as the model with the weights that codes and scales stand for, or refused in one line."""

import json
from typing import Any

import pytest
import torch
from examples import relative
from loud import loud
from packed_files import METHODS, SIZES, compressed, written
from refusals import refused
from safetensors.torch import save_file
from small_models import language_model
from transformers import AutoModelForCausalLM
import ssmscope
from ssmscope.loading.packed import quantisation_of, read_quantised, without_quantisation

IDS = [5, 17, 3, 9, 22, 1, 4]


@pytest.mark.parametrize("name", METHODS)
def test_the_model_is_that_of_the_weights_that_codes_stand_for(tmp_path, name):
    weights = written(tmp_path, name)
    model = ssmscope.load(tmp_path)
    found = model.module.state_dict()
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-6, atol=1e-7)
    plain = language_model("mamba2", **SIZES, conv_kernel=4, n_groups=1, chunk_size=8).eval()
    plain.load_state_dict(weights)
    with torch.no_grad():
        assert relative(model.run(model.encode(ids=IDS)).logits, plain(torch.tensor([IDS])).logits) < 1e-5


@pytest.mark.parametrize(("options", "said"), [
    ({"quant_method": "mxfp4"}, "are quantised (mxfp4), which is not read (bitsandbytes, gptq, awq, fp8,"),
    ({"quant_method": 5}, "are quantised, which is not read"),
    ({}, "are quantised, which is not read"),
    ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "(gptq with checkpoint_format 'marlin'), which is"),
    ({"quant_method": "awq", "version": "gemv"}, "(awq with version 'gemv'), which is not"),
    ({"quant_method": "awq", "bits": 3}, "(awq with bits 3), which is not"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
     "(compressed-tensors with format 'nvfp4-pack-quantized'), which is not"),
    ({"quant_method": "fp8"}, "quantised by fp8, cannot be read (no layer has weight_scale_inv)"),
    ({"quant_method": "compressed-tensors"}, "(b: config_groups is None; allowed is an object of groups with"),
    (compressed("float-quantized", "channel", num_bits=8, type="float"), "cannot be read: a.weight has no scale"),
    ({"quant_method": "gptq", "bits": 4}, "quantised by gptq, cannot be read (b: qzeros is missing): give the"),
])  # fmt: skip
def test_what_is_not_read_is_said(tmp_path, options, said):
    file = tmp_path / "model.safetensors"
    tensors = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    if options.get("quant_method") == "compressed-tensors":
        tensors |= {"b.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "b.weight_scale": torch.ones(2, 1)}
    if options.get("quant_method") == "gptq":
        tensors |= {"b.qweight": torch.ones(2, 2, dtype=torch.int32)}
    save_file(tensors, file)
    assert said in refused(read_quantised, [file], options, "m")


def test_the_configuration_is_found_wherever_it_stands_and_left_out():
    options = {"quant_method": "gptq"}
    for fields in ({"quantization_config": options}, {"a": {"b": {"compression_config": options}}, "c": 1}):
        assert quantisation_of(fields) == options and quantisation_of(without_quantisation(fields)) is None
    assert quantisation_of({"quantization_config": None, "compression_config": {}, "a": {"b": 1}}) is None
    assert quantisation_of({"quantization_config": "gptq"}) == {}


def test_a_configuration_that_says_nothing_of_the_weights_is_left_out(tmp_path):
    """transformers reads a null as an object."""
    language_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=12).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for none in (None, {}):
        (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": none}))
        assert ssmscope.load(tmp_path).architecture == "mamba"


@pytest.mark.parametrize("how", ["nf4", "8 bits", "torchao"])
def test_what_the_package_saved_is_what_it_loads(tmp_path, how):
    package = pytest.importorskip("torchao.quantization" if how == "torchao" else "bitsandbytes")
    from transformers import BitsAndBytesConfig, TorchAoConfig

    torch.manual_seed(0)
    sizes = SIZES | dict(hidden_size=64, num_heads=8)
    loud(language_model("mamba2", **sizes, conv_kernel=4, n_groups=1, chunk_size=8)).save_pretrained(tmp_path / "plain")
    options = {
        "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        "8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
        "torchao": lambda: TorchAoConfig(package.Int8WeightOnlyConfig()),
    }[how]()
    cpu: dict[str, Any] = dict(device_map="cpu", dtype=torch.float32)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=options, **cpu)
    try:
        module.save_pretrained(tmp_path / "packed")
    except ValueError:  # transformers 4 saves torchao's integers pickled alone.
        module.save_pretrained(tmp_path / "packed", safe_serialization=False)
    model = ssmscope.load(tmp_path / "packed")
    own = ssmscope.load(AutoModelForCausalLM.from_pretrained(tmp_path / "packed", **cpu))
    found, expected = (each.trace(each.encode(ids=IDS)) for each in (model, own))
    plain = ssmscope.load(tmp_path / "plain")
    assert relative(found.logits, expected.logits) < 1e-5 < relative(found.logits, plain.trace(ids=[IDS]).logits)
    for one, two in zip(found.linearized, expected.linearized):
        with torch.no_grad():
            assert relative(one.attention("block"), two.attention("block")) < 1e-5
    assert relative(found.survival().nan_to_num(), expected.survival().nan_to_num()) < 1e-5
