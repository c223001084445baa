"""What results are made of when they are shown: the same blocks in a terminal, in HTML and in a report.

A result yields blocks; `ssmscope.show.terminal` and `ssmscope.show.html` draw them. A picture is drawn by matplotlib,
on a `Sheet` of `ssmscope.show.figure`. `Custom` is for what is special, such as a text with its changes marked;
`TokenScores` and `TokenMaps` are such views that a report relates to one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ssmscope.show.table import Table

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True)
class Prose:
    """A paragraph, a heading, the title of a result, or a note in smaller letters.

    A title stands above a terminal's view alone: a page has its own.
    """

    text: str
    kind: Literal["text", "heading", "title", "note"] = "text"


@dataclass(frozen=True)
class Picture:
    """A figure, drawn where pictures are shown.

    Attributes:
        draw: makes it.
        alt: what it says, for those who do not see it.
        vector: whether it is drawn as lines, not as pixels, where that is possible.
        folded: whether a page shows it when it is asked for, because another view of the result says the same.
    """

    draw: Callable[[], Figure]
    alt: str = ""
    vector: bool = True
    folded: bool = False


@dataclass(frozen=True)
class Custom:
    """A view of its own.

    Attributes:
        terminal: what a terminal shows, told whether it has 256 colours.
        html: a fragment, safe as it is, without styles and scripts.
        style: the rules that it adds to the stylesheet.
        script: what makes it live. It runs once, after everything that is in the page, and leaves alone what it has
            started before.
        on_request: whether a report, which shows many results, puts the fragment into its page only when it is asked
            for, because it has an element for every token.
    """

    terminal: Callable[[bool], Iterable[RenderableType]] | None = None
    html: Callable[[], str] | None = None
    style: str = ""
    script: str = ""
    on_request: bool = False


class ScoredText(Protocol):
    """A text of a `TokenScores`: (tokens,) tokens with scores (layers, tokens) and their mean (tokens,)."""

    @property
    def tokens(self) -> tuple[str, ...]: ...
    @property
    def words(self) -> tuple[int | None, ...]:
        """The word that each token belongs to; None for a special token."""

    @property
    def special(self) -> np.ndarray: ...
    @property
    def scores(self) -> np.ndarray: ...
    @property
    def mean(self) -> np.ndarray: ...
    @property
    def rationale(self) -> tuple[int, ...]:
        """The tokens that are marked, the highest first."""

    @property
    def answer(self) -> str: ...
    @property
    def probability(self) -> float: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class TokenScores(Custom):
    """Texts whose tokens are scored in several layers. A report shows those of an analysis in one view to point at,
    in place of the fragments.

    Attributes:
        texts: the texts.
        layers: the number of each layer.
        score: what a token's score is, in a word.
        name: the same, as a legend has it.
    """

    texts: Sequence[ScoredText]
    layers: Sequence[int]
    score: str
    name: str


@dataclass(frozen=True, kw_only=True)
class TokenMaps(Custom):
    """Weights between the tokens of texts. In a report the tokens of `TokenScores` of the same model lead to them.

    The fragment holds one element `script` of type application/json, {"texts": [...]}, in the order of `tokens`: for
    each text null or {"length", "queries", "edges", "maps"}, as `ssmscope.interp.attention.page` packs them.

    Attributes:
        tokens: the tokens of each text.
        name: what the weights are of.
    """

    tokens: Sequence[tuple[str, ...]]
    name: str


Block = Prose | Table | Picture | Custom
