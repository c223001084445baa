"""Documents of known texts in rows of tokens, and tokenizers of bytes, words and symbols."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.language import next_token_rows, token_names
from ssmscope.data.rows import checked_column
from ssmscope.data.text import LINE_SOURCES, known_rows
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError, check_whole, did_you_mean
from ssmscope.zoo.tokenizers import fast_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
"""Special tokens of `word_tokenizer`; WikiText also writes the first for its rare words."""

DOCUMENTS = ("books",)
"""Known texts whose rows are documents."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of UTF-8 bytes: 256 tokens, the byte's value being its id, and no special tokens. In
    `word_ids`, the bytes of a word belong together with the space before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    # ByteLevel writes a byte as the character with that code if it is printable, else as the next one from 256 on.
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast_tokenizer(tokenizer)


def word_tokenizer(lines: Sequence[str], *, vocabulary: int = 10_000) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the most frequent white-space-separated words of `lines`; ties are in alphabetical order.
    There are at most `vocabulary` tokens: id 0 is `<unk>`, any other word, and id 1 `<eos>`, the end of a line, which
    `language_data` adds; encoding a text adds no token. Decoding joins the words with single spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if vocabulary < 3:
        raise InputError(
            f"a vocabulary of {vocabulary} was asked for; it needs at least 3: {UNKNOWN}, {END_OF_LINE}, a word"
        )
    counts = Counter(word for line in lines for word in line.split())
    special = (UNKNOWN, END_OF_LINE)
    words = sorted((word for word in counts if word not in special), key=lambda word: (-counts[word], word))
    if not words:
        raise InputError("there is no word to make a tokenizer of; give at least one")
    names = (*special, *words[: vocabulary - 2])
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # "<unk>" is looked up like any word, not searched for within words: "non-<unk>" is one unknown word.
    return fast_tokenizer(tokenizer, unk_token=UNKNOWN, eos_token=END_OF_LINE, split_special_tokens=True)


def symbol_tokenizer(tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of a synthetic task's symbols, written with white space between them; the index is the id. There
    are no special tokens, and a text with any other symbol cannot be encoded (`tokenize` names it)."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if not tokens:
        raise InputError("there is no symbol to make a tokenizer of; give at least one")
    split = pre_tokenizers.WhitespaceSplit()
    broken = [token for token in tokens if [word for word, _ in split.pre_tokenize_str(token)] != [token]]
    if broken:
        raise InputError(f"the symbol {broken[0]!r} is empty or holds white space; give symbols that are one word each")
    twice = [token for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise InputError(f"the symbol {twice[0]!r} is given twice; every symbol needs an id of its own")
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = split
    return fast_tokenizer(tokenizer)


@dataclass(frozen=True, eq=False)
class DocumentData(TokenData):
    """Documents in rows of token ids; `characters` (examples,) is the number of characters in a row's targets."""

    characters: np.ndarray


def load_documents(data: str, split: str | None = None) -> tuple[str, ...]:
    """Load the documents of a known text, unchanged, by default of its split `test`. `books` (English novels in the
    public domain, in documents of about 10,000 characters) is read from `$SSMSCOPE_DATA/books/<split>.parquet`. Raise
    InputError for an unknown name or split, rows that cannot be read, or one without a text."""
    if data not in DOCUMENTS:
        raise InputError(f"unknown documents '{data}'; give {', '.join(DOCUMENTS)}{did_you_mean(data, DOCUMENTS)}")
    source = LINE_SOURCES[data]
    rows = known_rows(data, source, split or source.default_split)
    texts = tuple(checked_column(row, "text") for row in rows)
    for row, text in zip(rows, texts):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{row.where} has no text; every row needs one")
    return texts


def characters_of_tokens(tokenizer: Any) -> np.ndarray:
    """Count the characters that begin in each token of a byte-level tokenizer, (tokens,) int64; 0 for special tokens.
    Every UTF-8 character has exactly one byte that is no continuation byte (10xxxxxx), so the counts of a text's tokens
    sum to its number of characters. Another kind of tokenizer, or one with a normalizer, raises InputError."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.loads(backend.to_str()) if backend is not None else {}
    if (whole.get("decoder") or {}).get("type") != "ByteLevel" or whole.get("normalizer") is not None:
        raise InputError("characters are counted for tokenizers of bytes that take a text as it is; give one of those")
    from tokenizers.pre_tokenizers import ByteLevel

    cut = ByteLevel(add_prefix_space=False, use_regex=False)
    # U+0080 to U+00BF are byte 194 and one continuation byte each, so they show how ByteLevel writes all 64 of these.
    continuation = {cut.pre_tokenize_str(chr(code))[0][0][1] for code in range(0x80, 0xC0)}
    special = {*tokenizer.all_special_tokens}
    counts = (0 if name in special else sum(c not in continuation for c in name) for name in token_names(tokenizer))
    return np.array(list(counts), dtype=np.int64)


def document_data(
    texts: Sequence[str], tokenizer: Any, *, length: int, name: str = "text", split: str = "all"
) -> DocumentData:
    """Join documents into one stream and cut it into rows of `length` tokens with next-token targets.

    The stream begins with the tokenizer's end token and has one after each document, so every character is predicted
    exactly once. The rest of the last row is padding without targets. Raise InputError for a length below 1, no
    document, or a tokenizer without an end token or not of bytes.
    """
    check_whole(1, length=length)
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
    """Compute Σ nats / (ln 2 · Σ characters) of the examples, a loss that does not depend on the tokenizer."""
    total = int(np.sum(characters))
    if not total:
        raise InputError("there is no character to measure a model on; give a text")
    return float(np.sum(nats)) / (math.log(2) * total)
