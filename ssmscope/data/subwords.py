"""BPE-dropout: a new segmentation of every word in every epoch (Provilkov, Emelianenko & Voita 2020, section 3).

Greedy BPE always segments a word the same way, and a small data set is soon learnt by heart. Here each merge is skipped
with some probability, so words also appear in finer pieces. `tokenizers` has this as an option of its model, but its
random generator cannot be seeded: a run could be neither repeated nor resumed.

Unlike in the paper, a word keeps one segmentation within an epoch, which is many times faster than a draw for every
occurrence.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ssmscope.core.tokenizing import tokenize
from ssmscope.data.batches import Examples
from ssmscope.data.instructions import InstructionData
from ssmscope.data.text import TextData
from ssmscope.errors import InputError


class Word(NamedTuple):
    """Token ids of a word's greedy segmentation, or of one special token."""

    ids: tuple[int, ...]
    special: bool


class SubwordDropout:
    """Texts of a data set, segmented anew for every epoch, each merge skipped with probability `share`.

    A text is truncated to `max_length` tokens, its special tokens at the end kept; None for no limit. Special tokens,
    and words with characters unknown to the tokenizer, keep their greedy segmentation.

    Raises:
        InputError: for a tokenizer that is not a plain byte-pair encoding.
    """

    def __init__(
        self, data: TextData | InstructionData, tokenizer: Any, max_length: int | None, share: float, seed: int
    ) -> None:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer.is_fast else {}
        if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise InputError(f"subword_dropout {share} needs a byte-pair tokenizer without prefixes; set it to 0")
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        self.ranks = {(left, right): rank for rank, (left, right) in enumerate(pairs)}
        self.vocabulary: dict[str, int] = model["vocab"]
        self.names = {i: name for name, i in self.vocabulary.items() if name != model.get("unk_token")}
        self.max_length, self.share, self.seed, self.labels = max_length, share, seed, list(data.labels)
        encoded = tokenize(tokenizer, list(data.texts))
        self.numbers: dict[Word, int] = {}
        self.texts = [
            [self.numbers.setdefault(word, len(self.numbers)) for word in words(ids, encoded.word_ids(i))]
            for i, ids in enumerate(encoded["input_ids"])
        ]
        self.letters = [self._letters(word) for word in self.numbers]
        self.special = [word.special for word in self.numbers]

    def examples(self, epoch: int) -> Examples:
        """Return every text as token ids of this epoch's segmentation, the same for the same seed and epoch."""
        cuts = self.cuts(epoch)
        return Examples([self.row(text, cuts) for text in range(len(self.texts))], self.labels)

    def cuts(self, epoch: int) -> list[list[int]]:
        """Return the token ids of every distinct word in this epoch."""
        draw = random.Random(self.seed * 1_000_003 + epoch)
        return [
            list(word.ids) if letters is None else [self.vocabulary[part] for part in self.cut(letters, draw)]
            for word, letters in zip(self.numbers, self.letters)
        ]

    def row(self, number: int, cuts: Sequence[Sequence[int]]) -> list[int]:
        """Return one text as token ids of the given segmentations."""
        text = self.texts[number]
        end = len(text)
        while end and self.special[text[end - 1]]:
            end -= 1
        tail = [token for word in text[end:] for token in cuts[word]]
        body = [token for word in text[:end] for token in cuts[word]]
        return (body if self.max_length is None else body[: self.max_length - len(tail)]) + tail

    def cut(self, letters: str, draw: random.Random) -> list[str]:
        """Merge `letters` pair by pair, earliest-learnt merge first, each skipped with probability `share`."""
        parts = list(letters)
        while len(parts) > 1:
            open_merges = [
                (self.ranks[pair], at)
                for at, pair in enumerate(zip(parts, parts[1:]))
                if pair in self.ranks and draw.random() >= self.share
            ]
            if not open_merges:
                break
            at = min(open_merges)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts

    def _letters(self, word: Word) -> str | None:
        if word.special or any(i not in self.names for i in word.ids):
            return None
        letters = "".join(self.names[i] for i in word.ids)
        return letters if all(letter in self.vocabulary for letter in letters) else None


def words(ids: list[int], word_ids: list[int | None]) -> list[Word]:
    """Group a text's token ids by word; each special token (None) is its own group."""
    found = []
    for number, group in groupby(zip(ids, word_ids), key=lambda pair: pair[1]):
        tokens = [token for token, _ in group]
        found += [Word((t,), True) for t in tokens] if number is None else [Word(tuple(tokens), False)]
    return found
