"""The bound of a model of the theorem, the terms that stand for it in another, and the lengths of their curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.errors import InputError
from ssmscope.probes.bound.layers import measured
from ssmscope.probes.bound.norms import TheoremModel, norms_of, worst_row
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import Norms, capacity, gap, log_linear_capacity, log_lower_bound
from ssmscope.probes.stability.inputs import LENGTH, inputs_of

if TYPE_CHECKING:
    from ssmscope.core.model import Model, TextsLike

LONGEST = 10**15
POINTS = 41
"""Lengths of the curves where none are given, spread evenly on a logarithmic axis."""


def of_theorem(
    parts: TheoremModel, lengths: Sequence[int] | None, provenance: dict[str, Any], setting: dict[str, Any]
) -> GeneralizationBound:
    """The bound of a selective SSM between embeddings and a head; `setting` holds T, m, δ, c_l and l.

    Raises:
        InputError: weights that are not finite.
    """
    length, examples = setting["length"], setting["examples"]
    grid = grid_of(lengths, length)
    row = worst_row(parts, length)
    norms = norms_of(parts, row)
    found = capacity(norms, length)
    notes = []
    if examples < norms.channels:
        notes.append(f"the covers of Lemma D.3 ask for m ≥ d, here {examples:,} and {norms.channels:,}")
    if parts.bias:
        notes.append("the head has a bias, which the theorem's output wᵀy[T] has not: it is left out")
    return GeneralizationBound(
        provenance=provenance,
        **setting,
        norms=norms,
        row=row,
        rows=len(parts.head),
        capacity=found,
        gap=gap(found.log, **{name: value for name, value in setting.items() if name != "length"}),
        log_linear=log_linear_capacity(norms, length),
        log_lower=log_lower_bound(norms.abscissa, norms.B_w, length=length, examples=examples),
        layers=(),
        inputs="",
        lengths=grid,
        curves=curves_of(norms, grid),
        notes=tuple(notes),
    )


def elsewhere(
    model: Model,
    texts: TextsLike | None,
    lengths: Sequence[int] | None,
    seed: int,
    provenance: dict[str, Any],
    setting: dict[str, Any],
) -> GeneralizationBound:
    """The terms of a model that is not the theorem's, measured on texts, or on 4 random sequences of at most 512
    tokens; T is by default the length of the longest.

    Raises:
        InputError: texts that the model cannot read, or terms that are not finite.
    """
    T = setting["length"]
    drawn = None if texts is not None or model.channels is not None or T is None else max(2, min(T, LENGTH))
    inputs = inputs_of(model, texts, length=drawn, samples=4, seed=seed)
    T = inputs.longest if T is None else T
    grid = grid_of(lengths, T)
    layers = measured(model, inputs.batch)
    provenance = {**provenance, "options": {**provenance["options"], "length": T}}
    return GeneralizationBound(
        provenance=provenance,
        **{**setting, "length": T},
        norms=None,
        row=0,
        rows=0,
        capacity=None,
        gap=None,
        log_linear=math.nan,
        log_lower=math.nan,
        layers=layers,
        inputs=inputs.name,
        lengths=grid,
        curves=np.array([[one.log_output(int(at)) for at in grid] for one in layers]),
        notes=(),
    )


def curves_of(norms: Norms, lengths: np.ndarray) -> np.ndarray:
    """(3, lengths) ln C by `CURVES`."""
    found = [(capacity(norms, int(T)), log_linear_capacity(norms, int(T))) for T in lengths]
    return np.array([[c.log for c, _ in found], [c.log_printed for c, _ in found], [linear for _, linear in found]])


def grid_of(lengths: Sequence[int] | None, length: int) -> np.ndarray:
    """The lengths of the curves, ascending; by default from 2 to 10,000, or to 10 `length`.

    Raises:
        InputError: one above `LONGEST`, where whole numbers have no 64 bits for ten times as many.
    """
    if (longest := max(length, *(lengths or (1,)))) > LONGEST:
        raise InputError(f"a length is {longest:,}; the bound is evaluated at {LONGEST:,} at most")
    if lengths is None:
        top = max(10_000, 10 * length)
        return np.unique(np.round(np.geomspace(2, top, POINTS)).astype(np.int64))
    return np.array(sorted(set(map(int, lengths))), dtype=np.int64)
