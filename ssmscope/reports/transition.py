"""Blocks of results whose HTML view is not made of blocks; a class with `blocks` of its own needs nothing of this."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ssmscope.results import Result
from ssmscope.show.blocks import Block, Custom, Picture, TokenMaps, TokenScores


def blocks_of(result: Result) -> Iterable[Block]:
    """The blocks of a result."""
    own = type(result)
    if own.blocks is Result.blocks and own._repr_html_ is not Result._repr_html_ and result.kind in _OWN:
        return _OWN[result.kind](result)
    return result.blocks()


def _whole(result: Any) -> Iterable[Block]:
    yield Custom(html=lambda: _lower(result._repr_html_()))


def _heatmap(result: Any) -> Iterable[Block]:
    if result.of_images:
        yield from Result.blocks(result)
        return
    about = dict(texts=result.texts, layers=result.layers, score=result.score, name=result.score_name)
    yield TokenScores(html=result._repr_html_, **about)
    yield Picture(result.figure, result.headline, vector=False, folded=True)


def _attention(result: Any) -> Iterable[Block]:
    html = result._repr_html_()
    script = re.search(r"<script>(.*?)</script></div>$", html, re.DOTALL)
    html = html.replace(f"<script>{script[1]}</script>", "") if script else html
    tokens = [text.tokens for text in result]
    yield TokenMaps(html=lambda: html, script=script[1] if script else "", tokens=tokens, name=result.level_name)


def _lower(html: str) -> str:
    """The view with its headings below those of an entry, and with rules that are of nothing else in the page."""
    html = html.replace('<div class="ssmscope">', '<div class="ssmscope-own">').replace(".ssmscope ", ".ssmscope-own ")
    return html.replace("<h2>", "<h4>").replace("</h2>", "</h4>")


_OWN: Mapping[str, Callable[[Any], Iterable[Block]]] = {
    "attention": _attention,
    "effect": _whole,
    "heatmap": _heatmap,
    "prompts": _whole,
    "words": _whole,
}
