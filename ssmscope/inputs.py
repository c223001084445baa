"""What somebody typed on the command line, as values: texts, lists of numbers, a directory to write to."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ssmscope.errors import InputError
from ssmscope.reading import LARGEST, SURROGATE, decoded_text, read_text

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx")
"""How files end that hold more than lines of text."""

LONGEST_NAME = 255
"""How many bytes the name of a file or directory has at most."""

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
        if SURROGATE.search(text):
            raise InputError("--text is not valid UTF-8; give it in UTF-8, or in a file with --file")
    return list(texts)


def lines_of(file: str) -> list[str]:
    """The lines of a UTF-8 file, `-` being stdin.

    Raises:
        InputError: the file cannot be read, is a table, is no UTF-8 text, has no line, or an empty one between others:
            the numbers of the texts would no longer be those of the lines.
    """
    suffix = Path(file).suffix.lower()
    if suffix in TABLES:
        raise InputError(f"--file {file} is a table, and --file takes lines: save its texts one a line in a .txt file")
    advice = "save it as UTF-8, one text a line"
    if file == "-":
        text = decoded_text(sys.stdin.buffer.read(LARGEST + 1), "--file -", advice=advice)
    else:
        text = read_text(file, f"--file {file}", advice=advice)
    lines = text.replace("\r\n", "\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise InputError(f"--file {file} is empty; give one text a line")
    empty = next((number for number, line in enumerate(lines, start=1) if not line.strip()), None)
    if empty is not None:
        raise InputError(f"--file {file}: line {empty} is empty; give one text a line")
    return lines


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse a command line with bytes that are no UTF-8; names of what exists may have them.

    Raises:
        InputError: naming the option.
    """
    for before, argument in zip(("", *arguments), arguments):
        if SURROGATE.search(argument) and not os.path.lexists(argument):
            named = before if before.startswith("--") else argument.partition("=")[0]
            named = named if named.startswith("--") and not SURROGATE.search(named) else "an argument"
            raise InputError(f"{named} is not valid UTF-8; give it in UTF-8")


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
    if os.path.exists(out) and not os.path.isdir(out):
        raise InputError(f"--out {out} is a file; give a directory")
    existing = next(parent for parent in (out, *out.absolute().parents) if os.path.lexists(parent))
    if not os.path.isdir(existing):
        raise InputError(f"--out {out} lies under {existing}, which is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {existing} cannot be written to; give a directory of yours")
    longest = next((part for part in out.parts if len(os.fsencode(part)) > LONGEST_NAME), None)
    if longest is not None:
        raise InputError(f"--out has a name of {len(longest):,} characters; give a shorter one")
