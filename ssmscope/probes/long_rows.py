"""Bounded-memory runs of long rows through a language model, piece by piece from the states after the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from ssmscope.core import heads
from ssmscope.core.batching import by_length
from ssmscope.core.heads import hidden_vectors
from ssmscope.core.model import Model
from ssmscope.core.progress import count_tokens, duration
from ssmscope.core.tokenizing import tokenize
from ssmscope.core.trace import LayerState, States, gathered
from ssmscope.errors import InputError
from ssmscope.evaluation.forking import Rows
from ssmscope.evaluation.running import max_batch_tokens, try_resuming

PIECE_TOKENS = 2048
"""Tokens of a row that run at once in a model that continues from its states."""
MAX_CACHED_COUNTS = 2**16
"""Number of texts whose number of tokens is cached: sentences of filler recur in every context."""


TIMED_TOKENS, ANNOUNCED_SECONDS = 1024, 10.0
"""Tokens of the run that long work is estimated by, and the shortest estimate that is worth a line."""


def announce(models: Sequence[Model], tokens: float, advice: str, say: Callable[[str], None]) -> float:
    """Estimate the seconds that it takes to run so many tokens through each model, by a short run of each, and say so
    before the work if that is long; return the estimate."""
    seconds = 0.0
    for model in models:
        batch = model.encode(ids=torch.arange(TIMED_TOKENS).remainder(model.vocabulary).view(4, -1))
        with torch.no_grad(), model.running():
            model.forward(batch.rows([0]), last_only=True, checked=False)  # The first run is slow.
            began = time.perf_counter()
            model.forward(batch, last_only=True, checked=False)
        seconds += (time.perf_counter() - began) / TIMED_TOKENS * tokens
    if seconds >= ANNOUNCED_SECONDS:
        say(f"about {tokens * len(models):,.0f} tokens to read, about {duration(seconds)}; {advice}")
    return seconds


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of some rows, which have their numbers, from position `start` on."""

    rows: Int[np.ndarray, " rows"]
    start: int
    lengths: Int[np.ndarray, " rows"]
    """Numbers of tokens in this piece."""
    ends: Bool[np.ndarray, " rows"]
    """True if the row's last token is in this piece."""
    hidden: Tensor
    """(rows, width, model width): what the head reads, padded on the right."""


def pieces_of(model: Model, rows: Rows, *, piece: int = PIECE_TOKENS) -> Iterator[Piece]:
    """Run every row once, in batches of similar length, at most `piece` tokens of a row at a time, or as a whole in a
    model that does not continue from its states, as `try_resuming` tests."""
    lengths = rows.lengths
    longest = int(lengths.max())
    width = piece if longest <= piece or try_resuming(model, rows)[0] else longest
    ascending = np.argsort(lengths, kind="stable").tolist()
    for chosen in by_length(np.minimum(lengths, width).tolist(), max_batch_tokens(model), rows=ascending):
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
    """Return the logits (…, vocabulary), float32, of hidden vectors (…, model width)."""
    with torch.no_grad():
        return heads.head_logits(model.module, hidden).float()


def language_models(models: Model | Sequence[Model]) -> tuple[Model, ...]:
    """Return one or several language models as a tuple."""
    every = (models,) if isinstance(models, Model) else tuple(models)
    if not every:
        raise InputError("no model was given; give one or several language models")
    for model in every:
        if model.is_classifier:
            raise InputError(f"{model.name} is {model.role}; give a language model")
        model.check_classes("what comes next")
        model.check_tokenizer()
    return every


def distinct_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of models, numbered where several are the same."""
    found: list[str] = []
    for given in names:
        numbered = (f"{given} ({number})" for number in count(2))
        found.append(next(name for name in chain([given], numbered) if name not in found))
    return tuple(found)


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, with a cache."""
    return lru_cache(MAX_CACHED_COUNTS)(
        lambda text: len(tokenize(tokenizer, text, add_special_tokens=False)["input_ids"])
    )
