"""Pairs of layers, one of which reads the positions from the last to the first: bidirectional Mamba and its like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.adapted import Adapted, Terms
from ssmscope.core.mixers import adapter_for
from ssmscope.ops import Recurrence, Scan
from ssmscope.ops.recurrence import OVER_TIME

SHARES = (1.0, 0.5)
"""Factors of the sum of both outputs that pairs are tried with."""


def pair(forward: str, backward: str, share: float) -> Adapted:
    """Return the adapter of modules that give f(u) + flip(b(flip(u))), times a `share`, for the layers f and b at these
    paths in them."""

    def terms(mixer: nn.Module, u: Tensor) -> Terms:
        (one, _), (other, _) = _both(mixer, u)
        return Terms([*one.recurrences, *map(_flipped, other.recurrences)])

    def output(mixer: nn.Module, u: Tensor, ys: list[Tensor]) -> Tensor:
        found, ys = [], list(ys)
        for at, (layer, part) in enumerate(_both(mixer, u)):
            own = [ys.pop(0) for _ in layer.recurrences]
            scans = tuple(
                Scan((y.flip(1) if at else y).unflatten(-1, each.x.shape[2:]), u.new_empty(0), None)
                for y, each in zip(own, layer.recurrences)
            )
            y = adapter_for(part).output(part, layer, scans)
            found.append(y.flip(1) if at else y)
        return share * (found[0] + found[1])

    def _both(mixer: nn.Module, u: Tensor) -> list[tuple[Any, nn.Module]]:
        parts = [mixer.get_submodule(path) for path in (forward, backward)]
        return [(adapter_for(part).compute_terms(part, v), part) for part, v in zip(parts, (u, u.flip(1)))]

    return Adapted(terms, output, None, 1, True, False)


def _flipped(terms: Any) -> Recurrence:
    """Return a recurrence over flipped positions as one over the positions themselves, from the last to the first."""
    given = {name: t.flip(1) for name in OVER_TIME if (t := getattr(terms, name, None)) is not None}
    return replace(terms, order=torch.arange(terms.x.shape[1], device=terms.x.device).flip(0), **given)
