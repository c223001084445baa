"""Attacks on prompts and words by name, and a check before loading; quick to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ssmscope.core.registry import Registry


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


Build = Callable[[Any, bool], Recipe]


@dataclass(frozen=True)
class Attack:
    """An attack as whoever adds it declares it: on prompts by `suffixes` or a search, on words by a search.

    Attributes:
        words: the function that builds the search on words, from resources and False.
        prompts: that of the search on prompts, which gets True in place of False.
        suffixes: texts appended to a prompt after a space, all of which are tried.
        about: the suffixes in words, for the result.
        options: options of `words` and `prompts` that it reads and others do not.
        row: heading of its row on a scorecard, as an attack on prompts; none by default.
    """

    words: Build | None = None
    prompts: Build | None = None
    suffixes: tuple[str, ...] = ()
    about: str = ""
    options: tuple[str, ...] = ()
    row: str = ""

    def build(self, resources: Any, prompt: bool) -> Recipe:
        """Return the search on prompts, or on words."""
        found = self.prompts if prompt else self.words
        assert found is not None
        return found(resources, prompt)


ATTACKS: Registry[Attack] = Registry("attack", "ssmscope.attacks")
"""Attacks by name; installed packages add theirs."""


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
