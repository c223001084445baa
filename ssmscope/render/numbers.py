"""Formatting of numbers: a dash for NaN, true minus signs, ∞, commas between thousands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ssmscope.core.bootstrap import Estimate


def number(value: float, digits: int | None = None, *, significant: int = 3) -> str:
    """Format a number with `digits` decimal places or `significant` digits; a whole one below a million has all."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if not digits and value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace("-", "−")
    text = f"{value:#.{significant}g}".rstrip(".") if digits is None else f"{value:.{digits}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 text", "2,000 texts"."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def with_ties(names: Sequence[str], every: int) -> str:
    """Return the first of `names`, with the number of others that are indistinguishable from it; "" if these are more
    than half of all others among `every` names, because then none stands out."""
    others = len(names) - 1
    if not names or 2 * others > every - 1:
        return ""
    return names[0] + f", indistinguishable from {counted(others, 'other')}" * bool(others)


def brackets(found: Estimate, digits: int | None = None, *, significant: int = 3) -> str:
    """Return the interval after a space, " [0.1, 0.2]"; empty if there is none."""
    if not found.has_interval:
        return ""
    low, high = (number(end, digits, significant=significant) for end in (found.low, found.high))
    return f" [{low}, {high}]"


def token_count(count: float) -> str:
    """Format a number of tokens: with a fraction if small, with a power of ten if very large."""
    if count < 100:
        return number(count, significant=2) if count < 10 else f"{count:.1f}"
    if count < 1e6 or not math.isfinite(count):
        return f"{count:,.0f}" if math.isfinite(count) else number(count)
    power = math.floor(math.log10(count))
    return f"{count / 10**power:.1f}·10^{power}"


def percent_of(part: int, whole: int) -> str:
    """Return a part in percent of the whole: "0", "all", "1.2 %", or the number itself if below 0.05 %."""
    if part in (0, whole):
        return "all" if part else "0"
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 0.05 else f"{part:,}"


def format_probability(probability: float) -> str:
    """Format the probability of an answer; empty for answers without one."""
    return "" if math.isnan(probability) else f"p = {probability:.3f}"


def score_range(scores: np.ndarray, special: np.ndarray) -> str:
    """Format the lowest and highest score of the ordinary tokens, with enough digits to tell them apart."""
    plain = scores[~special]
    return format_range(float(plain.min()), float(plain.max())) if plain.size else "no scores"


def format_range(low: float, high: float) -> str:
    """Format two ends of a range, with enough digits to tell them apart."""
    digits = 3 if high == low else int(np.clip(np.ceil(-np.log10(high - low)) + 2, 3, 8))
    return f"{low:.{digits}f}–{high:.{digits}f}".replace("-", "−")


def number_runs(indices: Sequence[int]) -> str:
    """Abbreviate layer numbers: (0, 1, 2, 5) is "0–2, 5"."""
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def evenly_spaced(layers: int, most: int) -> list[int]:
    """Return at most `most` of the layers 0 to `layers` − 1, evenly spaced, with the first and the last."""
    return np.unique(np.rint(np.linspace(0, layers - 1, min(layers, most))).astype(int)).tolist()
