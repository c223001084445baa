"""Checks of attacks on prompts, made before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssmscope.attacks.checks import check_asked
from ssmscope.errors import InputError

SEMANTIC = "semantic"
"""Name of the attack that tries rewritten prompts."""

SPLIT = "<SPLIT>"
"""Marker at which TextAttack splits texts."""


def check_prompts(
    *,
    attacks: Sequence[str],
    template: str | Sequence[str] | None,
    suffix: str,
    as_promptbench: bool,
    semantic: str | Path | None,
    **others: Any,
) -> None:
    """Raise InputError if options contradict each other, or if templates or label words are not usable."""
    if SEMANTIC in attacks and semantic is None:
        raise InputError("the attack semantic needs rewritten prompts: give semantic, 'promptbench' or a text file")
    if as_promptbench and suffix != "end":
        raise InputError(f"as_promptbench places suffixes as PromptBench does; leave out suffix {suffix!r}, or it")
    check_asked(template=template, **others)
    given = [template] if isinstance(template, str) else list(template or ())
    for text in given:
        check_parts(text)
    twice = next((text for at, text in enumerate(given) if text in given[:at]), None)
    if twice is not None:
        raise InputError(f"the template {twice!r:.60} is given twice; give each once")


def check_parts(template: str) -> None:
    """Raise InputError if TextAttack would split the template."""
    if SPLIT in template:
        raise InputError(f"the template {template!r:.60} holds {SPLIT}, at which TextAttack splits texts; remove it")
