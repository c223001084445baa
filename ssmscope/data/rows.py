"""Rows of a csv, tsv, jsonl or parquet file, and the text, the label, the class and the rationale of a row."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssmscope.core.text_files import no_character, parse_json, read_text
from ssmscope.data.columns import NAMES, renamed
from ssmscope.data.labels import COLUMNS, is_unnamed, match_labels
from ssmscope.errors import InputError, did_you_mean, nearest

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")

MAX_ROWS = 10_000_000
"""Maximum number of rows of a parquet file; a small file can hold any number of equal rows."""


class Row(dict[str, Any]):
    """Values of a row by column, with its number (from 1) and its place, a file or a data set, for error messages."""

    def __init__(self, values: Mapping[str, Any], number: int, place: str | Path) -> None:
        super().__init__(values)
        self.number, self.place = number, place

    @property
    def where(self) -> str:
        return f"row {self.number} of {self.place}"


Spans = tuple[tuple[int, int], ...]
"""Spans of characters [start, end) of a text, in order and not touching."""


def checked_path(
    data: str | Path,
    known: Collection[str],
    split: str | None = None,
    *,
    suffixes: Sequence[str] = SUFFIXES,
    what: str = "data",
    one_of: str = "one of ",
) -> Path:
    """Return data as a file's path. Raise InputError if it is neither a known name nor a file, or a split is given."""
    path = Path(data)
    if path.suffix.lower() not in suffixes and not os.path.exists(path):
        raise InputError(
            f"unknown {what} '{data}'; give {one_of}{', '.join(known)}, or a file ending in {', '.join(suffixes)}"
            f"{did_you_mean(str(data), known)}"
        )
    if split is not None:
        raise InputError(f"split '{split}' was asked for, but file {path} has none; give a file each")
    return path


def check_split(name: str, split: str, splits: Sequence[str], kind: str = "") -> None:
    """Raise InputError if a known data set has no such split."""
    if split not in splits:
        hint = did_you_mean(split, splits)
        raise InputError(f"{name} has no {kind}split {split!r:.80}; there are {', '.join(splits)}{hint}")


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a csv, tsv, jsonl or parquet file. Raise InputError if the file is absent, malformed or without
    rows, or has a column twice or an invalid character."""
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
    return numbered(rows, path)


TABLE_READERS: Mapping[str, tuple[str, ...]] = {"to_dicts": (), "to_list": (), "to_dict": ("records",)}
"""Methods that give a table's rows, of polars, `datasets` and pandas, and their arguments."""


def is_table(data: Any) -> bool:
    """Return True for a DataFrame of pandas or polars, a `datasets.Dataset`, and a list of (text, label) pairs, of rows
    by column, or of texts."""
    if hasattr(data, "columns") or hasattr(data, "column_names"):
        return any(hasattr(data, name) for name in TABLE_READERS)
    return isinstance(data, list | tuple) and all(map(_is_row, data))


def given_rows(data: Any) -> list[Row] | None:
    """Return the rows of a table that Python holds (`is_table`). None for anything else; raise InputError if there is
    none."""
    if not is_table(data):
        return None
    if isinstance(data, list | tuple) and not hasattr(data, "columns"):
        rows = [{"text": row} if isinstance(row, str) else dict(zip(("text", "label"), row))
                if isinstance(row, list | tuple) else row for row in data]  # fmt: skip
    else:
        _distinct([str(name) for name in getattr(data, "columns", ())], "the data")
        name = next(name for name in TABLE_READERS if hasattr(data, name))
        rows = [
            {str(column): each for column, each in row.items()} for row in getattr(data, name)(*TABLE_READERS[name])
        ]
    if not len(rows):
        raise InputError("the data hold no rows; give at least one text")
    return numbered(rows, "the data")


def _is_row(row: Any) -> bool:
    pair = isinstance(row, list | tuple) and len(row) == 2 and isinstance(row[0], str)
    return pair or isinstance(row, str | Mapping)


def numbered(rows: Sequence[Mapping[str, Any]], place: str | Path) -> list[Row]:
    return [Row(row, number, place) for number, row in enumerate(renamed(rows, place), 1)]


CSV: dict[str, Any] = {"delimiter": ",", "strict": True}
QUOTED_TSV: dict[str, Any] = {"delimiter": "\t", "strict": True}
PLAIN_TSV: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}


SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
"""Separators of a csv file; the first of these in its header separates it."""


def _is_quoted(content: str) -> bool:
    """Return True if quotes in a tab-separated table are not part of the text, as in most, but enclose what no plain
    field can hold: line ends, tabs or doubled quotes."""
    if '"' not in content:
        return False
    try:
        quoted, plain = (
            [fields for fields in csv.reader(io.StringIO(content, newline=""), **dialect) if fields]
            for dialect in (QUOTED_TSV, PLAIN_TSV)
        )
    except csv.Error:
        return False
    if {*map(len, quoted)} != {len(quoted[0])}:
        return False
    if len(quoted) != len(plain) or {*map(len, plain)} != {len(quoted[0])}:
        return True
    return any('""' in plain_field[1:-1] and plain_field != field
               for rows in zip(quoted, plain) for field, plain_field in zip(*rows))  # fmt: skip


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a csv or tsv file below its header, ignoring blank lines and empty fields beyond the header; a
    short row has None in its missing columns. A csv file may have other `SEPARATORS`."""
    content = read_text(path, str(path))
    first = content.lstrip().partition("\n")[0]
    dialect = {**CSV, "delimiter": next((each for each in SEPARATORS if each in first), ",")}
    if path.suffix.lower() == ".tsv":
        dialect = QUOTED_TSV if _is_quoted(content) else PLAIN_TSV
    separator = SEPARATORS[dialect["delimiter"]]
    lines = csv.reader(io.StringIO(content, newline=""), **dialect)
    rows: list[dict[str, Any]] = []
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
                    f"row {len(rows) + 1} of {path} has {len(fields)} fields, its header {len(header)}; put a text "
                    f"that holds a {separator} in double quotes"
                )
            else:
                rows.append(dict(zip(header, [*fields, *[None] * (len(header) - len(fields))])))
    except csv.Error as error:
        advice = "; close its quotes, or save it as jsonl" if "field limit" in str(error) else ""
        raise ValueError(f"line {lines.line_num}: {error}{advice}") from error
    return rows


def _distinct(columns: Sequence[str], path: str | Path) -> None:
    twice = next((name for at, name in enumerate(columns) if name and name in columns[:at]), None)
    if twice is not None:
        raise InputError(f"{path} has the column {twice!r:.60} twice; rename or remove one")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
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
            raise ValueError(f"line {number} has {wrong}, which is not a character; remove it")
        rows.append(row)
    return rows


def read_parquet(path: Path) -> list[dict[str, Any]]:
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


READERS = {".csv": read_table, ".tsv": read_table, ".jsonl": read_jsonl, ".parquet": read_parquet}


def checked_column(row: Row, column: str) -> Any:
    if column not in row:
        names = [str(name) for name in row if name is not None]
        found = ", ".join(name if name == name.strip() else repr(name) for name in names) or "none"
        where = row.place if row.number == 1 else row.where
        free = [name for name in names if name not in NAMES and column in NAMES]
        alike = [name for name in free if name.strip().lower() == column] or nearest(column, free, 1) or free[:2]
        named = alike[0] if len(alike) == 1 else "NAME"
        advice = f"name it, columns='{column}={named}'" if free else "add it"
        raise InputError(f"{where} has no column '{column}'; its columns are {found:.300}: {advice}")
    return row[column]


def checked_string(value: str, column: str, row: Row) -> str:
    """Return the value, or raise InputError if it has an invalid character, as parquet files and hubs may."""
    wrong = no_character(value)
    if wrong is not None:
        raise InputError(f"the {column} of {row.where} has {wrong}, which is not a character; remove it")
    return value


def text_of(row: Row, column: str = "text") -> str:
    """Return the text in a column unchanged, or "" if there is none; raise InputError if the value is not text."""
    value = checked_column(row, column)
    if value is None or value != value:
        return ""
    if not isinstance(value, str):
        kinds = {bool: "the value", list: "the list", dict: "the struct", bytes: "the bytes"}
        what = kinds.get(type(value), "the number" if isinstance(value, int | float) else f"the {type(value).__name__}")
        raise InputError(f"{row.where} has {what} {value!r:.40} as its {column}; give a text in quotes")
    return checked_string(value, column, row)


def whole(label: str) -> str:
    """Drop the fraction of an integer label: "1" for "1.0"."""
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", label, flags=re.ASCII)


def checked_text(row: Row, *columns: str, separator: str = " ") -> str:
    """Return the stripped text of a row; several columns are joined by the separator."""
    parts = {column: text_of(row, column).strip() for column in columns}
    empty = next((column for column, text in parts.items() if not text), None)
    if empty is not None:
        raise InputError(f"{row.where} has an empty {empty}; every row needs a text")
    return separator.join(parts.values())


def checked_label(row: Row, column: str = "label") -> str:
    """Return a row's label as a string; integers have no fraction, so that 1 and 1.0 are one class."""
    value = checked_column(row, column)
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # Numbers of numpy.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not (value is None or isinstance(value, str | int | float)):
        raise InputError(f"{row.where} has the label {value!r:.40}; a label is a name or a whole number")
    label = "" if value is None or value != value else checked_string(str(value).strip(), column, row)
    if not label:
        raise InputError(f"{row.where} has no label; every row needs one")
    return label


def checked_class_id(row: Row, names: Sequence[str]) -> int:
    """Return a row's label as an index into `names`, or raise InputError if it is none."""
    label = checked_label(row)
    if not label.isdecimal() or int(label) >= len(names):
        allowed = ", ".join(f"{i} ({name})" for i, name in enumerate(names))
        raise InputError(f"{row.where} has the label '{label}'; allowed are {allowed}")
    return int(label)


def label_column(row: Row) -> str:
    """Return the name of a file's label column, given its first row."""
    return next((name for name in COLUMNS if name in row), COLUMNS[0])


def class_ids(
    labels: Sequence[str],
    names: Sequence[str],
    place: str | Path,
    column: str,
    *,
    as_written: bool = False,
    numbers: Sequence[str] | None = None,
) -> list[int]:
    """Return the class of every label of a file, as an index into `names`, by `match_labels`. Raise InputError as that,
    and if a label is neither a name nor an index, or names and indices are mixed."""
    known = {*names, *map(str, range(len(names)))}
    labels = [label if label in known else whole(label) for label in labels]
    found = match_labels(labels, names, place, column, as_written=as_written, numbers=numbers)
    if found is not None:
        return [found.classes[label] for label in labels]
    by_index = [*map(str, range(len(names)))] if column != COLUMNS[1] else []
    by_name = list(names) if column != COLUMNS[2] else []
    allowed = ", ".join(by_name) or f"0 to {len(names) - 1}"
    advice = "; name the classes in their place, in the same order" if is_unnamed(names) else ""
    for at, label in enumerate(labels, start=1):
        if label not in by_name and label not in by_index:
            raise InputError(f"row {at} of {place} has the label '{label:.60}'; allowed are {allowed}{advice}")
    name = next(label for label in labels if label not in by_index)
    index = next(label for label in labels if label not in by_name)
    raise InputError(
        f"{place} has the label '{name:.60}' (row {labels.index(name) + 1}), a class's name, and '{index}' (row "
        f"{labels.index(index) + 1}), a class's index; write all labels as names ({allowed}) or all as indices"
    )


def sorted_names(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct labels sorted by name, or by value if all are integers."""
    distinct = set(labels)
    try:
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    except ValueError:
        return tuple(sorted(distinct))


def rationale_spans(row: Row, column: str = "rationale") -> Spans | None:
    """Read a column of a row as spans of characters of its stripped text; None if absent or empty.

    The column holds spans of characters, [[0, 4], [10, 17]] (end exclusive); a 0 or 1 for every white-space-separated
    word, [0, 1, 1] or "0 1 1"; or the marked words themselves, "a gripping film" or ["a", "film"], each of which occurs
    in the text once. In a csv or tsv file lists are written as JSON. Anything else raises InputError.
    """
    given = row.get(column)
    whole = row["text"]
    if isinstance(given, str):
        given = _parsed_rationale(given, len(whole.split()))
    if given is None or given != given or given == []:
        return None
    which = f"the {column} of {row.where}"
    if not isinstance(given, list):
        raise InputError(f"{which} is {given!r}; allowed are {RATIONALES}")
    if all(isinstance(item, str) for item in given):
        spans = [_found(words, whole, which) for words in given]
    elif all(isinstance(item, list) for item in given):
        spans = [_checked_span(item, len(whole), which) for item in given]
    elif all(item in (0, 1) for item in given):
        words = [match.span() for match in re.finditer(r"\S+", whole)]
        if len(given) != len(words):
            raise InputError(f"{which} has {len(given)} numbers for {len(words)} words; give a 0 or 1 for every word")
        spans = [span for span, marked in zip(words, given) if marked]
    else:
        raise InputError(f"{which} is {given!r:.60}; allowed are {RATIONALES}")
    return _joined_spans(spans, whole)


RATIONALES = "spans [[start, end], …], a 0 or 1 for every word, or words of the text"


def _parsed_rationale(given: str, words: int) -> Any:
    """Parse a string as a JSON list, as digits for `words` words, or as the one marked text."""
    given = given.strip()
    if not given:
        return None
    if re.fullmatch(r"[01](\s+[01])*", given) and len(given.split()) == words:
        return [int(digit) for digit in given.split()]
    found = None
    with suppress(ValueError):
        found = parse_json(given)
    return found if isinstance(found, list) else [given]


def _found(words: str, whole: str, which: str) -> tuple[int, int]:
    times = whole.count(words) if words else 0
    if not times:
        raise InputError(f"{which}, {words!r:.60}, is not in its text; rename the column if it holds something else")
    if times > 1:
        raise InputError(f"{which}, {words!r:.60}, is in its text {times} times; give spans [[start, end], …] instead")
    start = whole.index(words)
    return start, start + len(words)


def _checked_span(span: Sequence[Any], length: int, which: str) -> tuple[int, int]:
    whole = len(span) == 2 and all(isinstance(end, int) and not isinstance(end, bool) for end in span)
    if not whole or not 0 <= span[0] < span[1] <= length:
        raise InputError(f"{which} has the span {span!r:.60}; allowed are [start, end] within 0 to {length}")
    return span[0], span[1]


def _joined_spans(spans: Iterable[tuple[int, int]], whole: str) -> Spans | None:
    """Sort spans, merge those that overlap or touch, and count from the first character that is not a space."""
    before, end = len(whole) - len(whole.lstrip()), len(whole.strip())
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((max(a - before, 0), min(b - before, end)) for a, b in spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined) or None


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
