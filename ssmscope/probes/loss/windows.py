"""Long texts cut into windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.language import load_lines, token_names
from ssmscope.data.rows import SUFFIXES, checked_column, checked_path, checked_string, read_rows
from ssmscope.data.text import LINE_SOURCES
from ssmscope.errors import InputError
from ssmscope.evaluation.encoded import check_vocabulary


def documents(data: str | Path | Sequence[str], split: str | None) -> tuple[list[Sequence[str]], str]:
    """Return the lines of every document, and a name for them.

    Args:
        data: a known text or a .txt file, whose lines are one document; a file with a column `text`, one document per
            row; or texts, one document each.

    Raises:
        InputError: data that cannot be read or holds no text, or a split for data without splits.
    """
    if isinstance(data, str | Path):
        path = Path(data)
        if str(data) in LINE_SOURCES or path.suffix.lower() not in SUFFIXES:
            return [load_lines(data, split)], str(data)
        checked_path(path, LINE_SOURCES, split)
        rows = [checked_column(row, "text", number, path) for number, row in enumerate(read_rows(path), 1)]
        wrong = next((number for number, text in enumerate(rows, 1) if not isinstance(text, str)), None)
        if wrong is not None:
            raise InputError(f"row {wrong} of {path} has no text; every row needs a document")
        for number, text in enumerate(rows, 1):
            checked_string(text, "text", number, path)
        return [text.split("\n") for text in rows], str(data)
    if split is not None:
        raise InputError(f"split '{split}' has no meaning for texts; leave it out")
    texts = list(data)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError("data holds no text, or something that is not a text; give a name, a file, or texts")
    return [text.split("\n") for text in texts], "texts"


def shared_windows(
    models: Sequence[Model], documents: Sequence[Sequence[str]], length: int
) -> tuple[Int[np.ndarray, "windows length+1"], int]:
    """Return `windows_of` several models; raise InputError if they do not share a tokenizer."""
    first = models[0]
    windows, left_out = windows_of(first, documents, length)
    for other in models[1:]:
        same = token_names(other.tokenizer) == token_names(first.tokenizer)
        if not same or not np.array_equal(windows_of(other, documents, length)[0], windows):
            raise InputError(
                f"{first.name} and {other.name} do not share a tokenizer, so a token of one is no token of the other; "
                "measure them one at a time"
            )
    return windows, left_out


def windows_of(
    model: Model, documents: Sequence[Sequence[str]], length: int
) -> tuple[Int[np.ndarray, "windows length+1"], int]:
    """Return windows of `length` + 1 tokens, the last of which is only predicted, and the number of documents without
    one.

    A line ends with a newline if the tokenizer has a token for it, else with its end-of-text token (`language_data`).
    """
    tokenizer = model.tokenizer
    try:
        newline = bool(tokenize(tokenizer, "\n", add_special_tokens=False)["input_ids"])
    except InputError:  # The tokenizer has no token for a newline.
        newline = False
    tail = [] if newline or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    windows, longest, left_out = [], 0, 0
    for lines in documents:
        texts = [line + "\n" for line in lines] if newline else list(lines)
        rows = tokenize(tokenizer, texts, add_special_tokens=False)["input_ids"] if texts else []
        stream = np.array([i for row in rows for i in (*row, *tail)], dtype=np.int64)
        number = (len(stream) - 1) // length if len(stream) else 0
        longest, left_out = max(longest, len(stream)), left_out + (number == 0)
        if number:
            windows.append(stream[np.arange(number)[:, None] * length + np.arange(length + 1)])
    if not windows:
        raise InputError(
            f"no document is long enough for a window of {length:,} tokens and one more: the longest has {longest:,}; "
            "give a smaller length, or longer texts"
        )
    found = np.concatenate(windows)
    check_vocabulary(model, found.max())
    return found, left_out
