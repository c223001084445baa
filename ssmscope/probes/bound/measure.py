"""The bound of a model that the theorem covers, the corresponding terms of any other, and the lengths of the curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.errors import InputError
from ssmscope.probes.bound.layers import measure_terms
from ssmscope.probes.bound.norms import TheoremModel, norms_of, worst_row
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import Norms, capacity, gap, log_linear_capacity, log_lower_bound
from ssmscope.probes.stability.inputs import DEFAULT_LENGTH, inputs_of

if TYPE_CHECKING:
    from ssmscope.core.model import Model, TextsLike

MAX_LENGTH = 10**15
CURVE_POINTS = 41
"""Number of lengths of a curve by default, evenly spaced on a logarithmic axis."""


def theorem_bound(
    parts: TheoremModel, lengths: Sequence[int] | None, provenance: dict[str, Any], setting: dict[str, Any]
) -> GeneralizationBound:
    """Compute the bound of a selective SSM between embeddings and a head; `setting` holds T, m, δ, c_l and l.

    Raises:
        InputError: weights that are not finite.
    """
    length, examples = setting["length"], setting["examples"]
    grid = curve_lengths(lengths, length)
    row = worst_row(parts, length)
    norms = norms_of(parts, row)
    found = capacity(norms, length)
    notes = []
    if examples < norms.channels:
        notes.append(f"the covers of Lemma D.3 require m ≥ d, here {examples:,} and {norms.channels:,}")
    if parts.bias:
        notes.append("the head's bias is left out: the theorem's output wᵀy[T] has none")
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
        lengths=grid,
        curves=curves_of(norms, grid),
        notes=tuple(notes),
    )


def measured_terms(
    model: Model,
    texts: TextsLike | None,
    lengths: Sequence[int] | None,
    seed: int,
    provenance: dict[str, Any],
    setting: dict[str, Any],
) -> GeneralizationBound:
    """Measure the terms of a model outside the theorem on texts, or on 4 random sequences of at most 512 tokens.

    T is by default the length of the longest.

    Raises:
        InputError: texts that the model cannot read, or terms that are not finite.
    """
    T = setting["length"]
    drawn = None if texts is not None or model.channels is not None or T is None else max(2, min(T, DEFAULT_LENGTH))
    inputs = inputs_of(model, texts, length=drawn, samples=4, seed=seed)
    T = inputs.longest if T is None else T
    grid = curve_lengths(lengths, T)
    layers = measure_terms(model, inputs.batch)
    provenance = {**provenance, "options": {**provenance["options"], "length": T}}
    return GeneralizationBound(
        provenance=provenance,
        **{**setting, "length": T},
        layers=layers,
        inputs=inputs.name,
        lengths=grid,
        curves=np.array([[one.log_output(int(at)) for at in grid] for one in layers]),
    )


def curves_of(norms: Norms, lengths: np.ndarray) -> np.ndarray:
    """Return ln C by `CURVES`, (3, lengths)."""
    found = [(capacity(norms, int(T)), log_linear_capacity(norms, int(T))) for T in lengths]
    return np.array([[c.log for c, _ in found], [c.log_printed for c, _ in found], [linear for _, linear in found]])


def curve_lengths(lengths: Sequence[int] | None, length: int) -> np.ndarray:
    """Return the lengths of the curves, ascending; by default from 2 to 10,000, or to 10 `length`.

    Raises:
        InputError: a length above `MAX_LENGTH`, ten times which would approach the range of 64-bit integers.
    """
    if (longest := max(length, *(lengths or (1,)))) > MAX_LENGTH:
        raise InputError(f"length is {longest:,}; allowed are lengths up to {MAX_LENGTH:,}")
    if lengths is None:
        top = max(10_000, 10 * length)
        return np.unique(np.round(np.geomspace(2, top, CURVE_POINTS)).astype(np.int64))
    return np.array(sorted(set(map(int, lengths))), dtype=np.int64)
