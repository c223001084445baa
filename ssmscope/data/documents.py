"""Documents for language models with byte-level tokenizers, and the loss in bits per character."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssmscope.core.tokenizing import tokenize
from ssmscope.data.language import next_token_rows, token_names
from ssmscope.data.rows import checked_column
from ssmscope.data.text import LINE_SOURCES, known_rows
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError, did_you_mean

DOCUMENTS = ("books",)
"""Known texts whose rows are documents."""


@dataclass(frozen=True, eq=False)
class DocumentData(TokenData):
    """Documents in rows of token ids.

    Attributes:
        characters: (examples,) number of characters in each row's target tokens.
    """

    characters: np.ndarray


def load_documents(data: str, split: str | None = None) -> tuple[str, ...]:
    """Load the documents of a known text, unchanged.

    Args:
        data: `books` (English novels in the public domain, in documents of about 10,000 characters), read from
            `$SSMSCOPE_DATA/books/<split>.parquet`.
        split: `train`, `validation` or, by default, `test`.

    Raises:
        InputError: an unknown name or split, rows that cannot be read, or one without a text.
    """
    if data not in DOCUMENTS:
        raise InputError(f"unknown documents '{data}'; give {', '.join(DOCUMENTS)}{did_you_mean(data, DOCUMENTS)}")
    source = LINE_SOURCES[data]
    rows, place = known_rows(data, source, split or source.default_split)
    texts = []
    for number, row in enumerate(rows, 1):
        text = checked_column(row, "text", number, place)
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"row {number} of {place} has no text; every row needs one")
        texts.append(text)
    return tuple(texts)


def characters_of_tokens(tokenizer: Any) -> np.ndarray:
    """Count the characters that begin in each token of a byte-level tokenizer, (tokens,) int64; 0 for special tokens.

    Every UTF-8 character has exactly one byte that is no continuation byte (10xxxxxx), so the counts of a text's tokens
    sum to its number of characters even where a token is part of a character.

    Raises:
        InputError: for another kind of tokenizer, or one with a normalizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.loads(backend.to_str()) if backend is not None else {}
    if (whole.get("decoder") or {}).get("type") != "ByteLevel" or whole.get("normalizer") is not None:
        raise InputError("characters are counted for tokenizers of bytes that take a text as it is; give one of those")
    from tokenizers.pre_tokenizers import ByteLevel

    cut = ByteLevel(add_prefix_space=False, use_regex=False)
    # U+0080 to U+00BF are byte 194 and one continuation byte each, so they show how ByteLevel writes all 64 of these.
    continuation = {cut.pre_tokenize_str(chr(code))[0][0][1] for code in range(0x80, 0xC0)}
    special = {*tokenizer.all_special_tokens}
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    counts = [0 if name in special else sum(letter not in continuation for letter in name) for name in names]
    return np.array(counts, dtype=np.int64)


def document_data(
    texts: Sequence[str], tokenizer: Any, *, length: int, name: str = "text", split: str = "all"
) -> DocumentData:
    """Join documents into one stream and cut it into rows of `length` tokens with next-token targets.

    The stream begins with the tokenizer's end token and has one after each document, so every character is predicted
    exactly once. The rest of the last row is padding without targets.

    Raises:
        InputError: for a length below 1, no document, or a tokenizer without an end token or not of bytes.
    """

    if length < 1:
        raise InputError(f"rows of {length} tokens were asked for; give a length of at least 1")
    if not texts:
        raise InputError(f"{name} has no document; give at least one")
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the tokenizer has no end token, which stands between documents; give one that has")
    counts = characters_of_tokens(tokenizer)
    rows = tokenize(tokenizer, list(texts), add_special_tokens=False)["input_ids"]
    stream = np.concatenate([np.array([end]), *(np.array([*row, end]) for row in rows)]).astype(np.int64)
    ids, targets = next_token_rows(stream, length, tokenizer)
    characters = np.where(targets == IGNORED, 0, counts[targets]).sum(1)
    return DocumentData(name, split, ids, targets, token_names(tokenizer), characters)


def bits_per_character(nats: np.ndarray, characters: np.ndarray) -> float:
    """Compute Σ nats / (ln 2 · Σ characters), a loss that does not depend on the tokenizer.

    Args:
        nats: summed cross-entropy of each example, (examples,).
        characters: number of characters that each example predicts, (examples,).

    Raises:
        InputError: if there is no character.
    """
    total = int(np.sum(characters))
    if not total:
        raise InputError("there is no character to measure a model on; give a text")
    return float(np.sum(nats)) / (math.log(2) * total)
