"""Views of series in their words: a position is a "step", not a token or word, and an input a "series", not a text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

WORDS = re.compile(r"“[^”]*”|\b(?:token|word|text)s?\b", re.IGNORECASE)


def in_steps(said: str) -> str:
    """Return what is said of tokens, words and texts as said of steps and series; quotations are left."""

    def other(found: re.Match[str]) -> str:
        word = found[0]
        if word[0] == "“":
            return word
        new = "series" if word.lower().startswith("text") else "step" + "s" * word.endswith("s")
        return new.capitalize() if word[0].isupper() else new

    return WORDS.sub(other, said)


def worded(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what a result says or shows, a sentence or blocks, to be in the words of its inputs."""

    @functools.wraps(own)
    def said(result: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(result, *args, **kwargs)
        if result.provenance.get("reads") != "series":
            return found
        return in_steps(found) if isinstance(found, str) else map(_block, found)

    return said


def _block(block: Any) -> Any:
    from ssmscope.render.blocks import Prose, TokenRows
    from ssmscope.render.table import Table

    if isinstance(block, Prose):
        return replace(block, text=in_steps(block.text))
    if isinstance(block, TokenRows):
        texts = [replace(text, about=in_steps(text.about)) for text in block.texts]
        return replace(block, texts=texts, name=in_steps(block.name), marked=in_steps(block.marked))
    if isinstance(block, Table):
        heads, columns = (tuple(map(in_steps, each)) for each in (block.heads, block.columns))
        return replace(block, heads=heads, columns=columns, note=in_steps(block.note), title=in_steps(block.title))
    return block
