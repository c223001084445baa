"""Store of what a run has computed, in an SQLite file from which a later process continues.

Bytes by key suit answers and shards, which are many and small. A report's jobs (`reports.store`) are folders of files
that users open, and a checkpoint of training is one file that replaces the last: renaming them once they are complete
is enough to survive a kill.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ssmscope.api.writing import MAX_NAME_BYTES, check_writable, write_errors_explained
from ssmscope.errors import InputError

APPLICATION_ID = 0x73736D65
"""SQLite `application_id` of our files, "ssme"."""
LOCK_TIMEOUT_SECONDS = 10.0
"""Time for which another process may lock the file."""
KEYS_PER_QUERY = 500
"""Number of keys that one query looks up."""


class Store:
    """Bytes by key in a file; without a file nothing is stored.

    `add`, which creates the file, writes all values of a call or none before it returns, so that they survive a kill;
    several processes may share the file. Raise InputError when it cannot be opened or created, is not one of ours, is
    damaged, or stays locked."""

    def __init__(self, file: str | Path | None) -> None:
        self.file = None if file is None else Path(file)
        if self.file is not None:
            _check_file(self.file)
            with self._opened(make=False):
                pass

    @contextmanager
    def _opened(self, *, make: bool) -> Iterator[sqlite3.Connection | None]:
        """Connect to the file for one call, in whatever thread it is made; create the file only with `make`. Another
        process may have created it."""
        if self.file is None or not (make or os.path.exists(self.file)):
            yield None
            return
        with closing(_connect(self.file)) as connection, errors_told(self.file):
            yield connection

    def _rows(self, columns: str, keys: Sequence[bytes]) -> Iterator[tuple[bytes, ...]]:
        with self._opened(make=False) as connection:
            for first in range(0, len(keys) if connection is not None else 0, KEYS_PER_QUERY):
                part = keys[first : first + KEYS_PER_QUERY]
                query = f"SELECT {columns} FROM kept WHERE key IN ({','.join('?' * len(part))})"
                assert connection is not None
                yield from connection.execute(query, part).fetchall()

    def known(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of the keys that have a value."""
        return {key for (key,) in self._rows("key", keys)}

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of those keys that have one."""
        return dict(self._rows("key, value", keys))  # type: ignore[arg-type]

    def add(self, values: Mapping[bytes, bytes]) -> None:
        """Store values; those that are stored already stay."""
        with self._opened(make=True) as connection:
            if connection is not None:
                with _transaction(connection):
                    connection.executemany("INSERT OR IGNORE INTO kept VALUES (?, ?)", values.items())

    def drop(self, keys: Iterable[bytes]) -> None:
        """Remove values, and the file when none are left."""
        left = 1
        with self._opened(make=False) as connection:
            if connection is not None:
                with _transaction(connection):
                    connection.executemany("DELETE FROM kept WHERE key = ?", [(key,) for key in keys])
                    (left,) = connection.execute("SELECT count(*) FROM kept").fetchone()
        if not left:
            assert self.file is not None
            _remove(self.file)


@contextmanager
def removed_if_refused(file: Path) -> Iterator[None]:
    """Remove a file of a `Store` that the body made, with the directories for it, if the body refuses its input.

    It stays if the process is killed, or if a disk or workers fail.
    """
    known = os.path.exists(file)
    new = [place for place in file.parents if not os.path.lexists(place)]
    try:
        yield
    except InputError as error:
        if not known and isinstance(error.__cause__, None | ValueError | LookupError | TypeError):
            _remove(file)
            for place in new:
                with suppress(OSError):
                    place.rmdir()
        raise


def _remove(file: Path) -> None:
    for tail in ("", "-wal", "-shm", "-journal"):
        file.with_name(file.name + tail).unlink(missing_ok=True)


def _check_file(file: Path) -> None:
    """Raise InputError for a directory, or a file that cannot be created, before anything runs."""
    if os.path.isdir(file):
        raise InputError(f"the cache {file} could not be used (it is a directory): give another file")
    if os.path.exists(file):
        return
    if len(os.fsencode(file.name)) > MAX_NAME_BYTES:
        raise InputError(f"the cache {file.name[:60]}… cannot be created: its name is too long")
    check_writable(file.absolute().parent)


def _connect(file: Path) -> sqlite3.Connection:
    new = not os.path.exists(file)
    with write_errors_explained(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    with errors_told(file):
        connection = sqlite3.connect(file, timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None)
        try:
            (mark,) = connection.execute("PRAGMA application_id").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if mark != APPLICATION_ID and (mark or tables):
                raise InputError(f"{file} is a database of another program; give a new file, or a cache of scores")
            if not tables:
                with _transaction(connection):
                    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                    connection.execute(
                        "CREATE TABLE IF NOT EXISTS kept (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
                    )
        except BaseException:
            connection.close()
            if new:
                _remove(file)
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
def errors_told(file: Path | None) -> Iterator[None]:
    """Raise database errors as an InputError of one line."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        reason = str(error)
        if "locked" in reason or "busy" in reason:
            raise InputError(f"the cache {file} is in use by another process: wait, or give another file") from error
        if "not a database" in reason or "malformed" in reason or "no such column" in reason:
            raise InputError(f"{file} is not a cache of scores ({reason}): give another file, or delete it") from error
        raise InputError(f"the cache {file} could not be used ({reason}): give another file") from error
