"""Sizes of analyses in plans, as they are declared, and the time that a plan may take."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ssmscope.errors import InputError, did_you_mean

SIZE_KEYS = ("option", "runs", "start")
START = 5000.0
"""Default cost of an analysis in runs, apart from its examples."""
MAX_BUDGET = 1e7
MAX_HARDEST = 100
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*([smh])")


@dataclass(frozen=True)
class Size:
    """Option of an analysis that a budget chooses, and the cost in runs of each of its units and of the rest."""

    option: str
    runs: float
    start: float


@dataclass(frozen=True)
class Expected:
    """Expected cost of a call: runs of its models on a text, and seconds."""

    runs: float
    seconds: float


def read_budget(given: Any) -> float | None:
    """Read a time such as "90s", "10m" or "1.5h", in seconds; None for none. Raise InputError for anything else."""
    if given is None:
        return None
    found = _BUDGET.fullmatch(given.strip()) if isinstance(given, str) else None
    seconds = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not 0 < seconds <= MAX_BUDGET:
        raise InputError(f"the budget is {given!r:.60}; give a time such as 90s, 10m or 1.5h")
    return seconds


def read_hardest(given: Any) -> int:
    """Read the number of hardest examples; 0 for none. Raise InputError if it is not a number up to 100."""
    if given is None:
        return 0
    if not (isinstance(given, str) and given.isdecimal() and int(given) <= MAX_HARDEST):
        raise InputError(f"hardest is {given!r:.60}; give a number of examples from 0 to {MAX_HARDEST}")
    return int(given)


def read_size(given: Any, options: Mapping[str, Any], set_: Collection[str], where: str) -> Size | None:
    """Read an analysis's `size`; None for none, or if the plan sets the option itself. Raise InputError if it names no
    number among the options, or no cost."""
    if given is None:
        return None
    wrong = not isinstance(given, dict) or set(given) - set(SIZE_KEYS) or not {"option", "runs"} <= set(given)
    if wrong:
        raise InputError(f"{where}: size is {given!r:.80}; give a mapping with {', '.join(SIZE_KEYS)}")
    if not isinstance(given["option"], str) or given["option"] not in options:
        near = did_you_mean(str(given["option"]), options)
        raise InputError(f"{where}: size names the option {given['option']!r:.60}, which it does not have{near}")
    costs = {}
    for name in ("runs", "start"):
        try:
            costs[name] = float(given.get(name, START))
        except (TypeError, ValueError):
            costs[name] = math.nan
        if not 0 < costs[name] < math.inf:
            raise InputError(f"{where}: size has {name} {given[name]!r:.60}; give a number above 0")
    return None if given["option"] in set_ else Size(given["option"], costs["runs"], costs["start"])
