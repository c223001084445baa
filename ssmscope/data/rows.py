"""Rows of a csv, tsv, jsonl or parquet file, and the text and label of a row."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssmscope.core.reading import no_character, parse_json, read_text
from ssmscope.errors import InputError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")

MAX_ROWS = 10_000_000
"""Maximum number of rows of a parquet file; a small file can hold any number of equal rows."""

Row = Mapping[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a csv, tsv, jsonl or parquet file as mappings from column to value.

    Raises:
        InputError: for a missing file, another format, malformed content, two columns of one name, a row with more
            fields than columns, an invalid character, or no row.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path} is not a data file; its name must end in {', '.join(SUFFIXES)}")
    if not os.path.isfile(path):
        raise InputError(f"there is no file {path}; give the path of a data file, or the name of a known data set")
    try:
        rows = READERS[suffix](path)
    except InputError:
        raise
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} could not be read as {suffix[1:]}: {first_line(error)}") from error
    if not rows:
        raise InputError(f"{path} holds no rows; give at least one text")
    return rows


def read_csv(path: Path) -> list[Row]:
    advice = "put a text that holds a comma in double quotes"
    return _table(read_text(path, str(path)), path, advice, delimiter=",", strict=True)


QUOTED_TSV: dict[str, Any] = {"delimiter": "\t", "strict": True}
PLAIN_TSV: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}


def read_tsv(path: Path) -> list[Row]:
    content = read_text(path, str(path))
    advice = "put a text that holds a tab in double quotes"
    return _table(content, path, advice, **(QUOTED_TSV if _is_quoted(content) else PLAIN_TSV))


def _is_quoted(content: str) -> bool:
    """Return True if a tab-separated table is quoted like a csv.

    In most such tables quotes are part of the text; they are not if they enclose what no plain field can hold: line
    ends, tabs or doubled quotes.
    """
    if '"' not in content:
        return False
    try:
        quoted, plain = (
            [fields for fields in csv.reader(io.StringIO(content, newline=""), **dialect) if fields]
            for dialect in (QUOTED_TSV, PLAIN_TSV)
        )
    except csv.Error:
        return False
    width = len(quoted[0])
    if any(len(fields) != width for fields in quoted):
        return False
    if len(quoted) != len(plain) or any(len(fields) != width for fields in plain):
        return True
    return any('""' in plain_field[1:-1] and plain_field != field
               for rows in zip(quoted, plain) for field, plain_field in zip(*rows))  # fmt: skip


def _table(content: str, path: Path, advice: str, **dialect: Any) -> list[Row]:
    """Read the rows below a header, ignoring blank lines and empty fields beyond the header; a short row has None in
    its missing columns."""
    lines = csv.reader(io.StringIO(content, newline=""), **dialect)
    rows: list[Row] = []
    header: list[str] = []
    try:
        for fields in lines:
            if not fields:
                continue
            if not header:
                header = fields
                _distinct(header, path)
            elif any(fields[len(header) :]):
                raise InputError(
                    f"row {len(rows) + 1} of {path} has {len(fields)} fields, its header {len(header)}; {advice}"
                )
            else:
                rows.append(dict(zip(header, [*fields, *[None] * (len(header) - len(fields))])))
    except csv.Error as error:
        advice = "; close its quotes, or save it as jsonl" if "field limit" in str(error) else ""
        raise ValueError(f"line {lines.line_num}: {error}{advice}") from error
    return rows


def _distinct(columns: Sequence[str], path: Path) -> None:
    twice = next((name for at, name in enumerate(columns) if name and name in columns[:at]), None)
    if twice is not None:
        raise InputError(f"{path} has the column {twice!r:.60} twice; rename or remove one")


def read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(read_text(path, str(path)).replace("\r", "\n").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {first_line(error)}") from error
        if not isinstance(row, dict):
            raise ValueError(f'line {number} is not an object such as {{"text": "...", "label": 0}}')
        wrong = no_character(row) if "\\u" in line else None
        if wrong is not None:
            raise ValueError(f"line {number} has {wrong}, which is no character; remove it")
        rows.append(row)
    return rows


def read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if file.metadata.num_rows > MAX_ROWS:
                raise InputError(
                    f"{path} has {file.metadata.num_rows:,} rows; allowed are up to {MAX_ROWS:,}: divide it"
                )
            _distinct(file.schema_arrow.names, path)
            return file.read().to_pylist()
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ValueError(first_line(error)) from error


READERS = {".csv": read_csv, ".tsv": read_tsv, ".jsonl": read_jsonl, ".parquet": read_parquet}


def checked_column(row: Row, column: str, number: int, place: str | Path) -> Any:
    if column not in row:
        found = ", ".join(str(name) for name in row if name is not None) or "none"
        where = place if number == 1 else f"row {number} of {place}"
        raise InputError(f"{where} has no column '{column}'; its columns are {found:.300}")
    return row[column]


def checked_string(value: str, column: str, number: int, place: str | Path) -> str:
    """Return the value, or raise InputError if it has an invalid character, as parquet files and hubs may."""
    wrong = no_character(value)
    if wrong is not None:
        raise InputError(f"the {column} of row {number} of {place} has {wrong}, which is no character; remove it")
    return value


def text_of(value: Any, column: str, number: int, place: str | Path) -> str:
    """Return a text unchanged, or "" if there is none.

    Raises:
        InputError: if the value is a list, a number or anything else that is no text.
    """
    if value is None or value != value:
        return ""
    if not isinstance(value, str):
        kinds = {bool: "the value", list: "the list", dict: "the struct", bytes: "the bytes"}
        what = kinds.get(type(value), "the number" if isinstance(value, int | float) else f"the {type(value).__name__}")
        raise InputError(f"row {number} of {place} has {what} {value!r:.40} as its {column}; give a text in quotes")
    return checked_string(value, column, number, place)


def whole(label: str) -> str:
    """Drop the fraction of an integer label: "1" for "1.0"."""
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", label, flags=re.ASCII)


def checked_text(row: Row, columns: Sequence[str], number: int, place: str | Path, separator: str = " ") -> str:
    """Return the stripped text of a row; several columns are joined by the separator."""
    parts: list[str] = []
    for column in columns:
        text = text_of(checked_column(row, column, number, place), column, number, place).strip()
        if not text:
            raise InputError(f"row {number} of {place} has an empty {column}; every row needs a text")
        parts.append(text)
    return separator.join(parts)


def checked_label(row: Row, number: int, place: str | Path, column: str = "label") -> str:
    """Return a row's label as a string; integers have no fraction, so that 1 and 1.0 are one class."""
    value = checked_column(row, column, number, place)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not (value is None or isinstance(value, str | int | float)):
        raise InputError(f"row {number} of {place} has the label {value!r:.40}; a label is a name or a whole number")
    label = "" if value is None or value != value else checked_string(str(value).strip(), column, number, place)
    if not label:
        raise InputError(f"row {number} of {place} has no label; every row needs one")
    return label


def checked_class_id(label: str, names: Sequence[str], number: int, place: str | Path) -> int:
    """Return a row's label as an index into `names`, or raise InputError if it is none."""
    if not label.isdecimal() or int(label) >= len(names):
        allowed = ", ".join(f"{i} ({name})" for i, name in enumerate(names))
        raise InputError(f"row {number} of {place} has the label '{label}'; allowed are {allowed}")
    return int(label)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
