"""Pairs of a clean and a corrupted text with different answers: of a file, a table, or a generated set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssmscope.core.registry import Registry
from ssmscope.data.rows import SUFFIXES, Row, checked_column, given_rows, read_rows
from ssmscope.data.tokens import fingerprint_of
from ssmscope.errors import InputError, did_you_mean

Said = str | tuple[int, ...]
"""A text, or token ids."""
COLUMNS = ("clean", "corrupted", "target", "contrast")


@dataclass(frozen=True)
class PairData:
    """Pairs, in the order of their source.

    Attributes:
        name: the set's name, or the file's stem.
        clean, corrupted: texts or token ids, of as many tokens within each pair.
        targets, contrasts: answer of the clean text and of the corrupted one; None for the predicted one.
        spans: by class, the words or positions that are this class in each clean text, such as its subject.
    """

    name: str
    clean: tuple[Said, ...]
    corrupted: tuple[Said, ...]
    targets: tuple[str | int | None, ...]
    contrasts: tuple[str | int | None, ...]
    spans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split = "pairs"

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of everything but the name."""
        return fingerprint_of([self.clean, self.corrupted, self.targets, self.contrasts, dict(self.spans)])

    def take(self, count: int | None) -> PairData:
        """Return the first pairs, all by default."""
        own = {name: getattr(self, name)[:count] for name in ("clean", "corrupted", "targets", "contrasts")}
        return PairData(self.name, **own, spans={name: words[:count] for name, words in self.spans.items()})

    def sample(self, n: int, *, seed: int = 0) -> PairData:
        """Return the first `n` pairs, whatever the seed."""
        return self.take(n)


PAIRS: Registry[Callable[[], PairData]] = Registry("set of pairs", "ssmscope.pairs")
"""Functions that return a generated set of pairs, by its name."""


def given_pairs(data: Any, split: str | None) -> PairData | None:
    """Return the pairs that data are; None for other data. Raise InputError for a split of pairs."""
    if not is_pairs(data):
        return None
    if split is not None:
        raise InputError("pairs have no splits; leave split=… out")
    return read_pairs(data)


def is_pairs(data: Any) -> bool:
    """Return True for the name of a generated set, a file or a table with the columns `clean` and `corrupted`."""
    if isinstance(data, PairData) or (isinstance(data, str) and data in PAIRS):
        return True
    try:
        if not isinstance(data, str | Path):
            rows = given_rows(data) or []
        else:
            rows = read_rows(Path(data)) if Path(data).suffix.lower() in SUFFIXES else []
    except InputError:  # Whoever reads the data otherwise says what is wrong.
        return False
    return bool(rows) and {*COLUMNS[:2]} <= {*rows[0]}


def read_pairs(data: Any) -> PairData:
    """Return the pairs of a generated set, a csv, tsv, jsonl or parquet file, or a table.

    The columns `clean` and `corrupted` are texts, or token ids such as "5 17 3" or [5, 17, 3]; `target` and `contrast`
    are the answers. Every other column is a class of positions: words of the clean text. Raise InputError for other
    data, or a row without both texts.
    """
    if isinstance(data, PairData):
        return data
    rows = given_rows(data) if not isinstance(data, str | Path) else None
    name = "the data"
    if rows is None:
        if data in PAIRS:
            return PAIRS[data]()
        path = Path(data)
        if path.suffix.lower() not in SUFFIXES:
            said = f"unknown pairs '{data}'; give one of {', '.join(PAIRS)}, or a file ending in {', '.join(SUFFIXES)}"
            raise InputError(f"{said}{did_you_mean(str(data), PAIRS)}")
        rows, name = read_rows(path), path.stem
    return _of_rows(name, rows)


def _of_rows(name: str, rows: Sequence[Row]) -> PairData:
    texts = {column: tuple(_said(row, column) for row in rows) for column in COLUMNS[:2]}
    answers = {column: tuple(_answer(row.get(column)) for row in rows) for column in COLUMNS[2:]}
    others = [column for column in rows[0] if column not in COLUMNS]
    spans = {column: tuple(str(row.get(column) or "") for row in rows) for column in others}
    return PairData(name, texts["clean"], texts["corrupted"], answers["target"], answers["contrast"], spans)


def _said(row: Row, column: str) -> Said:
    value = checked_column(row, column)
    if isinstance(value, list | tuple) and value and all(isinstance(each, int) for each in value):
        return tuple(value)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{row.where} has no {column}; pairs have the columns clean and corrupted, perhaps target")
    parts = value.split()
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else value


def _answer(value: Any) -> str | int | None:
    if value is None or value == "" or value != value:  # NaN of a table.
        return None
    return int(value) if not isinstance(value, str) or (value.isascii() and value.isdigit()) else value
