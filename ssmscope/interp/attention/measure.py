"""Maps of implicit attention: those of single layers, their product over layers, those of a hybrid's softmax attention,
and maps weighed by the gradient of a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from ssmscope.api.options import chosen_layers
from ssmscope.core.attention_layers import attending, attention_layers, attention_numbers
from ssmscope.core.encoding import Batch
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.model import Model
from ssmscope.core.trace import Trace
from ssmscope.errors import InputError
from ssmscope.interp.attention.maps import SOFTMAX, AttendedText, AttentionMap, Readouts
from ssmscope.interp.methods.gradients import output_gradients
from ssmscope.interp.objective import objective
from ssmscope.interp.spans import find_piece, spelling
from ssmscope.ops.pooled import causal_pairs, edges

MAX_WHOLE_TOKENS = 1024
"""Largest number of tokens whose map is whole by default; longer texts are pooled to `DEFAULT_CELLS` cells."""
DEFAULT_CELLS = 512
MAX_ROLLOUT_TOKENS = 8192
"""Largest number of tokens of a text in a rollout, which needs whole maps."""
MAX_SEPARATE_HEADS = 64
"""Largest number of heads that "all" maps one by one; more are averaged in groups of neighbours."""
MAX_HEAD_GROUPS = 16
MAX_MAP_WEIGHTS = 2**29
"""Largest number of weights of a softmax layer's whole maps of a text, which are in memory at once."""


Marks = Sequence[np.ndarray | None] | None
"""Marked tokens of every text of a batch, (length,) bool; None for none."""


@dataclass(frozen=True)
class Asked:
    """Options of `implicit_attention` that all maps share."""

    level: str
    heads: str
    rows: str | Sequence[int]
    pool: int | None
    skip: bool
    residual: float
    span: str | None
    top: int


class ShownText:
    """One text of a trace, its rows or cells, and the maps added so far."""

    def __init__(
        self, trace: Trace, row: int, asked: Asked, marked: np.ndarray | None = None, *, rollout: bool = False
    ) -> None:
        self.trace, self.row, self.asked, self.marked = trace, row, asked, marked
        self.length = len(trace.tokens[row])
        self.chosen = self._rows(asked.rows)
        cells = asked.pool
        if cells is None and self.length > MAX_WHOLE_TOKENS:
            cells = DEFAULT_CELLS
        self.edges: Tensor | None = None
        if self.chosen is None and cells and cells < self.length:
            self.edges = edges(self.length, cells)
        if rollout and self.length > MAX_ROLLOUT_TOKENS:
            limit = f"at most {MAX_ROLLOUT_TOKENS:,} tokens"
            raise InputError(f"text {row} has {self.length:,} tokens: a rollout needs whole maps, of {limit}")
        self.span = None if asked.span is None else self._span(asked.span)
        if self.span is not None:
            self.marked = np.zeros(self.length, dtype=bool)
            self.marked[slice(*self.span)] = True
        self.maps: list[AttentionMap] = []

    def _rows(self, rows: str | Sequence[int]) -> list[int] | None:
        if isinstance(rows, str):
            return None if rows == "all" else [self.length - 1]
        absent = next((row for row in rows if not -self.length <= row < self.length), None)
        if absent is not None:
            raise InputError(f"text {self.row} has no row {absent}; allowed are positions below {self.length}")
        return [row % self.length for row in rows]

    def _span(self, span: str) -> tuple[int, int]:
        first, _, last = span.partition(":")
        numbers = first.isdecimal() and last.isdecimal()
        found = (int(first), int(last)) if numbers else find_piece(span, spelling(self.trace, self.row))
        if found is None:
            raise InputError(f"text {self.row} has no {span!r}; give a piece of it, or token positions as 3:7")
        if not 0 <= found[0] < found[1] <= self.length:
            raise InputError(
                f"the span {found[0]}:{found[1]} is not within the {self.length} tokens of text {self.row}"
            )
        return found

    @cached_property
    def reader(self) -> Reader:
        edges = np.arange(self.length + 1) if self.edges is None else self.edges.numpy()
        return Reader(self.queries, edges, self.marked, self.asked.top)

    @property
    def queries(self) -> np.ndarray:
        if self.edges is not None:
            return self.edges[1:].numpy() - 1
        return np.array(self.chosen if self.chosen is not None else range(self.length), dtype=np.int64)

    def add(self, layer: str, part: str, head: str, values: Tensor, sink: Tensor | None = None) -> None:
        """Add a map of the rows or cells that are shown."""
        shown = values.detach().float().cpu().numpy()
        if not np.isfinite(shown).all():
            raise InputError(f"the attention of text {self.row} is not finite at layer {layer}: the model is damaged")
        column = None if sink is None else sink.detach().float().cpu().numpy()
        if self.trace.bidirectional:
            readouts = Readouts(*[math.nan] * 4)  # Neither distances back nor first tokens have a meaning.
        else:
            readouts = self.reader.read(shown, column)
        self.maps.append(AttentionMap(layer, part, head, shown, column, readouts))

    def even_map(self) -> AttentionMap:
        """Return a map of equal weights."""
        ones = np.ones(self.reader.pairs.shape, dtype=np.float32)
        return AttentionMap("even", "", "", ones, None, self.reader.read(ones, None))

    def add_softmax(self, number: int, weights: Float[Tensor, "heads length keys"], *, summed: bool = False) -> None:
        """Add the maps of a layer of attention, averaged or summed over all heads or those of each group."""
        names = head_names(len(weights), self.asked.heads)
        grouped = weights.unflatten(0, (len(names), -1))
        for name, values in zip(names, grouped.sum(1) if summed else grouped.mean(1)):
            self.add(f"{number} {SOFTMAX}", "", name, self.shown(values))

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
        """Return the text with its maps, sorted by layer, as the result holds it."""
        answer, probability = self.trace.answers[self.row]
        pixels, series, length = self.trace.pixels, self.trace.series, len(self.trace.tokens[self.row])
        maps = self.maps
        if any(each.softmax for each in maps):
            maps = sorted(maps, key=lambda each: int(each.layer.split()[0]))
        return AttendedText(
            tokens=tuple(self.trace.tokens[self.row]),
            words=tuple(self.trace.words[self.row]),
            queries=self.queries,
            edges=None if self.edges is None else self.edges.numpy(),
            span=self.span,
            maps=tuple(maps),
            answer=answer,
            probability=float(probability),
            pixels=None if pixels is None else pixels[self.row].float().cpu().numpy(),
            series=None if series is None else series[self.row, :length].float().cpu().numpy(),
            bidirectional=self.trace.bidirectional,
        )


def pooled(matrix: Tensor, edge: Tensor) -> Tensor:
    """Average each cell over its pairs in which the key does not come after the query."""
    place = torch.repeat_interleave(torch.arange(len(edge) - 1), edge.diff()).to(matrix.device)
    cells = len(edge) - 1
    rows = matrix.new_zeros(cells, matrix.shape[1]).index_add_(0, place, matrix)
    return matrix.new_zeros(cells, cells).index_add_(1, place, rows) / causal_pairs(edge).clamp(min=1).to(matrix)


def head_names(number: int, heads: str) -> list[str]:
    """Return the names of the maps of a layer with so many heads."""
    if heads != "all":
        return [heads]
    if number <= MAX_SEPARATE_HEADS:
        return [str(head) for head in range(number)]
    groups = next(g for g in range(MAX_HEAD_GROUPS, 0, -1) if number % g == 0)
    size = number // groups
    return [f"{g * size}–{(g + 1) * size - 1}" for g in range(groups)]


def add_maps(
    text: ShownText, linearized: LinearizedLayer, layer: int, part: str | None, *, summed: bool = False
) -> None:
    """Add a layer's maps, or those of one of its parts, to a text: means over channels, or sums."""
    asked = text.asked
    names = head_names(linearized.channels[0], asked.heads)
    scale = linearized.channels[0] * linearized.channels[1] / len(names) if summed else 1.0
    how: Mapping[str, Any] = {"groups": len(names), "part": part}
    absolute = asked.heads == "abs"
    if text.edges is not None and not absolute:
        maps = linearized.pooled_attention(asked.level, len(text.edges) - 1, skip=asked.skip, **how)
    else:
        maps = linearized.attention(asked.level, absolute=absolute, rows=text.chosen, skip=asked.skip, **how)
    sink = linearized.sink(asked.level, absolute=absolute, **how)
    for group, name in enumerate(names):
        values = maps[0, group]
        if text.edges is not None and absolute:
            values = pooled(values, text.edges)
        column = None if sink is None else text.shown_column(sink[0, group] * scale)
        text.add(str(layer), part or "", name, values * scale, column)


# ---- rollout


def roll_out(
    trace: Trace, chosen: Sequence[int], texts: Sequence[ShownText], beside: Sequence[Mapping[int, Tensor]]
) -> None:
    """Add the rollout of every text: R ← R (residual · I + (1 − residual) A) from the last layer to the first, A being
    |signed mean|, the mean of absolute values with heads "abs", or a text's softmax weights `beside`, by layer; where a
    layer has both, their mean. The share of a state before the first token stays there."""
    asked, sinks = texts[0].asked, False
    every_row = slice(None)
    starts = [torch.eye(t.length, dtype=torch.float32)[every_row if t.chosen is None else t.chosen] for t in texts]
    carried = [(start, torch.zeros_like(start[:, 0])) for start in starts]
    places = {trace.layer_numbers[index]: index for index in chosen}
    for number in sorted({*places, *(each for of in beside for each in of)}, reverse=True):
        linearized = trace.linearized[places[number]] if number in places else None
        for row, text in enumerate(texts):
            every = []
            if linearized is not None:
                one = linearized.of_text(row, text.length)
                *found, sink = absolute_map(one, asked.level, signed=asked.heads != "abs", skip=asked.skip)
                sinks |= sink
                every.append(normalise_rows(*found))
            if number in beside[row]:
                every.append((beside[row][number], torch.zeros_like(beside[row][number][0])))
            weights, column = (torch.stack(each).mean(0) for each in zip(*every))
            (R, gone), share = carried[row], asked.residual
            carried[row] = (share * R + (1 - share) * (R @ weights), gone + (1 - share) * (R @ column))
    for text, (R, gone) in zip(texts, carried):
        if text.edges is not None:
            R, gone = pooled(R, text.edges), text.shown_column(gone)
        text.add("rollout", "", asked.heads, R, gone if sinks else None)


def absolute_map(
    linearized: LinearizedLayer, level: str, *, signed: bool = False, skip: bool = True
) -> tuple[Float[Tensor, "length keys"], Float[Tensor, " length"], bool]:
    """Return a text's mean |weight| over channels, or |signed mean|; that of its initial state; and True if it has
    one."""
    weights = linearized.attention(level, absolute=not signed, skip=skip)[0, 0].abs().float().cpu()
    sink = linearized.sink(level, absolute=not signed)
    column = torch.zeros_like(weights[0]) if sink is None else sink[0, 0].abs().float().cpu()
    return weights, column, sink is not None


def normalise_rows(weights: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows and the sink column, none negative, by their sums; rows of zeros become the identity's."""
    total = weights.sum(-1) + sink
    empty = total == 0
    weights = weights / total.masked_fill(empty, 1).unsqueeze(-1)
    return weights + torch.diag(empty.to(weights)), sink / total.masked_fill(empty, 1)


# ---- softmax attention of a hybrid's other layers


def split_layers(
    layers: str | Sequence[int], numbers: Sequence[int], softmax: Sequence[int]
) -> tuple[str | tuple[int, ...], tuple[int, ...]]:
    """Split the chosen layers into state-space layers, with these `numbers`, and layers of attention."""
    if isinstance(layers, str) or not softmax:
        return layers if isinstance(layers, str) else tuple(layers), tuple(dict.fromkeys(softmax))
    chosen_layers(layers, sorted({*numbers, *softmax}))
    own, others = (tuple(layer for layer in layers if layer in some) for some in (numbers, softmax))
    return own, others


def see_softmax(
    model: Model, batch: Batch, row: int, layers: Sequence[int], take: Callable[[int, Tensor], None]
) -> None:
    """Run a text and pass softmax(q kᵀ), (heads, length, length), of these attention layers to `take`."""
    numbers, one = attention_numbers(model.module), batch.rows([row])

    def see(index: int, weights: Tensor) -> None:
        if numbers[index] in layers:
            take(numbers[index], weights[0])

    with torch.no_grad(), model.running(mask=one.mask), attending(model.module, mask=one.mask, see=see):
        model.forward(one, last_only=True, checked=False)


def mean_weights(
    model: Model, batch: Batch, row: int, layers: Sequence[int]
) -> dict[int, Float[Tensor, "length keys"]]:
    """Return softmax(q kᵀ) of a text, averaged over heads, by the number of the layer."""
    found: dict[int, Tensor] = {}
    if exceeds_map_limit(model, 1, batch.lengths[row]):
        raise InputError(f"text {row} has {batch.lengths[row]:,} tokens, too many for whole maps of attention layers")
    see_softmax(model, batch, row, layers, lambda number, w: found.update({number: w.mean(0).float().cpu()}))
    return found


def exceeds_map_limit(model: Model, texts: int, length: int) -> bool:
    """Return True if an attention layer has more than `MAX_MAP_WEIGHTS` weights on so many texts of this length."""
    counts = [part.config.num_attention_heads for part in attention_layers(model.module).values()]
    return texts * length**2 * max(counts, default=0) > MAX_MAP_WEIGHTS


# ---- attention × gradient


def gradient_maps(
    model: Model, batch: Batch, layers: str | Sequence[int], target: int | str | None, asked: Asked, marks: Marks = None
) -> tuple[Trace, list[ShownText], list[str]]:
    """Return the trace, the texts with their maps of attention × gradient, and the targets."""
    labels = model.labels
    if isinstance(target, str) and target.isdecimal() and target not in (labels or ()):
        target = int(target)
    goal = objective(model, batch, target=target)
    if goal.continues:
        raise InputError(f"the target {target!r} has several tokens; give one token's id")
    trace, numbers = model.trace(batch), attention_numbers(model.module)
    own, beside = split_layers(layers, trace.layer_numbers, numbers)
    chosen = chosen_layers(own, trace.layer_numbers)
    beside = () if exceeds_map_limit(model, len(trace), max(batch.lengths)) else beside
    texts = [ShownText(trace, row, asked, None if marks is None else marks[row]) for row in range(len(trace))]
    mixers, rows = [model.mixers[index] for index in chosen], list(range(len(trace)))
    found = output_gradients(goal, goal.embeddings(), rows, mixers, attention=bool(beside))
    for index, (_, gradient) in zip(chosen, found):
        linearized = trace.linearized[index]
        weighed = linearized.contributions(gradient.to(linearized.u))
        for row, text in enumerate(texts):
            add_maps(text, weighed.of_text(row, text.length), trace.layer_numbers[index], None, summed=True)
    for number, (A, gradient) in zip(numbers, found[len(chosen) :]):
        for row, text in enumerate(texts if number in beside else ()):
            text.add_softmax(number, (A * gradient)[row, :, : text.length, : text.length], summed=True)
    targets = [ids[0] for ids in goal.targets]
    return trace, texts, [labels[each] if labels is not None else str(each) for each in targets]


# ---- readouts


class Reader:
    """Readouts of the maps of a text, whole, pooled or with chosen rows.

    A pooled map stands for the map of single tokens that has in every causal pair of a cell the cell's mean: its mass
    is |mean| × pairs, and where the window, the first tokens or marked ones cut a cell, its share is that of its pairs.
    This is exact where the weights within each cell are equal; where their signs differ within a cell, less mass is
    seen than there is. A row of cells is one distribution, and counts as often as it has queries.

    `queries` has the position of each row, in a pooled map any in its cell; `edges` the first positions of the cells,
    or of single tokens, and the length; `top` is the k of `recent` and `sink`. Without `marked` tokens `outside` is
    NaN.
    """

    def __init__(
        self,
        queries: Int[np.ndarray, " queries"],
        edges: Int[np.ndarray, " cells+1"],
        marked: Bool[np.ndarray, " length"] | None,
        top: int,
    ) -> None:
        cell = np.searchsorted(edges, queries, side="right") - 1
        first, last = edges[cell][:, None], edges[cell + 1][:, None]  # A column: the queries of each row.
        begin, end = edges[:-1][None], edges[1:][None]  # A row: the keys of each column.
        self.queries = (last - first)[:, 0].astype(np.float64)
        self.pairs = _pairs(first, last, begin, end)
        # Off the diagonal the mean of t − s is that of the means; in a cell on it, Σ d (h − d) / (h (h + 1) / 2).
        apart = (first + last - begin - end) / 2
        self.distance = self.pairs * np.where(begin == first, (last - first - 1) / 3, apart)
        self.late = self.pairs - _pairs(first, last, begin, end, lag=top)
        self.early = _pairs(first, last, begin, np.clip(top, begin, end))
        marked = np.ones(edges[-1], dtype=bool) if marked is None else marked
        stop = np.flatnonzero(marked).max(initial=-1) + 1
        rest = np.clip(stop, first, last)  # In a cell with the last marked token only later queries count.
        self.after = (last - rest)[:, 0].astype(np.float64)
        self.whole = _pairs(rest, last, begin, end)
        self.beside = self.whole - (last - rest) * np.add.reduceat(marked, edges[:-1], dtype=np.int64)

    def read(self, values: Float[np.ndarray, "queries keys"], sink: Float[np.ndarray, " queries"] | None) -> Readouts:
        """Compute the readouts of one map, with the weight of the state before it; of pooled maps both are means."""
        mass = np.abs(values.astype(np.float64))
        state = np.zeros(len(mass)) if sink is None else np.abs(sink.astype(np.float64))

        def over(pairs: np.ndarray) -> np.ndarray:
            return np.einsum("qk,qk->q", mass, pairs)

        total = over(self.pairs) + state * self.queries
        before = state * self.after
        return Readouts(
            distance=_mean(over(self.distance), total, self.queries),
            recent=_mean(over(self.late), total, self.queries),
            sink=_mean(over(self.early) + state * self.queries, total, self.queries),
            outside=_mean(over(self.beside) + before, over(self.whole) + before, self.after),
        )


def _pairs(first: np.ndarray, last: np.ndarray, begin: np.ndarray, end: np.ndarray, lag: int = 0) -> np.ndarray:
    """Count the pairs with a query t in [first, last), a key s in [begin, end), and t − s ≥ lag: of each t
    min(max(t − lag + 1 − begin, 0), end − begin)."""
    width = end - begin

    def sum_below(count: np.ndarray) -> np.ndarray:  # Σ min(j, width) over j from 0 to count − 1
        small = np.clip(count, 0, width)
        return small * (small - 1) // 2 + width * np.maximum(count - width, 0)

    shift = 1 - lag - begin
    return sum_below(last + shift) - sum_below(first + shift)


def _mean(part: np.ndarray, total: np.ndarray, weight: np.ndarray) -> float:
    """Return the weighted mean of part / total over the rows that have a total; NaN if no such row has weight."""
    there = (total > 0) & (weight > 0)
    if not there.any():
        return math.nan
    # What a difference of equal sums leaves below zero is rounding.
    return float(np.average(np.maximum(part[there], 0.0) / total[there], weights=weight[there]))
