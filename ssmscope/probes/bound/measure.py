"""The bound of a model that the theorem covers, and the corresponding terms of any other, measured on inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from ssmscope import ops
from ssmscope.api.provenance import record_provenance
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.take_trace import TextsLike
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError
from ssmscope.probes.bound import terms as bounds
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import LayerTerms, TheoremModel, norms_of, worst_row
from ssmscope.probes.stability.measure import DEFAULT_LENGTH, inputs_of, step_gains, step_masks, visit_layers

MAX_LENGTH = 10**15
CURVE_POINTS = 41
"""Number of lengths of a curve by default, evenly spaced on a logarithmic axis."""


def theorem_bound(
    parts: TheoremModel, lengths: Sequence[int] | None, provenance: dict[str, Any], setting: dict[str, Any]
) -> GeneralizationBound:
    """Compute the bound of a selective SSM between embeddings and a head; `setting` holds T, m, δ, c_l and l."""
    length, examples = setting["length"], setting["examples"]
    grid, row = curve_lengths(lengths, length), worst_row(parts, length)
    norms = norms_of(parts, row)
    found, along = bounds.capacity(norms, length), [bounds.capacity(norms, int(T)) for T in grid]
    linear = [bounds.log_linear_capacity(norms, int(T)) for T in grid]
    covers = f"the covers of Lemma D.3 require m ≥ d, here {examples:,} and {norms.channels:,}"
    bias = "the head's bias is left out: the theorem's output wᵀy[T] has none"
    return GeneralizationBound(
        provenance=provenance,
        **setting,
        norms=norms,
        row=row,
        rows=len(parts.head),
        capacity=found,
        gap=bounds.gap(found.log, **{name: value for name, value in setting.items() if name != "length"}),
        log_linear=bounds.log_linear_capacity(norms, length),
        log_lower=bounds.log_lower_bound(norms.abscissa, norms.B_w, length=length, examples=examples),
        lengths=grid,
        curves=np.array([[c.log for c in along], [c.log_printed for c in along], linear]),
        notes=(covers,) * (examples < norms.channels) + (bias,) * parts.bias,
    )


def measured_terms(
    model: Model, texts: TextsLike | None, lengths: Sequence[int] | None, setting: dict[str, Any], seed: int
) -> GeneralizationBound:
    """Measure the terms of a model outside the theorem on texts, or on 4 random sequences of at most 512 tokens. T is
    by default the length of the longest."""
    T = setting["length"]
    drawn = None if texts is not None or model.channels is not None or T is None else max(2, min(T, DEFAULT_LENGTH))
    inputs = inputs_of(model, texts, length=drawn, sequences=4, seed=seed)
    setting = {**setting, "length": inputs.longest if T is None else T}
    grid, layers = curve_lengths(lengths, setting["length"]), measure_terms(model, inputs.batch)
    return GeneralizationBound(
        provenance=record_provenance(model.source, options=setting, seed=seed),
        **setting,
        layers=layers,
        inputs=inputs.name,
        lengths=grid,
        curves=np.array([[one.log_output(int(at)) for at in grid] for one in layers]),
    )


def curve_lengths(lengths: Sequence[int] | None, length: int) -> np.ndarray:
    """Return the lengths of the curves, ascending; by default from 2 to 10,000, or to 10 `length`."""
    if (longest := max([length, *(lengths or ())])) > MAX_LENGTH:
        raise InputError(f"length is {longest:,}; allowed are lengths up to {MAX_LENGTH:,}")
    if lengths is None:
        top = max(10_000, 10 * length)
        return np.unique(np.round(np.geomspace(2, top, CURVE_POINTS)).astype(np.int64))
    return np.array(sorted(set(map(int, lengths))), dtype=np.int64)


def measure_terms(model: Model, batch: Batch) -> tuple[LayerTerms, ...]:
    found: list[list[_Extremes]] = [[] for _ in range(model.num_layers)]

    def see(rows: list[int], index: int, layer: LayerTrace) -> None:
        for place, recurrence in enumerate(layer.recurrences):
            if len(found[index]) == place:
                found[index].append(_Extremes())
            found[index][place].add(layer, place, recurrence)

    visit_layers(model, batch, see)
    return tuple(one.terms(layer, at, len(parts)) for layer, parts in enumerate(found) for at, one in enumerate(parts))


class _Extremes:
    """Running extremes of one recurrence's terms over batches."""

    def __init__(self) -> None:
        self.norms, self.log_rho = {"x": 0.0, "b": 0.0, "c": 0.0}, -math.inf
        self.steps: tuple[Tensor, Tensor] | None = None
        """Smallest and largest Δ of each head."""
        self.A: Tensor | None = None
        self.shape: Sequence[int] = ()

    def add(self, layer: LayerTrace, place: int, recurrence: ops.Recurrence) -> None:
        counted, stepping = step_masks(layer, place)
        self.shape, self.A = recurrence.shape[2:], recurrence.A
        real = torch.ones_like(counted) if layer.mask is None else layer.mask
        for name, term in (("x", recurrence.x.flatten(2).unsqueeze(2)), ("b", recurrence.b), ("c", recurrence.c)):
            norms = term.double().norm(dim=-1).amax(-1).masked_fill(~real, 0)
            self.norms[name] = max(self.norms[name], norms.max().item())
        gains = step_gains(recurrence, counted, stepping)
        self.log_rho = max(self.log_rho, gains.largest.max().item())
        step = recurrence.step
        if step is not None:
            own = stepping.unsqueeze(-1)
            low = step.double().masked_fill(~own, torch.inf).amin((0, 1))
            high = step.double().masked_fill(~own, -torch.inf).amax((0, 1))
            before = self.steps or (low, high)
            self.steps = torch.minimum(before[0], low), torch.maximum(before[1], high)

    def terms(self, layer: int, part: int, parts: int) -> LayerTerms:
        heads, width, state = self.shape
        low, high = self.steps or (None, None)
        half_range = math.nan
        if self.A is not None:
            assert low is not None and high is not None
            half_range = ((_inverse_softplus(high) - _inverse_softplus(low)) / 2).max().item()
        terms = LayerTerms(
            layer=layer,
            part=part,
            parts=parts,
            channels=heads * width,
            state=state,
            abscissa=math.nan if self.A is None else self.A.max().item(),
            B_A=math.nan if self.A is None else self.A.abs().max().item(),
            **{f"B_{name}": value for name, value in self.norms.items()},
            delta_min=1.0 if low is None else low.min().item(),
            M_delta=1.0 if high is None else high.max().item(),
            half_range=half_range,
            log_rho=self.log_rho,
        )
        if not all(map(math.isfinite, (terms.B_x, terms.B_b, terms.B_c, terms.M_delta, terms.log_rho))):
            raise InputError(f"the terms of layer {layer} are not finite on these inputs: give others, or shorter ones")
        return terms


def _inverse_softplus(step: Tensor) -> Tensor:
    """Return x with softplus(x) = `step` > 0."""
    return step + torch.log(-torch.expm1(-step))
