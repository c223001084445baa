"""Which options are an attack's own, of those on single texts."""

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
"""The options that are an attack's own."""

CANDIDATES = 3
"""How many flips of a text HotFlip puts to the model. More of them find a little more for many more questions."""

ACTIVE = 64
"""How many searches are under way at a time."""
