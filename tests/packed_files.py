"""Small directories as quantisers write them, with the weights that they stand for by slow loops."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loud import loud
from safetensors.torch import save_file
from small_models import language_model
from torch import Tensor

SIZES = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, expand=2, state_size=12, num_heads=4, head_dim=16)
Packed = tuple[dict[str, Tensor], Tensor]
"""Stored tensors of a layer by the ends of their names, and its weight."""


def words(codes: list[int], bits: int) -> list[int]:
    """Codes one after the other in words of 32 bits, from the lowest bit on."""
    stream = sum(code << (bits * place) for place, code in enumerate(codes))
    found = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(len(codes) * bits // 32)]
    return [word - 2**32 if word >= 2**31 else word for word in found]


def random_codes(shape: tuple[int, ...], bits: int) -> Tensor:
    return torch.randint(0, 2**bits, shape)


def gptq(outputs: int, inputs: int, bits: int, version: int, shuffled: bool) -> Packed:
    codes, zeros, scales = random_codes((outputs, inputs), bits), random_codes((2, outputs), bits), scale(2, outputs)
    group = torch.arange(inputs) // (inputs // 2)
    group = group[torch.randperm(inputs)] if shuffled else group
    weight = torch.stack([(codes[:, i] - zeros[g] - (2 - version)) * scales[g] for i, g in enumerate(group)], 1)
    packed = torch.tensor([words(row.tolist(), bits) for row in codes], dtype=torch.int32).T.contiguous()
    stored = {"qweight": packed, "scales": scales, "g_idx": group.int()}
    return stored | {"qzeros": torch.tensor([words(row.tolist(), bits) for row in zeros], dtype=torch.int32)}, weight


def scale(*shape: int) -> Tensor:
    return torch.rand(*shape) / 40 + 0.01


def awq(outputs: int, inputs: int) -> Packed:
    codes, zeros, scales = random_codes((inputs, outputs), 4), random_codes((2, outputs), 4), scale(2, outputs)

    def packed(rows: Tensor) -> Tensor:
        eights = [
            [row[at + place] for at in range(0, outputs, 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)] for row in rows
        ]
        return torch.tensor([words([int(code) for code in row], 4) for row in eights], dtype=torch.int32)

    weight = torch.stack([(codes[i] - zeros[2 * i // inputs]) * scales[2 * i // inputs] for i in range(inputs)], 1)
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, weight


def eight_bits(outputs: int, inputs: int) -> Packed:
    codes, largest = random_codes((outputs, inputs), 8) - 128, 2 * torch.rand(outputs)
    stored = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes / 127 * largest[:, None]


def four_bits(outputs: int, inputs: int, kind: str, nested: bool) -> Packed:
    codes, table, block = random_codes((outputs * inputs,), 4), torch.randn(16), 64
    largest = torch.rand(outputs * inputs // block)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [outputs, inputs]}
    stored = {"weight": (16 * codes[::2] + codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    if nested:
        inner, outer, table_of_scales = (
            random_codes((len(largest),), 8),
            torch.rand(-(-len(largest) // 16)),
            torch.randn(256),
        )
        largest = table_of_scales[inner] * outer[torch.arange(len(inner)) // 16] + 0.5
        state |= {"nested_blocksize": 16, "nested_offset": 0.5, "nested_dtype": "float32"}
        stored |= {"weight.absmax": inner.to(torch.uint8), "weight.nested_absmax": outer}
        stored |= {"weight.nested_quant_map": table_of_scales}
    else:
        stored["weight.absmax"] = largest
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    return stored, (table[codes] * largest[torch.arange(outputs * inputs) // block]).view(outputs, inputs)


def fp8(outputs: int, inputs: int) -> Packed:
    codes, scales = (
        torch.randn(outputs, inputs).to(torch.float8_e4m3fn),
        torch.rand(-(-outputs // 24), -(-inputs // 24)),
    )
    weight = codes.float() * torch.stack(
        [torch.stack([scales[o // 24, i // 24] for i in range(inputs)]) for o in range(outputs)]
    )
    return {"weight": codes, "weight_scale_inv": scales}, weight


def packed_integers(outputs: int, inputs: int, zeros: bool) -> Packed:
    codes, zero, scales = random_codes((outputs, inputs), 4) - 8, random_codes((outputs, 2), 4) - 8, scale(outputs, 2)
    stored = {
        "weight_packed": torch.tensor([words((row + 8).tolist(), 4) for row in codes], dtype=torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if zeros:
        columns = [words((column + 8).tolist(), 4) for column in zero.T]
        stored["weight_zero_point"] = torch.tensor(columns, dtype=torch.int32).T.contiguous()
    else:
        zero = torch.zeros_like(zero)
    halves = torch.arange(inputs) // (inputs // 2)
    return stored, (codes - zero[:, halves]) * scales[:, halves]


def floats(outputs: int, inputs: int) -> Packed:
    codes, scales = torch.randn(outputs, inputs).to(torch.float8_e4m3fn), scale(outputs, 1)
    return {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}, codes.float() * scales


def compressed(form: str, strategy: str, **weights: Any) -> dict[str, Any]:
    settings = {"type": "int", "symmetric": True, "strategy": strategy, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": settings}}
    return dict(quant_method="compressed-tensors", format=form, config_groups=groups, ignore=["lm_head"])


METHODS: dict[str, tuple[Callable[[int, int], Packed], dict[str, Any]]] = {
    "gptq": (lambda o, i: gptq(o, i, 4, 1, True), dict(quant_method="gptq", bits=4, group_size=32, desc_act=True)),
    "gptq, 3 bits": (
        lambda o, i: gptq(o, i, 3, 2, False),
        dict(quant_method="gptq", bits=3, group_size=32, checkpoint_format="gptq_v2"),
    ),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=32, version="gemm", zero_point=True)),
    "8 bits": (eight_bits, dict(quant_method="bitsandbytes", load_in_8bit=True)),
    "nf4": (lambda o, i: four_bits(o, i, "nf4", True), dict(quant_method="bitsandbytes", load_in_4bit=True)),
    "fp4": (lambda o, i: four_bits(o, i, "fp4", False), dict(quant_method="bitsandbytes", load_in_4bit=True)),
    "fp8": (fp8, dict(quant_method="fp8", weight_block_size=[24, 24], activation_scheme="dynamic")),
    "integers": (
        lambda o, i: packed_integers(o, i, False), compressed("pack-quantized", "group", num_bits=4, group_size=32)
    ),
    "integers with zeros": (
        lambda o, i: packed_integers(o, i, True),
        compressed("pack-quantized", "group", num_bits=4, group_size=32, symmetric=False),
    ),
    "floats": (floats, compressed("float-quantized", "channel", num_bits=8, type="float")),
}  # fmt: skip


def written(where: Path, name: str) -> dict[str, Tensor]:
    """Write a directory with quantised output projections, and return all weights of its model."""
    torch.manual_seed(0)
    module = loud(language_model("mamba2", **SIZES, conv_kernel=4, n_groups=1, chunk_size=8))
    module.save_pretrained(where)
    pack, options = METHODS[name]
    weights = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    stored = dict(weights)
    for key in [key for key in weights if key.endswith("out_proj.weight")]:
        made, weights[key] = pack(*stored.pop(key).shape)
        stored |= {key.removesuffix("weight") + end: tensor.contiguous() for end, tensor in made.items()}
    save_file(stored, where / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(fields | {"quantization_config": options}))
    return weights
