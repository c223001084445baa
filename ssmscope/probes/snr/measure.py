"""Means of needle questions over examples in every layer, with intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float
from ssmscope.core.bootstrap import Estimate, estimate, ratio, resampled_means
from ssmscope.probes.snr.reading import Needles

METRICS = {
    "needle": "needle probability",
    "distractor": "probability of the best distractor",
    "log_ratio": "log of needle / best distractor",
    "candidate": "needle's share among the candidates",
    "beats": "needle above every distractor",
    "rank": "rank of the needle",
    "leads": "needle above every token",
}
"""Metrics of every example and layer, with their names in the views."""


@dataclass(frozen=True)
class LayerSNR:
    """Means over examples in one layer; NaN where no example has distractors. See `needle_snr`."""

    layer: int
    """i: the input of block i is read, 0 being the embeddings; L, the last one, is the model itself."""
    depth: float
    """i / L."""
    needle: Estimate
    distractor: Estimate
    ratio: Estimate
    """Mean needle probability / mean probability of the best distractor."""
    log_ratio: Estimate
    """Mean of ln(needle / best distractor)."""
    candidate: Estimate
    beats: Estimate
    rank: Estimate
    leads: Estimate


@dataclass(frozen=True)
class SNRCurve:
    """Means of one model over the questions of one task and length, by layer."""

    model: str
    task: str
    """Name of the task, or "all"."""
    length: int | None
    """None for the user's own questions."""
    examples: int
    tokens: float
    chance: float
    """Value of `candidate` if all candidates are equally likely."""
    layers: tuple[LayerSNR, ...]
    average: Estimate
    """Mean needle probability over the layers 0 … L − 1."""

    @property
    def accuracy(self) -> Estimate:
        """Share of examples in which the model itself ranks the needle first."""
        return self.layers[-1].leads


@dataclass(frozen=True)
class LayerDifference:
    """Paired difference of the first model minus the second in one layer."""

    layer: int
    """Layer of the model with fewer layers."""
    depth: float
    needle: Estimate
    log_ratio: Estimate


@dataclass(frozen=True)
class SNRDifference:
    """Difference of two models on the same questions, first minus second."""

    first: str
    second: str
    task: str
    length: int | None
    layers: tuple[LayerDifference, ...]
    average: Estimate
    """Difference of the needle probability, mean over the layers below the models' own answers."""


def columns_of(read: Needles) -> Float[np.ndarray, "examples streams columns"]:
    """Return all metrics, in the order of `METRICS`, then the needle's probability in examples with distractors."""
    alone = np.isnan(read.distractor)
    needle, apart = np.exp(read.needle), read.needle - read.distractor
    beats = np.where(alone, np.nan, apart > 0)
    leads = (read.rank == 1).astype(np.float64)
    columns = [needle, np.exp(read.distractor), apart, read.candidate, beats, read.rank, leads]
    return np.stack([*columns, np.where(alone, np.nan, needle)], axis=-1)


def measure(
    names: Sequence[str], read: Sequence[Needles], seed: int
) -> tuple[list[dict[str, Any]], list[tuple[tuple[str, str], dict[str, Any]]]]:
    """Return the fields of every model's curve, and of the difference of every two, all from the same resamples."""
    every = [columns_of(one) for one in read]
    flat = np.concatenate([columns.reshape(len(columns), -1) for columns in every], axis=1)
    rows = resampled_means(flat, seed=seed)
    ends = np.cumsum([columns[0].size for columns in every])[:-1]
    means = [part.reshape(len(part), *columns.shape[1:]) for part, columns in zip(np.split(rows, ends, axis=1), every)]
    place = {name: at for at, name in enumerate(METRICS)}
    curves = []
    for one, mean in zip(read, means):
        layers = mean.shape[1] - 1
        shares = {"leads": len(one), "beats": int((~np.isnan(one.distractor[:, 0])).sum())}
        ratios = ratio(mean[..., -1], mean[..., place["distractor"]])
        found = [
            LayerSNR(i, i / layers, ratio=estimate(ratios[:, i]), **own)
            for i in range(layers + 1)
            for own in [{name: estimate(mean[:, i, at], of=shares.get(name)) for name, at in place.items()}]
        ]
        sizes = one.choices[one.choices > 1]
        curve: dict[str, Any] = {"examples": len(one), "tokens": float(one.tokens.mean()), "layers": tuple(found)}
        curve["chance"] = float((1 / sizes).mean()) if len(sizes) else float("nan")
        curves.append({**curve, "average": estimate(mean[:, :-1, place["needle"]].mean(1))})
    wanted = [place["needle"], place["log_ratio"]]
    pairs = combinations(range(len(read)), 2)
    return curves, [((names[a], names[b]), _difference(means[a], means[b], wanted)) for a, b in pairs]


def _difference(first: np.ndarray, second: np.ndarray, wanted: Sequence[int]) -> dict[str, Any]:
    """Return first minus second, (rows, streams, columns) each, at the layers of the model with fewer."""
    layers = min(first.shape[1], second.shape[1]) - 1
    one, other = (
        np.einsum("rsc,gs->rgc", mean[..., wanted], interpolation(mean.shape[1] - 1, layers))
        for mean in (first, second)
    )
    apart = one - other
    found = [LayerDifference(i, i / layers, *map(estimate, apart[:, i].T)) for i in range(layers + 1)]
    return {"layers": tuple(found), "average": estimate(apart[:, :-1, 0].mean(1))}


def interpolation(layers: int, onto: int) -> Float[np.ndarray, "grid streams"]:
    """Return the matrix that interpolates values at i / `layers` linearly to j / `onto`."""
    at = np.arange(onto + 1) * layers / onto
    return np.maximum(0.0, 1 - np.abs(at[:, None] - np.arange(layers + 1)))
