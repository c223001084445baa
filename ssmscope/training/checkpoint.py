"""Checkpoints of a run that may be killed at any moment: whole or absent, and with every source of chance in them."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ssmscope.errors import InputError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """`path` has its old content or the new one, also if the process or the machine dies on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(unfinished, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`content` as indented JSON, atomically."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode("utf-8")))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        InputError: when it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); remove it, or train into another directory") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object; remove it, or train into another directory")
    return content


def random_states() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, the GPUs' included."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """The generators as they were; the GPUs' only where as many are present."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Tensors and plain values in one file, atomically."""
    write_atomically(path, lambda stream: torch.save(dict(state), stream))


def load_state(path: Path) -> dict[str, Any]:
    """What `save_state` wrote, on the CPU; only tensors and plain values are ever unpickled.

    Raises:
        InputError: for a file that is no such state.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"the checkpoint {path} cannot be read ({reason}); remove its directory to start again"
        ) from error
