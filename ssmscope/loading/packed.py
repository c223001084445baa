"""Quantised directories, read with the weights that codes and scales stand for, see `packed_layers`.

A weight, in float32, needs no package of the quantiser but torchao's; what such a package does to activations is left
out, as it is for a model in memory.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from ssmscope.errors import InputError
from ssmscope.loading import packed_layers, stored
from ssmscope.loading.packed_layers import OF_INPUT, STATES, Misfit, Options, Parts

TORCHAO = "torchao"
CONFIG_FIELDS = ("quantization_config", "compression_config")


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
    layers = list(dict.fromkeys(name.removesuffix(marker) for name, marker in ends))
    if not layers:
        raise ValueError(f"no layer has {' or '.join(method.markers)}")
    for layer in layers:
        parts = {end: tensors.pop(layer + end) for end in method.parts if layer + end in tensors}
        try:
            tensors[f"{layer}weight"] = method.weight(parts, options)
        except Misfit as error:
            raise ValueError(f"{layer[:-1]}: {error}") from error
    return tensors


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
    return found | {each: _dequantised(each, found[each]) for each in theirs}


def _dequantised(name: str, tensor: Any) -> Tensor:
    """Return a tensor of torchao's dequantised. Raises ValueError if its scales are not one for each of its blocks."""
    plain = getattr(tensor, "tensor_impl", None)  # Older versions have one.
    parts: Any = [getattr(tensor, end, None) for end in ("qdata", "scale", "zero_point")]
    codes, scale, zero = parts if plain is None else plain.get_plain()
    block = getattr(tensor, "block_size", None)
    if scale is None or not isinstance(block, list | tuple) or getattr(tensor, "act_pre_scale", None) is not None:
        raise ValueError(f"{name} is a {type(tensor).__name__} of a form that is not read")
    grid = tuple(-(-size // each) for size, each in zip(tensor.shape, block, strict=True))
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2) if "Float8" in type(tensor).__name__ else (torch.int8,)
    kinds = kinds if plain is None else (*kinds, torch.uint8, torch.float8_e4m3fn, torch.int32)
    fits = codes.shape == tensor.shape and codes.dtype in kinds and scale.is_floating_point()
    for each in (scale, *([] if zero is None else [zero])):
        fits = fits and each.numel() == math.prod(grid) and (each.ndim < len(grid) or each.shape == grid)
    if not fits:
        said = f"codes {tuple(codes.shape)} {codes.dtype}, scales {tuple(scale.shape)} and blocks {tuple(block)}"
        raise ValueError(f"{name}, {tuple(tensor.shape)}, has {said}")
    return tensor.dequantize()


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
    odd = f"version {form!r:.40}" if form.lower() != "gemm" else "" if bits == 4 else f"bits {bits!r:.40}"
    return odd or ("" if options.get("zero_point") in (None, True) else "no zero_point")


COMPRESSED_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "pack-quantized")


def _odd_in_compressed(options: Options) -> str:
    groups = options.get("config_groups")
    named = [*groups.values()] if isinstance(groups, Mapping) else []
    inner = [each.get("format") for each in named if isinstance(each, Mapping)]
    odd = [form for form in (options.get("format"), *inner) if form not in (None, *COMPRESSED_FORMATS)]
    if options.get("transform_config"):
        return "a transform_config"
    return f"format {odd[0]!r:.40}" if odd else ""


def _none(options: Options) -> str:
    return ""


GROUPED = ("qweight", "qzeros", "scales", "g_idx", "weight")
EIGHT_BITS = ("SCB", "weight_format")
FOUR_BITS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES)
SCALED = ("weight", "weight_scale", "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx")
FP8 = ("weight", "weight_scale_inv")
METHODS = {
    "bitsandbytes": Method(("weight.quant_map", "SCB"), (*FOUR_BITS, *EIGHT_BITS), packed_layers.bitsandbytes, _none),
    "gptq": Method(("qweight",), GROUPED, packed_layers.gptq, _odd_in_gptq),
    "awq": Method(("qweight",), GROUPED, packed_layers.awq, _odd_in_awq),
    "fp8": Method(("weight_scale_inv",), (*FP8, *OF_INPUT), packed_layers.fp8, _none),
    "compressed-tensors": Method(("weight_scale",), (*SCALED, *OF_INPUT), packed_layers.compressed, _odd_in_compressed),
}
