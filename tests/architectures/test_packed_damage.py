"""Damaged quantised directories: the right weights or one line, whatever tensor or field is not as it was."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exhaustive import half
from packed_files import METHODS, written
from refusals import refuses
from safetensors.torch import load_file, save_file
from torch import Tensor
import ssmscope
from ssmscope.errors import InputError
from ssmscope.loading.packed import read_quantised

LAYER = "backbone.layers.0.mixer.out_proj."
Damage = tuple[str, dict[str, Tensor], dict[str, Any]]
"""What is done, and the tensors and settings after it."""


def damaged_tensors(tensors: dict[str, Tensor], layer: str = LAYER) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for name in (name for name in tensors if name.startswith(layer)):
        part = tensors[name]
        yield f"{name} dropped", {key: each for key, each in tensors.items() if key != name}
        for axis in range(part.ndim):
            yield f"{name} cut along {axis}", {**tensors, name: part.narrow(axis, 0, part.shape[axis] - 1)}
            yield f"{name} twice along {axis}", {**tensors, name: torch.cat([part, part], axis)}
            yield f"{name} halved along {axis}", {**tensors, name: part.narrow(axis, 0, part.shape[axis] // 2)}
        yield f"{name} transposed", {**tensors, name: part.T if part.ndim == 2 else part}
        yield f"{name} flat", {**tensors, name: part.reshape(-1)}
        yield f"{name} one number", {**tensors, name: part.flatten()[0].clone()}
        for dtype in (torch.float32, torch.int32, torch.int64, torch.uint8):
            plain = part.float() if part.itemsize == 1 and part.is_floating_point() else part
            yield f"{name} as {dtype}", {**tensors, name: plain.to(dtype)}
        if name.endswith(("g_idx", "weight_shape", "weight_format")):
            yield f"{name} −1", {**tensors, name: torch.full_like(part.int(), -1)}
            yield f"{name} one more", {**tensors, name: part + 1}
    for end in "qweight weight weight_zero_point g_idx weight_g_idx SCB weight.nested_absmax foo".split():
        if layer + end not in tensors:
            yield f"{end} added", {**tensors, layer + end: torch.arange(5)}


def damaged_fields(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in fields.items():
        yield f"{name} dropped", {key: each for key, each in fields.items() if key != name}
        odd = (None, "x", "4", [1], {"a": 5}, -3, 0, 10**9, 1.5)
        for other in odd[:5] if name == "nested_offset" else odd:  # It may be any number.
            yield f"{name} is {other!r}", {**fields, name: other}
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{name} one more", {**fields, name: value + 1}
        if isinstance(value, dict):
            for said, inner in damaged_fields(value):
                yield f"{name}.{said}", {**fields, name: inner}


def damaged_states(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Damage within the JSON of a layer of 4 bits."""
    for name in (name for name in tensors if name.startswith(LAYER) and "quant_state" in name):
        state = json.loads(bytes(tensors[name].tolist()))
        for said, other in damaged_fields(state):
            yield said, {**tensors, name: torch.tensor([*json.dumps(other).encode()], dtype=torch.uint8)}


def damages(tensors: dict[str, Tensor], options: dict[str, Any]) -> Iterator[Damage]:
    for said, other in (*damaged_tensors(tensors), *damaged_states(tensors)):
        yield said, other, options
    for said, fields in damaged_fields(options):
        # A file of GPTQ without a checkpoint_format is one of the first version.
        if "checkpoint_format" not in said or fields.get("checkpoint_format"):
            yield said, tensors, fields


@pytest.mark.parametrize("name", METHODS)
def test_damage_gives_the_right_weights_or_one_line(tmp_path: Path, name: str) -> None:
    right = written(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors, config = load_file(file), json.loads((tmp_path / "config.json").read_text())
    refused = 0
    for said, damaged, options in half(damages(tensors, config["quantization_config"]), name):
        save_file({key: part.contiguous() for key, part in damaged.items()}, file, metadata={"format": "pt"})
        try:
            found = read_quantised([file], copy.deepcopy(options), name)
            if {key: part.shape for key, part in found.items()} != {key: part.shape for key, part in right.items()}:
                (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
                found = ssmscope.load(tmp_path).module.state_dict()
        except InputError as error:
            assert "\n" not in str(error), said
            refused += 1
            continue
        weight = found[f"{LAYER}weight"]
        torch.testing.assert_close(weight, right[f"{LAYER}weight"], rtol=1e-6, atol=1e-7, msg=lambda m: f"{said}: {m}")  # noqa: B023
    assert refused > 20


def test_symmetric_codes_have_their_zero_in_the_middle(tmp_path: Path) -> None:
    """A version of the format that the configuration does not name shows where the codes are symmetric."""
    weights = written(tmp_path, "gptq")
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors, options = load_file(file), config["quantization_config"]
    for code, version in ((7, "gptq"), (8, "gptq_v2")):
        zeros = torch.tensor(sum(code << 4 * place for place in range(8)) - 2**32 * (code > 7)).int()
        symmetric = {key: zeros.expand_as(part) if key.endswith("qzeros") else part for key, part in tensors.items()}
        save_file({key: part.contiguous() for key, part in symmetric.items()}, file)
        found = read_quantised([file], {**options, "sym": True, "checkpoint_format": version}, "m")
        assert found.keys() == weights.keys()
        other = "gptq" if version == "gptq_v2" else "gptq_v2"
        with pytest.raises(InputError, match="out_proj: qzeros are not 8, the middle of the codes, as sym says"):
            read_quantised([file], {**options, "sym": True, "checkpoint_format": other}, "m")


def test_a_layer_may_have_settings_of_its_own(tmp_path: Path) -> None:
    weights = written(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    own = {**config["quantization_config"], "bits": 8, "group_size": 16, "dynamic": {"+:.*": {"bits": 4}}}
    refuses("out_proj: ", read_quantised, [tmp_path / "model.safetensors"], own, "m")
    own["dynamic"] = {"-:.*in_proj": {}, "+:.*out_proj": {"bits": 4, "group_size": 32}}
    found = read_quantised([tmp_path / "model.safetensors"], own, "m")
    torch.testing.assert_close(found[f"{LAYER}weight"], weights[f"{LAYER}weight"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_damage_to_torchaos_tensors(tmp_path: Path, kind: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 33, bias=False))
    quantization.quantize_(module, getattr(quantization, kind)())
    right, file = module[0].weight.dequantize(), tmp_path / "model.safetensors"
    tensors, about = flatten_tensor_state_dict(module.state_dict())
    refused = 0
    for said, damaged in (("none", tensors), *damaged_tensors(tensors, "0.")):
        save_file({key: part.contiguous() for key, part in damaged.items()}, file, metadata=about)
        try:
            weight = read_quantised([file], {"quant_method": "torchao"}, "m")["0.weight"]
        except InputError:
            refused += 1
            continue
        # Fewer columns than the model's are refused where the weights are put into it.
        assert weight.shape != right.shape or torch.equal(weight, right), said
    assert refused > 10
