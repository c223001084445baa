"""What a model is run on where its stability is measured: given texts, or random tokens drawn by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ssmscope.core.limits import ROW, TOGETHER, refuse_above, refuse_held
from ssmscope.core.model import as_batch
from ssmscope.errors import InputError
from ssmscope.render.numbers import counted

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model, TextsLike

LENGTH = 512
"""Tokens of a random text where no length is given."""


class Inputs(NamedTuple):
    """A batch, and what it is in words, such as "4 random sequences of 512 tokens (seed 0)"."""

    batch: Batch
    name: str

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self.batch.lengths)


def inputs_of(model: Model, texts: TextsLike | None, *, length: int | None, samples: int, seed: int) -> Inputs:
    """The given texts as a batch; without them `samples` random sequences of `length` tokens (by default 512; of a
    pixel model the size of its images), every ordinary token, or number in [0, 1], being equally likely.

    Raises:
        InputError: a length beside texts, a length or a number that is none, a text of one token, or texts that the
            model cannot read.
    """
    if texts is not None:
        if length is not None:
            raise InputError(f"length {length!r} was given beside texts; it is that of random sequences: give one")
        batch = as_batch(model, texts)
        short = next((at for at, n in enumerate(batch.lengths) if n < 2), None)
        if short is not None:
            raise InputError(f"text {short} has one token; give two or more: a state is kept from one to the next")
        number = len(batch.tokens)
        name = f"{counted(number, 'text')} of {_span(batch.lengths)} tokens"
        return Inputs(batch, name)
    if length is None:
        size = getattr(model.config, "image_size", None) if model.channels is not None else None
        length = size[0] * size[1] + 1 if size else LENGTH
    refuse_above(ROW, length=length)
    refuse_held(
        samples * length, f"{samples:,} sequences of {length:,} tokens", "ask for fewer or shorter ones", most=TOGETHER
    )
    draw = np.random.default_rng(seed)
    name = f"{counted(samples, 'random sequence')} of {length:,} tokens (seed {seed})"
    if model.channels is not None:
        pixels = draw.random((samples, length - 1, model.channels), dtype=np.float32)
        return Inputs(model.encode(values=pixels), name)
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    ordinary = [token for token in range(model.vocabulary) if token not in special] or list(range(model.vocabulary))
    return Inputs(model.encode(ids=draw.choice(ordinary, (samples, length)).tolist()), name)


def _span(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
