"""What somebody typed on the command line, as values: texts, lists of numbers, a directory to write to."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ssmscope.errors import InputError

WHOLE_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


def texts_of(texts: Sequence[str] | None, file: str | None) -> list[str]:
    """The texts of `--text` or of `--file`.

    Raises:
        InputError: both or neither are given, a text is not valid UTF-8, or the file cannot be used.
    """
    if texts and file is not None:
        raise InputError("--text cannot be combined with --file; give one of them")
    if file is not None:
        return lines_of(file)
    if not texts:
        raise InputError(
            "no text; give --text TEXT, --file FILE, or --ids 5,17,3 for a model without a tokenizer; --image FILE for "
            "one of pixels"
        )
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InputError("--text is not valid UTF-8; give it in UTF-8, or in a file with --file")
    return list(texts)


def lines_of(file: str) -> list[str]:
    """The lines of a UTF-8 file, `-` being stdin.

    Raises:
        InputError: the file cannot be read, is no UTF-8 text, has no line, or an empty one between others: the
            numbers of the texts would no longer be those of the lines.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read --file {file}: {error.strerror or error}") from error
    try:
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        where = f"byte {error.start}"
        raise InputError(f"--file {file} is not UTF-8 text ({where}); save it as UTF-8, one text a line") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError(f"--file {file} is empty; give one text a line")
    empty = next((number for number, line in enumerate(lines, start=1) if not line.strip()), None)
    if empty is not None:
        raise InputError(f"--file {file}: line {empty} is empty; give one text a line")
    return lines


def whole_numbers(value: str, option: str, example: str) -> list[int]:
    """The numbers of "5,17,3".

    Raises:
        InputError: a part is no whole number of at most 18 digits.
    """
    parts = [part.strip() for part in value.split(",")]
    wrong = next((part for part in parts if not WHOLE_NUMBER.fullmatch(part)), None)
    if wrong is not None:
        raise InputError(f"{option} {value!r}: {wrong!r} is no whole number; write for example {option} {example}")
    return [int(part) for part in parts]


def check_writable(out: Path | None) -> None:
    """Refuse a directory that cannot be written to before the work begins; nothing is created.

    Raises:
        InputError: it is a file, lies under a file, or is somebody else's.
    """
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a directory")
    existing = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise InputError(f"--out {out} lies under {existing}, which is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {existing} cannot be written to; give a directory of yours")
