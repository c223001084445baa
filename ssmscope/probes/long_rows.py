"""Long rows through a language model in bounded memory: piece after piece, each from the states after the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ssmscope.core import mixers
from ssmscope.core.batching import by_length
from ssmscope.core.heads import hidden_vectors
from ssmscope.core.model import Model
from ssmscope.core.progress import count_tokens
from ssmscope.core.states import States, gathered
from ssmscope.core.trace import LayerState
from ssmscope.errors import InputError
from ssmscope.evaluation.forking import Rows
from ssmscope.evaluation.running import continues, tokens_together

PIECE = 2048
"""How many tokens of a row run at once where a model continues from its states."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The tokens of some rows from `start` on, and what the head reads there.

    Attributes:
        rows: (rows,) their numbers.
        start: the position of the piece's first token in every row.
        lengths: (rows,) how many tokens each has in this piece.
        ends: (rows,) True where the row's last token is in this piece.
        hidden: (rows, width, model width), padded on the right.
    """

    rows: Int[np.ndarray, " rows"]
    start: int
    lengths: Int[np.ndarray, " rows"]
    ends: Bool[np.ndarray, " rows"]
    hidden: Tensor


def pieces_of(model: Model, rows: Rows, *, piece: int = PIECE) -> Iterator[Piece]:
    """Run every row once, in batches of alike length, at most `piece` tokens of a row at a time.

    A model that does not continue from its states runs every row whole (`continues` tries it).
    """
    lengths = rows.lengths
    longest = int(lengths.max(initial=1))
    width = piece if longest <= piece or continues(model, rows)[0] else longest
    ascending = np.argsort(lengths, kind="stable").tolist()
    for chosen in by_length(np.minimum(lengths, width).tolist(), tokens_together(model), rows=ascending):
        going, start, states = np.array(chosen), 0, None
        while len(going):
            stop = np.minimum(lengths[going], start + width)
            ends = lengths[going] <= start + width
            ids, mask = rows.padded(going, np.full_like(going, start), stop)
            hidden, after = _run(model, ids, mask, states, keep=not ends.all())
            yield Piece(going, start, stop - start, ends, hidden)
            left = np.flatnonzero(~ends)
            states = after if len(left) == len(going) else gathered(after, torch.from_numpy(left).to(model.device))
            going, start = going[left], start + width


def _run(
    model: Model, ids: Int[np.ndarray, "rows width"], mask: np.ndarray, states: States | None, *, keep: bool
) -> tuple[Tensor, States]:
    after: list[LayerState] = []
    real = torch.from_numpy(mask).to(model.device)
    given = {"input_ids": torch.from_numpy(ids).to(model.device), "attention_mask": real.long()}
    count_tokens(ids.size)
    with torch.no_grad(), model.running(mask=real, states=states, keep=after if keep else None):
        hidden = hidden_vectors(model.module, **given)
    return hidden, tuple(after)


def head_logits(model: Model, hidden: Tensor) -> Tensor:
    """The logits (…, vocabulary) float32 of what the head reads, (…, model width)."""
    with torch.no_grad():
        return mixers.head_logits(model.module, hidden).float()


def language_models(models: Model | Sequence[Model]) -> tuple[Model, ...]:
    """One or several models of language with their tokenizers.

    Raises:
        InputError: for none, a classifier, or one without a tokenizer.
    """
    every = (models,) if isinstance(models, Model) else tuple(models)
    if not every:
        raise InputError("no model was given; give one or several language models")
    for model in every:
        if model.is_classifier:
            raise InputError(f"{model.name} is a classifier; give a language model, which says what comes next")
        model.check_classes("what comes next")
        model.check_tokenizer()
    return every


def own_names(models: Sequence[Model]) -> tuple[str, ...]:
    """The models' names, numbered where one stands for several."""
    names: list[str] = []
    for model in models:
        name, number = model.name, 1
        while name in names:
            number += 1
            name = f"{model.name} ({number})"
        names.append(name)
    return tuple(names)
