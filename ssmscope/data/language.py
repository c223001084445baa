"""Texts for language models: lines, tokenizers of bytes, words and symbols, and rows of tokens."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.core.limits import MAX_TOKENS_PER_ROW, refuse_above
from ssmscope.core.reading import read_text
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.rows import SUFFIXES, checked_column, checked_path, read_rows, text_of
from ssmscope.data.text import LINE_SOURCES, known_rows
from ssmscope.data.tokenizer import fast_tokenizer
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
"""Special tokens of `word_tokenizer`; WikiText also writes the first for its rare words."""


def load_lines(data: str | Path, split: str | None = None) -> tuple[str, ...]:
    """Load the lines of a known text or of a file, stripped of white space. Blank lines are kept.

    Args:
        data: `wikitext2` (WikiText-2, words separated by spaces and rare ones written `<unk>`), `books` (English
            novels), a .txt file, or a csv, tsv, jsonl or parquet file with a column `text`.
        split: `train`, `validation` or, by default, `test` of a known text. A file has no splits.

    Raises:
        InputError: for an unknown name or split, a file that cannot be read, a missing column, or no word at all.
    """
    if isinstance(data, str) and data in LINE_SOURCES:
        source = LINE_SOURCES[data]
        rows, place = known_rows(data, source, split or source.default_split)
        texts = [_text(row, number, place) for number, row in enumerate(rows, 1)]
        # The hub's files, cut at line ends, may leave an empty last row, which is no line.
        return _lines(texts[:-1] if texts[-1] == "" else texts, place)
    path = Path(data)
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory; give a file of text")
    checked_path(data, LINE_SOURCES, split, suffixes=(".txt", *SUFFIXES), what="text", one_of="")
    if path.suffix.lower() != ".txt":
        return _lines([_text(row, number, path) for number, row in enumerate(read_rows(path), 1)], path)
    return _lines([read_text(path, str(path)).replace("\r\n", "\n").replace("\r", "\n")], path)


def _text(row: Any, number: int, place: str | Path) -> str:
    value = checked_column(row, "text", number, place)
    if value is None:
        raise InputError(f"row {number} of {place} has no text; every row needs one, which may be blank")
    return text_of(value, "text", number, place)


def _lines(texts: Sequence[str], place: str | Path) -> tuple[str, ...]:
    lines = [line for text in texts for line in (text[:-1] if text.endswith("\n") else text).split("\n")]
    if not any(line.strip() for line in lines):
        raise InputError(f"{place} holds no word; give a text")
    return tuple(line.strip() for line in lines)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of UTF-8 bytes: 256 tokens, the byte's value being its id.

    Every text can be encoded and is decoded exactly. There are no special tokens. In `word_ids`, the bytes of a word
    belong together with the space before it.
    """
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

    Id 0 is `<unk>`, any other word, and id 1 `<eos>`, the end of a line, which `language_data` adds; encoding a text
    adds no token. Decoding joins the words with single spaces.

    Args:
        vocabulary: maximum number of tokens, the two special ones included.

    Raises:
        InputError: for lines without a word, or a vocabulary below 3.
    """
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
    """Make a tokenizer of a synthetic task's symbols, written with white space between them; the index is the id.

    There are no special tokens, and a text with any other symbol cannot be encoded (`tokenize` names it).

    Raises:
        InputError: if there is no symbol, or one is given twice, is empty or holds white space.
    """
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


def token_names(tokenizer: Any) -> tuple[str, ...]:
    """Return a tokenizer's tokens in the order of their ids."""
    return tuple(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))


def language_data(
    lines: Sequence[str], tokenizer: Any, *, length: int, name: str = "text", split: str = "all"
) -> TokenData:
    """Cut a text into rows of `length` tokens with next-token targets.

    Every line is followed by the tokenizer's `eos_token`, or by a line end if it has none. The text is one stream: a
    row's last target is the first token of the next row, so all tokens but the first are predicted exactly once. The
    rest of the last row is padding without targets.

    Raises:
        InputError: for a length below 1 or too large, fewer than two tokens, or a symbol unknown to the tokenizer.
    """
    if length < 1:
        raise InputError(f"rows of {length} tokens were asked for; give a length of at least 1")
    refuse_above(MAX_TOKENS_PER_ROW, length=length)
    end = tokenizer.eos_token_id
    texts = [line if end is not None else line + "\n" for line in lines]
    tail = [] if end is None else [end]
    rows = tokenize(tokenizer, texts, add_special_tokens=False)["input_ids"] if texts else []
    stream = np.array([i for row in rows for i in (*row, *tail)], dtype=np.int64)
    if len(stream) < 2:
        raise InputError(f"{name} has {len(stream)} tokens; a language model needs at least 2")
    return TokenData(name, split, *next_token_rows(stream, length, tokenizer), token_names(tokenizer))


def next_token_rows(stream: np.ndarray, length: int, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Cut a stream of token ids into rows, (rows, length) inputs and next-token targets, the last one padded."""
    count = -(-(len(stream) - 1) // length)
    padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = np.full(count * length, padding, dtype=np.int64)
    targets = np.full(count * length, IGNORED, dtype=np.int64)
    ids[: len(stream) - 1], targets[: len(stream) - 1] = stream[:-1], stream[1:]
    return ids.reshape(count, length), targets.reshape(count, length)
