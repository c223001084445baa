"""What a model's numbers come from: a hash over its configuration and weights, and whether they are still the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.functional import pad

from ssmscope.errors import InputError

AT_ONCE = 2**17
"""32-bit words that are multiplied at a time, so that they stay in a CPU's cache."""
ON_A_GPU = 2**8
"""How many times as many words there."""
ROW = 2**16
"""Words in a row: a word's factor is that of its place in the row times that of the row."""
SMALL = ROW // 4
"""Words of the tensors that are summed together."""


def versions(weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> dict[str, int]:
    """A 64-bit hash of the bytes of every weight, and of every setting of `adapters`, by its name.

    Bytes are read, because no counter sees all that writes to a tensor: `p.data.mul_(2)` leaves none. On a GPU it is
    `hashes`, on a CPU another.

    Raises:
        InputError: for weights that are not in memory.
    """
    return versions_to_come(weights, settings)()


def versions_to_come(
    weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> Callable[[], dict[str, int]]:
    """What gives `versions`: a GPU has its part of the work from now on, and is waited for when they are asked for.

    Raises:
        InputError: as `versions`.
    """
    there = {
        name: value for name, value in weights.items() if isinstance(value, Tensor) and value.device.type == "cuda"
    }
    on_gpus = _hashes_to_come(there)

    def all_of_them() -> dict[str, int]:
        found = on_gpus()
        for name, value in weights.items():
            if name in there:
                continue
            digest = xxhash.xxh3_64()
            for part in _parts(value, name):
                digest.update(part.numpy().data if isinstance(part, Tensor) else part)
            found[name] = digest.intdigest()
        for name, setting in (settings or {}).items():
            said = json.dumps(setting, sort_keys=True, default=str)
            found[f"adapter {name}"] = xxhash.xxh3_64_intdigest(said.encode())
        return found

    return all_of_them


def fingerprint(config: Any, weights: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> str:
    """16 hexadecimal digits of a hash over the configuration, every weight and every setting of `adapters`, the same on
    every device.

    Raises:
        InputError: for weights that are not in memory.
    """
    digest = hashlib.blake2b(json.dumps(essence(config), sort_keys=True, default=str).encode(), digest_size=8)
    words = hashes({name: value for name, value in weights.items() if isinstance(value, Tensor)})
    for name in sorted(weights):
        value = weights[name]
        if isinstance(value, Tensor):
            said = f"{name} {value.dtype} {tuple(value.shape)} {words[name]}"
            digest.update(said.encode())
        else:
            for part in _parts(value, name):
                digest.update(part.numpy().data if isinstance(part, Tensor) else part)
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


def _parts(value: Any, name: str) -> Iterator[Any]:
    """A weight as pieces that can be hashed; quantised layers keep tuples and scales beside tensors."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each, name)
    elif not isinstance(value, Tensor):
        yield repr(value).encode()
    else:
        if value.is_quantized:
            yield str((value.dtype, value.qscheme())).encode()
        yield _bytes(value, name).cpu()


def _bytes(value: Tensor, name: str) -> Tensor:
    """The bytes of a tensor where it is.

    Raises:
        InputError: for one that is not in memory.
    """
    if value.device.type == "meta":
        raise InputError(f"the weights of {name} are not in memory (offloaded, or on the device meta): load them")
    value = value.detach()
    return (value.dequantize() if value.is_quantized else value).contiguous().flatten().view(torch.uint8)


def hashes(values: Mapping[str, Tensor]) -> dict[str, int]:
    """A 64-bit hash of the bytes of every tensor, found where it is and the same everywhere: Σ word · row's factor ·
    column's factor over its 32-bit words modulo 2⁶⁴, the factors drawn once and odd.

    A change of one word always shows, and of several but for a chance of about 2⁻³².

    Raises:
        InputError: for weights that are not in memory.
    """
    return _hashes_to_come(values)()


def _hashes_to_come(values: Mapping[str, Tensor]) -> Callable[[], dict[str, int]]:
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, value in values.items():
        flat = _bytes(value, name)
        odd = len(flat) % 4
        if odd or flat.data_ptr() % 4:
            flat = torch.cat([flat, flat.new_zeros(4 - odd)])
        by_device.setdefault(value.device, {})[name] = flat.view(torch.int32)
    found: list[tuple[list[str], Tensor]] = []
    for device, own in by_device.items():
        rows, columns = _factors(device)
        small = {name: words for name, words in own.items() if len(words) <= SMALL}
        large = {name: words for name, words in own.items() if len(words) > SMALL}
        if small:
            found.append(([*small], _sums_of_small(list(small.values()), columns) * rows[0]))
        if large:
            found.append(([*large], torch.stack([_sum_of_words(words, rows, columns) for words in large.values()])))
    return lambda: {name: word for names, sums in found for name, word in zip(names, sums.tolist(), strict=True)}


def _sums_of_small(values: list[Tensor], columns: Tensor) -> Tensor:
    """Return Σ word · column's factor of each tensor of at most a row: on a GPU few kernel launches for all of them."""
    lengths = torch.tensor([len(words) for words in values])
    ends = lengths.cumsum(0).to(columns.device)
    starts = (ends - lengths.to(ends)).repeat_interleave(lengths.to(ends), output_size=int(lengths.sum()))
    places = torch.arange(len(starts), device=columns.device) - starts
    sums = pad((torch.cat(values) * columns[places]).cumsum(0), (1, 0))  # modulo 2⁶⁴, as all of these sums
    return sums[ends] - sums[ends - lengths.to(ends)]


def _sum_of_words(words: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = AT_ONCE * (1 if words.device.type == "cpu" else ON_A_GPU)
    for start in range(0, len(words), step):
        part, first = words[start : start + step], start // ROW % len(rows)
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
