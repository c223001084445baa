"""Weights are read as they are stored, in every layout: none goes through a narrower dtype."""

import pytest
import torch
from examples import FEW, random_example
from peft import LoraConfig, get_peft_model
from saving import write_diff_mamba2, write_mamba_ssm
from torch import Tensor, nn
import ssmscope
from ssmscope.zoo.baleen import convert


def finer(module: nn.Module) -> nn.Module:
    """Return the model in float64, with digits that float32 lacks."""
    generator = torch.Generator().manual_seed(0)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 1e-8 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    assert any((parameter.float() != parameter).any() for parameter in module.parameters())
    return module


def same(found: nn.Module, expected: dict[str, Tensor]) -> None:
    own = found.state_dict()
    assert set(own) >= set(expected)
    for name, tensor in expected.items():
        assert own[name].dtype == torch.float64 and torch.equal(own[name], tensor), name


@pytest.mark.parametrize("name", FEW)
def test_a_directory_of_transformers(name, tmp_path):
    module = finer(random_example(name))
    module.save_pretrained(tmp_path)
    same(ssmscope.load(tmp_path, dtype="float64").module, dict(module.named_parameters()))


def test_a_directory_of_mamba_ssm(tmp_path):
    module = finer(random_example("mamba2-one-group"))
    where = write_mamba_ssm(module, tmp_path / "double")
    same(ssmscope.load(where, dtype="float64").module, dict(module.named_parameters()))
    module.to(torch.bfloat16)
    found = ssmscope.load(write_mamba_ssm(module, tmp_path / "half")).module
    for name, parameter in module.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter.float()), name


def test_a_file_of_a_selective_ssm(tmp_path):
    module = finer(random_example("selective-ssm-classes"))
    weights = {name.replace("head.weight", "W"): t for name, t in module.state_dict().items()}
    torch.save(weights, tmp_path / "model.pth")
    same(ssmscope.load(tmp_path / "model.pth", dtype="float64").module, module.state_dict())


def test_a_directory_of_differential_mambas_authors(tmp_path):
    module = finer(random_example("diff-mamba"))
    write_diff_mamba2(module, tmp_path / "theirs")
    same(ssmscope.load(tmp_path / "theirs", dtype="float64").module, dict(module.named_parameters()))


def test_an_adapters_folder(tmp_path):
    base = finer(random_example("mamba2"))
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    finer(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    base.save_pretrained(tmp_path / "again")
    found = ssmscope.load(tmp_path / "adapter", dtype="float64").module
    own = {n: t for n, t in found.named_parameters() if "lora_" in n}
    expected = {n.removeprefix("base_model.model."): t for n, t in adapted.named_parameters() if "lora_" in n}
    assert own.keys() == expected.keys() and own
    for name, tensor in own.items():
        assert tensor.dtype == torch.float64 and torch.equal(tensor, expected[name]), name


def test_a_model_that_becomes_a_baleen():
    module = finer(random_example("mamba2"))
    same(convert(module, gate="bernoulli"), dict(module.named_parameters()))
