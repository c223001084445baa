"""Batches of texts of similar length, in an order that depends only on seed and epoch, and BPE-dropout."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.zoo.instructions import InstructionData

BATCHES_PER_POOL = 50
"""Number of batches whose rows are sorted by length together."""


def encode(data: TextData, tokenizer: Any, max_length: int) -> list[list[int]]:
    """Encode every text, cut to `max_length` tokens; the tokenizer's end token is kept."""
    return tokenize(tokenizer, list(data.texts), truncation=True, max_length=max_length)["input_ids"]


def epoch_order(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the row indices of one epoch's batches: shuffled, then sorted by length within each pool of batches."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rows = torch.randperm(len(lengths), generator=draw).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(rows), batch_size * BATCHES_PER_POOL):
        pool = sorted(rows[start : start + batch_size * BATCHES_PER_POOL], key=lambda row: lengths[row])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return rows of token ids padded on the right to (batch, length) int64, and their mask int64, 1 at tokens."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows])
    return ids, (torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]).long()


def drop_tokens(ids: Tensor, share: float, unknown_id: int, special: Tensor) -> Tensor:
    """Replace each token by the unknown token with probability `share`, except the tokens in `special`."""
    if share == 0:
        return ids
    dropped = (torch.rand(ids.shape, dtype=torch.float32) < share) & ~torch.isin(ids, special)
    return ids.masked_fill(dropped, unknown_id)


class Word(NamedTuple):
    """Token ids of a word's greedy segmentation, or of one special token."""

    ids: tuple[int, ...]
    special: bool


class SubwordDropout:
    """BPE-dropout: a new segmentation of every word in every epoch (Provilkov, Emelianenko & Voita 2020, section 3).

    Greedy BPE always segments a word the same way, and a small data set is soon learnt by heart. Here each merge is
    skipped with probability `share`, so words also appear in finer pieces. The option of `tokenizers` cannot be seeded.
    Unlike in the paper, a word keeps one segmentation within an epoch, which is many times faster.

    A text is truncated to `max_length` tokens, its special tokens at the end kept; None for no limit. Special tokens,
    and words with characters unknown to the tokenizer, keep their greedy segmentation. A tokenizer that is not a plain
    byte-pair encoding raises InputError.
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
        self.max_length, self.share, self.seed = max_length, share, seed
        encoded = tokenize(tokenizer, list(data.texts))
        known: dict[Word, Word] = {}  # Texts share their words.
        self.texts = [
            [known.setdefault(word, word) for word in words(ids, encoded.word_ids(i))]
            for i, ids in enumerate(encoded["input_ids"])
        ]
        self.letters = {word: self._letters(word) for word in known}

    def rows(self, epoch: int) -> list[list[int]]:
        """Return every text as token ids of this epoch's segmentation, the same for the same seed and epoch."""
        cuts = self.cuts(epoch)
        return [self.row(text, cuts) for text in range(len(self.texts))]

    def cuts(self, epoch: int) -> dict[Word, list[int]]:
        """Return the token ids of every distinct word in this epoch."""
        draw = random.Random(self.seed * 1_000_003 + epoch)
        return {
            word: list(word.ids) if letters is None else [self.vocabulary[part] for part in self.cut(letters, draw)]
            for word, letters in self.letters.items()
        }

    def row(self, number: int, cuts: Mapping[Word, Sequence[int]]) -> list[int]:
        """Return one text as token ids of the given segmentations."""
        text = self.texts[number]
        end = len(text) - sum(1 for _ in takewhile(lambda word: word.special, reversed(text)))
        body, tail = ([token for word in part for token in cuts[word]] for part in (text[:end], text[end:]))
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
        tokens = tuple(token for token, _ in group)
        found += [Word((t,), True) for t in tokens] if number is None else [Word(tokens, False)]
    return found
