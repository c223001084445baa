"""Names, options and suffixes of the attacks on prompts and words, and a check before loading; quick to import."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PROMPT = ("stresstest", "checklist", "deepwordbug", "textbugger", "textfooler", "bertattack")
WORDS = ("deepwordbug", "textbugger", "textfooler", "bertattack", "pwws", "checklist")
"""The attacks of each flavour."""
PROMPTBENCH = "promptbench"
"""Name of the package, and of its rewritten prompts."""
PROMPTBENCH_PREFIX = f"{PROMPTBENCH}:"
FROM_PROMPTBENCH = tuple(f"{PROMPTBENCH_PREFIX}{name}" for name in PROMPT)
"""The attacks on prompts as PromptBench runs them itself."""
SEMANTIC, HOTFLIP = "semantic", "hotflip"
"""Further attacks: one on prompts that tries rewritten ones, and one on words by gradients."""
OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "textbugger": ("embeddings", "encoder"),
        "textfooler": ("embeddings", "encoder"),
        "bertattack": ("masked_lm", "encoder"),
        "pwws": ("synonyms",),
        HOTFLIP: ("beam", "flips", "candidates", "stopwords"),
    }
)
"""Options that only some attacks on words have."""
CANDIDATES = 3
"""Flips of a text that HotFlip evaluates. More of them find little more, for many more queries."""
ACTIVE = 64
"""Searches in progress at a time."""

RANDOM_STRINGS = """
    d6ZQ3u0GBQ vTAjHynoIG OB4KVJzIft LkF0FZxMZ4 iia2yL9Uzm CuVpbbkC4c w52rwgo0Av Vq3aBzuZcD hXLpw3bbiw RcRneWo6Iv
    S6oUV5E54P xikCjkMydH MQnugHcaoy Q47Jmd4lMV 9vGXgnbWB8 IhuBIhoPGc 5yWbBXztUY AMsRIKZniY EAB4KP2NVY 9Q3S1F94fE
    b74X5IVXQY SFPCqpiClT bhrRSokrfa YHQiDfFhw4 BWmsLx8xOA PDCGfz6DL9 yh912BU8T0 ofOQXLxiW4 Cev0s49fbe rzu98kF2KF
    zexKUTWJYG 5XeflW1ZJc is77sOXAu8 XStsD2pUzu fwhUZUQzXW Pbl3tYuoRo MSAddJ4D2a mzjVogkRhM Kw6nrs57gH ItGDrrA1Sc
    KjPJJ2a7RB mOJ9nEwT4f ofw9fEkN5R njCuciQJpB 6a4Yn3RGVc SvAp8RlOFn g0vBZf3tQC zq0DcZ5dnI lf8wBa2yEm lWJoGGRdjv
"""

SUFFIXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "stresstest": (" and true is true ", " and false is not true ", " and true is true " * 5),
        "checklist": tuple(RANDOM_STRINGS.split()),
    }
)
"""Suffixes that PromptBench 0.0.4 appends to a prompt after a space: sentences that mean nothing for the task (Naik et
al. 2018), and 50 random strings (Ribeiro et al. 2020)."""

SUFFIX_PARTS = {
    "stresstest": ("3 suffixes (true is true, false is not true, the first five times), all tried",),
    "checklist": ("50 random strings of 10 characters, all tried",),
}
"""Descriptions of the suffixes."""


def check_asked(**options: Any) -> None:
    """Raise InputError if a template has no place for the text, or if label words are not usable."""
    given = options.get("template")
    if given:
        from ssmscope.evaluation.verbalizer import Template

        for text in [given] if isinstance(given, str) else given:
            Template(text)
    if options.get("words") is not None:
        from ssmscope.evaluation.verbalizer import checked_words

        checked_words(list(options["words"]))
