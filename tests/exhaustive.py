"""What is tried on everything with SSMSCOPE_EXHAUSTIVE=1, and otherwise on a few that stand for it."""

from __future__ import annotations

import os
from collections.abc import Iterable

ALL = os.environ.get("SSMSCOPE_EXHAUSTIVE") == "1"


def few(everything: Iterable[str], *chosen: str) -> list[str]:
    """The chosen ones of everything, or all of it."""
    names = list(everything)
    assert set(chosen) <= set(names)
    return names if ALL else list(chosen)
