"""Another runtime's tensors against those of the model: which differ, by how much, and by how much they may."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.probes.parity.faults import Rows, Suspect, likely_fault
from ssmscope.probes.parity.result import Compared
from ssmscope.probes.states.files import GROWING, read_file, recorded_run

ROUNDING_FACTOR = 8.0
"""Factor of the rounding error that is measured: another order of the same sums rounds otherwise."""
ORDER = ("residual", "before", "conv", "state", "keys", "values", "output")
"""Tensors of a layer in the order in which it computes them; others come after the states."""


def compared(
    model: Model, batch: Batch, rows: Rows, given: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[tuple[Compared, ...], str]:
    """Return every tensor of a file with its error, and the likely fault behind the first that differs.

    The error of a row is rms(given − exact) / rms(exact), exact from the model in at least float32. Rounding is
    measured by a run of the model in `dtype`, its weights changed by up to one unit in the last place where that is the
    model's own; allowed is `ROUNDING_FACTOR` times the largest error of that run, and the file's own rounding.
    """
    parts = [part for part, found in parts_of(given).items() if found]
    own = next(model.module.parameters()).dtype
    exact_model = model if own in (torch.float32, torch.float64) else copied(model, torch.float32)
    exact = recorded_run(exact_model, batch, rows, parts)
    rounded = recorded_run(copied(exact_model, dtype), batch, rows, parts)
    names = sorted((name for name in exact if name in given and name not in ("tokens", "rows")), key=_depth)
    lacking = sorted(name for name in given if name not in (*exact, "tokens", "rows"))
    if lacking or not names:
        said = f"the file has {lacking[0]}" if lacking else "the file has no states, logits or layers"
        raise InputError(
            f"{said}, which a run of {model.name} lacks; its tensors begin with {', '.join([*exact][1:7])}"
        )
    mask, found = batch.mask.cpu(), list[Compared]()
    errors: dict[str, np.ndarray] = {}
    for name in names:
        _check_shape(name, given[name], exact[name])
        places = [*rows] if len(exact[name]) == len(rows) and _of_rows(name) else _places(mask, exact[name])
        errors[name] = _errors(name, given[name], exact, mask)
        allowed = _allowed(name, given[name], exact, rounded, mask)
        over = np.flatnonzero(~(errors[name] <= allowed))
        text, position = min((places[row] for row in over), default=(-1, -1))
        token = _token(model, batch, text, position) if over.size else ""
        found.append(Compared(name, float(errors[name].max()), allowed, len(over), len(places), text, position, token))
    first = next((each for each in found if each.over), None)
    if first is None:
        return tuple(found), ""
    allowances = {each.name: each.allowed for each in found}
    layer = re.match(r"layers\.(\d+)\.", first.name)
    number = int(layer[1]) if layer is not None else -1
    inside = [name for name in names if _depth(name) <= _depth(f"layers.{number}.output")]

    def fits(tried: Mapping[str, Tensor], row: int | None = None) -> bool:
        for name in inside if row is None else [each for each in inside if each.startswith(f"layers.{number}.")]:
            if name in tried and (row is None or _of_rows(name)):
                theirs = given[name] if row is None else given[name][row : row + 1]
                if not (_errors(name, theirs, tried, mask, exact[name]) <= allowances[name]).all():
                    return False
        return True

    index = exact_model.layer_numbers.index(number) if number >= 0 else None
    over_rows = ~(errors[first.name] <= first.allowed)
    differs = [row for row in range(len(rows)) if _of_rows(first.name) and over_rows[row]]
    suspect = Suspect(index, first.name, rows, differs, parts, fits, first.allowed, dtype)
    return tuple(found), likely_fault(exact_model, batch, given, exact, suspect)


def read_parts(paths: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Return the tensors and the metadata of files by the part that each is given for, and the files' names. Raises
    InputError if one lacks its part, or is of other tokens or rows."""
    given: dict[str, Tensor] = {}
    about: dict[str, str] = {}
    files = dict.fromkeys(os.fspath(path) for path in paths.values() if path is not None)
    for where in files:
        found, own = read_file(where)
        asked = [part for part, path in paths.items() if path is not None and os.fspath(path) == where]
        lacks = next((part for part in asked if not parts_of(found)[part]), None)
        if lacks is not None:
            raise InputError(f"{where} has no {lacks}; it has {', '.join(sorted(found))}")
        shared = [name for name in ("tokens", "rows") if name in found and name in given]
        other = next((name for name in shared if not torch.equal(given[name], found[name])), None)
        if other is not None:
            raise InputError(f"{where} has other {other} than the first file; dump them of the same run")
        given, about = {**given, **found}, {**about, **own}
    return given, about, [os.path.basename(where) for where in files]


def parts_of(given: Mapping[str, Tensor]) -> dict[str, bool]:
    """Return, for each part that a file may have, whether this one has it."""
    layers = [name for name in given if name.endswith((".residual", ".output"))]
    states = [name for name in given if name not in (*layers, "logits", "tokens", "rows")]
    return {"states": bool(states), "logits": "logits" in given, "layers": bool(layers)}


def copied(model: Model, dtype: torch.dtype) -> Model:
    """Return a copy of a model in a dtype; in its own, with each weight changed by up to one unit in the last place."""
    module = copy.deepcopy(model.module)
    if next(module.parameters()).dtype != dtype:
        return replace(model, module=module.to(dtype))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.is_floating_point():
                noise = 2 * torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 1
                weight.copy_(weight * (1 + torch.finfo(dtype).eps * noise.to(weight.device)))
    return replace(model, module=module)


def _depth(name: str) -> tuple[float, int, str]:
    """Return the place of a tensor in the order in which a model computes them."""
    head, *rest = name.split(".")
    if head not in ("layers", "attention"):
        return (float("inf") if head == "logits" else -1.0, 0, name)
    order = ORDER.index(rest[1]) if rest[1] in ORDER else ORDER.index("keys")
    digits = re.match(r"\d+", rest[0])
    return (float(digits[0] if digits else -1), order, name)


def _of_rows(name: str) -> bool:
    """Return True for tensors that have a row for each (text, position), not for each text."""
    return name != "logits" and not name.endswith((".residual", ".output"))


def _places(mask: Tensor, like: Tensor) -> list[tuple[int, int]]:
    """Return text and position of every row of a tensor of texts: (texts, length, …), or a classifier's logits."""
    if like.ndim == 2:
        return [(text, int(n) - 1) for text, n in enumerate(mask.sum(1))]
    return [(int(text), int(at)) for text, at in mask.nonzero()]


def _errors(
    name: str, given: Tensor, found: Mapping[str, Tensor], mask: Tensor, scale: Tensor | None = None
) -> Float[np.ndarray, " places"]:
    """Return the rms of given − found at every place / rms of the whole tensor; NaN counts as infinite."""
    theirs, ours = (_by_place(name, t, mask) for t in (given, found[name]))
    size = _by_place(name, found[name] if scale is None else scale, mask).square().mean().sqrt()
    error = (theirs - ours).square()
    if {*GROWING} & {*name.split(".")} and f"{name.rpartition('.')[0]}.places" in found:
        real = found[f"{name.rpartition('.')[0]}.places"] > 0
        error = error.view(*real.shape, -1).where(real.unsqueeze(-1), 0).flatten(1)
    found_errors = error.flatten(1).mean(1).sqrt() / size.clamp(min=1e-30)
    return torch.nan_to_num(found_errors, nan=float("inf")).numpy()


def _by_place(name: str, t: Tensor, mask: Tensor) -> Tensor:
    t = t.double()
    kept = t if _of_rows(name) or t.ndim == 2 else t[mask]
    return kept.reshape(len(kept), -1)


def _allowed(
    name: str, given: Tensor, exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor], mask: Tensor
) -> float:
    """Return the error that rounding may cause: at any place as much as at the worst."""
    if not given.is_floating_point():
        return 0.0
    return ROUNDING_FACTOR * (float(_errors(name, rounded[name], exact, mask).max()) + torch.finfo(given.dtype).eps)


def _token(model: Model, batch: Batch, text: int, position: int) -> str:
    shown = batch.tokens[text][position]
    return shown if model.tokenizer is None else model.tokenizer.decode([int(batch.input_ids[text, position])])


def _check_shape(name: str, given: Tensor, exact: Tensor) -> None:
    if given.shape != exact.shape:
        said = f"the file has {name} of the shape {tuple(given.shape)}; the model's is {tuple(exact.shape)}"
        raise InputError(f"{said}, see `analyze states --help` for the layout")
