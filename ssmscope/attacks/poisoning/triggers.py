"""Triggers as tokens and as text: their vocabulary, and the texts with a place for one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from ssmscope.attacks.curves import Questions
from ssmscope.attacks.insertion.measure import inserted
from ssmscope.attacks.words.hotflip import letters
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.language import load_lines
from ssmscope.errors import InputError
from ssmscope.evaluation.encoded import token_rows

Trigger = tuple[int, ...]
"""Indices of words in a `Vocabulary`."""


@dataclass(frozen=True)
class Vocabulary:
    """Words of triggers; after a space each is one token."""

    words: tuple[str, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, given: str | Path | None = None, absent: Iterable[str] = ()) -> Vocabulary:
        """Collect the model's tokens that are words, or a file's lines of one token, without `absent` ones."""
        tokenizer = model.tokenizer
        if not tokenizer.is_fast:
            raise InputError(
                f"poison needs the offsets of tokens in a text; the slow tokenizer of {model.name} has none"
            )
        special = set(tokenizer.all_special_ids)
        if given is None:
            numbers = sorted(set(tokenizer.get_vocab().values()) - special)
            listed = [letters(model, number) for number in numbers if number < model.vocabulary]
        else:
            listed = [line.strip() for line in load_lines(given)]
        avoided = {word.lower() for word in absent}
        words = [word for word in dict.fromkeys(listed) if word and word.lower() not in avoided]
        encoded = tokenize(tokenizer, [f"{word} {word}" for word in words], return_offsets_mapping=True)
        found = []
        for word, ids, offsets in zip(words, encoded["input_ids"], encoded["offset_mapping"]):
            own = [number for number, (start, stop) in zip(ids, offsets) if stop > max(start, len(word))]
            if len(own) == 1 and own[0] not in special and own[0] < model.vocabulary:
                found.append((word, own[0]))
        if len(found) < 2:
            where = f"the tokens of {model.name}" if given is None else str(given)
            raise InputError(
                f"no tokens left for a trigger: {len(found)} of {where} is a word of one token; two are needed"
            )
        return cls(*zip(*found))

    def __len__(self) -> int:
        return len(self.words)

    def text(self, trigger: Trigger) -> str:
        return " ".join(self.words[number] for number in trigger)

    def tokens(self, triggers: Sequence[Trigger]) -> np.ndarray:
        """Return the token ids of triggers, (triggers, length)."""
        return np.asarray(self.ids, dtype=np.int64)[np.asarray(triggers, dtype=np.int64)]

    def drawn(self, random: np.random.Generator, number: int, length: int) -> list[Trigger]:
        """Draw random triggers."""
        return [tuple(row) for row in random.integers(0, len(self), (number, length)).tolist()]


@dataclass(frozen=True)
class Slot:
    """A text (`row` of the questions) with a place for a trigger after so many words, and the token ids on either side.

    `span` is True at the tokens before it whose memory is attacked.
    """

    row: int
    words: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    span: Bool[np.ndarray, " before"]


def slots_of(model: Model, asked: Questions, filler: str, place: float, span: str | None) -> list[Slot]:
    """Return the texts that have the span before the place, which is after the first ⌊place · n + ½⌋ of n words.

    The filler has as many words, of one token each, as a trigger. The first occurrence of the span counts; without one,
    all tokens before the place are attacked.
    """
    places = [math.floor(place * len(content.split()) + 0.5) for content in asked.contents]
    filled = [inserted(content, filler, words) for content, words in zip(asked.contents, places)]
    texts = [asked.before + content + asked.after for content in filled]
    rows = token_rows(model, texts)
    offsets = tokenize(model.tokenizer, texts, return_offsets_mapping=True)["offset_mapping"]
    found = []
    for row, (content, words, ids, own) in enumerate(zip(asked.contents, places, rows, offsets)):
        first = len(asked.before) + len(inserted(content, "\0", words).partition("\0")[0])
        ends = np.asarray(own[: len(ids)]).reshape(-1, 2)
        real = ends[:, 1] > ends[:, 0]
        within = np.flatnonzero(real & (ends[:, 1] > first) & (ends[:, 0] < first + len(filler)))
        if not words or len(within) != len(filler.split()):
            continue
        start, stop = int(within[0]), int(within[-1]) + 1
        chosen = np.ones(start, dtype=bool)
        if span is not None:
            begin = content.find(span)
            at = len(asked.before) + begin
            chosen = real[:start] & (ends[:start, 1] > at) & (ends[:start, 0] < at + len(span)) & (begin >= 0)
            if begin < 0 or at + len(span) > first:
                continue
        if chosen.any():
            found.append(Slot(row, words, tuple(ids[:start]), tuple(ids[stop:]), chosen))
    if not found:
        what = "a word" if span is None else f"{span!r}"
        raise InputError(f"no text has {what} before the trigger; give another span, or a larger place (up to 1)")
    return found


def attacked(asked: Questions, slot: Slot, trigger: str) -> str:
    """Return the whole text with a trigger."""
    return asked.before + inserted(asked.contents[slot.row], trigger, slot.words) + asked.after
