"""Options and constants of the attacks on single texts; quick to import."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

HOTFLIP = "hotflip"

OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "textbugger": ("embeddings", "encoder"),
        "textfooler": ("embeddings", "encoder"),
        "bertattack": ("masked_lm", "encoder"),
        "pwws": ("synonyms",),
        HOTFLIP: ("beam", "flips", "candidates", "stopwords"),
    }
)
"""Options that only one attack has."""

CANDIDATES = 3
"""Flips of a text that HotFlip evaluates. More of them find little more, for many more queries."""

ACTIVE = 64
"""Searches in progress at a time."""
