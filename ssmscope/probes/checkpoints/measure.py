"""Rows of a table of checkpoints, each of which is loaded and measured on its own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.loading.load import load
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.bound.terms import CURVES, theorem_model
from ssmscope.probes.checkpoints.result import Checkpoint
from ssmscope.probes.stability import stability
from ssmscope.probes.stability.measure import DEFAULT_LENGTH

SUFFIXES = (".pth", ".pt")
"""Suffixes of weight files that a directory of checkpoints is searched for."""
Source = str | os.PathLike[str] | Model


def sources_of(checkpoints: Source | Iterable[Source]) -> list[Source]:
    """Return one or several checkpoints as a list; raise InputError if there are none."""
    given: Any = checkpoints
    sources = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not sources:
        raise InputError("no checkpoint was given; give files, directories, names or models")
    return sources


def name_of(source: Source) -> str:
    return source.name if isinstance(source, Model) else str(source)


def expand_directories(sources: Sequence[Source]) -> list[Source]:
    """Replace every directory that is not a checkpoint itself by the checkpoints in it, sorted by name."""
    found: list[Source] = []
    for source in sources:
        inside: list[Path] = []
        if isinstance(source, str | os.PathLike) and os.path.isdir(source) and not Path(source, "config.json").exists():
            try:
                files = sorted(file for file in Path(source).iterdir() if not file.name.startswith("."))
            except OSError as error:
                raise InputError(f"cannot read {source}: {error.strerror or error}") from error
            inside = [f for f in files if (f.suffix in SUFFIXES and f.is_file()) or (f / "config.json").is_file()]
        found += [str(file) for file in inside] or [source]
    return found


def measure_checkpoint(
    source: Any, length: int | None, examples: int | None, setting: dict[str, Any], grid: np.ndarray, seed: int
) -> tuple[Checkpoint, np.ndarray]:
    """Return a row of the table, with the reason if it cannot be read, and ln C at the lengths of `grid`, else NaN."""
    curve, bounded = np.full(len(grid), math.nan), dict[str, Any]()
    try:
        model = source if isinstance(source, Model) else load(source)
        probe = None if model.channels is not None else min(max(length or DEFAULT_LENGTH, 2), DEFAULT_LENGTH)
        found = stability(model, length=probe, positions=1, seed=seed)
        if theorem_model(model) is not None:
            at = length or int(grid[-1])
            bound = generalization_bound(model, length=at, examples=examples or 1, **setting, lengths=grid.tolist())
            curve = bound.curves[CURVES.index("with constants")]
            bounded = {"norms": bound.norms}
            if length is not None and bound.capacity is not None:
                bounded |= {"length": bound.length, "log_capacity": bound.capacity.log}
                bounded["log_capacity_printed"] = bound.capacity.log_printed
            if length is not None and examples is not None and bound.gap is not None:
                bounded |= {"bound": bound.gap.bound, "vacuous": bound.gap.vacuous}
    except InputError as error:
        return Checkpoint(name_of(source), str(error)), curve
    names = ["spectral_abscissa", "largest_gain", "possible_gain", "growth"]
    largest = found.to_frame()[names].max().tolist()  # Of those that are numbers.
    fingerprint = str(found.provenance["fingerprint"])
    about = Checkpoint(model.name, "", model.architecture, fingerprint, found.behaviour, *largest)
    return replace(about, **bounded), curve
