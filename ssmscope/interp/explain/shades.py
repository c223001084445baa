"""What every view of explanations shares: the colours of scores, their ranges, and what is said of a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.show import signed
from ssmscope.show.tokens import SHADES, bounds, shorten, visible

if TYPE_CHECKING:
    from ssmscope.interp.explain.result import Attribution, ExplainedText, Explanation


def ordinary(text: ExplainedText) -> np.ndarray:
    """(tokens,) bool: the tokens that the range of the colours is of; all of them where all are special."""
    return ~text.special if not text.special.all() else np.ones(len(text), dtype=bool)


def end(each: Attribution, text: ExplainedText) -> float:
    """Where the colours of a signed method end: the largest |score| of the ordinary tokens."""
    return float(np.abs(each.scores[ordinary(text)].astype(np.float64)).max())


def levels(each: Attribution, text: ExplainedText) -> np.ndarray:
    """The shade of every token: from −STEPS to STEPS around zero of a signed method (`views.signed`), else from 0 to
    SHADES − 1 between the lowest and the highest score. A special token beyond the range has the shade of its end."""
    if each.signed:
        return signed.levels(each.scores.astype(np.float64), end(each, text))
    plain = each.scores[ordinary(text)].astype(np.float64)
    low, span = plain.min(), np.ptp(plain)
    unit = (each.scores - low) / span if span > 0 else np.full(len(text), 0.5)
    return np.rint(np.clip(unit, 0, 1) * (SHADES - 1)).astype(np.int64)


def limits(each: Attribution, text: ExplainedText) -> str:
    """The range of a method's colours: "±0.12", or from the lowest score to the highest."""
    return f"±{end(each, text):.3g}" if each.signed else bounds(each.scores, ~ordinary(text))


def doubt(each: Attribution) -> str:
    """What has to be said where scores have not converged, or do not add up; else nothing."""
    if each.converged is None or each.converged:
        return ""
    if each.error is not None:
        return f"not converged, ±{each.error:.1%}" if math.isfinite(each.error) else "convergence not checked"
    if each.delta is None:
        return ""
    return f"misses {each.delta:.1%}" if each.delta < 10 else f"misses {each.delta:.0f}×"


def baselines(result: Explanation) -> list[str]:
    """Per method with a baseline, what it compares every text with, and what has to be said of that."""
    found: dict[str, None] = {}
    for text in result:
        for each in text.attributions:
            if each.baseline:
                note = f"; {each.note}" if each.note else ""
                found[f"{each.method} compares with {each.baseline}{note}."] = None
    return list(found)


def about(text: ExplainedText, room: int = 70) -> str:
    """What is explained, and its value, in `room` characters where that is possible."""
    value = f", f = {text.value:.4g}".replace("= -", "= −")
    return f"explained: {shorten(visible(text.target), max(room - 11 - len(value), 5))}{value}"
