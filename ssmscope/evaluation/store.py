"""Scores by row: in memory, and in an SQLite file from which a later process goes on."""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import Float

from ssmscope.errors import InputError

MARK = 0x73736D65
"""What tells our files from other SQLite databases: their `application_id`, "ssme"."""
PATIENCE = 10.0
"""For how many seconds another process may hold the file."""
AT_ONCE = 500
"""How many rows one query asks for."""


class Store:
    """Scores by the key of their row.

    With a file, what is added is in it when `add` returns, all rows of a call or none, even where the process is killed
    a moment later; several processes may share it.

    Raises:
        InputError: when the file cannot be opened, is none of ours, is damaged, or stays locked.
    """

    def __init__(self, file: str | Path | None, width: int) -> None:
        self._places: dict[bytes, int] = {}
        self._count = 0
        self._scores = np.empty((0, width))
        self._file = None if file is None else Path(file)
        self._connection = None if self._file is None else _opened(self._file)
        if self._connection is not None:
            weakref.finalize(self, self._connection.close)

    def recall(self, keys: Sequence[bytes]) -> float:
        """Bring what the file knows of these rows to memory; how many seconds it once took to run what is new there."""
        unknown = [key for key in keys if key not in self._places]
        seconds = 0.0
        if self._connection is None or not unknown:
            return seconds
        assert self._file is not None
        with _reported(self._file):
            for first in range(0, len(unknown), AT_ONCE):
                part = unknown[first : first + AT_ONCE]
                marks = ",".join("?" * len(part))
                found = self._connection.execute(
                    f"SELECT key, seconds, scores FROM rows WHERE key IN ({marks})", part
                ).fetchall()
                if not found:
                    continue
                known, times, scores = zip(*found)
                numbers = np.frombuffer(b"".join(scores), dtype="<f8")
                self._remember(known, numbers.reshape(len(known), -1))
                seconds += sum(times)
        return seconds

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def scores(self, keys: Sequence[bytes]) -> Float[np.ndarray, "rows classes"]:
        """The scores of rows that are all known."""
        return self._scores[[self._places[key] for key in keys]]

    def add(self, keys: Sequence[bytes], scores: Float[np.ndarray, "rows classes"], seconds: float) -> None:
        """Keep the scores of rows that took so many seconds together."""
        if self._connection is not None:
            assert self._file is not None
            each = seconds / len(keys)
            rows = [(key, each, row.astype("<f8").tobytes()) for key, row in zip(keys, scores)]
            with _reported(self._file), _transaction(self._connection):
                self._connection.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?, ?)", rows)
        self._remember(keys, scores)

    def _remember(self, keys: Sequence[bytes], scores: np.ndarray) -> None:
        held, needed = self._count, self._count + len(keys)
        if needed > len(self._scores):
            larger = np.empty((max(1024, 2 * needed), self._scores.shape[1]))
            larger[:held] = self._scores[:held]
            self._scores = larger
        self._scores[held:needed] = scores
        self._places.update(zip(keys, range(held, needed)))
        self._count = needed


def _opened(file: Path) -> sqlite3.Connection:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the cache {file} cannot be made: {error.strerror or error}") from error
    with _reported(file):
        connection = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None)
        try:
            (mark,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if mark != MARK and (mark or tables):
                raise InputError(f"{file} is a database of something else; give a new file, or one of this cache")
            # commits that outlive the process without waiting for the disk
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            with _transaction(connection):
                connection.execute(f"PRAGMA application_id = {MARK}")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS rows "
                    "(key BLOB PRIMARY KEY, seconds REAL NOT NULL, scores BLOB NOT NULL) "
                    "WITHOUT ROWID"
                )
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def _reported(file: Path) -> Iterator[None]:
    """A database's errors in one line."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        reason = str(error)
        if "locked" in reason or "busy" in reason:
            raise InputError(f"the cache {file} is in use by another process: wait, or give another file") from error
        if "not a database" in reason or "malformed" in reason:
            raise InputError(f"{file} is no cache of scores ({reason}): give another file, or delete it") from error
        raise InputError(f"the cache {file} could not be used ({reason}): give another file") from error
