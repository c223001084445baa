"""Attention maps in every view: their causal cells, the limits of their colours, and their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.core.ties import descending
from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention

CLIP_PERCENTILE = 99.5
"""Percentile of |weight| at which a map's colours end."""
MEAN_MAP = "mean of |weight|"
"""Name of the average of maps, in the place of a layer's number."""


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


def mean_map(text: AttendedText) -> AttentionMap | None:
    """Average |weight| over a text's implicit maps of whole layers and heads; None where there is only one."""
    maps = [each for each in text.maps if not each.part and not each.softmax]
    if len(maps) < 2:
        return None
    values = np.mean([np.abs(each.values) for each in maps], axis=0)
    sinks = [np.abs(each.sink) for each in maps if each.sink is not None]
    sink = np.sum(sinks, axis=0) / len(maps) if sinks else None
    return replace(maps[0], layer=MEAN_MAP, head=f"{len(maps)} maps", values=values, sink=sink)


def title(map_: AttentionMap) -> str:
    """Name a map: "layer 3 · head 5", or "rollout"; `heads_name` says how channels were combined."""
    parts = [f"layer {map_.layer}" if map_.layer.isdigit() else visible(map_.layer)]
    if map_.part:
        parts.append(visible(map_.part))
    if map_.layer == MEAN_MAP:
        return f"{MEAN_MAP} over {map_.head}"
    if map_.head not in ("mean", "abs"):
        parts.append(f"head {map_.head}" if map_.head.isdigit() else f"channels {visible(map_.head)}")
    return " · ".join(parts)


def heads_name(result: ImplicitAttention) -> str:
    """Describe how the channels of a result's maps were combined."""
    if result.heads == "all":
        return "each head or group of channels"
    if result.level == "gradient":
        return "sum over channels"
    if result.heads == "abs":
        return "mean of absolute values over channels"
    rolled = any(map_.layer == "rollout" for text in result.texts for map_ in text.maps)
    return "absolute value of the signed mean over channels" if rolled else "signed mean over channels"


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
