"""Another runtime's tensors against those of the model: which differ, by how much, and by how much they may."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean
from ssmscope.loading.in_memory import converted
from ssmscope.probes.parity.faults import Case, Rows, explanations
from ssmscope.probes.parity.result import Compared
from ssmscope.probes.states.files import GROWING, read_file, recorded_run

ROUNDING_FACTOR = 8.0
"""Factor of the rounding error that is measured: another order of the same sums rounds otherwise."""
ORDER = ("residual", "before", "conv", "state", "keys", "values", "output")
"""Tensors of a layer in the order in which it computes them; others come after the states."""
ABOUT = ("tokens", "rows")
"""Tensors that say of what the others are."""


def compared(
    model: Model, batch: Batch, rows: Rows, given: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[tuple[Compared, ...], str]:
    """Return every tensor of a file with its error, and the likely fault behind the first that differs.

    The error of a row is rms(given − exact) / rms(exact), exact from the model in at least float32; NaN counts as
    infinite. Rounding is measured by a run of the model in `dtype`, its weights changed by up to one unit in the last
    place where that is the model's own; allowed is `ROUNDING_FACTOR` times the largest error of that run, and the
    file's own rounding.
    """
    parts = [part for part, has in parts_of(given).items() if has]
    own = next(model.module.parameters()).dtype
    wide = torch.float64 if torch.float64 in (own, dtype) else torch.float32
    model = model if own == wide else copied(model, wide)
    exact = recorded_run(model, batch, rows, parts)
    names = sorted((given.keys() & exact.keys()).difference(ABOUT), key=_depth)
    _check(model, given, exact, names)
    mask = batch.mask.cpu()
    theirs, ours, near = (
        _by_place(found, mask) for found in (given, exact, recorded_run(copied(model, dtype), batch, rows, parts))
    )
    sizes = {name: float(ours[name].square().mean().sqrt().clamp(min=1e-30)) for name in names}

    def errors(name: str, one: Tensor, other: Tensor) -> np.ndarray:
        found = (one - other).square().mean(1).sqrt() / sizes[name]
        return found.nan_to_num(nan=math.inf, posinf=math.inf).numpy()

    error = {name: errors(name, theirs[name], ours[name]) for name in names}
    allowed = {
        name: ROUNDING_FACTOR * (float(errors(name, near[name], ours[name]).max()) + torch.finfo(given[name].dtype).eps)
        if given[name].is_floating_point()
        else 0.0
        for name in names
    }
    ends = [(text, int(n) - 1) for text, n in enumerate(mask.sum(1))]
    inside = [(int(text), int(at)) for text, at in mask.nonzero()]
    found = list[Compared]()
    for name in names:
        places = rows if _of_rows(name) else ends if exact[name].ndim == 2 else inside
        over = np.flatnonzero(error[name] > allowed[name]).tolist()
        text, position = min((places[row] for row in over), default=(-1, -1))
        token = batch.tokens[text][position] if over else ""
        most = float(error[name].max())
        found.append(Compared(name, most, allowed[name], len(over), len(places), text, position, token))
    first = next((each for each in found if each.over), None)
    layer = re.match(r"layers\.(\d+)\.", first.name) if first is not None else None
    if first is None or layer is None:
        return tuple(found), ""
    own_names = [name for name in names if name.startswith(layer[0]) and _of_rows(name)]
    earlier = [name for name in names if _depth(name) <= _depth(f"{layer[0]}output")]

    def fits(tried: Mapping[str, Tensor], row: int | None = None) -> bool:
        which, chosen = (earlier, slice(None)) if row is None else (own_names, slice(row, row + 1))
        made = _by_place({name: tried[name] for name in which if name in tried}, mask)
        return all((errors(name, theirs[name][chosen], t) <= allowed[name]).all() for name, t in made.items())

    differs = np.flatnonzero(error[first.name] > first.allowed).tolist() if _of_rows(first.name) else []
    index = model.layer_numbers.index(int(layer[1]))
    case = Case(model, batch, rows, parts, given, exact, index, first.name, differs, fits, first.allowed, dtype)
    return tuple(found), next(explanations(case), "")


def read_parts(paths: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Return the tensors and the metadata of files by the part that each is given for, and the files' names. Raises
    InputError if one lacks its part, or is of other tokens or rows."""
    given, about = dict[str, Tensor](), dict[str, str]()
    files = [os.fspath(path) for path in paths.values() if path is not None]
    for where in dict.fromkeys(files):
        found, own = read_file(where)
        asked = [part for part, path in paths.items() if path is not None and os.fspath(path) == where]
        lacks = next((part for part in asked if not parts_of(found)[part]), None)
        if lacks is not None:
            raise InputError(f"{where} has no {lacks}; it has {', '.join(sorted(found))}")
        shared = [name for name in ABOUT if name in found and name in given]
        other = next((name for name in shared if not given[name].equal(found[name])), None)
        if other is not None:
            raise InputError(f"{where} has other {other} than the first file; dump them of the same run")
        given, about = {**given, **found}, {**about, **own}
    return given, about, [os.path.basename(where) for where in dict.fromkeys(files)]


def parts_of(given: Mapping[str, Tensor]) -> dict[str, bool]:
    """Return, for each part that a file may have, whether this one has it."""
    states = any(_of_rows(name) for name in given.keys() - {*ABOUT})
    return {"states": states, "logits": "logits" in given, "layers": not all(map(_of_rows, given.keys() - {"logits"}))}


def copied(model: Model, dtype: torch.dtype) -> Model:
    """Return a copy of a model in a dtype; in its own, with each weight changed by up to one unit in the last place."""
    if next(model.module.parameters()).dtype != dtype:
        return replace(model, module=converted(model.module, dtype, None))
    module = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                noise = 2 * torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 1
                weight.copy_(weight * (1 + torch.finfo(dtype).eps * noise.to(weight.device)))
    return replace(model, module=module)


def _depth(name: str) -> tuple[float, int, str]:
    """Return the place of a tensor in the order in which a model computes them."""
    head, number, kind = (*name.split("."), "", "")[:3]
    if head not in ("layers", "attention"):
        return (math.inf if head == "logits" else -1.0, 0, name)
    return (int(number.rstrip("b")), ORDER.index(kind if kind in ORDER else "keys"), name)


def _of_rows(name: str) -> bool:
    """Return True for tensors that have a row for each (text, position), not for each text."""
    return name != "logits" and not name.endswith((".residual", ".output"))


def _by_place(found: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return tensors by name as (places, numbers) float64: a place is a row, a text, or a text's token. Kept keys are 0
    at padding."""
    placed = {}
    for name, t in found.items():
        kept = found.get(f"{name.rpartition('.')[0]}.places")
        t = t.double() if _of_rows(name) or t.ndim == 2 else t.double()[mask]
        if kept is not None and name.endswith(GROWING):
            t = t.where((kept > 0).view(*kept.shape, *[1] * (t.ndim - 2)), 0)
        placed[name] = t.reshape(len(t), -1)
    return placed


def _check(model: Model, given: Mapping[str, Tensor], exact: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise InputError for a file with a tensor that the model's run lacks, or has of another shape or kind."""
    lacking = sorted(given.keys() - exact.keys())
    if "rows" not in given and parts_of(given)["states"]:
        raise InputError("the file has states but no rows, the (text, position) of each; add them")
    if lacking:
        hint = did_you_mean(lacking[0], exact) or f"; it has {', '.join(exact)}"
        raise InputError(f"the file has {lacking[0]}, which a run of {model.name} lacks{hint}")
    for name in names:
        theirs, ours = given[name], exact[name]
        if theirs.shape != ours.shape or theirs.is_floating_point() != ours.is_floating_point():
            shown = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (theirs, ours)]
            said = f"the file has {name} as {shown[0]}; the model's is {shown[1]}"
            raise InputError(f"{said}, see `analyze states --help` for the layout")
