"""What results are made of when they are shown: the same blocks in a terminal, in HTML and in a report.

A result yields blocks; `terminal` and `html` of this package draw them. A picture is drawn by matplotlib,
on a `Sheet` of `ssmscope.render.figure`. `TokenRows` are texts whose tokens are coloured by scores, row by row: of each
layer, by each method, for a query. `Custom` is for what is special, such as a text with its changes marked; `TokenMaps`
is such a view, to which a report leads from the tokens of `TokenRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ssmscope.render.numbers import number
from ssmscope.render.signed import STEPS
from ssmscope.render.table import Table
from ssmscope.render.tokens import SHADES, span_of

if TYPE_CHECKING:
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


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A score for every token of a text: of a layer, by a method, or what a query takes from each.

    Attributes:
        name: what it is of; a second line is written smaller.
        scores: (tokens,).
        ends: where the colours begin and end; a score beyond has the colour of the end.
        signed: whether scores are for (positive) or against (negative); their ends are −e and e.
        outside: (tokens,) bool, those that have no colour; None for none.
        marked: the tokens that are underlined, the strongest first.
        against: the same of those against what the marked ones are for.
        query: the token that is framed, because the others' scores are what it takes from them.
        state: the score of what comes before the first token.
        remark: what has to be said of it.
        own: the lowest and highest score, where other rows have the same ends.
    """

    name: str
    scores: np.ndarray
    ends: tuple[float, float]
    signed: bool = False
    outside: np.ndarray | None = None
    marked: Sequence[int] = ()
    against: Sequence[int] = ()
    query: int | None = None
    state: float | None = None
    remark: str = ""
    own: tuple[float, float] | None = None

    @property
    def extent(self) -> str:
        """The ends of the colours in figures."""
        return f"±{number(self.ends[1])}" if self.signed else span_of(*(self.own or self.ends))

    def shades(self, scores: np.ndarray | None = None, *, count: int | None = None) -> np.ndarray:
        """Which of `count` colours each token has, or each of other scores on the same scale, from 0 on; −1 for none.
        By default there are 2 STEPS + 1 around zero, or SHADES."""
        low, high = self.ends
        values = (self.scores if scores is None else scores).astype(np.float64)
        unit = np.clip((values - low) / (high - low), 0, 1) if high > low else np.full(values.shape, 0.5)
        found = np.rint(unit * ((count or (2 * STEPS + 1 if self.signed else SHADES)) - 1)).astype(np.int64)
        return found if self.outside is None or scores is not None else np.where(self.outside, -1, found)


@dataclass(frozen=True, eq=False)
class TokenText:
    """A text whose tokens are shown in colour.

    Attributes:
        tokens: its tokens.
        words: the word that each of them belongs to; None for a special token.
        rows: what the tokens are coloured by.
        answer: the model's, with its probability.
        about: what else is said above it.
        span: tokens that are set apart, from the first to the one after the last.
        pixels: (height, width, channels), of an image whose pixels are the tokens.
    """

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    rows: Sequence[TokenRow]
    answer: str
    probability: float
    about: str = ""
    span: tuple[int, int] | None = None
    pixels: np.ndarray | None = None

    @property
    def special(self) -> np.ndarray:
        """(tokens,) bool: the tokens that the tokenizer added."""
        return np.array([word is None for word in self.words], dtype=bool)


@dataclass(frozen=True)
class TokenRows:
    """Texts whose tokens are coloured, in one row or several. A report has those of an analysis in one view to point
    at; images are in the picture alone.

    Attributes:
        texts: the texts.
        of: what a row is of: "layer", "method".
        score: what is scored, in a word.
        name: the same, as a legend has it.
        marked: what is underlined, in words.
        around: what negative and positive scores are called.
        first: how many rows of each text a terminal shows; None for all.
        summed: whether the scores of the tokens of a word add up; else the word has their mean.
    """

    texts: Sequence[TokenText]
    of: str
    score: str
    name: str
    marked: str
    around: tuple[str, str] = ("against", "for")
    first: int | None = None
    summed: bool = True


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


@dataclass(frozen=True, kw_only=True)
class TokenMaps(Custom):
    """Weights between the tokens of texts. In a report the tokens of `TokenRows` of the same model lead to them.

    The fragment holds one element `script` of type application/json, {"texts": [...]}, in the order of `tokens`: for
    each text null or {"length", "queries", "edges", "maps"}, as `ssmscope.interp.attention.page` packs them.

    Attributes:
        tokens: the tokens of each text.
        name: what the weights are of.
    """

    tokens: Sequence[tuple[str, ...]]
    name: str


Block = Prose | Table | Picture | TokenRows | Custom
