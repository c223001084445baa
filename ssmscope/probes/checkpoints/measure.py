"""The rows of a table of checkpoints: each is loaded and measured by itself."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssmscope.architectures.loading.load import load
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.bound.norms import theorem_model
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import CURVES
from ssmscope.probes.checkpoints.result import Checkpoint
from ssmscope.probes.stability import stability
from ssmscope.probes.stability.inputs import LENGTH

SUFFIXES = (".pth", ".pt")
"""How files of weights end that are looked for in a directory of checkpoints."""

Source = str | os.PathLike[str] | Model


def sources_of(checkpoints: Source | Iterable[Source]) -> list[Source]:
    """What was given, one or several.

    Raises:
        InputError: nothing.
    """
    one = isinstance(checkpoints, str | os.PathLike | Model)
    sources = [checkpoints] if one else list(checkpoints)  # type: ignore[arg-type]
    if not sources:
        raise InputError("no checkpoint was given; give files, directories, names or models")
    return sources  # type: ignore[return-value]


def name_of(source: Source) -> str:
    return source.name if isinstance(source, Model) else str(source)


def expanded(sources: Sequence[Source]) -> list[Source]:
    """The checkpoints; in place of a directory that is none itself, those in it, in the order of their names.

    Raises:
        InputError: a directory that cannot be read.
    """
    found: list[Source] = []
    for source in sources:
        inside: list[Path] = []
        if not isinstance(source, Model) and os.path.isdir(source) and not Path(source, "config.json").exists():
            try:
                files = sorted(file for file in Path(source).iterdir() if not file.name.startswith("."))
            except OSError as error:
                raise InputError(f"cannot read {source}: {error.strerror or error}") from error
            inside = [f for f in files if (f.suffix in SUFFIXES and f.is_file()) or (f / "config.json").is_file()]
        found += [str(file) for file in inside] or [source]
    return found


def checkpoint(
    source: Any, length: int | None, examples: int | None, setting: dict[str, Any], grid: np.ndarray, seed: int
) -> tuple[Checkpoint, np.ndarray]:
    """A row of the table, and ln C at the lengths of `grid`, NaN where there is none; what cannot be read says why."""
    curve, bounded = np.full(len(grid), math.nan), {}
    try:
        model = source if isinstance(source, Model) else load(source)
        probe = None if model.channels is not None else min(max(length or LENGTH, 2), LENGTH)
        found = stability(model, length=probe, positions=1, seed=seed)
        if theorem_model(model) is not None:
            at = length or int(grid[-1])
            bound = generalization_bound(model, length=at, examples=examples or 1, **setting, lengths=grid.tolist())
            curve = bound.curves[CURVES.index("with constants")]
            bounded = _bounded(bound, length is not None, examples is not None)
    except InputError as error:
        return Checkpoint(name_of(source), str(error)), curve
    row = Checkpoint(
        name=model.name,
        reason="",
        architecture=model.architecture,
        fingerprint=str(found.provenance["fingerprint"]),
        behaviour=found.behaviour,
        abscissa=_largest(layer.spectral_abscissa for layer in found.layers),
        largest_gain=_largest(layer.largest_gain for layer in found.layers),
        possible_gain=_largest(layer.possible_gain for layer in found.layers),
        growth=_largest(layer.growth.value for layer in found.layers),
        **bounded,
    )
    return row, curve


def _bounded(bound: GeneralizationBound, at_length: bool, at_examples: bool) -> dict[str, Any]:
    """The fields of a checkpoint that the bound gives, as far as a length and a number of examples are known."""
    assert bound.capacity is not None and bound.gap is not None
    found: dict[str, Any] = {"norms": bound.norms}
    if at_length:
        found |= {
            "length": bound.length,
            "log_capacity": bound.capacity.log,
            "log_capacity_printed": bound.capacity.log_printed,
        }
        if at_examples:
            found |= {"bound": bound.gap.bound, "vacuous": bound.gap.vacuous}
    return found


def _largest(values: Iterable[float]) -> float:
    """The largest that is a number; NaN where none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def length_of_each(length: int | Sequence[int] | None, number: int) -> list[int | None]:
    """T of each checkpoint: one for all, or one for each.

    Raises:
        InputError: another number of lengths than of checkpoints.
    """
    if length is None or isinstance(length, int):
        return [length] * number
    if len(length) != number:
        raise InputError(f"{len(length)} lengths were given for {number} checkpoints; give one for each, or one")
    return list(length)
