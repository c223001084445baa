"""Agreement of explanations with what people marked as the reason (ERASER, DeYoung et al. 2020), by text and in all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from ssmscope.api.provenance import record_provenance
from ssmscope.core.bootstrap import estimate, resampled_means
from ssmscope.core.ties import descending, levels
from ssmscope.errors import InputError
from ssmscope.interp.explain.result import Explanation
from ssmscope.interp.plausibility.measures import MEASURES, check_top
from ssmscope.interp.plausibility.result import Plausibility

MIN_OVERLAP = 0.5
"""Smallest intersection over union of two matching spans."""


def token_f1(chosen: Bool[np.ndarray, " n"], marked: Bool[np.ndarray, " n"]) -> float:
    """Return F1 of the chosen tokens as a guess of the marked ones: 2 |both| / (|chosen| + |marked|)."""
    total = int(chosen.sum()) + int(marked.sum())
    return 2 * int((chosen & marked).sum()) / total if total else 0.0


def iou_f1(chosen: Bool[np.ndarray, " n"], marked: Bool[np.ndarray, " n"], threshold: float = MIN_OVERLAP) -> float:
    """Return F1 of the chosen spans as a guess of the marked ones; a span is a run of tokens, and two match when their
    intersection has at least `threshold` of the tokens of their union (DeYoung et al. 2020, sec. 4.1)."""
    guesses, truths = _runs(chosen), _runs(marked)
    if not guesses or not truths:
        return 0.0
    overlap = np.array([[_overlap(guess, truth) for truth in truths] for guess in guesses]) >= threshold
    precision, recall = overlap.any(1).mean(), overlap.any(0).mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def average_precision(scores: Float[np.ndarray, " n"], marked: Bool[np.ndarray, " n"]) -> float:
    """Return the area under the curve of precision over recall, Σ_k (R_k − R_{k−1}) P_k over the distinct scores from
    the highest on; NaN where nothing is marked."""
    if not marked.any():
        return float("nan")
    scores = levels(scores)
    order = descending(scores)
    ordered, hits = scores[order], np.cumsum(marked[order])
    last = np.append(ordered[1:] != ordered[:-1], True)  # The last of the tokens that share a score.
    precision = hits[last] / (np.flatnonzero(last) + 1)
    recall = hits[last] / hits[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def chance_precision(n: int, marked: int) -> float:
    """Return the expected average precision of a random ranking of n tokens of which some are marked (Bestgen 2015):
    ((r − 1) / (n − 1) · (n − H_n) + H_n) / n with r marked tokens and H_n = 1 + 1/2 + … + 1/n."""
    harmonic = sum(1 / place for place in range(1, n + 1))
    return ((marked - 1) / (n - 1) * (n - harmonic) + harmonic) / n if n > 1 else 1.0


def _runs(tokens: Bool[np.ndarray, " n"]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], tokens, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> float:
    both = max(0, min(a[1], b[1]) - max(a[0], b[0]))
    return both / (a[1] - a[0] + b[1] - b[0] - both)


def agreement(scores: Float[np.ndarray, " n"], marked: Bool[np.ndarray, " n"], top: int) -> tuple[float, ...]:
    """Return `MEASURES` of one text; the rationale is the `top` tokens, ties by position."""
    chosen = np.zeros(len(scores), dtype=bool)
    chosen[descending(scores)[:top]] = True
    return token_f1(chosen, marked), iou_f1(chosen, marked), average_precision(scores, marked)


def rationale_size(n: int, top: int | float) -> int:
    """Return the number of tokens, out of n, in a rationale: `top`, or that share of them, rounded; 1 to n."""
    return min(n, max(1, round(top * n) if isinstance(top, float) else top))


def marked_share(masks: Iterable[Bool[np.ndarray, " _"] | None]) -> float:
    """Return the mean over texts of the share of tokens that is marked."""
    shares = [float(mask.mean()) for mask in masks if mask is not None]
    return sum(shares) / len(shares)


def plausibility_of(
    explained: Explanation | Mapping[str, Sequence[Float[np.ndarray, " tokens"]]],
    rationales: Sequence[Bool[np.ndarray, " tokens"] | Sequence[int] | None],
    *,
    top: int | float | None = None,
    seed: int = 0,
) -> Plausibility:
    """Measure how far the scores of each method agree with human rationales, token by token, as `plausibility` does.

    Args:
        explained: texts that `explain` explained, whose special tokens are left out, or per method its scores of every
            text, without special tokens.
        rationales: per text a 0 or 1 for every token that its scores are of (`marked_tokens` makes them); None for a
            text that nobody marked, which is left out.
        top: number of tokens in a rationale, or share of each text's tokens; by default the mean share marked.

    Raises:
        InputError: not one rationale for every text, one of another length, none at all, or a score that is not finite.
    """
    check_top(top)
    top = int(top) if top is not None and top >= 1 else top
    by_method, kept, source = _scores(explained)
    texts = len(next(iter(by_method.values()), ()))
    if len(rationales) != texts or any(len(scores) != texts for scores in by_method.values()):
        raise InputError(f"{len(rationales)} rationales were given for {texts} texts; give one for each, or None")
    masks: list[np.ndarray | None] = []
    for row, given in enumerate(rationales):
        mask = None if given is None else np.asarray(given)
        if mask is not None:
            if kept is not None and len(mask) == len(kept[row]):
                mask = mask[kept[row]]
            mask = _checked(mask, len(next(iter(by_method.values()))[row]), row)
        masks.append(mask)
    used = [row for row, mask in enumerate(masks) if mask is not None]
    if not used:
        raise InputError("no text has a rationale: there is nothing to agree with")
    share = marked_share(masks)
    values = np.empty((len(by_method), len(used), len(MEASURES)))
    for number, (method, scores) in enumerate(by_method.items()):
        for line, row in enumerate(used):
            own, mask = np.asarray(scores[row], dtype=np.float64), masks[row]
            assert mask is not None
            if own.shape != mask.shape or not np.isfinite(own).all():
                raise InputError(f"the scores that {method} gives text {row} are not {len(mask)} finite numbers")
            values[number, line] = agreement(own, mask, rationale_size(len(own), share if top is None else top))
    rows = resampled_means(values.transpose(1, 0, 2).reshape(len(used), -1), seed=seed)
    return Plausibility(
        provenance=record_provenance(source, options={"top": top}, seed=seed),
        methods=tuple(by_method),
        values=values,
        estimates=tuple(map(estimate, rows.T)),
        texts=tuple(used),
        share=share,
        chance=float(np.mean([chance_precision(len(m), int(m.sum())) for m in masks if m is not None])),
        top=share if top is None else top,
        left_out=texts - len(used),
    )


def _scores(explained: Any) -> tuple[dict[str, Sequence[np.ndarray]], list[np.ndarray] | None, dict[str, Any]]:
    """Return each method's scores of the non-special tokens, masks of these tokens, and their provenance."""
    if isinstance(explained, Mapping):
        if not explained:
            raise InputError("no method was given; give at least one method's scores")
        return dict(explained), None, {}
    kept = [np.array([word is not None for word in text.words], dtype=bool) for text in explained]
    by_method: dict[str, list[np.ndarray]] = {method: [] for method in explained.methods}
    for text, own in zip(explained, kept):
        for attribution in text.attributions:
            by_method[attribution.method].append(np.asarray(attribution.scores)[own])
    origin = ("model", "architecture", "fingerprint", "dtype", "device")
    source = {name: explained.provenance[name] for name in origin if name in explained.provenance}
    return dict(by_method), kept, source


def _checked(mask: np.ndarray, tokens: int, row: int) -> np.ndarray:
    if mask.shape != (tokens,) or not np.isin(mask, (0, 1)).all():
        raise InputError(f"the rationale of text {row} is not a 0 or 1 for each of its {tokens} tokens")
    if not mask.any():
        raise InputError(f"the rationale of text {row} marks no token; give None for a text that nobody marked")
    return mask.astype(bool)
