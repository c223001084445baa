"""How numbers are written: a dash where there is none, true minus signs, ∞, commas between thousands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssmscope.core.bootstrap import Estimate


def number(value: float, digits: int | None = None, *, significant: int = 3) -> str:
    """A number with so many digits behind the point, or else so many significant ones, zeros at the end among them; a
    whole number up to a million has all of its digits."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if not digits and value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace("-", "−")
    text = f"{value:#.{significant}g}".rstrip(".") if digits is None else f"{value:.{digits}f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "−")


def counted(count: int, noun: str) -> str:
    """ "1 text", "2,000 texts"."""
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def told_apart(names: Sequence[str], every: int) -> str:
    """The first of the names, with how many of the others it cannot be told from; nothing where these are more than
    half of all others, for then none stands out.

    Args:
        every: how many there are, those from which it can be told included.
    """
    others = len(names) - 1
    if not names or 2 * others > every - 1:
        return ""
    return names[0] + f", indistinguishable from {counted(others, 'other')}" * bool(others)


def brackets(found: Estimate, digits: int | None = None, *, significant: int = 3) -> str:
    """The interval, " [0.1, 0.2]" with the space before it; nothing where there is none."""
    if not found.has_interval:
        return ""
    low, high = (number(end, digits, significant=significant) for end in (found.low, found.high))
    return f" [{low}, {high}]"


def tokens(count: float) -> str:
    """A number of tokens, with a fraction where they are few and a power of ten where they are very many."""
    if count < 100:
        return number(count, significant=2) if count < 10 else f"{count:.1f}"
    if count < 1e6 or not math.isfinite(count):
        return f"{count:,.0f}" if math.isfinite(count) else number(count)
    power = math.floor(math.log10(count))
    return f"{count / 10**power:.1f}·10^{power}"


def portion(part: int, whole: int) -> str:
    """How many of so many, in percent: "0", "all", "1.2 %", or the number itself where that is less than 0.05 %."""
    if part in (0, whole):
        return "all" if part else "0"
    percent = 100 * part / whole
    return f"{percent:.1f} %" if percent >= 0.05 else f"{part:,}"
