"""Scores by row: in memory, and in an SQLite file from which a later process goes on."""

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

MARK = 0x73736D65
"""What tells our files from other SQLite databases: their `application_id`, "ssme"."""
PATIENCE = 10.0
"""For how many seconds another process may hold the file."""
LONGEST_NAME = 255
"""How many bytes the name of a file has at most."""
AT_ONCE = 500
"""How many rows one query asks for."""


class Store:
    """Scores by the key of their row.

    With a file, what is added is in it when `add` returns, all rows of a call or none, even where the process is killed
    a moment later; several processes may share it. The file is made when there is something to keep.

    Raises:
        InputError: when the file cannot be opened or made, is none of ours, is damaged, or stays locked.
    """

    def __init__(self, file: str | Path | None, width: int) -> None:
        self._places: dict[bytes, int] = {}
        self._count = 0
        self._scores = np.empty((0, width))
        self._file = None if file is None else Path(file)
        self._connection: sqlite3.Connection | None = None
        if self._file is not None:
            _check_place(self._file)
            self._open(make=False)

    def _open(self, *, make: bool) -> None:
        """Connect to the file, which is only made if that is asked for."""
        assert self._file is not None
        if self._connection is None and (make or os.path.exists(self._file)):
            self._connection = _opened(self._file)
            weakref.finalize(self, self._connection.close)

    def recall(self, keys: Sequence[bytes]) -> float:
        """Bring what the file knows of these rows to memory; how many seconds it once took to run what is new there."""
        unknown = [key for key in keys if key not in self._places]
        seconds = 0.0
        if self._file is None or not unknown:
            return seconds
        self._open(make=False)  # another process may have made it
        if self._connection is None:
            return seconds
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
                size = 8 * self._scores.shape[1]
                if any(type(one) is not bytes or len(one) != size for one in scores) or not all(
                    isinstance(time, float) for time in times
                ):
                    raise sqlite3.DatabaseError("malformed rows")
                numbers = np.frombuffer(b"".join(scores), dtype="<f8").reshape(len(known), -1)
                if np.isnan(numbers).any():
                    raise sqlite3.DatabaseError("malformed rows")
                self._remember(known, numbers)
                seconds += sum(times)
        return seconds

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def scores(self, keys: Sequence[bytes]) -> Float[np.ndarray, "rows classes"]:
        """The scores of rows that are all known."""
        return self._scores[[self._places[key] for key in keys]]

    def add(self, keys: Sequence[bytes], scores: Float[np.ndarray, "rows classes"], seconds: float) -> None:
        """Keep the scores of rows that took so many seconds together."""
        if self._file is not None:
            self._open(make=True)
            assert self._connection is not None
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


def _check_place(file: Path) -> None:
    """Refuse a file that is a directory, or that could not be made, before anything is run."""
    if os.path.isdir(file):
        raise InputError(f"the cache {file} could not be used (it is a directory): give another file")
    if os.path.exists(file):
        return
    above = next(place for place in file.absolute().parents if os.path.lexists(place))
    if not os.path.isdir(above):
        raise InputError(f"the cache {file} cannot be made: {above} is no directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"the cache {file} cannot be made: {above} cannot be written to")
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in file.parts):
        raise InputError(f"the cache {str(file)[:60]}… cannot be made: its name is too long")


def _opened(file: Path) -> sqlite3.Connection:
    new = not os.path.exists(file)
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
            if not new and _columns(connection) != ["key", "seconds", "scores"]:
                raise InputError(f"{file} is no cache of scores: give another file, or delete it")
        except BaseException:
            connection.close()
            if new:
                for left in (file, *(file.with_name(file.name + tail) for tail in ("-wal", "-shm", "-journal"))):
                    left.unlink(missing_ok=True)
            raise
    return connection


def _columns(connection: sqlite3.Connection) -> list[str]:
    return [name for _, name, *_ in connection.execute("PRAGMA table_info(rows)").fetchall()]


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
