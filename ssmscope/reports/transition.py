"""Blocks of results whose HTML view is not made of blocks; a class with `blocks` of its own needs nothing of this."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ssmscope.results import Result
from ssmscope.show.blocks import Block, Picture, TokenScores


def blocks_of(result: Result) -> Iterable[Block]:
    """The blocks of a result."""
    own = result.kind == "heatmap" and type(result).blocks is Result.blocks
    return _heatmap(result) if own else result.blocks()


def _heatmap(result: Any) -> Iterable[Block]:
    if result.of_images:
        yield from Result.blocks(result)
        return
    about = dict(texts=result.texts, layers=result.layers, score=result.score, name=result.score_name)
    yield TokenScores(html=result._repr_html_, **about)
    yield Picture(result.figure, result.headline, vector=False, folded=True)
