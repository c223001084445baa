"""Maps of implicit attention: those of single layers, and their product over layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssmscope.interp.attention.shown import ShownText, pooled

if TYPE_CHECKING:
    from ssmscope.core.linearized import LinearizedLayer
    from ssmscope.core.trace import Trace

MAX_SEPARATE_HEADS = 64
"""Largest number of heads that "all" maps one by one; more are averaged in groups of neighbours."""
MAX_HEAD_GROUPS = 16


def map_names(linearized: LinearizedLayer, heads: str) -> list[str]:
    """Return the names of the maps of a layer that `heads` asks for."""
    return head_names(linearized.channels[0], heads)


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
    text: ShownText,
    linearized: LinearizedLayer,
    layer: str,
    level: str,
    heads: str,
    skip: bool,
    part: str | None,
    top: int,
    channels: int | None = None,
) -> None:
    """Add a layer's maps, or those of one of its parts, to a text.

    Args:
        channels: number of channels, for maps that are sums over channels instead of means.
    """
    names = map_names(linearized, heads)
    scale = 1.0 if channels is None else channels / len(names)  # Sums over each group's channels.
    how: Mapping[str, Any] = {"groups": len(names), "skip": skip, "part": part}
    absolute = heads == "abs"
    if text.edges is not None and not absolute:
        maps = linearized.pooled_attention(level, len(text.edges) - 1, **how)
    else:
        maps = linearized.attention(level, absolute=absolute, rows=text.chosen, **how)
    sink = linearized.sink(level, groups=len(names), absolute=absolute, part=part)
    for group, name in enumerate(names):
        values = maps[0, group]
        if text.edges is not None and absolute:
            values = pooled(values, text.edges)
        column = None if sink is None else text.shown_column(sink[0, group] * scale)
        text.add(layer, part or "", name, values * scale, column, top)


def roll_out(
    trace: Trace,
    chosen: Sequence[int],
    texts: Sequence[ShownText],
    level: str,
    heads: str,
    skip: bool,
    residual: float,
    top: int,
    beside: Sequence[Mapping[int, Tensor]],
) -> None:
    """Add the rollout of every text: R ← R (residual · I + (1 − residual) A) from the last layer to the first, A being
    |signed mean| or, with heads "abs", the mean of absolute values. The share of a state before the first token stays
    there.

    `beside` has every text's softmax weights (length, length), by the number of the layer: they are the A of a layer of
    attention, and where a layer has both its A is the mean of the two.
    """
    carried: list[tuple[Tensor, Tensor]] = []
    for text in texts:
        start = torch.eye(text.length, dtype=torch.float32)
        start = start if text.chosen is None else start[text.chosen]
        carried.append((start, torch.zeros_like(start[:, 0])))
    sinks = False
    places = {trace.layer_numbers[index]: index for index in chosen}
    for number in sorted({*places, *(each for of in beside for each in of)}, reverse=True):
        linearized = trace.linearized[places[number]] if number in places else None
        for row, text in enumerate(texts):
            every = []
            if linearized is not None:
                one, absolute = linearized.of_text(row, text.length), heads == "abs"
                weights = one.attention(level, absolute=absolute, skip=skip)[0, 0].abs().float().cpu()
                sink = one.sink(level, absolute=absolute)
                sinks = sinks or sink is not None
                column = torch.zeros_like(weights[0]) if sink is None else sink[0, 0].abs().float().cpu()
                every.append(normalise_rows(weights, column))
            if number in beside[row]:
                every.append((beside[row][number], torch.zeros_like(beside[row][number][0])))
            weights, column = (torch.stack(each).mean(0) for each in zip(*every))
            R, gone = carried[row]
            carried[row] = (residual * R + (1 - residual) * (R @ weights), gone + (1 - residual) * (R @ column))
    for text, (R, gone) in zip(texts, carried):
        if text.edges is not None:
            shown, gone = pooled(R, text.edges), text.shown_column(gone)
        else:
            shown = R
        text.add("rollout", "", heads, shown, gone if sinks else None, top)


def normalise_rows(weights: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Divide rows (length, length) and the sink column (length,), none negative, by their sums; a row of zeros becomes
    the identity's."""
    total = weights.sum(-1) + sink
    empty = total == 0
    weights = weights / total.masked_fill(empty, 1).unsqueeze(-1)
    return weights + torch.diag(empty.to(weights)), sink / total.masked_fill(empty, 1)
