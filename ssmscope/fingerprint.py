"""What a model's numbers come from: a hash over its configuration and weights, and whether they are still the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ssmscope.errors import InputError

AT_ONCE = 2**25
"""Bytes of a weight that are brought to the CPU, or 32-bit words that are multiplied on a GPU, at a time."""
ROW = 2**16
"""Words in a row: a word's factor is that of its place in the row times that of the row."""


def versions(weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> dict[str, int]:
    """A 64-bit hash of the bytes of every weight, and of every setting of `adapters`, by its name.

    Bytes are read, because no counter sees all that writes to a tensor: `p.data.mul_(2)` leaves none. On a GPU they are
    read there: the hash is another than on a CPU.

    Raises:
        InputError: for weights that are not in memory.
    """
    found, there = {}, {}
    for name, value in weights.items():
        if isinstance(value, Tensor) and value.device.type == "cuda" and not value.is_quantized:
            there[name] = device_hash(value.detach())
            continue
        digest = xxhash.xxh3_64()
        for part in _parts(value, name):
            digest.update(part)
        found[name] = digest.intdigest()
    for device in {value.device for value in there.values()}:
        names = [name for name, value in there.items() if value.device == device]
        found |= zip(names, torch.stack([there[name] for name in names]).tolist(), strict=True)
    for name, setting in (settings or {}).items():
        found[f"adapter {name}"] = xxhash.xxh3_64_intdigest(json.dumps(setting, sort_keys=True, default=str).encode())
    return found


def fingerprint(config: Any, weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str:
    """16 hexadecimal digits of a hash over the configuration, every weight and every setting of `adapters`.

    Raises:
        InputError: for weights that are not in memory.
    """
    digest = hashlib.blake2b(json.dumps(essence(config), sort_keys=True, default=str).encode(), digest_size=8)

    def hashed(name: str) -> bytes:
        own = xxhash.xxh3_128()
        for part in _parts(weights[name], name, named=True):
            own.update(part)
        return own.digest()

    names = sorted(weights)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # neither hashing nor copying holds the interpreter
        for each in pool.map(hashed, names):
            digest.update(each)
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
    if named:
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    for part in tensor.contiguous().flatten().view(torch.uint8).split(AT_ONCE):
        yield part.cpu().numpy().data


def device_hash(value: Tensor) -> Tensor:
    """A 64-bit hash of the bytes of a tensor where it is, as a tensor of one number: Σ word · row's factor · column's
    factor over its 32-bit words modulo 2⁶⁴, the factors drawn once and odd.

    A change of one word always shows, and of several but for a chance of about 2⁻³².
    """
    flat = value.contiguous().flatten().view(torch.uint8)
    odd = len(flat) % 4
    if odd or flat.data_ptr() % 4:
        flat = torch.cat([flat, flat.new_zeros(4 - odd)])
    words, (rows, columns) = flat.view(torch.int32), _factors(value.device)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, len(words), AT_ONCE):
        part, first = words[start : start + AT_ONCE], start // ROW % len(rows)
        even = len(part) // ROW
        if even:
            total += ((part[: even * ROW].view(even, ROW) * columns).sum(1) * rows[first : first + even]).sum()
        if len(rest := part[even * ROW :]):
            total += (rest * columns[: len(rest)]).sum() * rows[first + even]
    return total


@cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(-(2**63), 2**63 - 1, (2**17 + ROW,), generator=torch.Generator().manual_seed(0))
    rows, columns = (drawn | 1).to(device).split([2**17, ROW])
    return rows, columns


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
