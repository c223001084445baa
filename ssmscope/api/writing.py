"""Atomic files, sets of files that appear together, and directories that one process locks.

After a kill at any moment a file from `write_atomically` has its old content or the new one, and a set from `publish`
has files of one generation only.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ssmscope.errors import InputError

LOCK = "lock"
"""Name of the lock file of a directory."""
LOCK_TIMEOUT_SECONDS = 60.0
"""Seconds that a set waits while another process publishes one of the same name."""
MAX_NAME_BYTES = 255
"""Maximum length of a file's or directory's name in bytes."""
READ_ATTEMPTS = 20
"""Attempts, 10 ms apart, to read a file that another process may be replacing."""


class _RecordingStream:
    """A stream that records why a write failed: some writers, such as torch's, report it as another error."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.failure: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            return self.stream.write(content)
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it has its old content or the new one, even if the process or machine dies midway.
    Raise OSError if it cannot be written; nothing of it stays."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with created(path.parent):
        try:
            with unfinished.open("wb") as stream:
                watched = _RecordingStream(stream)
                try:
                    write(watched)  # type: ignore[arg-type]
                except RuntimeError:
                    if watched.failure is not None:
                        raise watched.failure from None
                    raise
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(unfinished, path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a whole content with `write_atomically`; surrogates in a text are written as escapes."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    write_atomically(path, lambda stream: stream.write(data))


@contextmanager
def created(directory: Path) -> Iterator[None]:
    """Create a directory and its parents; if the body raises, remove those that were created and are empty."""
    new = [place for place in (directory, *directory.parents) if not os.path.lexists(place)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for place in new:
            with suppress(OSError):
                place.rmdir()
        raise


def publish(directory: Path, name: str, files: Mapping[str, bytes]) -> None:
    """Write files of these names into a directory, all or none, in place of older ones.

    They are written to `.NAME.staged`; renaming this to `.NAME.pending` makes them valid. Then all old files are moved
    away, and only after that the new ones to their places. After a kill before the renaming the old set stays; after a
    later one `complete_set`, with which `publish` begins, finishes the work, and until then `read_current` returns the
    new files. Raise InputError if another process keeps publishing this set, and OSError, with the old files in their
    places, if a file cannot be written."""
    with created(directory), _publishing_alone(directory, name):
        complete_set(directory, name)
        staged = directory / f".{name}.staged"
        try:
            staged.mkdir()
            for file, content in files.items():
                (staged / file).write_bytes(content)
            os.replace(staged, directory / f".{name}.pending")
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        complete_set(directory, name)


def complete_set(directory: Path, name: str) -> None:
    """Finish or undo the publication of a set that a killed process left halfway; raise OSError where that fails."""
    staged, pending, old = (directory / f".{name}.{step}" for step in ("staged", "pending", "old"))
    if not pending.is_dir():
        _put_back(directory, old)
        if staged.is_dir():
            shutil.rmtree(staged)
        return
    waiting = sorted(file.name for file in pending.iterdir())
    try:
        old.mkdir(exist_ok=True)
        for file in waiting:
            if os.path.lexists(directory / file):
                os.replace(directory / file, old / file)
    except OSError:
        os.replace(pending, staged)
        _put_back(directory, old)
        shutil.rmtree(staged)
        raise
    for file in waiting:
        os.replace(pending / file, directory / file)
    shutil.rmtree(old)
    pending.rmdir()


def _put_back(directory: Path, old: Path) -> None:
    if not old.is_dir():
        return
    for file in sorted(old.iterdir()):
        if not os.path.lexists(directory / file.name):
            os.replace(file, directory / file.name)
    shutil.rmtree(old)


def complete_all_sets(directory: Path) -> None:
    """Call `complete_set` for every set of a directory."""
    for left in sorted(directory.glob(".*.pending")):
        name = left.name[1 : -len(".pending")]
        with _publishing_alone(directory, name):
            complete_set(directory, name)


def read_current(path: Path) -> bytes:
    """Return the content of a file: the new one if a killed process left its set half-published. Raise OSError if it
    does not exist, or cannot be read."""
    for _ in range(READ_ATTEMPTS):
        for place in (*sorted(path.parent.glob(".*.pending")), path.parent):
            with suppress(FileNotFoundError, NotADirectoryError):
                return (place / path.name).read_bytes()
        if not any((place / path.name).exists() for place in path.parent.glob(".*")):
            break
        time.sleep(0.01)
    return path.read_bytes()


@contextmanager
def _alone(file: Path, timeout: float, refusal: Callable[[], str]) -> Iterator[None]:
    """Hold a lock file, or raise InputError with the refusal if another process holds it for `timeout` seconds."""
    from filelock import FileLock, Timeout

    lock = FileLock(file, timeout=timeout)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(refusal()) from error
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes no open file.
            file.unlink()
        lock.release()


def _publishing_alone(directory: Path, name: str) -> Any:
    refusal = f"another process writes to {directory}; wait until it has ended"
    return _alone(directory / f".{name}.lock", LOCK_TIMEOUT_SECONDS, lambda: refusal)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock a directory, which is created if necessary, against other runs. A killed run loses its lock. Raise
    InputError if another process has locked the directory, or it cannot be written to."""
    file, entered = directory / LOCK, False

    def refusal() -> str:
        holder = "another process"
        with suppress(OSError):
            holder = f"process {number}" if (number := file.read_text(encoding="utf-8").strip()) else holder
        return f"{directory} is in use by {holder}; wait until it has ended, or give another directory"

    try:
        with created(directory), _alone(file, 0, refusal):
            with suppress(PermissionError):  # Windows locks the content too.
                file.write_text(f"{os.getpid()}\n", encoding="utf-8")
            entered = True
            yield
    except OSError as error:
        if entered:
            raise
        raise InputError(f"cannot write to {directory}: {error.strerror or error}") from error


def check_writable(out: Path | None) -> None:
    """Raise InputError if a directory cannot be written to; nothing is created."""
    if out is None:
        return
    if os.path.exists(out) and not os.path.isdir(out):
        raise InputError(f"out {out} is a file; give a directory")
    existing = next(parent for parent in (out, *out.absolute().parents) if os.path.lexists(parent))
    if not os.path.isdir(existing):
        raise InputError(f"out {out} lies under {existing}, which is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"out {out}: {existing} cannot be written to; give a directory of yours")
    longest = next((part for part in out.parts if len(os.fsencode(part)) > MAX_NAME_BYTES), None)
    if longest is not None:
        raise InputError(f"out has a name of {len(longest):,} characters; give a shorter one")
