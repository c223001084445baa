"""Views of a change: both texts in coloured rows, the tables of tokens and layers, and remarks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.interp.heatmap.views import FLAT_REMARK
from ssmscope.interp.heatmap.words import is_selective
from ssmscope.render.blocks import TokenRow, TokenRows, TokenText
from ssmscope.render.numbers import evenly_spaced
from ssmscope.render.table import Cell, Line, Table, number_cell, table
from ssmscope.render.tokens import short_token

if TYPE_CHECKING:
    from ssmscope.attacks.effect.result import AttackEffect, Side

MAX_TABLE_LAYERS = 8
"""Layers that the table shows unless all were asked for."""


def token_rows(result: AttackEffect) -> TokenRows:
    """Both texts coloured by retention and by the last position's attention: mean, and layers if asked for."""
    return TokenRows(
        texts=tuple(_text(name, side, result) for name, side in result.sides),
        of="score",
        score="retention, attention",
        name="retention, and the share of the last position's attention",
        marked="tokens with the most attention; in orange, changed tokens",
        first=None if result.by_layer else 2,
        summed=False,
    )


def _text(name: str, side: Side, result: AttackEffect) -> TokenText:
    rows = list(_rows("", side.text.mean, side.mean_attention, side, result))
    if result.by_layer:
        for layer, retention, attention in zip(result.layers, side.text.scores, side.attention):
            rows += _rows(f"layer {layer} ", retention, attention, side, result)
    about = f"{name} the change"
    if side.changed.any():
        about += f"; {100 * side.on_changed.mean():.1f} % of the attention on changed tokens"
    text = side.text
    return TokenText(text.tokens, text.words, rows, text.answer, text.probability, about=about)


def _rows(
    name: str, retention: np.ndarray, attention: np.ndarray, side: Side, result: AttackEffect
) -> Iterator[TokenRow]:
    changed, special = np.flatnonzero(side.changed).tolist(), side.text.special
    ordinary = retention[~special]
    own = (float(ordinary.min()), float(ordinary.max())) if ordinary.size else None
    flat, ends = retention_scale(result)
    remark = FLAT_REMARK if flat else ""
    yield TokenRow(f"{name}retention", retention, ends, outside=special, against=changed, remark=remark, own=own)
    highest = max(float(each.mean_attention.max()) for _, each in result.sides) or 1.0
    top = [at for at in np.argsort(-attention, kind="stable")[: result.size].tolist() if attention[at] > 0]
    yield TokenRow(f"{name}attention", attention, (0.0, highest), marked=top, against=sorted({*changed} - {*top}))


def retention_scale(result: AttackEffect) -> tuple[bool, tuple[float, float]]:
    """Return whether the retention of both texts is flat, and the ends of its colours, equal where it is."""
    ordinary = np.concatenate([side.text.mean[~side.text.special] for _, side in result.sides])
    if not ordinary.size:
        return False, (0.0, 0.0)
    if not is_selective(1 - ordinary):
        return True, (float(ordinary.mean()),) * 2
    return False, (float(ordinary.min()), float(ordinary.max()))


def attended(name: str, side: Side, size: int) -> Table:
    """The tokens to which the last position attends most."""
    lines = []
    for at in side.top(size):
        cells = {
            "attention in %": number(100 * float(side.mean_attention[at]), 1),
            "retention": number(float(side.text.mean[at]), 4),
            "changed": Cell(text="yes" if side.changed[at] else ""),
        }
        lines.append(Line((str(at), short_token(side.text.tokens[at], 40)), cells))
    return replace(table(("position", "token"), lines), title=f"{name}: what the last position attends to most")


def layer_table(result: AttackEffect) -> Table:
    """A row for each layer, or for some of them, and one for the head."""
    frame, lines = result.summary(), []
    every = result.by_layer or len(result.layers) <= MAX_TABLE_LAYERS
    shown = range(len(result.layers)) if every else evenly_spaced(len(result.layers), MAX_TABLE_LAYERS)
    for at in (*shown, len(result.layers)):
        row = frame.iloc[at]
        cells = {
            "state cosine": number(row["state_cosine"]),
            "hidden cosine": number(row["hidden_cosine"]),
            "on new tokens in %": number(100 * row["on_new"], 1),
            "Δ retention": number(row["retention_change"], 4),
            "distance": Cell(text="0" if math.isnan(row["remains"]) else f"{row['peak']:.3f} at {row['peak_at']}"),
            "at the end": number(row["last"]),
        }
        lines.append(Line((str(row["layer"]),), cells))
    note = (
        "State cosine: of both texts' final states. Hidden cosine: of the layer's inputs at their last tokens. On new "
        "tokens: share of the last position's attention. Δ retention: mean absolute change at the tokens that both "
        "texts have. Distance: ‖u′ − u‖ / ‖u‖ of the layer's inputs there, at its largest and at the last such token."
    )
    return table(("layer",), lines, note=note)


def number(value: float, digits: int = 3) -> Cell:
    return replace(number_cell(value), digits=digits)


def remarks(result: AttackEffect) -> Iterator[str]:
    if all(map(math.isnan, result.state_cosine.tolist())):
        yield "No layer has a recurrent state: nothing is retained, and there are no states to compare."
    if not result.by_layer and len(result.layers) > MAX_TABLE_LAYERS:
        yield f"{MAX_TABLE_LAYERS} of {len(result.layers)} layers; layers='all' shows every one."
    head = result.spreads[-1]
    if result.first_changed is None:
        yield "The texts have the same tokens."
    elif head.first is None:
        yield (
            f"The texts differ from token {result.first_changed} on; at the tokens that both have, the head's input is "
            "the same."
        )
    else:
        yield (
            f"The texts differ from token {result.first_changed} on. The head's input differs most at token "
            f"{head.peak_at}; {100 * head.remains:.0f} % of that distance is left at the last token of both texts."
        )
    if result.before.text.answer != result.after.text.answer:
        yield f"The first answer has p = {result.kept:.3f} after the change."
