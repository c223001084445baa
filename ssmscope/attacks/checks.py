"""What attacks refuse of their options before anything is loaded."""

from __future__ import annotations

from typing import Any


def check_asked(**options: Any) -> None:
    """Refuse templates without a place for the text, and label words that are none.

    Raises:
        InputError: as said.
    """
    given = options.get("template")
    if given:
        from ssmscope.evaluation.template import Template

        for text in [given] if isinstance(given, str) else given:
            Template(text)
    if options.get("words") is not None:
        from ssmscope.evaluation.verbalizer import checked_words

        checked_words(list(options["words"]))
