"""Inputs on which a model is measured: given texts, or random sequences drawn by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ssmscope.core.limits import MAX_TOKENS_PER_ROW, MAX_TOKENS_TOGETHER, refuse_above, refuse_held
from ssmscope.core.model import as_batch
from ssmscope.errors import InputError
from ssmscope.render.numbers import counted

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model, TextsLike

DEFAULT_LENGTH = 512
"""Default length of random sequences in tokens."""


class Inputs(NamedTuple):
    """Batch with a description, such as "4 random sequences of 512 tokens (seed 0)"."""

    batch: Batch
    name: str

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self.batch.lengths)


def inputs_of(model: Model, texts: TextsLike | None, *, length: int | None, samples: int, seed: int) -> Inputs:
    """Return the given texts as a batch, or `samples` random sequences of `length` tokens (by default 512, or the size
    of a pixel model's images).

    Raises:
        InputError: a length given with texts, a text of one token, or texts that the model cannot read.
    """
    if texts is not None:
        if length is not None:
            raise InputError(
                f"both texts and length {length!r} were given; give texts, or a length of random sequences"
            )
        batch = as_batch(model, texts)
        short = next((at for at, n in enumerate(batch.lengths) if n < 2), None)
        if short is not None:
            raise InputError(f"text {short} has one token; give two or more: a state is kept from one to the next")
        return Inputs(batch, f"{counted(len(batch.tokens), 'text')} of {_span(batch.lengths)} tokens")
    if length is None:
        size = getattr(model.config, "image_size", None) if model.channels is not None else None
        length = size[0] * size[1] + 1 if size else DEFAULT_LENGTH
    batch = random_batch(model, samples, length, np.random.default_rng(seed))
    return Inputs(batch, f"{counted(samples, 'random sequence')} of {length:,} tokens (seed {seed})")


def random_batch(model: Model, number: int, length: int, random: np.random.Generator) -> Batch:
    """Draw random sequences, in which every token that is not special, or pixel value in [0, 1], is equally likely.

    Raises:
        InputError: sequences that are too long or too many, or images of no pixel.
    """
    refuse_above(MAX_TOKENS_PER_ROW, length=length)
    what = f"{number:,} sequences of {length:,} tokens"
    refuse_held(number * length, what, "ask for fewer or shorter ones", most=MAX_TOKENS_TOGETHER)
    if model.channels is not None:
        if length < 2:
            raise InputError(f"length is {length}; allowed is a whole number from 2 on: the last is the class token")
        return model.encode(values=random.random((number, length - 1, model.channels), dtype=np.float32))
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    ordinary = [token for token in range(model.vocabulary) if token not in special] or list(range(model.vocabulary))
    return model.encode(ids=random.choice(ordinary, (number, length)).tolist())


def _span(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
