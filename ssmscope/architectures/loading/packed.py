"""Weights of quantised directories, computed from the codes and scales that are stored for them.

A layer is stored as several tensors: codes of a few bits, a scale for each row, group or block of the weight, and
sometimes the code of zero. Its weight, in float32, needs no package of the quantiser but torchao's; what such a package
does to activations is left out, as it is for a model in memory.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from safetensors import safe_open
from torch import Tensor

from ssmscope.architectures.loading import stored
from ssmscope.errors import InputError

TORCHAO = "torchao"
CONFIG_FIELDS = ("quantization_config", "compression_config")
Parts = Mapping[str, Tensor]
"""Tensors of a layer by the ends of their names."""
Options = Mapping[str, Any]
"""Object quantization_config of a config.json."""


def quantisation_of(fields: Options) -> Options | None:
    """Return the first quantization_config of a config.json, at its top or within; None if no weight is quantised."""
    found = next((fields[name] for name in CONFIG_FIELDS if fields.get(name)), None)
    if found is not None:
        return found if isinstance(found, Mapping) else {}
    inner = (quantisation_of(value) for value in fields.values() if isinstance(value, Mapping))
    return next((each for each in inner if each is not None), None)


def without_quantisation(fields: Options) -> dict[str, Any]:
    """Return a config.json's fields without what they say of the weights' quantisation."""
    kept = {name: value for name, value in fields.items() if name not in CONFIG_FIELDS}
    return {name: without_quantisation(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def read_quantised(files: list[Path], options: Options, name: str) -> dict[str, Tensor]:
    """Return all tensors of a quantised model, by the names of the model that was quantised. Raises InputError for
    methods and forms that are not read, for damaged tensors, and without torchao where it made the files."""
    how = options.get("quant_method")
    method = METHODS.get(how) if isinstance(how, str) else None
    odd = method.refused(options) if method is not None else ""
    if odd or method is None and how != TORCHAO:
        said = f" ({how:.40}{f' with {odd}' if odd else ''})" if isinstance(how, str) else ""
        said = f"the weights of {name} are quantised{said}, which is not read ({', '.join([*METHODS, TORCHAO])} are):"
        raise InputError(f"{said} give the model that was quantised, or save one whose weights are dequantised")
    try:
        tensors = _from_torchao(files, name) if method is None else _unpacked(stored.read_all(files), method, options)
    except InputError:
        raise
    except stored.DAMAGE_ERRORS as error:
        what = f"the weights of {name}, quantised by {how}, cannot be read"
        raise InputError(f"{what} ({stored.reason(error)}): give the model that was quantised") from error
    unscaled = [each for each, t in tensors.items() if t.is_floating_point() and t.itemsize == 1]
    if unscaled:
        raise InputError(f"the quantised weights of {name} cannot be read: {unscaled[0]} has no scale")
    return tensors


def _unpacked(tensors: dict[str, Tensor], method: Method, options: Options) -> dict[str, Tensor]:
    ends = [(name, marker) for name in tensors for marker in method.markers if name.endswith(f".{marker}")]
    layers = [name.removesuffix(marker) for name, marker in ends]
    if not layers:
        raise ValueError(f"no layer has {' or '.join(method.markers)}")
    for layer in layers:
        parts = {end: tensors.pop(layer + end) for end in method.parts if layer + end in tensors}
        tensors[f"{layer}weight"] = method.weight(parts, options)
    return tensors


# ---- bitsandbytes


def weight_of_8_bits(codes: Tensor, largest: Tensor) -> Tensor:
    """Compute W = c ⊙ s / 127 from codes c (outputs, inputs) and the largest number s of each row."""
    return codes.float() * largest.float().unsqueeze(-1) / 127


def weight_of_4_bits(parts: Parts) -> Tensor:
    """Compute W = table[c] · s with a scale s for each block of numbers, which may be a code with a scale itself, and
    an offset (QLoRA, Dettmers et al. 2023, Sec. 3)."""
    state = json.loads(bytes(next(parts[end] for end in STATES if end in parts).tolist()))
    scale = parts["weight.absmax"]
    if scale.ndim == 2:  # Once a layer has run on a CPU, bitsandbytes keeps the scales of each row in a column.
        scale = scale.T.flatten()
    if "weight.nested_absmax" in parts:
        outer = parts["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: scale.numel()]
        scale = parts["weight.nested_quant_map"][scale.long()] * outer + state["nested_offset"]
    bytes_ = parts["weight"].flatten().view(torch.uint8)
    codes = torch.stack([bytes_ >> 4, bytes_ & 15], -1).flatten()
    numbers = parts["weight.quant_map"][codes.long()].float()
    shape = torch.Size(state["shape"])
    found = numbers * scale.float().repeat_interleave(state["blocksize"])[: numbers.numel()]
    return found[: shape.numel()].view(shape).to(getattr(torch, state["dtype"])).float()


def _bitsandbytes(parts: Parts, options: Options) -> Tensor:
    if "SCB" not in parts:
        return weight_of_4_bits(parts)
    if int(parts.get("weight_format", torch.tensor(0))) != 0:
        raise ValueError("codes of 8 bits are stored in a GPU's order")
    return weight_of_8_bits(parts["weight"], parts["SCB"])


STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


# ---- GPTQ and AWQ


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes in words of 32 bits: (…, words) int32 -> (…, 32 · words / bits), each from its lowest bit on."""
    single = (words.unsqueeze(-1) >> torch.arange(32)) & 1
    grouped = rearrange(single.to(torch.uint8), "... words bits -> ... (words bits)").unflatten(-1, (-1, bits))
    return (grouped << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.int32)


def _gptq(parts: Parts, options: Options) -> Tensor:
    """Compute W = s_g (c − z_g), g the group of an input, from codes packed along the inputs. The first version of the
    format stores z − 1 (Frantar et al. 2023; files of AutoGPTQ and GPTQModel)."""
    packed, scales = parts["qweight"], parts["scales"].float()
    group = parts.get("g_idx")
    bits = int(options["bits"]) if group is None else 32 * packed.shape[0] // group.numel()
    codes = _codes(packed.T, bits)  # (outputs, inputs)
    if group is None:
        size = int(options.get("group_size", -1))
        group = torch.arange(codes.shape[1]) // (size if size > 0 else codes.shape[1])
    zeros = _codes(parts["qzeros"], bits)[:, : scales.shape[1]] + (options.get("checkpoint_format") != "gptq_v2")
    return (codes - zeros[group.long()].T) * scales[group.long()].T


AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of its eight numbers of 4 bits."""


def _awq(parts: Parts, options: Options) -> Tensor:
    """Compute W = s_g (c − z_g) from codes packed along the outputs (Lin et al. 2024; AutoAWQ's form `gemm`)."""
    codes, zeros = (
        _codes(parts[name], 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2) for name in ("qweight", "qzeros")
    )
    group = torch.arange(len(codes)) // (len(codes) // len(zeros))
    return ((codes - zeros[group]) * parts["scales"].float()[group]).T.contiguous()


# ---- scales of rows and blocks: fp8 and compressed-tensors


def _scaled(codes: Tensor, scale: Tensor, block: Any = None) -> Tensor:
    """Multiply codes (…, outputs, inputs) by the scale of each row, group or block (of `block` rows and columns, the
    last of which may be cut), or by a single one."""
    scale = scale.float() if scale.ndim >= 2 else scale.float().reshape(-1, 1)
    for axis in (-2, -1):
        count, size = scale.shape[axis], codes.shape[axis]
        if count > 1:
            scale = scale.repeat_interleave(int(block[axis]) if block else size // count, axis).narrow(axis, 0, size)
    return codes.float() * scale


def _fp8(parts: Parts, options: Options) -> Tensor:
    return _scaled(parts["weight"], parts["weight_scale_inv"], options.get("weight_block_size"))


def _compressed(parts: Parts, options: Options) -> Tensor:
    """Compute W = s (c − z) from integers or floats of 8 bits, or from codes of 1, 2, 4 or 8 bits packed with half
    their range added."""
    scale, zero = parts["weight_scale"].float(), parts.get("weight_zero_point")
    if "weight_packed" not in parts:
        codes, block = parts["weight"].float(), _compressed_block(options)
        shift = 0 if zero is None else _scaled(torch.ones_like(codes), zero, block)
        return _scaled(codes - shift, scale, block)
    scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
    (outputs, inputs), words = parts["weight_shape"].tolist(), parts["weight_packed"]
    bits = next(bits for bits in (1, 2, 4, 8) if words.shape[1] == math.ceil(inputs * bits / 32))
    codes = (_codes(words, bits)[:, :inputs] - 2 ** (bits - 1)).float()
    if zero is not None and zero.dtype == torch.int32:  # It is packed along the outputs.
        zero = _codes(zero.T, bits).T[:outputs] - 2 ** (bits - 1)
    group = parts.get("weight_g_idx")
    group = torch.arange(inputs) // (inputs // scale.shape[1]) if group is None else group.long()
    return (codes - (0 if zero is None else zero[:, group])) * scale[:, group]


def _compressed_block(options: Options) -> Any:
    groups = options.get("config_groups")
    weights = [each.get("weights") or {} for each in groups.values()] if isinstance(groups, Mapping) else []
    return next((each["block_structure"] for each in weights if each.get("block_structure")), None)


# ---- torchao


def _from_torchao(files: list[Path], name: str) -> dict[str, Tensor]:
    """Return the tensors of files that torchao wrote, its own ones dequantised."""
    if importlib.util.find_spec("torchao") is None:
        raise InputError(f"the weights of {name} are quantised by torchao, which reads them: pip install torchao")
    import torchao.quantization  # noqa: F401, lets torch.load read its tensors
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    found: dict[str, Any] = {}
    for file in files:
        tensors: dict[str, Any] = stored.read_tensors(file)
        described: dict[str, str] = {}
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                described = opened.metadata() or {}
        if "tensor_names" in described:
            made, tensors = unflatten_tensor_state_dict(tensors, described)
            found |= made
        found |= tensors
    theirs = [each for each, t in found.items() if type(t).__module__.startswith("torchao.")]
    if not theirs:
        raise ValueError("no tensor is torchao's")
    return found | {each: found[each].dequantize() for each in theirs}


# ---- the table


class Method(NamedTuple):
    """Method of quantisation: the ends of names of which every quantised layer has one, the ends of all tensors that
    replace its weight, the function that computes it, and one that names an option that is not read."""

    markers: tuple[str, ...]
    parts: tuple[str, ...]
    weight: Callable[[Parts, Options], Tensor]
    refused: Callable[[Options], str]


def _odd_in_gptq(options: Options) -> str:
    form = options.get("checkpoint_format") or "gptq"
    return "" if form in ("gptq", "gptq_v2") else f"checkpoint_format {form!r:.40}"


def _odd_in_awq(options: Options) -> str:
    form, bits = str(options.get("version") or "gemm"), options.get("bits") or options.get("w_bit") or 4
    return f"version {form!r:.40}" if form.lower() != "gemm" else "" if bits == 4 else f"bits {bits!r:.40}"


COMPRESSED_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "pack-quantized")


def _odd_in_compressed(options: Options) -> str:
    groups = options.get("config_groups")
    inner = [each.get("format") for each in groups.values() if each] if isinstance(groups, Mapping) else []
    odd = [form for form in (options.get("format"), *inner) if form not in (None, *COMPRESSED_FORMATS)]
    if options.get("transform_config"):
        return "a transform_config"
    return f"format {odd[0]!r:.40}" if odd else ""


def _none(options: Options) -> str:
    return ""


GROUPED = ("qweight", "qzeros", "scales", "g_idx")
EIGHT_BITS = ("weight", "SCB", "weight_format")
FOUR_BITS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES)
SCALED = ("weight", "weight_scale", "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx")
OF_INPUT = ("input_scale", "input_zero_point", "activation_scale")
METHODS = {
    "bitsandbytes": Method(("weight.quant_map", "SCB"), (*FOUR_BITS, *EIGHT_BITS), _bitsandbytes, _none),
    "gptq": Method(("qweight",), GROUPED, _gptq, _odd_in_gptq),
    "awq": Method(("qweight",), GROUPED, _awq, _odd_in_awq),
    "fp8": Method(("weight_scale_inv",), ("weight", "weight_scale_inv", *OF_INPUT), _fp8, _none),
    "compressed-tensors": Method(("weight_scale",), (*SCALED, *OF_INPUT), _compressed, _odd_in_compressed),
}
