"""Hashes of a model's configuration and weights, and checks that these are unchanged and finite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import pad
from ssmscope.errors import InputError

MAX_WORDS_PER_STEP = 2**17
"""32-bit words multiplied at once on a CPU, so that they stay in its cache."""
GPU_STEP_FACTOR = 2**8
WORDS_PER_ROW = 2**16
"""Words in a row: a word's factor is that of its place in the row times that of the row."""


def versions(weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return a 64-bit hash of the bytes of every weight, and of every setting of `adapters`, by name. Bytes are read
    because no counter sees every write to a tensor: `p.data.mul_(2)` changes none. On a GPU the hash is that of
    `hashes`, on a CPU another. Raises InputError for weights that are not in memory."""
    found = hashes({name: t for name, t in weights.items() if isinstance(t, Tensor) and t.device.type == "cuda"})
    for name, value in weights.items():
        if name not in found:
            digest = xxhash.xxh3_64()
            for part in _parts(value, name):
                digest.update(part)
            found[name] = digest.intdigest()
    for name, setting in (settings or {}).items():
        said = json.dumps(setting, sort_keys=True, default=str)
        found[f"adapter {name}"] = xxhash.xxh3_64_intdigest(said.encode())
    return found


def fingerprint(config: Any, weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str:
    """Return a hash over the configuration, every weight and every setting of `adapters`, 16 hexadecimal digits, the
    same on every device. Raises InputError for weights that are not in memory."""
    digest = hashlib.blake2b(json.dumps(essence(config), sort_keys=True, default=str).encode(), digest_size=8)
    words = hashes({name: value for name, value in weights.items() if isinstance(value, Tensor)})
    for name in sorted(weights):
        value = weights[name]
        if isinstance(value, Tensor):
            said = f"{name} {value.dtype} {tuple(value.shape)} {words[name]}"
            digest.update(said.encode())
        else:
            for part in _parts(value, name):
                digest.update(part)
    if settings:
        digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def adapters(module: nn.Module) -> dict[str, Any]:
    """Return the settings that decide what PEFT adapters add: active, merged, off, scale."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    found = {}
    for path, part in module.named_modules():
        if hasattr(part, "merged_adapters"):
            found[path] = {name: getattr(part, name, None) for name in names}
    return found


def check_finite(module: nn.Module, name: str) -> None:
    """Raise InputError if a weight is not in memory, NaN or infinite."""
    for path, parameter in module.named_parameters():
        if parameter.device.type == "meta":
            said = f"{name}: the weights of {path} are not in memory (offloaded, or on the device meta); load the model"
            raise InputError(f"{said} whole, on a CPU or a GPU")
        values = parameter.detach()
        # The sum is finite for nearly all weights and three times as fast; it may overflow for some that are.
        if values.is_floating_point() and not bool(values.sum(dtype=torch.float32).isfinite()):
            wrong = int((~values.isfinite()).sum())
            if wrong:
                said = f"{name} is damaged: {wrong:,} of the {values.numel():,} numbers of {path} are not finite,"
                raise InputError(f"{said} and no answer would be")


def _parts(value: Any, name: str) -> Iterator[Any]:
    """Yield a weight in pieces that can be hashed; quantised layers keep tuples and scales with their tensors."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each, name)
    elif not isinstance(value, Tensor):
        yield repr(value).encode()
    else:
        if value.is_quantized:
            yield str((value.dtype, value.qscheme())).encode()
        yield _bytes(value, name).cpu().numpy().data


def _bytes(value: Tensor, name: str) -> Tensor:
    if value.device.type == "meta":
        raise InputError(f"the weights of {name} are not in memory (offloaded, or on the device meta): load them")
    value = value.detach()
    return (value.dequantize() if value.is_quantized else value).contiguous().flatten().view(torch.uint8)


def hashes(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a 64-bit hash of the bytes of every tensor, computed on its device and the same on all: Σ word · row's
    factor · column's factor over its 32-bit words modulo 2⁶⁴, the factors drawn once and odd. A change of one word
    always changes the hash; of several, with probability about 1 − 2⁻³². Raises InputError for weights that are not in
    memory."""
    found: dict[str, int] = {}
    for device in {value.device for value in values.values()}:
        own = {name: value for name, value in values.items() if value.device == device}
        sums = torch.stack([_sum_of_words(_bytes(value, name)) for name, value in own.items()])  # One wait for a GPU.
        found |= dict(zip(own, sums.tolist()))
    return found


def _sum_of_words(flat: Tensor) -> Tensor:
    odd = len(flat) % 4
    words = (pad(flat, (0, 4 - odd)) if odd or flat.data_ptr() % 4 else flat).view(torch.int32)
    rows, columns = _factors(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = MAX_WORDS_PER_STEP * (1 if words.device.type == "cpu" else GPU_STEP_FACTOR)
    for start in range(0, len(words), step):
        part, first = words[start : start + step], start // WORDS_PER_ROW % len(rows)
        width = min(len(part), WORDS_PER_ROW)
        grid = (pad(part, (0, -len(part) % width)) if len(part) % width else part).view(-1, width)
        total += ((grid * columns[:width]).sum(1) * rows[first : first + len(grid)]).sum()
    return total


@cache
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(-(2**63), 2**63 - 1, (2**17 + WORDS_PER_ROW,), generator=torch.Generator().manual_seed(0))
    rows, columns = (drawn | 1).to(device).split([2**17, WORDS_PER_ROW])
    return rows, columns


def essence(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that decide what a model computes, the same under every version of
    transformers: without those that it keeps for all models (dtypes, labels, generation, token ids), and sets."""
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
