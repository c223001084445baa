"""What a change of a text does to the mechanism: what is kept, what is attended to, and how far the states move.

A broken answer says that an attack worked, not how. The parts of a state-space layer are known, so that both texts can
be compared where it happened: the selection gates (Baleen, Eq. 10), the implicit attention of the last position (Ali et
al. 2024), the final states, and how a difference made at one token dies out or lives on along the text (as the
influence of early tokens does, Wang et al. 2024).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.errors import InputError
from ssmscope.interp.attending import implicit_attention
from ssmscope.interp.methods.gradients import outputs_kept
from ssmscope.interp.selection import ScoredText, selection_heatmap
from ssmscope.interp.views.tokens import shorten, visible
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.encoding import Batch
    from ssmscope.model import Model
    from ssmscope.trace import Trace

SAME = 1e-5
"""Up to which relative distance two vectors of float32 are the same: what rounding leaves. Of a coarser dtype it is 16
times the distance of its numbers."""

HEAD = "head"
"""The name of the row of what the model's head reads."""


def attack_effect(
    model: Model,
    before: str | Sequence[int],
    after: str | Sequence[int],
    *,
    layers: str | Sequence[int] = "mean",
    top: int = 5,
) -> AttackEffect:
    """Trace a text before and after a change, and compare what the model's layers did.

    Tokens are aligned by their ids (`difflib`): those with no counterpart are the changed ones. Retention is Baleen's
    Eq. 10, write 1 − retention. What the last position takes from a token is the implicit attention at the level of the
    block, the mean over channels of absolute values |α|, as a share of its sum over all tokens and the state before the
    first one. The last position is where a classifier reads its class, or a language model its next token.

    The distance at a token that both texts have is ‖u′ − u‖ / ‖u‖, with u and u′ a layer's input before and after the
    change; the row "head" has the vectors that the model's head reads. It is 0 up to the first changed token, since
    nothing looks ahead, and says behind it how the change is carried on. What rounding leaves (1e-5) counts as 0.

    Args:
        before, after: texts, or token ids for a model without a tokenizer.
        layers: "mean" averages all layers over tokens; "all", or a list of layer numbers, averages the chosen ones and
            also shows each of them in the table.
        top: how many tokens table and terminal name.

    Raises:
        InputError: a text and ids together, what `Model.encode` refuses, and an unknown layer.
    """
    batch = _batch(model, before, after)
    trace = model.trace(batch)
    heatmap = selection_heatmap(trace, layers=layers, top=top)
    chosen = heatmap.layers
    pairs = aligned(*(batch.input_ids[row, :length].tolist() for row, length in enumerate(batch.lengths)))
    maps = implicit_attention(trace, layers=list(chosen), rows="last", heads="abs")
    sides = []
    for row in (0, 1):
        shares, states = zip(*(_shares(each.values, each.sink) for each in maps[row].maps))
        changed = np.ones(batch.lengths[row], dtype=bool)
        changed[pairs[:, row]] = False
        sides.append(Side(heatmap[row], changed, np.stack(shares), np.array(states, dtype=np.float32)))
    distance, hidden, state = _moved(model, batch, trace, chosen, pairs)
    probabilities = trace.logits.double().softmax(-1)
    given = {"before": before, "after": after, "layers": layers}
    options: dict[str, Any] = {n: v if isinstance(v, str) else list(map(int, v)) for n, v in given.items()}
    return AttackEffect(
        provenance=record_provenance(trace.source, options={**options, "top": int(top)}),
        before=sides[0],
        after=sides[1],
        pairs=pairs,
        layers=chosen,
        by_layer=heatmap.by_layer,
        size=heatmap.size,
        distance=distance,
        hidden_cosine=hidden,
        state_cosine=state,
        kept=float(probabilities[1, int(probabilities[0].argmax())]),
    )


def aligned(before: Sequence[int], after: Sequence[int]) -> np.ndarray:
    """The positions of the tokens that both have, in order, (tokens, 2) int64; nothing is crossed."""
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    pairs = [(block.a + at, block.b + at) for block in blocks for at in range(block.size)]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _batch(model: Model, before: Any, after: Any) -> Batch:
    if isinstance(before, str) and isinstance(after, str):
        return model.encode([before, after])
    for given in (before, after):
        ids = isinstance(given, Sequence) and not isinstance(given, str)
        if not ids or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) for i in given):
            raise InputError(f"{given!r:.60} was given; allowed are two texts, or two lists of token ids")
    return model.encode(ids=[[int(i) for i in before], [int(i) for i in after]])


def _shares(weights: np.ndarray, sink: np.ndarray | None) -> tuple[np.ndarray, float]:
    """|α| of the last row (1, tokens) as shares (tokens,), and the share of the state before the first token."""
    mass = np.abs(weights[0].astype(np.float64))
    state = 0.0 if sink is None else abs(float(sink[0]))
    total = mass.sum() + state
    if total == 0:
        return np.zeros(len(mass), dtype=np.float32), 0.0
    return (mass / total).astype(np.float32), state / total


def _moved(
    model: Model, batch: Batch, trace: Trace, chosen: Sequence[int], pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distances (layers + 1, pairs) float32, and the cosines at the last position (layers + 1,) and of the final states
    (layers,); the row after the layers is that of the head."""
    last = np.array(batch.lengths) - 1
    distances: list[np.ndarray] = []
    cosines: list[float] = []
    states: list[float] = []
    for index in chosen:
        layer = trace.layers[index]
        flat = torch.cat([scan.state.flatten(1) for scan in layer.scan()], dim=1).double().cpu().numpy()
        states.append(cosine(*flat))
        _compare(layer.u, pairs, last, distances, cosines)
    _compare(_read_by_head(model, batch), pairs, last, distances, cosines)
    return np.stack(distances).astype(np.float32), np.array(cosines), np.array(states)


def _compare(
    vectors: Tensor, pairs: np.ndarray, last: np.ndarray, distances: list[np.ndarray], cosines: list[float]
) -> None:
    """One row of distances and cosines, from vectors (2, length, width)."""
    before, after = vectors.detach().double().cpu().numpy()
    same = max(SAME, 16 * torch.finfo(vectors.dtype).eps)
    distances.append(relative(before[pairs[:, 0]], after[pairs[:, 1]], same))
    cosines.append(cosine(before[last[0]], after[last[1]]))


def relative(before: np.ndarray, after: np.ndarray, same: float) -> np.ndarray:
    """‖after − before‖ / ‖before‖ of each row; 0 where it is at most `same`."""
    apart, size = np.linalg.norm(after - before, axis=1), np.linalg.norm(before, axis=1)
    with np.errstate(divide="ignore"):
        return np.divide(apart, size, out=np.zeros_like(apart), where=apart > same * size)


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """The cosine of two vectors, 1 where they are equal; NaN where just one is zero."""
    if np.array_equal(first, second):
        return 1.0
    size = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / size if size else math.nan


def _read_by_head(model: Model, batch: Batch) -> Tensor:
    """The vectors of which the head reads the last, (2, length, width)."""
    base = model.module.base_model
    source = base if base is not model.module else model.mixers[-1]  # a model that is its own base has one bare layer
    kept: dict[int, Any] = {}
    with torch.no_grad(), model.running(mask=batch.mask), outputs_kept([source], kept):
        model.forward(batch, last_only=True)
    return getattr(kept[0], "last_hidden_state", kept[0])


@dataclass(frozen=True, eq=False)
class Side:
    """The text before or after the change."""

    text: ScoredText
    """Its tokens, their retention (layers, tokens) and its mean, the answer and its probability."""
    changed: np.ndarray
    """(tokens,) bool: those that the other text does not have."""
    attention: np.ndarray
    """(layers, tokens) float32: the share of the last position's |α| that falls on each token."""
    sink: np.ndarray
    """(layers,) float32: the share that falls on the state before the first token."""

    def __len__(self) -> int:
        return len(self.text)

    @property
    def mean_attention(self) -> np.ndarray:
        """(tokens,): `attention`, the average over the layers."""
        return self.attention.mean(0)

    @property
    def on_changed(self) -> np.ndarray:
        """(layers,): the share of the last position's attention on the changed tokens."""
        return self.attention[:, self.changed].sum(1)

    def top(self, k: int) -> list[int]:
        """The positions of the k tokens to which the last position attends most, the highest first."""
        return np.argsort(-self.mean_attention, kind="stable")[:k].tolist()


@dataclass(frozen=True)
class Spread:
    """How a change is carried on in one row of distances. Positions are those after the change."""

    first: int | None
    """From which token on that both texts have the vectors differ; None where they never do."""
    peak: float
    """The largest distance, 0 where there is none."""
    peak_at: int | None
    last: float
    """The distance at the last token that both texts have."""

    @property
    def remains(self) -> float:
        """Which part of the largest distance is left at the end: 0 where the states meet again, 1 where they move apart
        until the end; NaN where they never differ."""
        return self.last / self.peak if self.peak else math.nan


@dataclass(frozen=True)
class AttackEffect(Result, kind="effect"):
    """What a change of a text did inside the model."""

    before: Side
    after: Side
    pairs: np.ndarray
    """(pairs, 2) int64: the positions before and after the change of the tokens that both texts have."""
    layers: tuple[int, ...]
    by_layer: bool
    """Whether the table shows every layer, or only the average."""
    size: int
    """How many tokens are named."""
    distance: np.ndarray
    """(layers + 1, pairs) float32: the relative distance of the layers' inputs, in the last row of what the head
    reads."""
    hidden_cosine: np.ndarray
    """(layers + 1,): the cosine of the same vectors at the last position of each text."""
    state_cosine: np.ndarray
    """(layers,): the cosine of the final states, of all of a layer's recurrences together."""
    kept: float
    """The probability after the change of what was the answer before it."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of the rows of `distance`."""
        return (*map(str, self.layers), HEAD)

    @property
    def first_changed(self) -> int | None:
        """The position from which on the texts differ; None where they do not."""
        same = np.flatnonzero((self.pairs != np.arange(len(self.pairs))[:, None]).any(1))
        common = int(same[0]) if len(same) else len(self.pairs)
        return None if common == len(self.before) == len(self.after) else common

    @property
    def spreads(self) -> tuple[Spread, ...]:
        """How the change is carried on, per row of `distance`."""
        return tuple(map(self._spread, self.distance))

    def _spread(self, distance: np.ndarray) -> Spread:
        apart = np.flatnonzero(distance)
        if not len(apart):
            return Spread(None, 0.0, None, 0.0)
        positions, peak = self.pairs[:, 1], int(distance.argmax())
        return Spread(int(positions[apart[0]]), float(distance[peak]), int(positions[peak]), float(distance[-1]))

    @property
    def retention_change(self) -> np.ndarray:
        """(layers, pairs): retention after less before, at the tokens that both texts have."""
        return self.after.text.scores[:, self.pairs[:, 1]] - self.before.text.scores[:, self.pairs[:, 0]]

    @property
    def attention_change(self) -> np.ndarray:
        """(layers, pairs): the share of attention after less before, at the tokens that both texts have."""
        return self.after.attention[:, self.pairs[:, 1]] - self.before.attention[:, self.pairs[:, 0]]

    @property
    def answer_name(self) -> str:
        """What became of the answer, in words."""
        old, new = (shorten(visible(side.text.answer), 32) for side in (self.before, self.after))
        p, q = (f"{side.text.probability:.3f}" for side in (self.before, self.after))
        if self.before.text.answer == self.after.text.answer:
            return f"“{old}” stays (p = {p}, then {q})"
        return f"“{old}” (p = {p}) becomes “{new}” (p = {q})"

    @property
    def changed_name(self) -> str:
        """How many tokens changed, in words."""
        gone, new = int(self.before.changed.sum()), int(self.after.changed.sum())
        if not gone and not new:
            return "no token changed"
        parts = [f"{gone} of {len(self.before)} tokens removed"] if gone else []
        parts += [f"{new} of {len(self.after)} tokens new"] if new else []
        return ", ".join(parts)

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        return f"Effect of a change on {model}: {self.answer_name}; {self.changed_name}"

    def to_frame(self) -> DataFrame:
        """A row per side, layer and token.

        Columns side ("before", "after"), layer ("mean" for the average; the layers follow if they were asked for, and
        "head"), position, token, changed, partner (the position in the other text, missing for changed tokens),
        retention, write, attention (the share of the last position's), distance (missing for changed tokens). Positions
        count from 0. What the head reads has a distance only.
        """
        import pandas as pd

        parts = []
        means = np.concatenate([self.distance[:-1].mean(0, keepdims=True), self.distance])
        for number, (name, side) in enumerate((("before", self.before), ("after", self.after))):
            here = self.pairs[:, number]
            partner = pd.array([None] * len(side), dtype="Int64")
            partner[here] = self.pairs[:, 1 - number]
            nothing = np.full(len(side), np.nan, dtype=np.float32)
            rows = zip(
                ("mean", *self.rows),
                (side.text.mean, *side.text.scores, nothing),
                (side.mean_attention, *side.attention, nothing),
                means,
            )
            for layer, retention, attention, distance in rows if self.by_layer else [next(rows)]:
                away = nothing.copy()
                away[here] = distance
                columns = {
                    "side": name,
                    "layer": layer,
                    "position": range(len(side)),
                    "token": pd.array(side.text.tokens, dtype="string"),
                    "changed": side.changed,
                    "partner": partner,
                    "retention": retention,
                    "write": 1 - retention,
                    "attention": attention,
                    "distance": away,
                }
                parts.append(pd.DataFrame(columns))
        return pd.concat(parts, ignore_index=True)

    def summary(self) -> DataFrame:
        """A row per layer, and one for the head.

        Columns layer, hidden_cosine (of the vectors at the last position), state_cosine, on_removed and on_new (the
        share of the last position's attention on the changed tokens before and after), retention_change and
        attention_change (the mean absolute change at the tokens that both texts have), first, peak, peak_at, last (see
        `Spread`) and remains. What the head reads has no state, gate or attention.
        """
        import pandas as pd

        alone = [math.nan]
        unchanged = bool(len(self.pairs))
        columns: dict[str, Any] = {
            "layer": self.rows,
            "hidden_cosine": self.hidden_cosine,
            "state_cosine": [*self.state_cosine, *alone],
            "on_removed": [*self.before.on_changed, *alone],
            "on_new": [*self.after.on_changed, *alone],
        }
        for name, change in (("retention_change", self.retention_change), ("attention_change", self.attention_change)):
            columns[name] = [*(np.abs(change).mean(1) if unchanged else alone * len(self.layers)), *alone]
        frame = pd.DataFrame(columns)
        for name in ("first", "peak", "peak_at", "last", "remains"):
            values = [getattr(spread, name) for spread in self.spreads]
            frame[name] = pd.array(values, dtype="Int64") if name in ("first", "peak_at") else values
        return frame

    def figure(self) -> Figure:
        """Both texts in boxes coloured by retention, changed tokens marked, under each box what the last position takes
        from it; below them the distance along the text, a line for each layer."""
        from ssmscope.attacks.effect_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.attacks.effect_terminal import terminal_view

        coloured = console.color_system in ("256", "truecolor") and not console.no_color
        return terminal_view(self, coloured=coloured)

    def _repr_html_(self) -> str:
        from ssmscope.attacks.effect_page import fragment

        return fragment(self)
