"""Where attention maps have weights, how far their colours reach, and how they are named in every view."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.render.tokens import visible

if TYPE_CHECKING:
    from ssmscope.interp.attention.result import AttendedText, AttentionMap, ImplicitAttention

CLIPPED = 99.5
"""The percentile of |weight| at which a map's colours end."""
MEAN = "mean of |weight|"
"""What stands in place of a layer's number where maps are averaged."""


def causal(text: AttendedText) -> np.ndarray:
    """(queries, keys) bool: the cells of the text's maps in which some key does not come after its query; where queries
    look ahead, all."""
    if text.bidirectional:
        return np.ones((len(text.queries), len(text)), dtype=bool)
    if text.edges is None:
        return np.arange(len(text))[None] <= text.queries[:, None]
    return text.edges[None, :-1] <= text.queries[:, None]


def limit(map_: AttentionMap, text: AttendedText) -> tuple[float, float]:
    """Where a map's colours end, and its largest |weight|, the state before the first token included.

    The end is the 99.5th percentile, or the largest where that is zero, which it is in a map of few weights.
    """
    return _end(map_.values[causal(text)], map_.sink)


def row_limits(map_: AttentionMap, text: AttendedText) -> np.ndarray:
    """(queries,): where the colours of each row end on a scale of its own, as `limit` has it."""
    sinks = [None] * len(map_.values) if map_.sink is None else map_.sink[:, None]
    rows = zip(map_.values, causal(text), sinks)
    return np.array([_end(values[seen], sink)[0] for values, seen, sink in rows], dtype=np.float64)


def _end(values: np.ndarray, sink: np.ndarray | None) -> tuple[float, float]:
    weights = np.abs(values if sink is None else np.concatenate([values, sink]))
    if not weights.size:
        return 0.0, 0.0
    # "higher" leaves fewer than 200 weights as they are: the largest one is above the percentile by rounding.
    largest = float(weights.max())
    return float(np.percentile(weights, CLIPPED, method="higher")) or largest, largest


def averaged(text: AttendedText) -> AttentionMap | None:
    """The mean of |weight| over a text's implicit maps of whole layers and their heads; None where there is one map
    alone."""
    maps = [each for each in text.maps if not each.part and not each.softmax]
    if len(maps) < 2:
        return None
    values = np.mean([np.abs(each.values) for each in maps], axis=0)
    sinks = [np.abs(each.sink) for each in maps if each.sink is not None]
    sink = np.sum(sinks, axis=0) / len(maps) if sinks else None
    return replace(maps[0], layer=MEAN, head=f"{len(maps)} maps", values=values, sink=sink)


def telling(map_: AttentionMap, text: AttendedText) -> int:
    """The row that shows most when each is coloured on its own scale: that of the largest sum of |weight| on keys other
    than the query, in shares of where its colours end, at most 1 each; the last of equal ones."""
    seen, ends = causal(text), row_limits(map_, text)[:, None]
    weights = np.where(seen, np.abs(map_.values), 0.0)
    own = text.queries if text.bidirectional else seen.sum(axis=1) - 1
    weights[np.arange(len(seen)), own] = 0.0 if map_.sink is None else np.abs(map_.sink)
    shown = np.divide(weights, ends, out=np.zeros_like(weights), where=ends > 0).clip(max=1).sum(axis=1)
    return len(shown) - 1 - int(shown[::-1].argmax())


def title(map_: AttentionMap) -> str:
    """ "layer 3 · head 5", or "rollout"; how channels were put together, `heads_name` says."""
    parts = [f"layer {map_.layer}" if map_.layer.isdigit() else visible(map_.layer)]
    if map_.part:
        parts.append(visible(map_.part))
    if map_.layer == MEAN:
        return f"{MEAN} over {map_.head}"
    if map_.head not in ("mean", "abs"):
        parts.append(f"head {map_.head}" if map_.head.isdigit() else f"channels {visible(map_.head)}")
    return " · ".join(parts)


def heads_name(result: ImplicitAttention) -> str:
    """How the channels of a result's maps were put together, in words."""
    if result.heads == "all":
        return "each head or group of channels"
    if result.level == "gradient":
        return "sum over channels"
    if result.heads == "abs":
        return "mean of absolute values over channels"
    rolled = any(map_.layer == "rollout" for text in result.texts for map_ in text.maps)
    return "absolute value of the signed mean over channels" if rolled else "signed mean over channels"


def strongest(map_: AttentionMap, row: int, text: AttendedText, count: int) -> list[tuple[int, float]]:
    """The `count` keys of the largest |weight| of a row, the strongest first, ties by position; the key −1 is the state
    before the first token. Of a pooled map keys are numbers of cells."""
    keys = np.flatnonzero(causal(text)[row])
    weights = map_.values[row, keys]
    if map_.sink is not None:
        keys, weights = np.concatenate([[-1], keys]), np.concatenate([map_.sink[[row]], weights])
    order = np.argsort(-np.abs(weights), kind="stable")[:count]
    return [(int(keys[i]), float(weights[i])) for i in order]


def span_name(text: AttendedText) -> str:
    """The marked tokens in words; "" where none are."""
    if text.span is None:
        return ""
    first, last = text.span[0], text.span[1] - 1
    return f"marked: token {first}" if first == last else f"marked: tokens {first}–{last}"


def coarse(texts: Iterable[AttendedText]) -> str:
    """What is to be said of readouts that come from cells; nothing where every map has single tokens."""
    sizes = [int(np.diff(text.edges).max()) for text in texts if text.edges is not None]
    if not sizes:
        return ""
    return (
        f"Of maps in cells the readouts take a cell's mass as spread evenly: with cells of {max(sizes)} tokens, "
        "nothing nearer than that is told apart. Single rows (option rows) are exact."
    )
