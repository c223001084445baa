"""Quantised linear layers, read with the weights that they stand for.

Layers of bitsandbytes (8 and, on a CPU, 4 bits) round what they are given, torchao's weights have few operations, and
layers of GPTQ and AWQ have no weight: none is a linear map that can be read or has gradients. A copy of the model with
dequantised weights is explained in their place. On a GPU bitsandbytes' layers of 4 bits are linear maps, and are read
by what they compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.errors import InputError
from ssmscope.loading.packed_layers import Misfit, weight_of_4_bits, weight_of_8_bits


def dequantised(module: nn.Module) -> nn.Module:
    """Return a model with the weights of its quantised layers in the dtype of its embeddings: a copy, without the
    layers in few bits, or the module itself if it has none. The module that is given is left unchanged."""
    found = {id(part): weight for part in module.modules() if (weight := _weight_of(part)) is not None}
    if not found:
        return module
    table: Any = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    dtype = torch.float32 if table is None else table.weight.dtype
    memo = {id(part): _plain(part, found[id(part)], dtype) for part in module.modules() if id(part) in found}
    copied: Any = copy.deepcopy(module, memo)
    for name in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "hf_quantizer", "quantization_method"):
        vars(copied).pop(name, None)
    if hasattr(copied, "config"):
        vars(copied.config).pop("quantization_config", None)
    return copied


def _plain(part: Any, weight: Callable[[Any], Tensor], dtype: torch.dtype) -> nn.Linear:
    with torch.no_grad():
        try:
            dense = weight(part).to(dtype)
        except Misfit as error:
            raise InputError(f"a {type(part).__name__} cannot be dequantised: {error}") from error
        made = nn.Linear(*dense.T.shape, bias=part.bias is not None, device="meta")
        made.weight = nn.Parameter(dense)
        if part.bias is not None:
            made.bias = nn.Parameter(part.bias.detach().to(dtype).clone())
    return made.train(part.training)


def _weight_of(part: nn.Module) -> Callable[[Any], Tensor] | None:
    """Return the function that computes the weight a quantised layer stands for; None for other modules."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(part).__mro__}
    if ("bitsandbytes", "Linear8bitLt") in kinds:
        return _of_8_bits
    if all(isinstance(getattr(part, name, None), Tensor) for name in ("qweight", "qzeros", "scales")):
        return _of_outputs
    weight = getattr(part, "weight", None)
    if ("bitsandbytes", "Linear4bit") in kinds:
        return None if weight is None or weight.is_cuda else _of_4_bits
    stored = weight.data if isinstance(weight, nn.Parameter) else weight
    theirs = type(stored).__module__.startswith("torchao.") and hasattr(stored, "dequantize")
    return (lambda part: part.weight.data.dequantize()) if theirs and isinstance(part, nn.Linear) else None


def _of_outputs(part: Any) -> Tensor:
    """Return what a layer of GPTQ or AWQ computes for each single input; kernels keep codes in orders of their own."""
    own = copy.deepcopy(part)
    own.bias = None
    inputs = own.in_features if hasattr(own, "in_features") else own.infeatures
    return own(torch.eye(inputs, dtype=own.scales.dtype, device=own.scales.device)).T.contiguous()


def _of_8_bits(part: Any) -> Tensor:
    """Return the weight of codes and scales that are kept by the layer, before its first run by its weight."""
    at = part.state if part.state.CB is not None else part.weight
    if at.CB is None:  # A layer for training keeps its weight whole.
        return part.weight.data.float()
    return weight_of_8_bits(at.CB, at.SCB)


def _of_4_bits(part: Any) -> Tensor:
    if part.weight.is_floating_point() and getattr(part.weight, "quant_state", None) is None:
        return part.weight.data.float()  # It is tied to embeddings, which stay whole.
    # A CPU's kernel reorders the weight, and saving undoes that.
    stored = copy.deepcopy(part).state_dict()
    return weight_of_4_bits({end: each for end, each in stored.items() if end != "bias"})
