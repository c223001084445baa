"""What is tried on everything with SSMSCOPE_EXHAUSTIVE=all, and otherwise on a few that stand for it."""

from __future__ import annotations

import os
from collections.abc import Iterable

ASKED = os.environ.get("SSMSCOPE_EXHAUSTIVE")
ALL = ASKED in ("all", "1")
CONTRACTS = ALL or ASKED == "contracts"
"""Whether contracts are tried on variants of architectures too, as the run on transformers 5 does."""


def few(everything: Iterable[str], *chosen: str) -> list[str]:
    """The chosen ones of everything, or all of it."""
    names = list(everything)
    assert set(chosen) <= set(names)
    return names if ALL else list(chosen)
