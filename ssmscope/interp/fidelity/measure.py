"""Measures of fidelity: from the curves of hidden tokens to means and differences with their intervals."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float

from ssmscope.core.bootstrap import estimates, ratio, resampled_means
from ssmscope.data.text import TextData
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.fidelity.measures import LERF, MEASURES, MORF, layer_of
from ssmscope.interp.fidelity.result import Fidelity
from ssmscope.interp.plausibility.measure import agreement, rationale_size
from ssmscope.interp.plausibility.measures import MEASURES as AGREEMENT

if TYPE_CHECKING:
    from torch import Tensor

    from ssmscope.interp.fidelity.perturbed import Hidden
    from ssmscope.interp.objective import Objective


FIRST_KNOCKOUT_COLUMN = len(MEASURES) + len(AGREEMENT)
"""First column of the correlations with knockouts."""


def trapezoid(curve: Float[np.ndarray, "... points"]) -> np.ndarray:
    """Return the area under values at evenly spaced points of [0, 1], by trapezoids."""
    return (curve[..., :-1] + curve[..., 1:]).mean(-1) / 2


def measures(
    curve: Float[np.ndarray, "... two points"],
    without: Float[np.ndarray, "... shares"],
    only: Float[np.ndarray, "... shares"],
) -> Float[np.ndarray, "... measures"]:
    """Compute all measures, in the order of `MEASURES`.

    Args:
        curve: f along MoRF and along LeRF, from the clean text on.
        without: f without the top tokens, for every share.
        only: f of the top tokens alone.
    """
    areas, clean = trapezoid(curve), curve[..., MORF, 0]
    morf, lerf = areas[..., MORF], areas[..., LERF]
    return np.stack([lerf - morf, morf, lerf, clean - without.mean(-1), clean - only.mean(-1)], axis=-1)


@dataclass(eq=False)
class Measured:
    """Measurements of every text; the rankings of a text are those of the methods followed by the random ones."""

    values: np.ndarray
    """(texts, rankings, measures): fidelity, then plausibility, NaN where there is no rationale, then the correlations
    with the effects of knocking tokens out, NaN where undefined."""
    curves: np.ndarray
    """(texts, methods + 1, 2, points), with the mean of the random ones last."""
    targets: np.ndarray
    tied: np.ndarray
    """(texts, methods)."""
    unconverged: np.ndarray
    """(methods,), numbers of texts."""
    said: dict[str, None] = field(default_factory=dict)
    """Notes on methods' baselines, each once."""

    @staticmethod
    def empty(texts: int, methods: int, rankings: int, points: int, knocked: int) -> Measured:
        width = FIRST_KNOCKOUT_COLUMN + knocked
        return Measured(
            values=np.full((texts, methods + rankings, width), np.nan),
            curves=np.empty((texts, methods + 1, 2, points)),
            targets=np.empty(texts, dtype=np.int64),
            tied=np.empty((texts, methods)),
            unconverged=np.zeros(methods, dtype=np.int64),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all measurements, for `take`."""
        return {**vars(self), "said": np.array(list(self.said), dtype=str)}

    def take(self, lines: Sequence[int], part: Mapping[str, np.ndarray]) -> None:
        """Store the measurements of some texts in their lines."""
        for name in ("values", "curves", "targets", "tied"):
            getattr(self, name)[lines] = part[name]
        self.unconverged += part["unconverged"]
        self.said.update(dict.fromkeys(part["said"].tolist()))

    def put(self, line: int, hidden: Hidden, values: np.ndarray, target: int) -> None:
        methods, curves = len(self.unconverged), values[hidden.asked]
        self.values[line, :, : len(MEASURES)] = measures(curves, values[hidden.without], values[hidden.only])
        self.curves[line, :methods], self.curves[line, methods] = curves[:methods], curves[methods:].mean(0)
        self.targets[line] = target

    def agree(self, line: int, scores: np.ndarray, mask: np.ndarray | None, share: float) -> None:
        if mask is not None:
            top = rationale_size(scores.shape[1], share)
            measured = [agreement(own, mask, top) for own in scores]
            self.values[line, :, len(MEASURES) : FIRST_KNOCKOUT_COLUMN] = measured

    def correlate(self, line: int, found: np.ndarray) -> None:
        """Store the correlations (methods and random rankings, cuts) with the effects of knocking a text's tokens
        out."""
        self.values[line, :, FIRST_KNOCKOUT_COLUMN:] = found


def tied_share(scores: np.ndarray) -> float:
    """Return the share of tokens whose score another token also has."""
    _, times = np.unique(scores, return_counts=True)
    return float(times[times > 1].sum()) / len(scores)


def circular_notes(
    goal: Objective,
    methods: Sequence[str],
    option: Mapping[str, Mapping[str, Any]],
    fill: Float[Tensor, " width"],
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
    data: TextData,
    found: Measured,
    grid: Sequence[Fraction],
    used: np.ndarray,
    share: float | None,
    seed: int,
    long: int,
    knocked: Sequence[str],
) -> Fidelity:
    """Summarise the measurements of texts: means and paired differences with their intervals, and notes.

    Args:
        used: the numbers of the texts that are measured.
        share: the mean share of tokens that people marked; None without rationales.
        long: number of texts left out for their length.
        knocked: the names of the correlations with knockouts.
    """
    every = (*MEASURES, *AGREEMENT, *knocked)
    asked = {*MEASURES, *(AGREEMENT if share is not None else ()), *knocked}
    names = tuple(name for name in every if name in asked)
    width, number = len(names), len(methods)
    places = [every.index(name) for name in names]
    values, random = np.split(found.values[..., places], [number], axis=1)
    values = values.transpose(1, 0, 2)
    beside = random.mean(1)
    columns = np.concatenate([values, beside[None]]).transpose(1, 0, 2)
    rows = resampled_means(columns.reshape(len(used), -1), seed=seed).reshape(-1, number + 1, width)
    curves = resampled_means(found.curves.reshape(len(used), -1), seed=seed)
    paired = [rows[:, a] - rows[:, b] for a, b in itertools.combinations(range(number + 1), 2)]
    short = len(data) - len(used) - long
    notes = [f"{short:,} of {len(data):,} texts have a single token and are left out"] if short else []
    notes += [f"{long:,} of {len(data):,} texts are longer than max_tokens and are left out"] if long else []
    for name, tied in zip(methods, found.tied.mean(0)):
        if tied > 0.05:
            notes.append(
                f"{name} gives {100 * tied:.0f} % of the tokens a score that another one has too: position decides"
            )
    notes += list(found.said)
    for name, failed in zip(methods, found.unconverged):
        if failed:
            notes.append(f"{name} did not converge on {failed:,} of {len(used):,} texts")
    unmarked = int(np.isnan(beside[:, len(MEASURES)]).sum()) if share is not None else 0
    for name in knocked:
        flat, layer = int(np.isnan(beside[:, names.index(name)]).sum()), layer_of(name)
        where = "" if layer is None else f" in layer {layer}"
        notes += [f"in {flat:,} of {len(used):,} texts no knockout{where} changes the output"] if flat else []
    if unmarked:
        notes.append(f"{unmarked:,} of {len(used):,} texts have no rationale; plausibility leaves them out")
    return Fidelity(
        provenance=provenance,
        methods=methods,
        measures=names,
        value=provenance["options"]["value"],
        texts=used,
        predicted=found.targets,
        clean=found.curves[:, 0, MORF, 0],
        values=values,
        random=beside,
        rankings=_mean_of_defined(random),
        estimates=estimates(rows),
        paired=estimates(np.stack(paired, axis=1)),
        shares=np.array([float(share) for share in grid]),
        curve=estimates(curves).reshape(number + 1, 2, len(grid), 3),
        marked=share,
        notes=tuple(notes),
    )


def _mean_of_defined(values: Float[np.ndarray, "texts rankings measures"]) -> Float[np.ndarray, "rankings measures"]:
    """Return the mean over the texts for which a number is defined; NaN where there is none."""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0.0).sum(0), defined.sum(0))
