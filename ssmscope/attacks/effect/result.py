"""Result of a comparison of a clean and a corrupted text: tokens, retention, attention and distances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from markupsafe import Markup
from ssmscope.api.results import Result
from ssmscope.core.ties import descending
from ssmscope.interp.heatmap.scored_text import ScoredText
from ssmscope.interp.heatmap.text_result import FLAT_REMARK
from ssmscope.interp.heatmap.words import is_selective
from ssmscope.outline import Outlined
from ssmscope.render.blocks import Block, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.html import folded_away
from ssmscope.render.numbers import evenly_spaced
from ssmscope.render.table import Cell, Line, Table, frame_table, number_cell, table
from ssmscope.render.tokens import short_token, shorten, visible

HEAD = "head"
"""Name of the row for the head's input."""
MAX_TABLE_LAYERS = 8
"""Layers that the table shows unless all were asked for."""


@dataclass(frozen=True, eq=False)
class Side(Outlined):
    """The clean or the corrupted text."""

    text: ScoredText
    """Tokens, their retention (layers, tokens) and its mean, the answer and its probability."""
    changed: np.ndarray
    """(tokens,) bool: tokens that the other text does not have."""
    attention: np.ndarray
    """(layers, tokens) float32: the share of the last position's |α| that falls on each token."""
    sink: np.ndarray
    """(layers,) float32: the share that falls on the state before the first token."""

    def __len__(self) -> int:
        return len(self.text)

    @property
    def mean_attention(self) -> np.ndarray:
        """Mean of `attention` over the layers, (tokens,)."""
        return self.attention.mean(0)

    @property
    def on_changed(self) -> np.ndarray:
        """Share of the last position's attention on the changed tokens, (layers,)."""
        return self.attention[:, self.changed].sum(1)

    def top(self, k: int) -> list[int]:
        """Return the positions of the k tokens to which the last position attends most, the highest first."""
        return descending(self.mean_attention)[:k].tolist()


@dataclass(frozen=True)
class Spread:
    """Propagation of a change in one row of distances. Positions are those in the corrupted text."""

    first: int | None
    """First token of both texts at which the vectors differ; None if they never do."""
    peak: float
    """Largest distance, 0 if there is none."""
    peak_at: int | None
    last: float
    """The distance at the last token that both texts have."""

    @property
    def remains(self) -> float:
        """Share of the largest distance that is left at the end. It is 0 if the states meet again, 1 if they diverge
        until the end, and NaN if they never differ."""
        return self.last / self.peak if self.peak else math.nan


@dataclass(frozen=True)
class AttackEffect(Result, kind="effect"):
    """Effect of a change of a text inside the model."""

    FORMER_FIELDS: ClassVar[Mapping[str, str]] = {"before": "clean", "after": "corrupted"}

    clean: Side
    corrupted: Side
    pairs: np.ndarray
    """(pairs, 2) int64: the positions in the clean and the corrupted text of the tokens that both have."""
    layers: tuple[int, ...]
    by_layer: bool
    """True if views show every layer, not only the average."""
    size: int
    """Number of tokens that are named."""
    distance: np.ndarray
    """(layers + 1, pairs) float32: the relative distance of the layers' inputs and, in the last row, of the head's."""
    hidden_cosine: np.ndarray
    """(layers + 1,): the cosine of the same vectors at the last position of each text."""
    state_cosine: np.ndarray
    """(layers,): the cosine of the final states of all of a layer's recurrences; NaN without a recurrent state."""
    kept: float
    """Probability, on the corrupted text, of the clean text's answer."""

    @property
    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        return ("clean", self.clean), ("corrupted", self.corrupted)

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows of `distance`."""
        return (*map(str, self.layers), HEAD)

    @property
    def first_changed(self) -> int | None:
        """Position from which on the texts differ; None if they do not."""
        same = np.flatnonzero((self.pairs != np.arange(len(self.pairs))[:, None]).any(1))
        common = int(same[0]) if len(same) else len(self.pairs)
        return None if common == len(self.clean) == len(self.corrupted) else common

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """Propagation of the change, per row of `distance`."""
        return tuple(map(self._spread, self.distance))

    def _spread(self, distance: np.ndarray) -> Spread:
        apart = np.flatnonzero(distance)
        if not len(apart):
            return Spread(None, 0.0, None, 0.0)
        positions, peak = self.pairs[:, 1], int(descending(distance)[0])
        return Spread(int(positions[apart[0]]), float(distance[peak]), int(positions[peak]), float(distance[-1]))

    @property
    def answer_name(self) -> str:
        """The answers to both texts in words."""
        old, new = (shorten(visible(side.text.answer), 32) for side in (self.clean, self.corrupted))
        p, q = (f"{side.text.probability:.3f}" for side in (self.clean, self.corrupted))
        if self.clean.text.answer == self.corrupted.text.answer:
            return f"“{old}” stays (p = {p}, then {q})"
        return f"“{old}” (p = {p}) becomes “{new}” (p = {q})"

    @property
    def changed_name(self) -> str:
        """The number of changed tokens in words."""
        gone, new = int(self.clean.changed.sum()), int(self.corrupted.changed.sum())
        if not gone and not new:
            return "no token changed"
        parts = [f"{gone} of {len(self.clean)} tokens removed"] if gone else []
        parts += [f"{new} of {len(self.corrupted)} tokens new"] if new else []
        return ", ".join(parts)

    def verdict(self, at: int = 0) -> str:
        return f"{self.answer_name}; {self.changed_name}"

    @classmethod
    def compare(cls, results: Sequence[AttackEffect], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            cells = {"answer": Cell(text=result.answer_name), "change": Cell(text=result.changed_name)}
            cells["p kept"] = number_cell(result.kept)
            for layer, cosine in zip(result.layers, result.state_cosine.tolist()):
                if math.isnan(cosine):
                    continue
                cells[f"final states alike, layer {layer}"] = number_cell(cosine)
            lines.append(Line((label,), cells))
        return table(
            ("model",), lines, note="Alike: the cosine of the final states of the clean and the corrupted text."
        )

    @property
    def headline(self) -> str:
        return f"Effect of a change on {self.model_name}: {self.verdict()}"

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        return curve("distance between the hidden vectors along the text", np.atleast_2d(self.distance)[-1])

    def to_frame(self) -> pd.DataFrame:
        """A row per side, layer and token. Columns: side ("clean", "corrupted"), layer ("mean" for the average; the
        layers follow if they were asked for, and "head"), position, token, changed, partner (the position in the other
        text, missing for changed tokens), retention, write, attention (the share of the last position's), distance
        (missing for changed tokens). Positions count from 0. The head's input has a distance only."""
        frames = []
        means = np.concatenate([self.distance[:-1].mean(0, keepdims=True), self.distance])
        for number, (name, side) in enumerate(self.sides):
            here, there = self.pairs[:, number], self.pairs[:, 1 - number]
            tokens = pd.array(side.text.tokens, dtype="string")
            own = {"side": name, "layer": "", "position": range(len(side)), "token": tokens, "changed": side.changed}
            frame = pd.DataFrame(own).assign(partner=pd.Series(there, here, dtype="Int64"))
            nothing = np.full(len(side), np.nan, dtype=np.float32)
            retention = (side.text.mean, *side.text.scores, nothing)
            attention = (side.mean_attention, *side.attention, nothing)
            for row, layer in enumerate(("mean", *self.rows) if self.by_layer else ("mean",)):
                numbers = {"retention": retention[row], "write": 1 - retention[row], "attention": attention[row]}
                frames.append(frame.assign(layer=layer, **numbers, distance=pd.Series(means[row], here)))
        return pd.concat(frames, ignore_index=True)

    def summary(self) -> pd.DataFrame:
        """A row per layer, and one for the head. Columns: layer, hidden_cosine (of the vectors at the last position),
        state_cosine, on_removed and on_new (the share of the last position's attention on the changed tokens of each
        text), retention_change and attention_change (the mean absolute change at the tokens that both texts have),
        first, peak, peak_at, last (see `Spread`) and remains. The head has no state, gate or attention."""
        columns: dict[str, Any] = {"state_cosine": self.state_cosine}
        columns |= {"on_removed": self.clean.on_changed, "on_new": self.corrupted.on_changed}
        here, there = self.pairs.T
        changes = {"retention_change": self.corrupted.text.scores[:, there] - self.clean.text.scores[:, here]}
        changes |= {"attention_change": self.corrupted.attention[:, there] - self.clean.attention[:, here]}
        for name, change in changes.items():
            columns[name] = np.abs(change).mean(1) if len(self.pairs) else math.nan
        layers = pd.DataFrame(columns, range(len(self.layers))).astype(np.float64).reindex(range(len(self.rows)))
        spreads = pd.DataFrame([{**vars(spread), "remains": spread.remains} for spread in self.spreads])
        spreads = spreads.astype({"first": "Int64", "peak_at": "Int64"})
        names = pd.DataFrame({"layer": self.rows, "hidden_cosine": self.hidden_cosine})
        return pd.concat([names, layers, spreads], axis=1)

    def token_rows(self) -> TokenRows:
        """Both texts coloured by retention and by the last position's attention: mean, and layers if asked for."""
        return TokenRows(
            texts=tuple(_text(name, side, self) for name, side in self.sides),
            of="score",
            score="retention, attention",
            name="retention, and the share of the last position's attention",
            marked="tokens with the most attention; in orange, changed tokens",
            first=None if self.by_layer else 2,
            summed=False,
        )

    @staticmethod
    def differ(results: Sequence[AttackEffect], names: Sequence[str]) -> str:
        """Say what the change does to each model's answer."""
        return "; ".join(f"{name}: {result.verdict()}" for name, result in zip(names, results))

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        yield self.token_rows()
        distances = partial(self.figure, distances=True)
        yield Picture(distances, "Relative distance of the vectors at the tokens of both texts")
        yield from (attended(name, side, self.size) for name, side in self.sides)
        yield layer_table(self)
        yield from (Prose(remark, "note") for remark in remarks(self))
        yield folded_away("All numbers of the layers", lambda: frame_table(self.summary()))


def _text(name: str, side: Side, result: AttackEffect) -> TokenText:
    names = ("", *(f"layer {layer} " for layer in result.layers))
    rows = [row for each in zip(names, *_shown(side, result)) for row in _rows(*each, side, result)]
    about = name
    if side.changed.any():
        about += f"; {100 * side.on_changed.mean():.1f} % of the attention on changed tokens"
    text = side.text
    return TokenText(text.tokens, text.words, rows, text.answer, text.probability, about=about)


def _shown(side: Side, result: AttackEffect) -> tuple[np.ndarray, np.ndarray]:
    """Return retention and attention (rows, tokens) that are shown: the mean and, if asked for, layers."""
    text, layers = side.text, slice(None if result.by_layer else 0)
    return np.vstack([text.mean, *text.scores[layers]]), np.vstack([side.mean_attention, *side.attention[layers]])


def _rows(
    name: str, retention: np.ndarray, attention: np.ndarray, side: Side, result: AttackEffect
) -> Iterator[TokenRow]:
    changed, special = np.flatnonzero(side.changed).tolist(), side.text.special
    ordinary = retention[~special]
    own = (float(ordinary.min()), float(ordinary.max())) if ordinary.size else None
    flat, ends = retention_scale(result)
    remark = FLAT_REMARK if flat else ""
    yield TokenRow(f"{name}retention", retention, ends, outside=special, against=changed, remark=remark, own=own)
    highest = max(float(_shown(each, result)[1].max()) for _, each in result.sides) or 1.0
    top = [at for at in descending(attention)[: result.size].tolist() if attention[at] > 0]
    own, against = (float(attention.min()), float(attention.max())), sorted({*changed} - {*top})
    yield TokenRow(f"{name}attention", attention, (0.0, highest), marked=top, against=against, own=own)


def retention_scale(result: AttackEffect) -> tuple[bool, tuple[float, float]]:
    """Return whether the retention of both texts is flat, and the ends of its colours, equal where it is."""
    ordinary = np.concatenate([_shown(side, result)[0][:, ~side.text.special].ravel() for _, side in result.sides])
    if not ordinary.size:
        return False, (0.0, 0.0)
    if not is_selective(1 - ordinary):
        return True, (float(ordinary.mean()),) * 2
    return False, (float(ordinary.min()), float(ordinary.max()))


def attended(name: str, side: Side, size: int) -> Table:
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
    if result.clean.text.answer != result.corrupted.text.answer:
        yield f"The clean text's answer has p = {result.kept:.3f} on the corrupted text."
