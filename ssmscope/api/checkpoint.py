"""Checkpoints of a run that may be killed at any moment: complete or absent, with all random states."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ssmscope.api.writing import LOCK, locked, write_atomically, write_errors_explained, write_whole
from ssmscope.core.text_files import parse_json
from ssmscope.data.rows import first_line
from ssmscope.errors import UNPICKLABLE, InputError, ran_out_of_memory

PLAN, STATE = "plan.json", "state.pt"
"""Files in a run's working directory: its plan and its checkpoint."""


@contextmanager
def continued(plan: Path) -> Iterator[None]:
    """Lock the working directory of a run, which holds its plan, for this process. A new run whose input is refused
    leaves nothing. A run that fails on a full disk leaves its last checkpoint, if any, from which the same call
    continues. Another process there, and a failure to write, raise InputError."""
    folder = plan.parent
    begins = not os.path.exists(plan)
    with locked(folder):
        try:
            with write_errors_explained(folder.parent):
                yield
        except InputError as error:
            kept, failed = os.path.exists(folder / STATE), isinstance(error.__cause__, OSError)
            if begins and not (kept and (failed or ran_out_of_memory(error.__cause__))):
                finish(folder)
            if kept and failed:
                told = f"{error}; the same command continues from the last checkpoint"
                raise InputError(told) from error.__cause__
            raise
    with suppress(OSError):  # It is not empty if the run is to be continued.
        folder.rmdir()


def finish(folder: Path) -> None:
    """Remove the files of a locked working directory."""
    for left in folder.iterdir():
        if left.name != LOCK:
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def clear(plan: Path) -> None:
    """Remove the working directory of a finished run that was killed between its last two steps."""
    if plan.parent.is_dir():
        with continued(plan):
            finish(plan.parent)


def is_new(out: Path, folder: Path) -> bool:
    """Return True if `out` is absent, empty, or holds only the working directory of a run stopped before its plan."""
    if not out.is_dir():
        return not os.path.lexists(out)
    inside = [*folder.iterdir()] if folder.is_dir() else []
    begun = {LOCK, f".{PLAN}.unfinished"}
    return {*out.iterdir()} <= {folder} and {place.name for place in inside} <= begun


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as indented JSON, atomically."""
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}); remove it, or train into another directory") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object; remove it, or train into another directory")
    return content


def random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch, including those of GPUs."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Restore the generators, those of GPUs only if as many are present."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Save tensors and plain values in one file, atomically."""
    write_atomically(path, lambda stream: torch.save(dict(state), stream))


def load_state(path: Path) -> dict[str, Any]:
    """Load what `save_state` wrote, on the CPU; only tensors and plain values are unpickled."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UNPICKLABLE as error:
        again = "remove its directory to start again"
        raise InputError(f"the checkpoint {path} cannot be read ({first_line(error)}); {again}") from error
