"""Texts and token ids as they are typed on a command line, and texts of a file's lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ssmscope.api.options import WHOLE_NUMBER
from ssmscope.core.text_files import MAX_FILE_BYTES, SURROGATE, decoded_text, read_text
from ssmscope.errors import InputError

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx")
"""Suffixes of files that hold more than lines of text."""


def texts_of(texts: Sequence[str] | None, file: str | None) -> list[str]:
    """Return the texts given, or those of a file. Raise InputError if both or neither are given, a text is not valid
    UTF-8, or the file cannot be used."""
    if texts and file is not None:
        raise InputError("text=… cannot be combined with file=…; give one of them")
    if file is not None:
        return lines_of(file)
    if not texts:
        raise InputError(
            "no text; give text=…, file=…, or ids='5,17,3' for a model without a tokenizer; image=… for one of pixels"
        )
    for text in texts:
        if SURROGATE.search(text):
            raise InputError("text=… is not valid UTF-8; give it in UTF-8, or in a file, file=…")
    return list(texts)


def lines_of(file: str) -> list[str]:
    """Return the lines of a UTF-8 file; `-` is stdin. Raise InputError if it cannot be read, is a table, is not UTF-8
    text, is empty, or has an empty line between others, which would number texts and lines differently."""
    suffix = Path(file).suffix.lower()
    if suffix in TABLES:
        raise InputError(f"file={file!r} is a table, and file=… takes lines: save its texts one a line in a .txt file")
    advice = "save it as UTF-8, one text a line"
    if file == "-":
        text = decoded_text(sys.stdin.buffer.read(MAX_FILE_BYTES + 1), "file='-'", advice=advice)
    else:
        text = read_text(file, f"file={file!r}", advice=advice)
    lines = text.replace("\r\n", "\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError(f"file={file!r} is empty; give one text a line")
    empty = next((number for number, line in enumerate(lines, start=1) if not line.strip()), None)
    if empty is not None:
        raise InputError(f"file={file!r}: line {empty} is empty; give one text a line")
    return lines


def whole_numbers(value: str, named: str, example: str) -> list[int]:
    """Parse whole numbers such as "5,17,3". Raise InputError for anything else, or more than 18 digits."""
    parts = [part.strip() for part in value.split(",")]
    wrong = next((part for part in parts if not WHOLE_NUMBER.fullmatch(part)), None)
    if wrong is not None:
        raise InputError(f"{named}={value!r}: {wrong!r} is not a whole number; write for example {named}={example!r}")
    return [int(part) for part in parts]
