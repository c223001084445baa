"""Checks of the attacks' options, made before anything is loaded."""

from __future__ import annotations

from typing import Any


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
