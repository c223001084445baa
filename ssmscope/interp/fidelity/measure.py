"""The measures of fidelity: from the curves of hidden tokens to means and differences with their intervals."""

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
from ssmscope.interp.plausibility.measure import agreement, size_of
from ssmscope.interp.plausibility.measures import MEASURES as AGREEMENT

if TYPE_CHECKING:
    from torch import Tensor

    from ssmscope.interp.fidelity.perturbed import Hidden
    from ssmscope.interp.objective import Objective


KNOCKED = len(MEASURES) + len(AGREEMENT)
"""Behind which columns those of knockouts stand."""


def trapezoid(curve: Float[np.ndarray, "... points"]) -> np.ndarray:
    """The area under values at evenly spaced points of [0, 1], by trapezoids."""
    return (curve[..., :-1] + curve[..., 1:]).mean(-1) / 2


def measures(
    curve: Float[np.ndarray, "... two points"],
    without: Float[np.ndarray, "... shares"],
    only: Float[np.ndarray, "... shares"],
) -> Float[np.ndarray, "... measures"]:
    """All measures, in the order of `MEASURES`.

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
    """What is known of every text; the rankings of a text are those of the methods and then the random ones."""

    values: np.ndarray
    """(methods, texts, measures), those of plausibility behind those of fidelity, NaN where there is no rationale, and
    last the correlations with what knocking tokens out does, NaN where they are not defined."""
    random: np.ndarray
    """(texts, rankings, measures)."""
    curves: np.ndarray
    """(texts, methods + 1, 2, points), the mean of the random ones last."""
    targets: np.ndarray
    tied: np.ndarray
    """(texts, methods)."""
    unconverged: np.ndarray
    """(methods,), on how many texts."""
    said: dict[str, None] = field(default_factory=dict)
    """What has to be said of methods' baselines, each once."""

    @staticmethod
    def empty(texts: int, methods: int, rankings: int, points: int, knocked: int) -> Measured:
        width = KNOCKED + knocked
        return Measured(
            values=np.full((methods, texts, width), np.nan),
            random=np.full((texts, rankings, width), np.nan),
            curves=np.empty((texts, methods + 1, 2, points)),
            targets=np.empty(texts, dtype=np.int64),
            tied=np.empty((texts, methods)),
            unconverged=np.zeros(methods, dtype=np.int64),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it, for `take`."""
        return {**vars(self), "said": np.array(list(self.said), dtype=str)}

    def take(self, lines: Sequence[int], part: Mapping[str, np.ndarray]) -> None:
        """Put what was measured of some texts in their lines."""
        self.values[:, lines] = part["values"]
        for name in ("random", "curves", "targets", "tied"):
            getattr(self, name)[lines] = part[name]
        self.unconverged += part["unconverged"]
        self.said.update(dict.fromkeys(part["said"].tolist()))

    def put(self, line: int, hidden: Hidden, values: np.ndarray, target: int) -> None:
        methods = len(self.values)
        curves = values[hidden.asked]
        measured = measures(curves, values[hidden.without], values[hidden.only])
        self.values[:, line, : len(MEASURES)] = measured[:methods]
        self.random[line, :, : len(MEASURES)] = measured[methods:]
        self.curves[line, :methods], self.curves[line, methods] = curves[:methods], curves[methods:].mean(0)
        self.targets[line] = target

    def agree(self, line: int, scores: np.ndarray, mask: np.ndarray | None, share: float) -> None:
        if mask is None:
            return
        methods = len(self.values)
        top = size_of(scores.shape[1], share)
        measured = np.array([agreement(own, mask, top) for own in scores])
        self.values[:, line, len(MEASURES) : KNOCKED] = measured[:methods]
        self.random[line, :, len(MEASURES) : KNOCKED] = measured[methods:]

    def correlate(self, line: int, found: np.ndarray) -> None:
        """Keep the correlations (methods and random rankings, cuts) with what knocking a text's tokens out does."""
        methods = len(self.values)
        self.values[:, line, KNOCKED:], self.random[line, :, KNOCKED:] = found[:methods], found[methods:]


def tied_share(scores: np.ndarray) -> float:
    """The share of tokens whose score another one has."""
    _, times = np.unique(scores, return_counts=True)
    return float(times[times > 1].sum()) / len(scores)


def circular_notes(
    goal: Objective,
    methods: Sequence[str],
    option: Mapping[str, Mapping[str, Any]],
    fill: Float[Tensor, " width"],
) -> Iterator[str]:
    """Of every method of ours whose baseline is the vector that tokens are replaced by: that this is circular."""
    from ssmscope.interp.methods import METHODS

    for name in methods:
        known = inspect.signature(METHODS[name]).parameters.get("baseline")
        if known is None:
            continue
        start = baseline_embeddings(goal.rows([0]), option.get(name, {}).get("baseline", known.default))[0, 0]
        if torch.allclose(start.to(fill), fill, rtol=1e-5, atol=1e-8):
            yield (
                f"{name} compares with the very embedding that tokens are replaced by, which favours it: give another "
                "replacement or baseline"
            )


def summarised(
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
    """The result of what was measured text by text: means and paired differences with their intervals, and notes.

    Args:
        used: the numbers of the texts that are measured.
        share: the mean share of tokens that people marked; None without rationales.
        long: how many texts are left out for their length.
        knocked: the names of the correlations with knockouts.
    """
    every = (*MEASURES, *AGREEMENT, *knocked)
    asked = {*MEASURES, *(AGREEMENT if share is not None else ()), *knocked}
    names = tuple(name for name in every if name in asked)
    width, number = len(names), len(methods)
    places = [every.index(name) for name in names]
    values, random = found.values[..., places], found.random[..., places]
    beside = random.mean(1)
    columns = np.concatenate([values, beside[None]]).transpose(1, 0, 2)
    rows = resampled_means(columns.reshape(len(used), -1), seed=seed).reshape(-1, number + 1, width)
    curves = resampled_means(found.curves.reshape(len(used), -1), seed=seed)
    paired = [rows[:, a] - rows[:, b] for a, b in itertools.combinations(range(number + 1), 2)]
    short = len(data) - len(used) - long
    notes = [f"{short:,} of {len(data):,} texts have a single token and are left out"] if short else []
    notes += [f"{long:,} of {len(data):,} texts are longer than asked for and are left out"] if long else []
    for name, tied in zip(methods, found.tied.mean(0)):
        if tied > 0.05:
            notes.append(
                f"{name} gives {100 * tied:.0f} % of the tokens a score that another one has: position decides"
            )
    notes += list(found.said)
    for name, failed in zip(methods, found.unconverged):
        if failed:
            notes.append(f"{name} did not converge on {failed:,} of {len(used):,} texts")
    unmarked = int(np.isnan(beside[:, len(MEASURES)]).sum()) if share is not None else 0
    for name in knocked:
        flat, layer = int(np.isnan(beside[:, names.index(name)]).sum()), layer_of(name)
        where = "" if layer is None else f" in layer {layer}"
        notes += [f"of {flat:,} of {len(used):,} texts no knockout{where} changes the output"] if flat else []
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
    """The mean over the texts of which a number is defined; NaN where there is none."""
    defined = ~np.isnan(values)
    return ratio(np.where(defined, values, 0.0).sum(0), defined.sum(0))
