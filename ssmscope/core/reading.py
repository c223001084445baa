"""What a user's file holds, as text or as JSON: read whole, or refused in one line."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from ssmscope.errors import InputError

LARGEST = 2**30
"""How many bytes of text a file has at most: devices and pipes may never end."""

ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""Marks at the beginning of a file, the longer ones first."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs: JSON can write them, and Python reads bytes as such that are no UTF-8."""
NO_CHARACTER = re.compile("[\0\ud800-\udfff]")
"""What no text holds: NUL, and halves of surrogate pairs."""


def read_text(path: str | os.PathLike[str], named: str, *, advice: str = "save it as UTF-8") -> str:
    """The text of a UTF-8 file, without a byte order mark; line ends stay as they are.

    Args:
        named: what a message calls the file.
        advice: what to do where it is no such text.

    Raises:
        InputError: it cannot be read, is no UTF-8 text, holds NUL, or is larger than `LARGEST`.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{named} could not be read: {reason}") from error
    return decoded_text(content, named, advice=advice)


def decoded_text(content: bytes, named: str, *, advice: str = "save it as UTF-8") -> str:
    """As `read_text`, of what a file holds."""
    if len(content) > LARGEST:
        raise InputError(f"{named} is larger than {LARGEST // 2**20:,} MiB; divide it")
    for mark, encoding in ENCODINGS:
        if content.startswith(mark):
            raise InputError(f"{named} is not UTF-8 text (it is {encoding}); {advice}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{named} is not UTF-8 text (byte {error.start}); {advice}") from error
    if "\0" in text:
        raise InputError(f"{named} is no text: it has a NUL at character {text.index(chr(0))}; {advice}")
    return text


def parse_json(content: str | bytes) -> Any:
    """What a JSON document says. Unlike `json.loads` alone, of two values of one name neither wins.

    Raises:
        ValueError: it is no JSON, has a name twice in one object, or is nested more deeply than can be read.
    """
    try:
        return json.loads(content, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(error.msg) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r:.40} twice; keep one")
    return found


def no_character(value: Any) -> str | None:
    """The first NUL or half of a surrogate pair within a value that JSON gave, as it would be escaped; else None."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    found = NO_CHARACTER.search(text if isinstance(value, str) else text.replace("\\u0000", "\0"))
    return None if found is None else f"\\u{ord(found.group()):04x}"
