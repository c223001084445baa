"""Attribution patching: every cell of a grid by one gradient, to first order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.core.edits import Edit, Place, Site, edited, new_state
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import weights_constant
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerState, mapped
from ssmscope.errors import InputError
from ssmscope.interp.sanity.measure import spearman

if TYPE_CHECKING:
    from ssmscope.interp.patch.measure import PatchRuns

Recorded = dict[tuple[int, int], list[Tensor]]
"""Values of a run, by layer, and by the token after which a state is, or the convolution or recurrence."""


def attributed(runs: PatchRuns, site: str, positions: Sequence[int], ids: tuple[int, int]) -> np.ndarray:
    """Return (layers, positions), or (layers, heads): (a_source − a_base) · ∂m/∂a, m the difference of the logits of
    answer and contrast in the base run (attribution patching, Nanda 2023; Syed et al. 2023, Eq. 2).

    Two forward passes and a backward one stand for all cells. It is what patching does where m is linear in a between
    the two runs, and misses what saturates.

    Raises:
        InputError: a site that the layers do not have.
    """
    kept: tuple[Recorded, Recorded] = ({}, {})
    with torch.no_grad():
        _logits(runs.model, runs.source, _edits(site, positions, kept[1]))
    with torch.enable_grad(), weights_constant(runs.model.module):
        logits = _logits(runs.model, runs.base, _edits(site, positions, kept[0]))
        if not kept[0]:
            raise InputError(f"the layers of {runs.model.name} have no {site}; patch another site")
        metric = (logits[:, ids[0]].double() - logits[:, ids[1]].double()).sum()
        points = [point for own in kept[0].values() for point in own]
        gradients: Iterator[Tensor | None] = iter(torch.autograd.grad(metric, points, allow_unused=True))
    layers = runs.model.num_layers
    found = np.zeros((layers, runs.heads() if site == "head" else len(positions)))
    column = {place: number for number, place in enumerate(positions)}
    for (layer, part), own in kept[0].items():
        for point, other in zip(own, kept[1][layer, part]):
            gradient = next(gradients)
            if gradient is None:
                continue
            # Where both are the same infinity, as in empty memories, nothing changes.
            change = torch.where(point == other, 0.0, other.double() - point.detach().double())
            effect = (change * gradient.double())[0].cpu()
            if site == "state":
                found[layer, column[part]] += float(effect.sum())
            elif site == "head":
                heads = effect[list(positions)].sum((0, 2)).numpy()
                found[layer, : len(heads)] += heads
            else:
                found[layer] += effect[list(positions)].flatten(1).sum(1).numpy()
    return found


def agreement(attributed: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Return Pearson's and Spearman's correlation over the cells of both grids; NaN where one grid is constant."""
    first, second = attributed.ravel(), exact.ravel()
    constant = first.std() == 0 or second.std() == 0
    return (np.nan if constant else float(np.corrcoef(first, second)[0, 1])), spearman(first, second)


def _logits(model: Model, batch: Batch, edits: Sequence[Edit]) -> Tensor:
    with edited(model, edits), model.running(mask=batch.mask):
        return model.forward(batch, last_only=True)


def _edits(site: str, positions: Sequence[int], into: Recorded) -> list[Edit]:
    """Return edits that record a site's values, and continue from them as from leaves of the gradient's graph."""
    if site == "state":
        return [new_state(place, partial(_states, into, place)) for place in positions]
    places: dict[str, Place] = {"head": "scans", "output": "output", "residual": "residual"}
    place = places.get(site, "convolution")
    return [Edit(f"{site} kept", place, partial(_values, into))]


def _values(into: Recorded, value: Any, site: Site) -> Any:
    if isinstance(value, tuple):
        return tuple(scan._replace(y=_leaf(into, (site.layer, n), scan.y)) for n, scan in enumerate(value))
    return _leaf(into, (site.layer, site.part), value)


def _states(into: Recorded, place: int, state: LayerState, site: Site) -> LayerState:
    return mapped(state, partial(_leaf, into, (site.layer, place)))


def _leaf(into: Recorded, key: tuple[int, int], value: Tensor) -> Tensor:
    """Return the value on a path of its own, so that its gradient covers only what comes after it."""
    if not value.is_floating_point():
        return value
    point = value + torch.zeros_like(value).requires_grad_(torch.is_grad_enabled())
    into.setdefault(key, []).append(point)
    return point
