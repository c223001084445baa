"""Grids of words by layer and token, coloured by a score: the block, its table in a terminal, and its page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Literal

import numpy as np
from rich.table import Table
from rich.text import Text
from ssmscope.render.blocks import Custom
from ssmscope.render.colours import SHADES, shade_style
from ssmscope.render.numbers import evenly_spaced
from ssmscope.render.tokens import REST, short_token, shorten, visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

MAX_PAGE_CELLS = 20_000
MAX_TERMINAL_TOKENS = 40
FIXED_WIDTH, LAYER_WIDTH = 40, 12
"""Characters of all other columns of a terminal's table, and of a layer's column."""


@dataclass(frozen=True, eq=False)
class WordGrid:
    """Words of each layer at some tokens, the model's own in the last row; arrays are (layers + 1, tokens).

    Attributes:
        label: heading of the grid, "text 2".
        numbers: position of each token, or number of its text.
        scores: numbers by name; NaN for none.
        same: True where a layer has the model's word.
        settled: (tokens,) the first layer from which on they are the same.
    """

    label: str
    numbers: np.ndarray
    tokens: Sequence[str]
    words: Sequence[Sequence[str]]
    scores: Mapping[str, np.ndarray]
    same: np.ndarray
    settled: np.ndarray

    def part(self, chosen: slice) -> WordGrid:
        return replace(
            self,
            numbers=self.numbers[chosen],
            tokens=self.tokens[chosen],
            words=[row[chosen] for row in self.words],
            scores={name: scores[:, chosen] for name, scores in self.scores.items()},
            same=self.same[:, chosen],
            settled=self.settled[chosen],
        )


@dataclass(frozen=True, eq=False)
class WordGrids:
    """Grids with a `column` for each token of a text, or for each text; the cells are coloured by `score`.

    `source` reads the words, and `names` are those of the scores in the views.
    """

    grids: Sequence[WordGrid]
    column: Literal["token", "text"]
    source: str
    names: Mapping[str, str]
    score: str

    @property
    def layers(self) -> int:
        return len(self.grids[0].words) - 1

    @property
    def highest(self) -> float:
        """End of the colour scale, which begins at 0: 1 for probabilities, else the highest score."""
        scores = np.concatenate([grid.scores[self.score].ravel() for grid in self.grids])
        if self.score.endswith("probability") or np.isnan(scores).all():
            return 1.0
        return max(float(np.nanmax(scores)), 1e-9)

    def block(self) -> Custom:
        return Custom(lambda colours: [self], self.html, STYLE, on_request=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield a table per text, with a line per token and as many layers as fit the terminal."""
        layers = evenly_spaced(self.layers, max((options.max_width - FIXED_WIDTH) // LAYER_WIDTH, 2))
        settled = "Settled: the layer from which on the final answer leads; bold, the layers that give it."
        yield Text(settled, style="dim")
        if len(layers) < self.layers:
            cut = f"{len(layers)} of {self.layers} layers below the model's answer; the files have all"
            yield Text(cut, style="dim")
        for grid in self.grids:
            yield Text(f"\n{grid.label}" if len(self.grids) > 1 else "", style="dim")
            shown = grid.part(slice(MAX_TERMINAL_TOKENS if self.column == "token" else None))
            yield _terminal_table(shown, layers, "text" if self.column == "text" else "")
            if len(shown.tokens) < len(grid.tokens):
                yield Text(f"{len(shown.tokens)} of {len(grid.tokens)} tokens; the files have all", style="dim")

    def html(self) -> str:
        """Return every grid with all numbers in tooltips, and a legend."""
        high = self.highest
        return (
            f'<div class="grids"><p class="legend"><span>{escape(self.source)}</span>'
            f'<span class="scale">0 <i></i> {high:.3g} {escape(self.names[self.score])}</span>'
            '<span><b class="settled">outlined</b> from here on the final answer leads</span></p>'
            f"{''.join(self._section(grid, high) for grid in self.grids)}</div>"
        )

    def _section(self, grid: WordGrid, high: float) -> str:
        shown = grid.part(slice(max(MAX_PAGE_CELLS // (self.layers + 1), 1)))
        columns = range(len(shown.tokens))
        lines = []
        for layer in range(self.layers, -1, -1):
            cells = "".join(self._cell(shown, layer, at, high) for at in columns)
            lines.append(f"<tr><th>{'model' if layer == self.layers else layer}</th>{cells}</tr>")
        named = [escape(shorten(visible(token) or REST, 40)) for token in shown.tokens]
        if self.column == "text":
            named = [f"text {number}<br>{name}" for number, name in zip(shown.numbers, named)]
        lines.append(f'<tr class="tokens"><th>token</th>{"".join(f"<td>{name}</td>" for name in named)}</tr>')
        rest = f"{len(columns)} of {len(grid.tokens)} {self.column}s" if len(columns) < len(grid.tokens) else ""
        note = f'<p class="note">{rest}</p>' if rest else ""
        return f'<section><div class="wide" tabindex="0"><table>{"".join(lines)}</table></div>{note}</section>'

    def _cell(self, grid: WordGrid, layer: int, at: int, high: float) -> str:
        where = f"{'position' if self.column == 'token' else 'text'} {grid.numbers[at]}"
        lines = ["the model's own answer" if layer == self.layers else f"{where}, layer {layer}"]
        values = {name: float(scores[layer, at]) for name, scores in grid.scores.items()}
        lines += [f"{self.names[name]}: {value:.5g}" for name, value in values.items() if not math.isnan(value)]
        level = shade(values[self.score], high)
        names = ["none" if level is None else f"v{level}"]
        names += ["same"] * bool(grid.same[layer, at]) + ["settled"] * bool(grid.settled[at] == layer)
        title = escape("\n".join(lines)).replace("\n", "&#10;")
        word = escape(shorten(visible(grid.words[layer][at]), 24))
        return f'<td class="{" ".join(names)}" title="{title}">{word}</td>'


def shade(value: float, high: float) -> int | None:
    """Return the index of a value's shade on a scale from 0 to `high`; None for NaN."""
    return None if math.isnan(value) else round(min(max(value / high, 0.0), 1.0) * (SHADES - 1))


def _terminal_table(grid: WordGrid, layers: Sequence[int], counted: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (counted, "token", "settled", *(f"layer {layer}" for layer in layers), "answer"):
        numeric = name in (counted, "settled")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis")
    for at, (number, token) in enumerate(zip(grid.numbers, grid.tokens)):
        styles = ["bold" if grid.same[layer, at] else "" for layer in layers]
        words = [Text(short_token(grid.words[layer][at], 10), style) for layer, style in zip(layers, styles)]
        final = f"{short_token(grid.words[-1][at], 12)} {grid.scores['answer_probability'][-1, at]:.2f}"
        words = [Text(short_token(token, 12)), Text(str(grid.settled[at])), *words, Text(final, style="bold")]
        table.add_row(str(number), *words)
    return table


STYLE = f"""{shade_style()}
.ssmscope .grids section {{ border-top: 1px solid var(--line); padding: 14px 0 16px; }}
.ssmscope .grids table {{ border-collapse: separate; border-spacing: 1px; font-size: 12px; }}
.ssmscope .grids th {{ position: sticky; left: 0; background: var(--paper); color: var(--soft); font-weight: 500;
  padding: 2px 8px 2px 0; text-align: right; border: 0; }}
.ssmscope .grids td {{ padding: 2px 5px; text-align: center; white-space: pre; min-width: 2.5em; border: 0; }}
.ssmscope .grids .tokens td {{ font-style: italic; }}
.ssmscope .grids .same {{ font-weight: 700; }}
.ssmscope .grids .settled {{ box-shadow: inset 0 0 0 2px var(--mark); }}
.ssmscope .grids b.settled {{ padding: 1px 5px; font-weight: 500; }}
"""
