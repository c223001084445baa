"""Store of scores by row, in memory and in an SQLite file from which a later process continues."""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from jaxtyping import Float

from ssmscope.errors import InputError

APPLICATION_ID = 0x73736D65
"""SQLite `application_id` of our files, "ssme"."""
LOCK_TIMEOUT_SECONDS = 10.0
"""Time for which another process may lock the file."""
MAX_NAME_BYTES = 255
"""Maximum length of a file name."""
KEYS_PER_QUERY = 500
"""Number of rows that one query looks up."""


class Store:
    """Scores by the key of their row.

    With a file, `add` writes all rows of a call or none before it returns, so that they survive a kill; several
    processes may share the file. It is created by the first `add`.

    Raises:
        InputError: when the file cannot be opened or created, is not one of ours, is damaged, or stays locked.
    """

    def __init__(self, file: str | Path | None, width: int) -> None:
        self._known: dict[bytes, np.ndarray] = {}
        self._width = width
        self._file = None if file is None else Path(file)
        self._connection: sqlite3.Connection | None = None
        if self._file is not None:
            _check_file(self._file)
            self._open(make=False)

    def _open(self, *, make: bool) -> None:
        """Connect to the file; create it only with `make`."""
        assert self._file is not None
        if self._connection is None and (make or os.path.exists(self._file)):
            self._connection = _connect(self._file)
            weakref.finalize(self, self._connection.close)

    def recall(self, keys: Sequence[bytes]) -> float:
        """Load the scores of these rows from the file, and return the seconds that running the loaded rows took."""
        unknown, seconds = [key for key in keys if key not in self._known], 0.0
        if self._file is not None and unknown:
            self._open(make=False)  # Another process may have created the file.
        if self._file is None or self._connection is None or not unknown:
            return seconds
        with _errors_told(self._file):
            for first in range(0, len(unknown), KEYS_PER_QUERY):
                part = unknown[first : first + KEYS_PER_QUERY]
                marks = ",".join("?" * len(part))
                for key, took, scores in self._connection.execute(
                    f"SELECT key, seconds, scores FROM rows WHERE key IN ({marks})", part
                ):
                    right = type(scores) is bytes and len(scores) == 8 * self._width and isinstance(took, float)
                    if not right or np.isnan(numbers := np.frombuffer(scores, dtype="<f8")).any():
                        raise sqlite3.DatabaseError("malformed rows")
                    self._known[key], seconds = numbers, seconds + took
        return seconds

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def scores(self, keys: Sequence[bytes]) -> Float[np.ndarray, "rows classes"]:
        """Return the scores of rows that are all known."""
        return np.array([self._known[key] for key in keys]).reshape(len(keys), self._width)

    def add(self, keys: Sequence[bytes], scores: Float[np.ndarray, "rows classes"], seconds: float) -> None:
        """Store the scores of rows that took `seconds` together."""
        if self._file is not None:
            self._open(make=True)
            assert self._connection is not None
            each = seconds / len(keys)
            rows = [(key, each, row.astype("<f8").tobytes()) for key, row in zip(keys, scores)]
            with _errors_told(self._file), _transaction(self._connection):
                self._connection.executemany("INSERT OR IGNORE INTO rows VALUES (?, ?, ?)", rows)
        self._known.update(zip(keys, scores))


def _check_file(file: Path) -> None:
    """Raise InputError for a directory, or a file that cannot be created, before anything runs."""
    if os.path.isdir(file):
        raise InputError(f"the cache {file} could not be used (it is a directory): give another file")
    if os.path.exists(file):
        return
    above = next(place for place in file.absolute().parents if os.path.lexists(place))
    if not os.path.isdir(above):
        raise InputError(f"the cache {file} cannot be created: {above} is not a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"the cache {file} cannot be created: {above} cannot be written to")
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in file.parts):
        raise InputError(f"the cache {str(file)[:60]}… cannot be created: its name is too long")


def _connect(file: Path) -> sqlite3.Connection:
    new = not os.path.exists(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the cache {file} cannot be created: {error.strerror or error}") from error
    with _errors_told(file):
        connection = sqlite3.connect(file, timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None)
        try:
            (mark,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if mark != APPLICATION_ID and (mark or tables):
                raise InputError(f"{file} is a database of another program; give a new file, or a cache of scores")
            # With these pragmas commits survive a kill of the process without waiting for the disk.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            with _transaction(connection):
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS rows "
                    "(key BLOB PRIMARY KEY, seconds REAL NOT NULL, scores BLOB NOT NULL) "
                    "WITHOUT ROWID"
                )
            columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(rows)").fetchall()]
            if columns != ["key", "seconds", "scores"]:
                raise InputError(f"{file} is not a cache of scores: give another file, or delete it")
        except BaseException:
            connection.close()
            if new:
                for left in (file, *(file.with_name(file.name + tail) for tail in ("-wal", "-shm", "-journal"))):
                    left.unlink(missing_ok=True)
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
def _errors_told(file: Path) -> Iterator[None]:
    """Raise errors of the database as an InputError of one line."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        reason = str(error)
        if "locked" in reason or "busy" in reason:
            raise InputError(f"the cache {file} is in use by another process: wait, or give another file") from error
        if "not a database" in reason or "malformed" in reason:
            raise InputError(f"{file} is not a cache of scores ({reason}): give another file, or delete it") from error
        raise InputError(f"the cache {file} could not be used ({reason}): give another file") from error
