"""Texts for language models: lines, and rows of tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ssmscope.core.batching import MAX_TOKENS_PER_ROW, refuse_above
from ssmscope.core.text_files import read_text
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.hub import is_hub_id, text_rows
from ssmscope.data.rows import SUFFIXES, Row, checked_column, checked_path, given_rows, read_rows, text_of
from ssmscope.data.text import LINE_SOURCES, known_rows
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError, check_whole


def load_lines(data: Any, split: str | None = None) -> tuple[str, ...]:
    """Load the lines of a known text or of a file, stripped of white space. Blank lines are kept.

    The data are `wikitext2` (WikiText-2, words separated by spaces and rare ones written `<unk>`), `books` (English
    novels), of the split `train`, `validation` or (default) `test`; a .txt file; a csv, tsv, jsonl or parquet file, or
    `OWNER/NAME` on the hub, with a column `text`; a DataFrame with that column, or a list of texts. A split may be cut,
    as `test[:200]`. Raise InputError for what cannot be read, a missing column, or no word at all.
    """
    if (given := given_rows(data)) is not None:
        return _lines(list(map(_text, given)), given[0].place)
    if isinstance(data, str) and data in LINE_SOURCES:
        source = LINE_SOURCES[data]
        rows = known_rows(data, source, split or source.default_split)
        texts = list(map(_text, rows))
        # The hub's files, cut at line ends, may leave an empty last row, which is not a line.
        return _lines(texts[:-1] if texts[-1] == "" else texts, rows[0].place)
    if is_hub_id(data):
        rows = text_rows(str(data), split or "test")
        return _lines(list(map(_text, rows)), rows[0].place)
    path = Path(data)
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory; give a file of text")
    checked_path(data, LINE_SOURCES, split, suffixes=(".txt", *SUFFIXES), what="text", one_of="")
    if path.suffix.lower() != ".txt":
        return _lines(list(map(_text, read_rows(path))), path)
    return _lines([read_text(path, str(path)).replace("\r\n", "\n").replace("\r", "\n")], path)


def _text(row: Row) -> str:
    if checked_column(row, "text") is None:
        raise InputError(f"{row.where} has no text; every row needs one, which may be blank")
    return text_of(row)


def _lines(texts: Sequence[str], place: str | Path) -> tuple[str, ...]:
    lines = [line for text in texts for line in (text[:-1] if text.endswith("\n") else text).split("\n")]
    if not any(line.strip() for line in lines):
        raise InputError(f"{place} holds no word; give a text")
    return tuple(line.strip() for line in lines)


def token_names(tokenizer: Any) -> tuple[str, ...]:
    """Return a tokenizer's tokens in the order of their ids."""
    return tuple(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))


def language_data(
    lines: Sequence[str], tokenizer: Any, *, length: int, name: str = "text", split: str = "all"
) -> TokenData:
    """Cut a text into rows of `length` tokens with next-token targets.

    Every line is followed by the tokenizer's `eos_token`, or by a line end if it has none. The text is one stream: a
    row's last target is the first token of the next row, so all tokens but the first are predicted exactly once. The
    rest of the last row is padding without targets. Raise InputError for a length below 1 or too large, fewer than two
    tokens, or a symbol unknown to the tokenizer.
    """
    check_whole(1, length=length)
    refuse_above(MAX_TOKENS_PER_ROW, length=length)
    tail = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = [line if tail else line + "\n" for line in lines]
    rows = tokenize(tokenizer, texts, add_special_tokens=False)["input_ids"] if texts else []
    stream = np.array([i for row in rows for i in (*row, *tail)], dtype=np.int64)
    if len(stream) < 2:
        raise InputError(f"{name} has {len(stream)} tokens; a language model needs at least 2")
    return TokenData(name, split, *next_token_rows(stream, length, tokenizer), token_names(tokenizer))


def next_token_rows(stream: np.ndarray, length: int, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Cut a stream of token ids into rows, (rows, length) inputs and next-token targets, the last one padded."""
    short = -(len(stream) - 1) % length
    ids = np.pad(stream[:-1], (0, short), constant_values=tokenizer.pad_token_id or 0)
    targets = np.pad(stream[1:], (0, short), constant_values=IGNORED)
    return ids.reshape(-1, length), targets.reshape(-1, length)
