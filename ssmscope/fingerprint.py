"""What a model's numbers come from: a hash over its configuration and weights, and whether they are still the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ssmscope.errors import InputError


def versions(weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> dict[str, int]:
    """A 64-bit hash of the bytes of every weight, and of every setting of `adapters`, by its name.

    Bytes are read, because no counter sees all that writes to a tensor: `p.data.mul_(2)` leaves none.

    Raises:
        InputError: for weights that are not in memory.
    """
    found = {}
    for name, value in weights.items():
        digest = xxhash.xxh3_64()
        for part in _parts(value, name):
            digest.update(part)
        found[name] = digest.intdigest()
    for name, setting in (settings or {}).items():
        found[f"adapter {name}"] = xxhash.xxh3_64_intdigest(json.dumps(setting, sort_keys=True, default=str).encode())
    return found


def fingerprint(config: Any, weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str:
    """16 hexadecimal digits of a hash over the configuration, every weight and every setting of `adapters`.

    Raises:
        InputError: for weights that are not in memory.
    """
    digest = hashlib.blake2b(json.dumps(essence(config), sort_keys=True, default=str).encode(), digest_size=8)
    for name in sorted(weights):
        for part in _parts(weights[name], name, named=True):
            digest.update(part)
    if settings:
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def adapters(module: nn.Module) -> dict[str, Any]:
    """What decides beside the weights what adapters (peft's) add: which are active, merged or off, by what scaled."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    found = {}
    for path, part in module.named_modules():
        if hasattr(part, "merged_adapters"):
            found[path] = {name: getattr(part, name, None) for name in names}
    return found


def check_finite(module: nn.Module, name: str) -> None:
    """Refuse a model that is damaged.

    Raises:
        InputError: naming a weight that is NaN or infinite, or one that is not in memory.
    """
    for path, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            raise InputError(
                f"{name}: the weights of {path} are not in memory (offloaded, or on the device meta); load the model "
                "whole, on a CPU or a GPU"
            )
        values = parameter.detach()
        # The sum is finite for nearly all weights and three times as fast; it may overflow for some that are.
        if values.is_floating_point() and not bool(values.sum(dtype=torch.float32).isfinite()):
            wrong = int((~values.isfinite()).sum())
            if wrong:
                raise InputError(
                    f"{name} is damaged: {wrong:,} of the {values.numel():,} numbers of {path} are not finite, and so "
                    "would every answer be"
                )


def _parts(value: Any, name: str, named: bool = False) -> Iterator[Any]:
    """A weight as pieces that can be hashed; quantised layers keep tuples and scales beside tensors."""
    if not isinstance(value, Tensor):
        if isinstance(value, list | tuple):
            for each in value:
                yield from _parts(each, name, named)
        else:
            yield repr(value).encode()
        return
    tensor = value.detach()
    if tensor.device.type == "meta":
        raise InputError(f"the weights of {name} are not in memory (offloaded, or on the device meta): load them")
    if tensor.is_quantized:
        yield str((tensor.dtype, tensor.qscheme())).encode()
        yield from _parts(tensor.dequantize(), name, named)
        return
    tensor = tensor.contiguous().cpu()
    if named:
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    yield tensor.flatten().view(torch.uint8).numpy().data


def essence(config: Any) -> dict[str, Any]:
    """The fields of a configuration that decide what a model computes, alike under every version of transformers.

    What transformers keeps for all models alike (dtypes, labels, generation, token ids) is left out, and so are sets,
    which no config.json holds.
    """
    from transformers import PretrainedConfig

    elsewhere = {
        *PretrainedConfig().to_dict(),
        *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "rms_norm", "layer_types"),
        *("use_cache", "use_mambapy", "use_falcon_mambapy", "use_associative_scan", "image_size"),
    }
    fields = {k: v for k, v in vars(config).items() if k not in elsewhere and not k.startswith("_")}
    fields = {k: v for k, v in fields.items() if not isinstance(v, set | frozenset)}
    backbone = fields.pop("backbone", None)
    if backbone is not None:
        fields["backbone"] = essence(backbone)
    return {"model_type": config.model_type, **fields}
