"""Views of series in their words: a position is a "step", not a token or word, and an input a "series", not a text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A word of a sentence, not part of a path, a file's name or an option.
WORD = r"(?<![\w/.=_-])(?P<word>(?:token|word|text)s?)(?![\w/=_-]|\.\w)"


def in_steps(said: str, names: Collection[str] = ()) -> str:
    """Return what is said of tokens, words and texts as said of steps and series; quotations and `names` are left."""
    left = "".join(rf"(?<!\w){re.escape(name)}(?!\w)|" for name in sorted(names, key=len, reverse=True) if name)

    def other(found: re.Match[str]) -> str:
        if (word := found["word"]) is None:
            return found[0]
        new = "series" if word.lower().startswith("text") else "step" + "s" * word.endswith("s")
        return new.capitalize() if word[0].isupper() else new

    return re.sub(rf"“[^”]*”|{left}(?i:{WORD})", other, said)


def worded(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what a result says or shows, a sentence or blocks, to be in the words of its inputs."""

    @functools.wraps(own)
    def said(result: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(result, *args, **kwargs)
        if (steps := _steps(result)) is None:
            return found
        return steps(found) if isinstance(found, str) else (_block(block, steps) for block in found)

    return said


def drawn_in_steps(result: Any, ax: Any, title: str | None, draw: Callable[[], Figure]) -> Figure:
    """Draw a result's picture into `ax` or a figure of its own, in the words of its inputs; the user's are left."""
    from matplotlib.text import Text

    if (steps := _steps(result, title or "")) is None:
        return draw()
    kept = {id(text) for text in ax.figure.findobj(Text)} if ax is not None else set[int]()
    figure = draw()
    for text in figure.findobj(Text):
        if id(text) not in kept:
            text.set_text(steps(text.get_text()))
    return figure


def _steps(result: Any, *names: str) -> Callable[[str], str] | None:
    """Return the function that words what a result of series says; None for other results."""
    if result.provenance.get("reads") != "series":
        return None
    given = (result.provenance.get(each) for each in ("model", "models", "data"))
    return functools.partial(in_steps, names=[*names, *(name for each in given for name in _strings(each))])


def _strings(given: Any) -> Iterator[str]:
    """Yield all strings in a record's entry."""
    if isinstance(given, str):
        yield given
    elif isinstance(given, Mapping | list | tuple):
        for each in given.values() if isinstance(given, Mapping) else given:
            yield from _strings(each)


def _block(block: Any, steps: Callable[[str], str]) -> Any:
    from ssmscope.render.blocks import Prose, TokenRows
    from ssmscope.render.table import Table

    if isinstance(block, Prose):
        return replace(block, text=steps(block.text))
    if isinstance(block, TokenRows):
        texts = [replace(text, about=steps(text.about)) for text in block.texts]
        return replace(block, texts=texts, name=steps(block.name), marked=steps(block.marked))
    if isinstance(block, Table):
        heads, columns = (tuple(map(steps, each)) for each in (block.heads, block.columns))
        return replace(block, heads=heads, columns=columns, note=steps(block.note), title=steps(block.title))
    return block
