"""Attention maps of a text: their causal cells, the limits of their colours, and their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.ties import descending
from ssmscope.outline import Outlined
from ssmscope.render.blocks import OfTokens
from ssmscope.render.numbers import number_runs
from ssmscope.render.tokens import visible

CLIP_PERCENTILE = 99.5
"""Percentile of |weight| at which a map's colours end."""
MEAN_MAP = "mean of |weight|"
"""Name of the average of maps, in the place of a layer's number."""
SOFTMAX = "attention"
"""Suffix of the number of a softmax attention layer."""


@dataclass(frozen=True)
class Readouts:
    """Readouts of a map: where the mass |weight| of each row lies, as means over queries; NaN where undefined.

    p(t, s) = |w(t, s)| / Σ_s |w(t, s)|, where the sum has the state before the first token too. Rows without any mass
    are left out.
    """

    distance: float
    """Mean attention distance, Σ_s p(t, s) (t − s), in tokens, without the state before the first token."""
    recent: float
    """Share on the query itself and the k − 1 tokens before it."""
    sink: float
    """Share on the first k tokens and on the state before them."""
    outside: float
    """Share outside the marked tokens, over the queries after the last of them: irrelevant context."""


@dataclass(frozen=True, eq=False)
class AttentionMap(Outlined):
    """One map of one text: the weight of each key in the layer's output at each query."""

    layer: str
    """Number of the layer ("12 attention" for softmax attention), or "rollout"."""
    part: str
    """ "" for the whole layer, else the name of one of its summands."""
    head: str
    """"mean" (the signed mean), "abs" (the mean of absolute values), "3" for a head, "0–95" for a group of channels."""
    values: np.ndarray
    """(queries, keys) float32, zero where the key comes after the query. In a pooled map the mean over the pairs of a
    cell in which the key does not come after the query."""
    sink: np.ndarray | None
    """(queries,) float32: the weight of the state before the first token, where that is not zero."""
    readouts: Readouts

    @property
    def softmax(self) -> bool:
        """True for softmax attention: weights are not negative, and those of a query sum to 1."""
        return self.layer.endswith(f" {SOFTMAX}")


@dataclass(frozen=True)
class MarkedShare(Outlined):
    """Share of a map's mass on the marked tokens, mean over texts; names as in `AttentionMap`."""

    layer: str
    part: str
    head: str
    share: Estimate


@dataclass(frozen=True, eq=False)
class AttendedText(OfTokens):
    """One text and its maps."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    """Word index of each token; None for special tokens."""
    queries: np.ndarray
    """(queries,) int64: the position of each row of a map; in a pooled map the last one of the cell."""
    edges: np.ndarray | None
    """(cells + 1,) int64: first positions of the cells of a pooled map, and the length; None for single tokens."""
    span: tuple[int, int] | None
    """Marked tokens, from the first to the one after the last."""
    maps: tuple[AttentionMap, ...]
    answer: str
    probability: float
    pixels: np.ndarray | None = None
    """(height, width, channels) float32 for an image whose pixels are the tokens."""
    series: np.ndarray | None = None
    """(length, channels) float32, the numbers of a series whose steps are the tokens."""
    bidirectional: bool = False
    """True if queries read keys that come after them."""

    @property
    def whole(self) -> bool:
        """True if the maps have a row and a column for every token."""
        return self.edges is None and len(self.queries) == len(self.tokens)


def causal(text: AttendedText) -> np.ndarray:
    """Return a mask (queries, keys), True where a key is not after its query; all True where queries look ahead."""
    keys = np.arange(len(text)) if text.edges is None else text.edges[:-1]
    return (keys <= text.queries[:, None]) | text.bidirectional


def limit(map_: AttentionMap, text: AttendedText) -> tuple[float, float]:
    """Return the end of a map's colours, the 99.5th percentile of |weight| (or the largest), and the largest."""
    return _end(map_.values[causal(text)], map_.sink)


def row_limits(map_: AttentionMap, text: AttendedText) -> np.ndarray:
    """Return the end of each row's own colour scale, (queries,), defined as in `limit`."""
    sinks = [None] * len(map_.values) if map_.sink is None else map_.sink[:, None]
    rows = zip(map_.values, causal(text), sinks)
    return np.array([_end(values[seen], sink)[0] for values, seen, sink in rows], dtype=np.float64)


def _end(values: np.ndarray, sink: np.ndarray | None) -> tuple[float, float]:
    weights = np.abs(values if sink is None else np.concatenate([values, sink]))
    if not weights.size:
        return 0.0, 0.0
    # "higher" leaves fewer than 200 weights as they are: the largest one is above the percentile by rounding.
    largest = float(weights.max())
    return float(np.percentile(weights, CLIP_PERCENTILE, method="higher")) or largest, largest


def mean_maps(text: AttendedText) -> list[AttentionMap]:
    """Average |weight| over a text's implicit maps, and over its softmax maps, of whole layers and all heads: the
    scales of the two differ. A single map of its kind is returned as it is."""
    whole = [each for each in text.maps if not each.part]
    kinds = [[each for each in whole if not each.softmax], [each for each in whole if each.softmax]]
    return [_mean(maps) if len(maps) > 1 else maps[0] for maps in kinds if maps]


def _mean(maps: Sequence[AttentionMap]) -> AttentionMap:
    values = np.mean([np.abs(each.values) for each in maps], axis=0)
    sinks = [np.abs(each.sink) for each in maps if each.sink is not None]
    sink = np.sum(sinks, axis=0) / len(maps) if sinks else None
    kind = f" of {SOFTMAX}" * maps[0].softmax
    return replace(maps[0], layer=MEAN_MAP, head=f"{len(maps)} maps{kind}", values=values, sink=sink)


def layer_names(maps: Iterable[AttentionMap]) -> str:
    """Name the layers of maps of one kind: "layers 0–1, 3", "layer 2 (attention)", "rollout"."""
    names = dict.fromkeys((each.layer.removesuffix(f" {SOFTMAX}"), each.softmax) for each in maps)
    numbers = [int(name) for name, _ in names if name.isdigit()]
    if not numbers:
        return ", ".join(name for name, _ in names)
    softmax = any(softmax for _, softmax in names)
    return f"layer{'s' * (len(numbers) > 1)} {number_runs(numbers)}" + f" ({SOFTMAX})" * softmax


def title(map_: AttentionMap | MarkedShare) -> str:
    """Name a map: "layer 3 · head 5", or "rollout"; `heads_name` says how channels were combined."""
    parts = [f"layer {map_.layer}" if map_.layer.isdigit() else visible(map_.layer)]
    if map_.part:
        parts.append(visible(map_.part))
    if map_.layer == MEAN_MAP:
        return f"{MEAN_MAP} over {map_.head}"
    if map_.head not in ("mean", "abs"):
        parts.append(f"head {map_.head}" if map_.head.isdigit() else f"channels {visible(map_.head)}")
    return " · ".join(parts)


def strongest(map_: AttentionMap, row: int, text: AttendedText, count: int) -> list[tuple[int, float]]:
    """Return the `count` strongest keys of a row, or cells of a pooled map, with weights; −1 is the state before."""
    sink = None if map_.sink is None else map_.sink[[row]]
    _, keys, weights = strongest_keys(map_.values[[row]], sink, causal(text)[[row]], count)
    return list(zip(keys.tolist(), weights.tolist()))


def strongest_keys(
    values: np.ndarray, sink: np.ndarray | None, seen: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the `count` strongest keys of each query among those `seen`: rows, columns (−1: the state), weights."""
    if sink is not None:
        values = np.concatenate([sink[:, None], values], axis=1)
        seen = np.concatenate([np.ones((len(seen), 1), dtype=bool), seen], axis=1)
    order = descending(np.abs(values))[:, :count]
    kept = np.take_along_axis(seen, order, axis=1)
    rows, columns = np.nonzero(kept)[0], order[kept]
    return rows, columns - (sink is not None), values[rows, columns]


def span_name(text: AttendedText) -> str:
    """Name the marked tokens; "" where none are marked."""
    if text.span is None:
        return ""
    first, last = text.span[0], text.span[1] - 1
    return f"marked: token {first}" if first == last else f"marked: tokens {first}–{last}"


def coarse_note(texts: Iterable[AttendedText]) -> str:
    """Return a note on readouts that come from cells; "" where every map has single tokens."""
    sizes = [int(np.diff(text.edges).max()) for text in texts if text.edges is not None]
    if not sizes:
        return ""
    return (
        f"The readouts of pooled maps assume that a cell's mass is spread evenly: with cells of {max(sizes)} tokens, "
        "they resolve no smaller distance. Single rows (option rows) are exact."
    )
