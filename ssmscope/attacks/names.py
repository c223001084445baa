"""Attacks on prompts and words by name, and a check before loading; quick to import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ssmscope.core.registry import Registry

RANDOM_STRINGS = """
    d6ZQ3u0GBQ vTAjHynoIG OB4KVJzIft LkF0FZxMZ4 iia2yL9Uzm CuVpbbkC4c w52rwgo0Av Vq3aBzuZcD hXLpw3bbiw RcRneWo6Iv
    S6oUV5E54P xikCjkMydH MQnugHcaoy Q47Jmd4lMV 9vGXgnbWB8 IhuBIhoPGc 5yWbBXztUY AMsRIKZniY EAB4KP2NVY 9Q3S1F94fE
    b74X5IVXQY SFPCqpiClT bhrRSokrfa YHQiDfFhw4 BWmsLx8xOA PDCGfz6DL9 yh912BU8T0 ofOQXLxiW4 Cev0s49fbe rzu98kF2KF
    zexKUTWJYG 5XeflW1ZJc is77sOXAu8 XStsD2pUzu fwhUZUQzXW Pbl3tYuoRo MSAddJ4D2a mzjVogkRhM Kw6nrs57gH ItGDrrA1Sc
    KjPJJ2a7RB mOJ9nEwT4f ofw9fEkN5R njCuciQJpB 6a4Yn3RGVc SvAp8RlOFn g0vBZf3tQC zq0DcZ5dnI lf8wBa2yEm lWJoGGRdjv
"""

STRESSES = (" and true is true ", " and false is not true ", " and true is true " * 5)
"""Suffixes that mean nothing for the task (Naik et al. 2018), of PromptBench 0.0.4; it has 50 `RANDOM_STRINGS` too
(Ribeiro et al. 2020)."""


@dataclass(frozen=True)
class Recipe:
    """An attack of TextAttack's parts, or (without transformation and search) one that tries all its suffixes. `ran`
    describes the parts that run, `left_out` those of the definition that do not, and why."""

    name: str
    transformation: Any
    constraints: tuple[Any, ...]
    search: Any
    ran: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attack:
    """An attack as whoever adds it declares it: on prompts by `suffixes` or a search, on words by a search.

    Attributes:
        words: the function that builds the search on words, from resources and False, or its place "module:function".
        prompts: that of the search on prompts, which gets True in place of False.
        suffixes: texts appended to a prompt after a space, all of which are tried.
        about: the suffixes in words, for the result.
        options: options of `words` and `prompts` that it reads and others do not.
    """

    words: Callable[..., Recipe] | str | None = None
    prompts: Callable[..., Recipe] | str | None = None
    suffixes: tuple[str, ...] = ()
    about: str = ""
    options: tuple[str, ...] = ()

    def build(self, resources: Any, prompt: bool) -> Recipe:
        """Return the search on prompts, or on words."""
        found = self.prompts if prompt else self.words
        if isinstance(found, str):
            module, _, name = found.partition(":")
            found = getattr(importlib.import_module(module), name)
        assert found is not None
        return found(resources, prompt)


ATTACKS: Registry[Attack] = Registry("attack", "ssmscope.attacks")
"""Attacks by name; installed packages add theirs."""


def _add(name: str, *, prompts: bool = True, **declared: Any) -> None:
    place = f"ssmscope.attacks.recipes:{name}"
    ATTACKS.add(name, Attack(words=place, prompts=place if prompts else None, **declared))


ATTACKS.add(
    "stresstest",
    Attack(suffixes=STRESSES, about="3 suffixes (true is true, false is not true, the first five times), all tried"),
)
_add(
    "checklist",
    prompts=False,
    suffixes=tuple(RANDOM_STRINGS.split()),
    about="50 random strings of 10 characters, all tried",
)
_add("deepwordbug")
_add("textbugger", options=("embeddings", "encoder"))
_add("textfooler", options=("embeddings", "encoder"))
_add("bertattack", options=("masked_lm", "encoder"))
_add("pwws", prompts=False, options=("synonyms",))


def on_prompts() -> list[str]:
    """Return the names of the attacks on prompts."""
    return [name for name in ATTACKS if ATTACKS[name].prompts is not None or ATTACKS[name].suffixes]


def on_words() -> list[str]:
    """Return the names of the attacks on words."""
    return [name for name in ATTACKS if ATTACKS[name].words is not None]


PROMPTBENCH = "promptbench"
"""Name of the package, and of its rewritten prompts."""
PROMPTBENCH_PREFIX = f"{PROMPTBENCH}:"
FROM_PROMPTBENCH = tuple(
    PROMPTBENCH_PREFIX + name
    for name in ("stresstest", "checklist", "deepwordbug", "textbugger", "textfooler", "bertattack")
)
"""The attacks on prompts as PromptBench runs them itself."""
SEMANTIC, HOTFLIP = "semantic", "hotflip"
"""Further attacks: one on prompts that tries rewritten ones, and one on words by gradients."""
HOTFLIP_OPTIONS = ("beam", "flips", "candidates", "stopwords")
CANDIDATES = 3
"""Flips of a text that HotFlip evaluates. More of them find little more, for many more queries."""
ACTIVE = 64
"""Searches in progress at a time."""


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
