"""Measures of fidelity: from the curves of hidden tokens to means and differences with their intervals."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.core.bootstrap import estimates, ratio, resampled_means
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.fidelity.measures import LERF, MEASURES, MORF, layer_of
from ssmscope.interp.fidelity.perturbed import Hidden
from ssmscope.interp.fidelity.result import Fidelity
from ssmscope.interp.objective import Objective
from ssmscope.interp.plausibility.measure import agreement, rationale_size
from ssmscope.interp.plausibility.measures import MEASURES as AGREEMENT
from ssmscope.interp.sanity.measure import spearman

MAX_TIED_SHARE = 0.05
"""Largest share of tokens with another token's score that needs no note."""


def trapezoid(curve: Float[np.ndarray, "... points"]) -> np.ndarray:
    """Return the area under values at evenly spaced points of [0, 1], by trapezoids."""
    return (curve[..., :-1] + curve[..., 1:]).mean(-1) / 2


def measures(
    curve: Float[np.ndarray, "... two points"],
    without: Float[np.ndarray, "... shares"],
    only: Float[np.ndarray, "... shares"],
) -> Float[np.ndarray, "... measures"]:
    """Return all `MEASURES` of f along MoRF and LeRF, and of f without the top tokens and of these alone, by share."""
    areas, clean = trapezoid(curve), curve[..., MORF, 0]
    morf, lerf = areas[..., MORF], areas[..., LERF]
    return np.stack([lerf - morf, morf, lerf, clean - without.mean(-1), clean - only.mean(-1)], axis=-1)


def text_measures(
    scores: Float[np.ndarray, "rankings n"],
    hidden: Hidden,
    values: Float[np.ndarray, " sets"],
    mask: np.ndarray | None,
    effects: Float[np.ndarray, "cuts n"] | None,
    *,
    methods: int,
    share: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a text's measures (rankings, measures), those of the methods followed by the random ones: fidelity, then
    plausibility, NaN where there is no rationale, then Spearman's correlations with the effects of knocking tokens out;
    and its curves (methods + 1, 2, points), with the mean of the random ones last."""
    curves = values[hidden.asked]
    agreed = np.full((len(scores), len(AGREEMENT)), np.nan)
    if mask is not None and share is not None:
        top = rationale_size(scores.shape[1], share)
        agreed = np.array([agreement(own, mask, top) for own in scores])
    effects = np.empty((0, scores.shape[1])) if effects is None else effects
    correlated = np.array([[spearman(own, effect) for effect in effects] for own in scores])
    found = [measures(curves, values[hidden.without], values[hidden.only]), agreed, correlated]
    return np.concatenate(found, axis=1), np.concatenate([curves[:methods], curves[methods:].mean(0, keepdims=True)])


def tied_share(scores: np.ndarray) -> float:
    """Return the share of tokens whose score another token also has."""
    _, times = np.unique(scores, return_counts=True)
    return float(times[times > 1].sum()) / len(scores)


def circular_notes(
    goal: Objective, methods: Sequence[str], option: Mapping[str, Mapping[str, Any]], fill: Float[Tensor, " width"]
) -> Iterator[str]:
    """Yield a note for every built-in method whose baseline is the vector that tokens are replaced by."""
    from ssmscope.interp.methods import method_function

    for name in methods:
        known = inspect.signature(method_function(name)).parameters.get("baseline")
        if known is None:
            continue
        start = baseline_embeddings(goal.rows([0]), option.get(name, {}).get("baseline", known.default))[0, 0]
        if torch.allclose(start.to(fill), fill, rtol=1e-5, atol=1e-8):
            yield (
                f"the baseline of {name} is the embedding that replaces tokens, which favours it: give another "
                "replacement or baseline"
            )


def summarise(
    provenance: dict[str, Any],
    methods: tuple[str, ...],
    found: Mapping[str, np.ndarray],
    grid: Sequence[Fraction],
    *,
    total: int,
    used: np.ndarray,
    long: int,
    share: float | None,
    knocked: Sequence[str],
    notes: list[str],
    seed: int,
) -> Fidelity:
    """Return means and paired differences of texts' measurements, with intervals, and notes."""
    every = (*MEASURES, *AGREEMENT, *knocked)
    places = [at for at, name in enumerate(every) if share is not None or name not in AGREEMENT]
    names, number = tuple(every[at] for at in places), len(methods)
    values, random = np.split(found["values"][..., places], [number], axis=1)
    beside = random.mean(1)
    columns = np.concatenate([values, beside[:, None]], axis=1)
    rows = resampled_means(columns.reshape(len(used), -1), seed=seed).reshape(-1, number + 1, len(names))
    curves = resampled_means(found["curves"].reshape(len(used), -1), seed=seed)
    paired = [rows[:, a] - rows[:, b] for a, b in itertools.combinations(range(number + 1), 2)]
    of_data, of_used = f"of {total:,} texts", f"of {len(used):,} texts"
    said = [f"{short:,} {of_data} have a single token and are left out"] if (short := total - len(used) - long) else []
    said += [f"{long:,} {of_data} are longer than max_tokens and are left out"] if long else []
    for name, tied in zip(methods, found["tied"].mean(0)):
        what = f"{name} gives {100 * tied:.0f} % of the tokens a score that another one has too: position decides"
        said += [what] if tied > MAX_TIED_SHARE else []
    said += notes
    for name, failed in zip(methods, found["unconverged"].sum(0)):
        said += [f"{name} did not converge on {failed:,} {of_used}"] if failed else []
    missing = dict(zip(names, np.isnan(beside).sum(0).tolist()))
    for name in knocked:
        where = "" if (layer := layer_of(name)) is None else f" in layer {layer}"
        said += [f"in {missing[name]:,} {of_used} no knockout{where} changes the output"] if missing[name] else []
    if unmarked := missing.get(next(iter(AGREEMENT)), 0):
        said.append(f"{unmarked:,} {of_used} have no rationale; plausibility leaves them out")
    return Fidelity(
        provenance=provenance,
        methods=methods,
        measures=names,
        value=provenance["options"]["value"],
        texts=used,
        predicted=found["targets"],
        clean=found["curves"][:, 0, MORF, 0],
        values=values.transpose(1, 0, 2),
        random=beside,
        rankings=_mean_of_defined(random),
        estimates=estimates(rows),
        paired=estimates(np.stack(paired, axis=1)),
        shares=np.array([float(share) for share in grid]),
        curve=estimates(curves).reshape(number + 1, 2, len(grid), 3),
        marked=share,
        notes=tuple(said),
    )


def _mean_of_defined(values: Float[np.ndarray, "texts rankings measures"]) -> Float[np.ndarray, "rankings measures"]:
    """Return the mean over the texts for which a number is defined; NaN where there is none."""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0.0).sum(0), defined.sum(0))
