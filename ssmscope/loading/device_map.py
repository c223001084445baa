"""Models split over several devices, between which accelerate's hooks move activations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from ssmscope.core.mixers import mixers
from ssmscope.errors import InputError, did_you_mean

SPLITS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Accelerate's strategies of assigning a device to each part of a model."""


def check_split(device_map: Any, device: Any, source: Any) -> None:
    """Raise InputError for an unknown device map, or one with a device, a model in memory or no accelerate."""
    if device_map is None:
        return
    if device is not None:
        raise InputError("device and device_map both say where the weights go: give one")
    if not isinstance(source, str | os.PathLike):
        raise InputError("device_map splits a directory as it is read; a model in memory stays where it is")
    if isinstance(device_map, str) and device_map not in SPLITS:
        raise InputError(
            f"device_map {device_map!r} is unknown: choose one of {', '.join(SPLITS)}, or give a device for each part"
            f"{did_you_mean(device_map, SPLITS)}"
        )
    if find_spec("accelerate") is None:
        raise InputError("device_map needs accelerate, which is not installed: pip install accelerate")


def device_of_parts(empty: Any, device_map: str | Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the device of each part of a model, the CPU as a `torch.device`: for parts on the string "cpu" accelerate
    keeps their weights elsewhere, and moves them to a GPU as they run.

    Args:
        empty: the model on the meta device.
        device_map: one of `SPLITS`, which never splits a block, or a device for each part.
        dtype: that in which the model is read; by default its own.

    Raises:
        InputError: if a part is on a disk or the device meta or has no device, or a mixer is on several."""
    where = {} if isinstance(device_map, str) else dict(device_map)
    if isinstance(device_map, str):
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory, get_max_memory

        empty.to(dtype=dtype).tie_weights()
        lists = (part for part in empty.modules() if isinstance(part, nn.ModuleList))
        whole = sorted({type(block).__name__ for part in lists for block in part})
        if device_map == "sequential":
            room = get_max_memory()
        else:
            low_zero = device_map == "balanced_low_0"
            room = get_balanced_memory(empty, no_split_module_classes=whole, low_zero=low_zero)
        where = infer_auto_device_map(empty, room, no_split_module_classes=whole)
    away = [part for part, device in where.items() if str(device) in ("disk", "meta")]
    if away:
        raise InputError(
            f"device_map leaves the weights of {away[0] or 'the model'} out of memory (disk, meta): give each part the "
            "CPU or a GPU"
        )
    for name, _ in empty.named_parameters(remove_duplicate=False):
        if not any(part in ("", name) or name.startswith(f"{part}.") for part in where):
            raise InputError(f"device_map gives {name} no device: it names {', '.join(map(repr, where))}")
    mixing = mixers(empty)
    for name in (name for name, part in empty.named_modules() if any(part is mixer for mixer in mixing)):
        if len({str(device) for part, device in where.items() if part.startswith(f"{name}.")}) > 1:
            raise InputError(f"device_map has parts of {name} on several devices: give a layer one")
    return {part: torch.device("cpu") if str(device) == "cpu" else device for part, device in where.items()}


def start_at_embeddings(module: Any) -> None:
    """Have a split model's input sent to the device of its embeddings; accelerate may send it to another."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.execution_device = module.get_input_embeddings().weight.device
