"""Estimates of state overflow from the answers and the log-odds of the true class."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange
from jaxtyping import Float, Int

from ssmscope.attacks.curves import Questions, unknown_tokens
from ssmscope.attacks.overflow.result import OverflowCurve
from ssmscope.core.bootstrap import Estimate, estimate, ratio, resampled_sums
from ssmscope.core.model import Model


class Measured(NamedTuple):
    """Estimates of all curves; `points` [place][length] are the fields of `Filled`."""

    clean: Estimate
    chance: float
    points: list[list[dict[str, Any]]]
    gaps: tuple[Estimate, ...]
    half_lengths: tuple[Estimate | None, ...]


def measure(
    labels: Int[np.ndarray, " examples"],
    answers: Int[np.ndarray, "places lengths examples"],
    odds: Float[np.ndarray, "places lengths examples"],
    lengths: Sequence[int],
    classes: int,
    seed: int,
) -> Measured:
    """Compute all estimates from class ids and the log-odds of the true class; the first length is 0."""
    places, steps, examples = answers.shape
    most = labels == np.bincount(labels, minlength=classes).argmax()
    given = np.moveaxis(answers[..., None] == np.arange(classes), -1, 0)
    every = np.concatenate([(answers == labels)[None], odds[None], given]).reshape(-1, examples)
    means = resampled_sums(np.concatenate([most[None], every]).T.astype(np.float64), seed=seed) / examples
    chance, (accuracy, mean_odds, *rest) = (
        means[:, 0],
        rearrange(means[:, 1:], "rows (numbers places steps) -> numbers rows places steps", places=places, steps=steps),
    )
    shares = np.stack(rest)
    entropy = (shares * -np.log2(np.where(shares > 0, shares, 1.0))).sum(0) + 0.0  # 0.0 + -0.0 is 0.0
    drops = 1 - ratio(accuracy, accuracy[:, :, :1])
    parts = {"accuracy": accuracy, "drop": drops, "log_odds": mean_odds, "majority": shares.max(0), "entropy": entropy}

    def point(place: int, at: int) -> dict[str, Any]:
        own = {name: estimate(part[:, place, at]) for name, part in parts.items()}
        return own | {"shares": tuple(estimate(share[:, place, at]) for share in shares)}

    return Measured(
        clean=estimate(accuracy[:, 0, 0]),
        chance=float(chance[0]),
        points=[[point(place, at) for at in range(steps)] for place in range(places)],
        gaps=tuple(map(estimate, (accuracy[:, 1] - accuracy[:, 0]).T)) if places == 2 else (),
        half_lengths=tuple(half_length(accuracy[:, place], chance, lengths) for place in range(places)),
    )


def half_length(
    accuracy: Float[np.ndarray, "rows lengths"], chance: Float[np.ndarray, " rows"], lengths: Sequence[int]
) -> Estimate | None:
    """Compute the shortest length at which accuracy − chance is at most half of its value at the first length.

    The value is that of the first row, the interval that of the others. Return None if there is no such length, or if
    the first accuracy is not above chance.
    """
    above = accuracy - chance[:, None]
    gone = above <= above[:, :1] / 2 + 1e-9  # Exactly half counts, despite rounding.
    first = np.where(gone.any(1), np.asarray(lengths, dtype=np.float64)[gone.argmax(1)], np.inf)
    defined = above[:, 0] > 0
    if not defined[0] or math.isinf(first[0]):
        return None
    # Quantiles are not interpolated, because some lengths are infinite.
    low, high = np.quantile(first[1:][defined[1:]], [0.025, 0.975], method="inverted_cdf")
    return Estimate(float(first[0]), float(low), float(high))


def notes_on(
    model: Model, asked: Questions, given: str | None, longest: str, measured: Measured, curves: Sequence[OverflowCurve]
) -> Iterable[str]:
    if measured.clean.low <= measured.chance:
        yield (
            f"the clean accuracy, {measured.clean}, is not clearly above chance, {measured.chance:.3f}: there is "
            "little to forget"
        )
    half = (measured.clean.value + measured.chance) / 2
    for curve in curves:
        gone = math.inf if curve.half_length is None else curve.half_length.value
        back = [point.tokens for point in curve.points if point.tokens > gone and point.accuracy.value > half + 1e-9]
        if back:
            yield f"with filler {curve.where} the text, accuracy is above half again at {back[0]:,} tokens"
    number, unknown = unknown_tokens(model, longest)
    if unknown:
        yield f"the tokenizer does not know {100 * unknown / number:.0f} % of the filler's tokens"
    if given is not None and len(longest) > len(given):
        yield "the filler is shorter than the longest length and is repeated"
    off = [(point, curve) for curve in curves for point in curve.points if abs(point.added - point.tokens) > 0.005]
    if off:
        point, curve = max(off, key=lambda pair: abs(pair[0].added - pair[0].tokens))
        yield (
            f"filler of {point.tokens} tokens adds {point.added:.2f} on average {curve.where} the texts, because token "
            "boundaries do not match or adjacent tokens merge"
        )
