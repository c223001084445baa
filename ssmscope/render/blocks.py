"""Blocks that results consist of in a terminal, in HTML and in a report.

A result yields blocks; `terminal` and `html` of this package draw them. Pictures are drawn by matplotlib, on a `Sheet`
of `ssmscope.render.figure`. `TokenRows` are texts whose tokens are coloured by scores, in a row for each layer, method
or query. `Custom` is for special views, such as a text with its changes marked; `TokenMaps` is one that a report links
to the tokens of `TokenRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from ssmscope.outline import Outlined
from ssmscope.render.colours import SHADES, STEPS
from ssmscope.render.numbers import format_range, number
from ssmscope.render.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True)
class Prose:
    """Paragraph, heading, note in smaller letters, the title of a result, which only a terminal shows, or a definition,
    which is shown on request."""

    text: str
    kind: Literal["text", "heading", "title", "note", "definition"] = "text"


@dataclass(frozen=True)
class Picture:
    """Figure, described by `alt`, for views with pictures, `vector` for vector graphics; a `folded` one is shown on
    request, because another view shows the same. Pages in dark mode darken it, but for the axes of its `photo`."""

    draw: Callable[[], Figure]
    alt: str = ""
    vector: bool = True
    folded: bool = False
    photo: bool = False


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Score for every token of a text, for example by layer, by method, or as contributions to a query.

    Attributes:
        name: label of the row; a picture joins its lines.
        ends: lowest and highest score of the colour scale; scores beyond have the colour of the end.
        signed: True if positive scores are evidence for and negative ones against; the ends are −e and e.
        outside: (tokens,) bool, the tokens without a colour; None if there are none.
        marked, against: the underlined tokens, and those of the opposite sign, the strongest first.
        query: the framed token, to which the other tokens contribute their scores.
        state: score of everything before the first token.
        remark: further words at the end of the row.
        own: lowest and highest score of this row, if several rows share `ends`.
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
        """The ends of the colour scale in numbers."""
        return f"±{number(self.ends[1])}" if self.signed else format_range(*(self.own or self.ends))

    def shades(self, scores: np.ndarray | None = None, *, count: int | None = None) -> np.ndarray:
        """Return the index of each token's colour among `count`, by default 2 STEPS + 1 for signed scores, else SHADES;
        −1 for none. Other `scores` are coloured on the same scale."""
        low, high = self.ends
        values = (self.scores if scores is None else scores).astype(np.float64)
        unit = np.clip((values - low) / (high - low), 0, 1) if high > low else np.full(values.shape, 0.5)
        found = np.rint(unit * ((count or (2 * STEPS + 1 if self.signed else SHADES)) - 1)).astype(np.int64)
        return found if self.outside is None or scores is not None else np.where(self.outside, -1, found)

    @property
    def state_shade(self) -> int:
        """Index of the state's colour."""
        return int(self.shades(np.array([self.state]))[0])


class OfTokens(Outlined):
    """Mixin of a text with `tokens` and `words`: its length, and its special tokens."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def special(self) -> np.ndarray:
        """Mask of the tokens that the tokenizer added: (tokens,) bool."""
        return np.array([word is None for word in self.words], dtype=bool)


@dataclass(frozen=True, eq=False)
class TokenText(OfTokens):
    """Text whose tokens are coloured by `rows`, under the model's answer, its probability and further words `about` it.

    Attributes:
        words: number of the word that each token belongs to; None for a special token.
        span: highlighted tokens, from the first to the one after the last.
        pixels: (height, width, channels), for an image whose pixels are the tokens.
        series: (length, channels), for a series whose steps are the tokens.
    """

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    rows: Sequence[TokenRow]
    answer: str
    probability: float
    about: str = ""
    span: tuple[int, int] | None = None
    pixels: np.ndarray | None = None
    series: np.ndarray | None = None


OF_DIFFERENCES = ("less", "more")
"""Names of the ends of a scale of differences between two models' unsigned scores."""


@dataclass(frozen=True)
class TokenRows:
    """Texts whose tokens are coloured, in one row or several. Only the picture shows images.

    Attributes:
        of: kind of the rows: "layer", "method".
        score, name: name of the score in one word, and in a legend.
        marked: description of the underlined tokens.
        around: names of negative and positive scores.
        first: maximum rows of a text in a terminal; None for all.
        summed: True if a word's score is the sum of its tokens' scores, False if it is their mean.
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
    """View that draws itself.

    Attributes:
        terminal: returns the terminal view, or a table to show there, given True if the terminal has 256 colours.
        html: returns an escaped fragment without the rules `style` and the `script`, which runs once, after the whole
            page, and skips elements that it has started before.
        on_request: True if a report inserts the fragment only on request, because it has an element for every token.
    """

    terminal: Callable[[bool], Iterable[RenderableType] | Table] | None = None
    html: Callable[[], str] | None = None
    style: str = ""
    script: str = ""
    on_request: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenMaps(Custom):
    """Weights called `name` between the tokens of texts, to which a report links the `TokenRows` of the same model.

    The fragment holds one element `script` of type application/json, {"texts": [...]}, in the order of `tokens`: for
    each text null or {"length", "queries", "edges", "maps"} and perhaps "ahead" and "notes", as
    `ssmscope.render.token_maps` packs them.
    """

    tokens: Sequence[tuple[str, ...]]
    name: str


Block = Prose | Table | Picture | TokenRows | Custom
