"""Texts and token ids as padded batches, with what each token is called and which word it belongs to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ssmscope.errors import InputError

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True, eq=False)
class Batch:
    """Token ids (batch, length) int64 padded on the right, their `mask` (True at real positions), and per text the
    shown tokens and the words they belong to (None for special tokens)."""

    input_ids: Tensor
    mask: Tensor
    tokens: tuple[tuple[str, ...], ...]
    words: tuple[tuple[int | None, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """The number of real tokens of each text."""
        return [len(tokens) for tokens in self.tokens]

    @property
    def last(self) -> Tensor:
        """Each text's last real position, (batch,)."""
        return self.mask.sum(1) - 1

    def rows(self, chosen: Sequence[int]) -> Batch:
        """The chosen texts, padded to the longest of them."""
        longest = max(len(self.tokens[row]) for row in chosen)
        return Batch(
            self.input_ids[list(chosen), :longest],
            self.mask[list(chosen), :longest],
            tuple(self.tokens[row] for row in chosen),
            tuple(self.words[row] for row in chosen),
        )

    def to(self, device: torch.device) -> Batch:
        return Batch(self.input_ids.to(device), self.mask.to(device), self.tokens, self.words)


def encode_texts(texts: Sequence[str], tokenizer: Any, vocabulary: int, max_tokens: int | None = None) -> Batch:
    """One batch of texts, with the tokenizer's own special tokens; tokens are shown as they stand in the text.

    Raises:
        InputError: no text, an empty one, control characters, only unknown tokens, or more than `max_tokens` tokens.
    """
    if not texts:
        raise InputError("no text was given")
    ids: list[list[int]] = []
    tokens: list[tuple[str, ...]] = []
    words: list[tuple[int | None, ...]] = []
    for number, text in enumerate(texts, start=1):
        which = f"text {number}" if len(texts) > 1 else "the text"
        _check_text(text, which)
        encoded = tokenizer(text, return_offsets_mapping=tokenizer.is_fast, return_special_tokens_mask=True)
        row, special = encoded["input_ids"], encoded["special_tokens_mask"]
        _check_length(len(row), max_tokens, which)
        content = [i for i, s in zip(row, special) if not s or i == tokenizer.unk_token_id]
        if not content:
            raise InputError(f"{which} has no token that this model's tokenizer knows")
        if tokenizer.unk_token_id is not None and set(content) == {tokenizer.unk_token_id}:
            raise InputError(f"{which} has only characters that this model's tokenizer does not know: {text[:40]!r}")
        ids.append(row)
        if tokenizer.is_fast:
            offsets = encoded["offset_mapping"]
            names = tokenizer.convert_ids_to_tokens(row)
            tokens.append(tuple(text[a:b] if b > a else name for (a, b), name in zip(offsets, names)))
            words.append(tuple(encoded.word_ids(0)))
        else:
            tokens.append(tuple(tokenizer.convert_ids_to_tokens(row)))
            words.append(tuple(None if s else i for i, s in enumerate(special)))
    _check_range(ids, vocabulary, "the tokenizer gives")
    return _padded(ids, tokens, words, getattr(tokenizer, "pad_token_id", None))


def encode_ids(
    rows: Sequence[Sequence[int]], vocabulary: int, tokenizer: Any = None, max_tokens: int | None = None
) -> Batch:
    """One batch of token ids as given, without special tokens added.

    Raises:
        InputError: no id, one outside the vocabulary, or more than `max_tokens`.
    """
    if not rows or any(not row for row in rows):
        raise InputError("no token id was given")
    for number, row in enumerate(rows, start=1):
        _check_length(len(row), max_tokens, f"row {number}")
    _check_range(rows, vocabulary, "the given ids hold")
    names = [tuple(tokenizer.convert_ids_to_tokens(list(r)) if tokenizer else map(str, r)) for r in rows]
    special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
    words = [tuple(None if i in special else at for at, i in enumerate(row)) for row in rows]
    return _padded(rows, names, words, None)


def _check_text(text: str, which: str) -> None:
    if not text.strip():
        raise InputError(f"{which} is empty: give at least one word")
    control = _CONTROL.search(text)
    if control:
        raise InputError(
            f"{which} has the control character U+{ord(control.group()):04X} at position {control.start()}: remove it"
        )


def _check_length(length: int, max_tokens: int | None, which: str) -> None:
    if max_tokens is not None and length > max_tokens:
        raise InputError(
            f"{which} has {length:,} tokens, more than the limit of {max_tokens:,}: shorten or split it, or raise "
            "--max-tokens"
        )


def _check_range(rows: Sequence[Sequence[int]], vocabulary: int, who: str) -> None:
    outside = sorted({i for row in rows for i in row if not 0 <= i < vocabulary})
    if outside:
        raise InputError(f"{who} id {outside[0]}, outside the model's vocabulary 0…{vocabulary - 1}")


def _padded(ids, tokens, words, pad_id: int | None) -> Batch:
    longest = max(map(len, ids))
    input_ids = torch.full((len(ids), longest), pad_id if pad_id is not None else 0, dtype=torch.long)
    mask = torch.zeros(len(ids), longest, dtype=torch.bool)
    for row, values in enumerate(ids):
        input_ids[row, : len(values)] = torch.tensor(values, dtype=torch.long)
        mask[row, : len(values)] = True
    return Batch(input_ids, mask, tuple(tokens), tuple(words))
