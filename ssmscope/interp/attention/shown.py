"""Texts in an attention analysis: the rows or cells shown, the marked span, and the maps so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ssmscope.errors import InputError
from ssmscope.interp.attention.readouts import Readouts, read
from ssmscope.interp.attention.result import AttendedText, AttentionMap
from ssmscope.interp.spans import find_piece, spelling
from ssmscope.ops.pooled import causal_pairs, edges

if TYPE_CHECKING:
    from ssmscope.core.trace import Trace

MAX_WHOLE_TOKENS = 1024
"""Largest number of tokens whose map is whole by default; longer texts are pooled to `DEFAULT_CELLS` cells."""
DEFAULT_CELLS = 512
MAX_ROLLOUT_TOKENS = 8192
"""Largest number of tokens of a text in a rollout, which needs whole maps."""


class ShownText:
    """One text of a trace, its rows or cells, and the maps added so far.

    Raises:
        InputError: a row or a span that the text does not have, or more than `MAX_ROLLOUT_TOKENS` tokens for a rollout.
    """

    def __init__(
        self,
        trace: Trace,
        row: int,
        *,
        rows: str | Sequence[int],
        pool: int | None,
        span: str | None,
        rollout: bool = False,
    ) -> None:
        self.trace, self.row = trace, row
        self.length = len(trace.tokens[row])
        self.chosen = self._rows(rows)
        cells = self._cells(pool)
        self.edges = None if cells is None else edges(self.length, cells)
        if rollout and self.length > MAX_ROLLOUT_TOKENS:
            raise InputError(
                f"text {row} has {self.length:,} tokens: a rollout needs whole maps, of at most {MAX_ROLLOUT_TOKENS:,} "
                "tokens"
            )
        self.span = self._span(span)
        self.maps: list[AttentionMap] = []

    def _rows(self, rows: str | Sequence[int]) -> list[int] | None:
        if isinstance(rows, str):
            return None if rows == "all" else [self.length - 1]
        absent = next((row for row in rows if not -self.length <= row < self.length), None)
        if absent is not None:
            raise InputError(f"text {self.row} has no row {absent}; allowed are positions below {self.length}")
        return [row % self.length for row in rows]

    def _cells(self, pool: int | None) -> int | None:
        if self.chosen is not None or pool == 0 or (pool is None and self.length <= MAX_WHOLE_TOKENS):
            return None
        cells = DEFAULT_CELLS if pool is None else pool
        return None if cells >= self.length else cells

    def _span(self, span: str | None) -> tuple[int, int] | None:
        if span is None:
            return None
        tokens = self.trace.tokens[self.row]
        first, colon, last = span.partition(":")
        found = (int(first), int(last)) if colon and first.isdecimal() and last.isdecimal() else None
        if found is None:
            found = find_piece(span, spelling(self.trace, self.row))
        if found is None:
            raise InputError(f"text {self.row} has no {span!r}; give a piece of it, or token positions as 3:7")
        if not 0 <= found[0] < found[1] <= len(tokens):
            raise InputError(
                f"the span {found[0]}:{found[1]} is not within the {len(tokens)} tokens of text {self.row}"
            )
        return found

    @property
    def queries(self) -> np.ndarray:
        if self.edges is not None:
            return self.edges[1:].numpy() - 1
        return np.array(self.chosen if self.chosen is not None else range(self.length), dtype=np.int64)

    def add(self, layer: str, part: str, head: str, values: Tensor, sink: Tensor | None, top: int) -> None:
        """Add a map of the rows or cells that are shown."""
        shown = values.detach().float().cpu().numpy()
        if not np.isfinite(shown).all():
            raise InputError(f"the attention of text {self.row} is not finite at layer {layer}: the model is damaged")
        column = None if sink is None else sink.detach().float().cpu().numpy()
        edge = None if self.edges is None else self.edges.numpy()
        if self.trace.bidirectional:
            readouts = Readouts(*[math.nan] * 4)  # Neither distances back nor first tokens have a meaning.
        else:
            readouts = read(shown, column, self.queries, edge, self.span, top)
        self.maps.append(AttentionMap(layer, part, head, shown, column, readouts))

    def shown(self, matrix: Tensor) -> Tensor:
        """Return the rows or cells of a whole map (length, length) that are shown."""
        if self.chosen is not None:
            return matrix[self.chosen]
        return matrix if self.edges is None else pooled(matrix, self.edges)

    def shown_column(self, column: Tensor) -> Tensor:
        """Return the entries of a column (length,) that are shown, averaged over cells."""
        if self.chosen is not None:
            return column[self.chosen]
        if self.edges is None:
            return column
        return torch.stack([part.mean() for part in column.split(self.edges.diff().tolist())])

    def finished(self) -> AttendedText:
        """Return the text with its maps as the result holds it."""
        answer, probability = self.trace.answers[self.row]
        pixels = self.trace.pixels
        return AttendedText(
            tokens=tuple(self.trace.tokens[self.row]),
            words=tuple(self.trace.words[self.row]),
            queries=self.queries,
            edges=None if self.edges is None else self.edges.numpy(),
            span=self.span,
            maps=tuple(self.maps),
            answer=answer,
            probability=float(probability),
            pixels=None if pixels is None else pixels[self.row].float().cpu().numpy(),
            bidirectional=self.trace.bidirectional,
        )


def pooled(matrix: Tensor, edge: Tensor) -> Tensor:
    """Average each cell over its pairs in which the key does not come after the query."""
    place = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(matrix.device)
    cells = len(edge) - 1
    rows = matrix.new_zeros(cells, matrix.shape[1]).index_add_(0, place, matrix)
    return matrix.new_zeros(cells, cells).index_add_(1, place, rows) / causal_pairs(edge).clamp(min=1).to(matrix)
