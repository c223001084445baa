"""Reading of a user's file as text or JSON: whole, or refused in one line."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from ssmscope.errors import InputError

MAX_FILE_BYTES = 2**30
"""Bytes of the largest text file that is read: devices and pipes may never end."""

ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""Byte order marks, the longer ones first."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs: JSON can write them, and Python decodes bytes that are not UTF-8 to them."""
NO_CHARACTER = re.compile("[\0\ud800-\udfff]")
"""Codes that no text holds: NUL, and halves of surrogate pairs."""


def read_text(path: str | os.PathLike[str], named: str, *, advice: str = "save it as UTF-8") -> str:
    """Return the text of a UTF-8 file, without a byte order mark; line ends stay as they are. Raises InputError, with
    the file as `named` and `advice`, if it cannot be read, is not UTF-8, holds NUL, or is above `MAX_FILE_BYTES`."""
    try:
        with open(path, "rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # A NUL in the name is a ValueError.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{named} could not be read: {reason}") from error
    return decoded_text(content, named, advice=advice)


def decoded_text(content: bytes, named: str, *, advice: str = "save it as UTF-8") -> str:
    """Return a file's content as text, checked as by `read_text`."""
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{named} is larger than {MAX_FILE_BYTES // 2**20:,} MiB; divide it")
    for mark, encoding in ENCODINGS:
        if content.startswith(mark):
            raise InputError(f"{named} is not UTF-8 text (it is {encoding}); {advice}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{named} is not UTF-8 text (byte {error.start}); {advice}") from error
    if "\0" in text:
        raise InputError(f"{named} is not text: it has a NUL at character {text.index(chr(0))}; {advice}")
    return text


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON document. Raises ValueError if it is none, has a name twice, or is too deep."""
    try:
        return json.loads(content, object_pairs_hook=_unique_names)
    except json.JSONDecodeError as error:
        raise ValueError(error.msg) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ValueError(f"it has {twice!r:.40} twice; keep one")
    return found


def no_character(value: Any) -> str | None:
    """Return the first NUL or half of a surrogate pair within a value from JSON, as an escape; None without one."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    found = NO_CHARACTER.search(text if isinstance(value, str) else text.replace("\\u0000", "\0"))
    return None if found is None else f"\\u{ord(found.group()):04x}"
