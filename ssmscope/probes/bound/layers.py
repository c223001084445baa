"""Terms of the bound measured on inputs, for layers that the theorem does not cover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssmscope import ops
from ssmscope.core.batching import by_length
from ssmscope.errors import InputError
from ssmscope.probes.bound.terms import LayerTerms
from ssmscope.probes.stability.layers import step_gains, step_masks

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.core.trace import LayerTrace


def measure_terms(model: Model, batch: Batch) -> tuple[LayerTerms, ...]:
    """Measure every recurrence's terms on a batch.

    Raises:
        InputError: terms that are not finite.
    """
    found: list[list[_Extremes]] = [[] for _ in range(model.num_layers)]
    for rows in by_length(batch.lengths):
        part = batch.rows(rows)

        def visit(index: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
            for place, recurrence in enumerate(layer.recurrences):
                if len(found[index]) == place:
                    found[index].append(_Extremes())
                found[index][place].add(layer, place, recurrence)

        with torch.no_grad(), model.running(mask=part.mask, visit=visit):
            model.forward(part, last_only=True, checked=False)
    return tuple(
        one.terms(layer, place, len(parts)) for layer, parts in enumerate(found) for place, one in enumerate(parts)
    )


class _Extremes:
    """Running extremes of one recurrence's terms over batches."""

    def __init__(self) -> None:
        self.norms = {"x": 0.0, "b": 0.0, "c": 0.0}
        self.log_rho = -math.inf
        self.low: Tensor | None = None
        self.high: Tensor | None = None
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
        if step is not None and bool(stepping.any()):
            own = stepping.unsqueeze(-1)
            low = step.double().masked_fill(~own, torch.inf).amin((0, 1))
            high = step.double().masked_fill(~own, -torch.inf).amax((0, 1))
            self.low = low if self.low is None else torch.minimum(self.low, low)
            self.high = high if self.high is None else torch.maximum(self.high, high)

    def terms(self, layer: int, part: int, parts: int) -> LayerTerms:
        heads, width, state = self.shape
        half_range = math.nan
        if self.A is not None and self.low is not None and self.high is not None:
            half_range = ((_inverse_softplus(self.high) - _inverse_softplus(self.low)) / 2).max().item()
        terms = LayerTerms(
            layer=layer,
            part=part,
            parts=parts,
            channels=heads * width,
            state=state,
            abscissa=math.nan if self.A is None else self.A.max().item(),
            B_A=math.nan if self.A is None else self.A.abs().max().item(),
            B_x=self.norms["x"],
            B_b=self.norms["b"],
            B_c=self.norms["c"],
            delta_min=1.0 if self.low is None else self.low.min().item(),
            M_delta=1.0 if self.high is None else self.high.max().item(),
            half_range=half_range,
            log_rho=self.log_rho,
        )
        if not all(map(math.isfinite, (terms.B_x, terms.B_b, terms.B_c, terms.M_delta, terms.log_rho))):
            raise InputError(f"the terms of layer {layer} are not finite on these inputs: give others, or shorter ones")
        return terms


def _inverse_softplus(step: Tensor) -> Tensor:
    """Return x with softplus(x) = `step` > 0."""
    return step + torch.log(-torch.expm1(-step))
