"""Answers layer by layer: what a lens reads in the residual stream on its way to the model's own answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.errors import InputError, did_you_mean
from ssmscope.probes.lens_training import POSITIONS
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType
    from torch import Tensor

    from ssmscope.encoding import Batch
    from ssmscope.model import Model
    from ssmscope.probes.lens import Lens

STATISTICS = {
    "answer_probability": "probability of the final answer",
    "top_probability": "probability of the layer's own answer",
    "entropy": "entropy, nats",
    "cross_entropy": "cross-entropy to the next token, nats",
    "kl": "KL(model ‖ lens), nats",
}
"""What is measured of every layer and position, and how the views call it."""


def trajectory(
    model: Model,
    texts: str | Sequence[str] | Batch | None = None,
    *,
    ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    values: Any = None,
    lens: Lens | str | Path | None = None,
    positions: str | None = None,
    statistic: str = "answer_probability",
) -> Trajectory:
    """What a lens answers at every layer, and how far that is from the model's own answer (Belrose et al., 2023).

    Layer i is what enters block i, 0 the embeddings; behind the last block (i = L) stands the model itself. With q_i
    the lens's distribution and p = q_L the model's: entropy −Σ q_i log q_i, cross-entropy −log q_i(next token) and
    KL(p ‖ q_i), all in nats; the answer argmax q_i with its probability, and q_i of the final answer argmax p. An
    answer has settled at the first layer from which on the final one leads.

    A classifier's head was trained on the last position. What it says at an earlier one is its answer to the text cut
    there, without the end token that it knows.

    Args:
        model: a language model, or a classifier, whose answers are its classes.
        texts, ids, values: as in `Model.encode`, or a batch.
        lens: the logit lens by default; a lens in hand, or the directory of one.
        positions: `every`, or each text's `last`; by default where the lens was fitted (the logit lens: every position
            of a language model, the last of a classifier).
        statistic: which of `STATISTICS` the views show in colour.

    Raises:
        InputError: for texts that cannot be encoded, an unknown option, a lens of another model, the cross-entropy of a
            classifier, or a model whose answers are not finite.
    """
    if statistic not in STATISTICS:
        raise InputError(
            f"unknown statistic {statistic!r}; allowed are {', '.join(STATISTICS)}"
            f"{did_you_mean(str(statistic), STATISTICS)}"
        )
    if positions is not None and positions not in POSITIONS:
        raise InputError(
            f"unknown positions {positions!r}; allowed are {', '.join(POSITIONS)}"
            f"{did_you_mean(str(positions), POSITIONS)}"
        )
    if statistic == "cross_entropy" and model.is_classifier:
        raise InputError(f"{model.name} is a classifier: there is no next token, and no cross-entropy to it")
    from ssmscope.encoding import Batch
    from ssmscope.probes.lens import lens_of

    batch = texts if isinstance(texts, Batch) else model.encode(texts, ids=ids, values=values)
    found = lens_of(lens, model)
    where = positions or found.positions
    options = {"lens": found.name, "positions": where, "statistic": statistic}
    return Trajectory(
        provenance=record_provenance(model.source, options=options),
        lens=found.title,
        positions=where,
        statistic=statistic,
        classes=model.is_classifier,
        texts=tuple(_read(model, found, batch, where)),
    )


def _read(model: Model, lens: Lens, batch: Batch, positions: str) -> list[LensedText]:
    """Every text of the batch, texts of alike length run together."""
    from ssmscope.probes.lens import chosen_states
    from ssmscope.probes.lens_data import packed
    from ssmscope.probes.lens_fitting import tokens_at_once

    texts: dict[int, LensedText] = {}
    names = _Names(model)
    for chosen in packed(range(len(batch.lengths)), batch.lengths, tokens_at_once(model, len(lens))):
        part = batch.rows(chosen)
        hidden = chosen_states(model, part, positions)
        read = _measured(lens, hidden, _following(part, positions, asked=not model.is_classifier))
        if not all(np.isfinite(read[name]).all() for name in STATISTICS if name != "cross_entropy"):
            raise InputError(f"{model.name} gives answers that are not finite; its weights are damaged")
        counts = part.lengths if positions == "every" else [1] * len(chosen)
        for row, start, count in zip(chosen, np.cumsum([0, *counts]), counts):
            own = {name: array[:, start : start + count] for name, array in read.items()}
            length = len(batch.tokens[row])
            places = np.arange(length) if positions == "every" else np.array([length - 1])
            texts[row] = LensedText(batch.tokens[row], batch.words[row], places, **own, answers=names.of(own["top"]))
    return [texts[row] for row in sorted(texts)]


def _following(batch: Batch, positions: str, *, asked: bool) -> Tensor:
    """The token that follows each chosen position, −1 where none does."""
    import torch

    following = torch.full_like(batch.input_ids, -1)
    if asked:
        following[:, :-1] = torch.where(batch.mask[:, 1:], batch.input_ids[:, 1:], -1)
    return following[batch.mask] if positions == "every" else following.gather(1, batch.last.unsqueeze(1)).squeeze(1)


def _measured(lens: Lens, hidden: Tensor, following: Tensor) -> dict[str, np.ndarray]:
    """All statistics and the leading answer's number `top`, (layers + 1, positions) each."""
    import torch

    pieces: list[dict[str, Tensor]] = []
    for part in lens.slices(hidden.shape[1]):
        logs = lens.log_probs(hidden[:, part])
        probabilities = logs.exp()
        best = probabilities.max(-1)
        answer = best.indices[-1].expand(len(logs), -1).unsqueeze(-1)
        after = following[part].expand(len(logs), -1).unsqueeze(-1)
        cross = -logs.gather(-1, after.clamp(min=0)).masked_fill(after < 0, torch.nan)
        pieces.append(
            {
                "answer_probability": probabilities.gather(-1, answer).squeeze(-1),
                "top_probability": best.values,
                "entropy": -(probabilities * logs).sum(-1),
                "cross_entropy": cross.squeeze(-1),
                "kl": ((logs[-1] - logs) * probabilities[-1]).sum(-1),
                "top": best.indices,
            }
        )
    return {name: torch.cat([piece[name] for piece in pieces], dim=1).cpu().numpy() for name in pieces[0]}


class _Names:
    """What answers are called: classes by their labels, tokens as the tokenizer writes them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.known: dict[int, str] = {}

    def of(self, numbers: np.ndarray) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self._name(number) for number in row) for row in numbers.tolist())

    def _name(self, number: int) -> str:
        if number not in self.known:
            labels, tokenizer = self.model.labels, self.model.tokenizer
            if labels is not None:
                self.known[number] = labels[number]
            else:
                self.known[number] = tokenizer.decode([number]) if tokenizer is not None else str(number)
        return self.known[number]


@dataclass(frozen=True)
class LensedText:
    """One text; arrays are (layers + 1, positions), the last row being the model itself."""

    tokens: tuple[str, ...]
    words: tuple[int | None, ...]
    positions: np.ndarray
    """Which tokens were asked at, (positions,)."""
    answer_probability: np.ndarray
    """q_i of the final answer."""
    top_probability: np.ndarray
    """q_i of the layer's own answer."""
    entropy: np.ndarray
    cross_entropy: np.ndarray
    """To the next token; NaN at the last one, and everywhere of a classifier."""
    kl: np.ndarray
    """KL(p ‖ q_i)."""
    top: np.ndarray
    """The layer's own answer, a token's id or a class's."""
    answers: tuple[tuple[str, ...], ...]
    """The same by name."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def final(self) -> tuple[str, ...]:
        """The model's own answers by name."""
        return self.answers[-1]

    @cached_property
    def agrees(self) -> np.ndarray:
        """Where a layer's answer is the final one, (layers + 1, positions) bool."""
        return self.top == self.top[-1]

    @cached_property
    def settled(self) -> np.ndarray:
        """The first layer from which on the final answer leads, (positions,)."""
        stays = np.logical_and.accumulate(self.agrees[::-1])[::-1]
        return stays.argmax(0)


@dataclass(frozen=True)
class Trajectory(Result, kind="trajectory"):
    """What a lens answers at every layer and position of some texts."""

    lens: str
    """ "logit lens", or the tuned lens by its directory."""
    positions: str
    statistic: str
    """What the views show in colour."""
    classes: bool
    """Whether answers are classes rather than tokens."""
    texts: tuple[LensedText, ...]

    @property
    def layers(self) -> int:
        """L: the rows are 0 … L."""
        return len(self.texts[0].top) - 1

    @property
    def headline(self) -> str:
        return f"Answers by layer of {self.provenance.get('model', 'a model')}: {self.lens}"

    def to_frame(self) -> DataFrame:
        """A row per text, position and layer.

        Columns: text (from 1), position, token, layer (0 the embeddings, the last one the model), answer (the layer's
        own), top_probability (its), final (the model's answer), answer_probability (its), agrees, settled (the layer
        from which on the final answer leads), entropy, kl and, of a language model, cross_entropy (nats).
        """
        import pandas as pd

        columns: dict[str, list[Any]] = {}
        for number, text in enumerate(self.texts, start=1):
            shape = text.top.T.shape
            every = {
                "text": np.full(shape, number),
                "position": np.broadcast_to(text.positions[:, None], shape),
                "token": np.broadcast_to(np.array([text.tokens[p] for p in text.positions])[:, None], shape),
                "layer": np.broadcast_to(np.arange(shape[1]), shape),
                "answer": np.array(text.answers).T,
                "top_probability": text.top_probability.T,
                "final": np.broadcast_to(np.array(text.final)[:, None], shape),
                "answer_probability": text.answer_probability.T,
                "agrees": text.agrees.T,
                "settled": np.broadcast_to(text.settled[:, None], shape),
                "entropy": text.entropy.T,
                "kl": text.kl.T,
                "cross_entropy": text.cross_entropy.T,
            }
            for name, table in every.items():
                columns.setdefault(name, []).append(table.ravel())
        frame = pd.DataFrame({name: np.concatenate(tables) for name, tables in columns.items()})
        return frame.drop(columns="cross_entropy") if self.classes else frame

    def figure(self, *, statistic: str | None = None, start: int = 0) -> Figure:
        """Layers × tokens of up to 4 texts, the embeddings at the bottom and the model at the top, in every cell the
        layer's own answer. 24 tokens are drawn, from token number `start` on, and 24 layers.

        Raises InputError for an unknown statistic, or when no text has a token number `start`.
        """
        from ssmscope.probes.trajectory_figure import draw

        return draw(self, statistic or self.statistic, start=start)

    def _repr_html_(self) -> str:
        from ssmscope.probes.trajectory_page import fragment

        return fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.probes.trajectory_terminal import terminal_view

        return terminal_view(self, width=options.max_width)
