"""Another runtime's tensors against those of the model: which differ, by how much, and by how much they may."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from ssmscope.core.edits import Edit
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean
from ssmscope.loading.in_memory import converted
from ssmscope.probes.parity.result import Compared
from ssmscope.probes.states.files import GROWING, check_shape, read_file, recorded_run

ROUNDING_FACTOR = 8.0
"""Factor of the rounding error that is measured: another order of the same sums rounds otherwise."""
ORDER = ("residual", "before", "conv", "state", "keys", "values", "output")
"""Tensors of a layer in the order in which it computes them; others come after the states."""
ABOUT = ("tokens", "rows")
"""Tensors that say of what the others are."""


class Case:
    """Tensors `given` in a file against those of a run of the model in at least float32, `exact`, with errors, and
    those allowed in a dtype, as `parity` says; NaN counts as infinite."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        rows: Sequence[tuple[int, int]],
        given: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        own = next(model.module.parameters()).dtype
        wide = torch.float64 if torch.float64 in (own, dtype) else torch.float32
        self.model = model if own == wide else copied(model, wide)
        self.batch, self.rows, self.given, self.dtype = batch, rows, given, dtype
        self.parts = [part for part, has in parts_of(given).items() if has]
        self.exact = self.run()
        self.names = sorted((given.keys() & self.exact.keys()).difference(ABOUT), key=_depth)
        _check(self.model, given, self.exact, self.names)
        self.theirs, self.ours = self.by_place(given), self.by_place(self.exact)
        near = self.by_place(recorded_run(copied(model, dtype), batch, rows, self.parts))
        self.error = {name: self.errors(name, self.theirs[name], self.ours[name]) for name in self.names}
        self.allowed = {
            name: ROUNDING_FACTOR
            * (float(self.errors(name, near[name], self.ours[name]).max()) + torch.finfo(given[name].dtype).eps)
            if given[name].is_floating_point()
            else 0.0
            for name in self.names
        }
        self.over = {name: np.flatnonzero(self.error[name] > self.allowed[name]).tolist() for name in self.names}

    def run(self, *edits: Edit) -> dict[str, Tensor]:
        """Return what the file would hold of a run under edits."""
        return recorded_run(self.model, self.batch, self.rows, self.parts, edits)

    def by_place(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name as (places, numbers) float64: a place is a row, a text, or a text's token. Kept keys
        are 0 at padding."""
        placed = {}
        for name, t in found.items():
            kept = found.get(f"{name.rpartition('.')[0]}.places")
            t = t.double() if of_rows(name) or t.ndim == 2 else t.double()[self.batch.mask.cpu()]
            if kept is not None and name.endswith(GROWING):
                t = t.where((kept > 0).view(*kept.shape, *[1] * (t.ndim - 2)), 0)
            placed[name] = t.reshape(len(t), -1)
        return placed

    def errors(self, name: str, one: Tensor, other: Tensor) -> np.ndarray:
        """Return the rms of the rows' differences / rms of the model's tensor."""
        size = self.ours[name].square().mean().sqrt().clamp(min=1e-30)
        return ((one - other).square().mean(1).sqrt() / size).nan_to_num(nan=math.inf, posinf=math.inf).numpy()

    def fits(self, tried: Mapping[str, Tensor], prefix: str, row: int | None = None) -> bool:
        """Return True if tensors agree with the file's up to the end of a layer, or in one row with that layer's."""
        earlier = [name for name in self.names if _depth(name) <= _depth(f"{prefix}output")]
        own = [name for name in self.names if name.startswith(prefix) and of_rows(name)]
        which, chosen = (earlier, slice(None)) if row is None else (own, slice(row, row + 1))
        made = self.by_place({name: tried[name] for name in which if name in tried})
        return all(
            (self.errors(name, self.theirs[name][chosen], t) <= self.allowed[name]).all() for name, t in made.items()
        )

    def tensors(self) -> tuple[Compared, ...]:
        """Return every tensor with its error, and the first place where it is larger than allowed."""
        mask, found = self.batch.mask.cpu(), list[Compared]()
        ends = [(text, int(n) - 1) for text, n in enumerate(mask.sum(1))]
        inside = [(int(text), int(at)) for text, at in mask.nonzero()]
        for name in self.names:
            places = self.rows if of_rows(name) else ends if self.exact[name].ndim == 2 else inside
            found.append(Compared.of(name, self.error[name], self.allowed[name], places, self.batch.tokens))
        return tuple(found)


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
    states = any(of_rows(name) for name in given.keys() - {*ABOUT})
    return {"states": states, "logits": "logits" in given, "layers": not all(map(of_rows, given.keys() - {"logits"}))}


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


def of_rows(name: str) -> bool:
    """Return True for tensors that have a row for each (text, position), not for each text."""
    return name != "logits" and not name.endswith((".residual", ".output"))


def _check(model: Model, given: Mapping[str, Tensor], exact: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise InputError for a file with a tensor that the model's run lacks, or has of another shape or kind."""
    lacking = sorted(given.keys() - exact.keys())
    if "rows" not in given and parts_of(given)["states"]:
        raise InputError("the file has states but no rows, the (text, position) of each; add them")
    if lacking:
        hint = did_you_mean(lacking[0], exact) or f"; it has {', '.join(exact)}"
        raise InputError(f"the file has {lacking[0]}, which a run of {model.name} lacks{hint}")
    for name in names:
        check_shape("the file", name, given, exact[name])
