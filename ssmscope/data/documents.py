"""Documents for language models that read any text, and what a model's loss on them is in bits per character."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ssmscope.core.tokenizing import tokenize
from ssmscope.data.rows import checked_column
from ssmscope.data.text import LINE_SOURCES, known_rows
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError, did_you_mean

DOCUMENTS = ("books",)
"""The known texts whose rows are documents."""


@dataclass(frozen=True, eq=False)
class DocumentData(TokenData):
    """Documents in rows of token ids.

    Attributes:
        characters: (examples,) how many characters the tokens that are asked for stand for.
    """

    characters: np.ndarray


def load_documents(data: str, split: str | None = None) -> tuple[str, ...]:
    """The documents of a known text, as they are.

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
    """How many characters begin in each token of a byte-level tokenizer, (tokens,) int64; 0 for special tokens.

    A character of UTF-8 has one byte that is no continuation byte (10xxxxxx). So the characters of a text are the sum
    over its tokens, also where a token is a part of a character.

    Raises:
        InputError: for another kind of tokenizer, or one that changes a text before it cuts it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.loads(backend.to_str()) if backend is not None else {}
    if (whole.get("decoder") or {}).get("type") != "ByteLevel" or whole.get("normalizer") is not None:
        raise InputError("characters are counted for tokenizers of bytes that take a text as it is; give one of those")
    from tokenizers.pre_tokenizers import ByteLevel

    cut = ByteLevel(add_prefix_space=False, use_regex=False)
    # how ByteLevel writes the 64 continuation bytes: U+0080 to U+00BF are 194 (as no other) and such a byte each
    continuation = {cut.pre_tokenize_str(chr(code))[0][0][1] for code in range(0x80, 0xC0)}
    special = {*tokenizer.all_special_tokens}
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    counts = [0 if name in special else sum(letter not in continuation for letter in name) for name in names]
    return np.array(counts, dtype=np.int64)


def document_data(
    texts: Sequence[str], tokenizer: Any, *, length: int, name: str = "text", split: str = "all"
) -> DocumentData:
    """Documents as one stream, cut into rows of `length` tokens, at each of which the next token is asked.

    The stream begins with the tokenizer's end token, and each document is followed by one: every character is asked
    for, once. The rest of the last row is padding, with nothing asked.

    Raises:
        InputError: for a length below 1, no document, or a tokenizer without an end token or not of bytes.
    """
    from ssmscope.data.language import token_names

    if length < 1:
        raise InputError(f"rows of {length} tokens were asked for; give a length from 1 on")
    if not texts:
        raise InputError(f"{name} has no document; give at least one")
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the tokenizer has no end token, which stands between documents; give one that has")
    counts = characters_of_tokens(tokenizer)
    rows = tokenize(tokenizer, list(texts), add_special_tokens=False)["input_ids"]
    stream = np.concatenate([np.array([end]), *(np.array([*row, end]) for row in rows)]).astype(np.int64)
    number = -(-(len(stream) - 1) // length)
    ids = np.full(number * length, 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id, dtype=np.int64)
    targets = np.full(number * length, IGNORED, dtype=np.int64)
    ids[: len(stream) - 1], targets[: len(stream) - 1] = stream[:-1], stream[1:]
    characters = np.where(targets == IGNORED, 0, counts[targets]).reshape(number, length).sum(1)
    shape = (number, length)
    return DocumentData(name, split, ids.reshape(shape), targets.reshape(shape), token_names(tokenizer), characters)


def bits_per_character(nats: np.ndarray, characters: np.ndarray) -> float:
    """Σ nats / (ln 2 · Σ characters): what it costs to tell a text's characters, whatever the tokens are.

    Args:
        nats: the summed cross-entropies of the examples, (examples,).
        characters: how many characters these stand for, (examples,).

    Raises:
        InputError: when there is no character.
    """
    total = int(np.sum(characters))
    if not total:
        raise InputError("there is no character to measure a model on; give a text")
    return float(np.sum(nats)) / (math.log(2) * total)
