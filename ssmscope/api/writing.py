"""Atomic files, sets of files that appear together, and directories that one process locks.

After a kill at any moment a file from `write_atomically` has its old content or the new one, and a set from `publish`
has files of one generation only.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ssmscope.errors import InputError

LOCK = "lock"
"""Name of the lock file of a directory."""
LOCK_TIMEOUT_SECONDS = 60.0
"""Seconds that a set waits while another process publishes one of the same name."""
MAX_NAME_BYTES = 255
"""Maximum length of a file's or directory's name in bytes."""
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a disk that takes no more."""
REMEDIES: dict[int | None, str] = {
    **dict.fromkeys((None, *DISK_FULL_ERRORS), "make room"),
    errno.ENAMETOOLONG: "give a shorter name",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is where a directory is meant"),
}
"""Advice about an error of writing, by its number, which torch and safetensors hide; about others: write elsewhere."""
RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""Number of an error of the system in the message of a library that is written in Rust."""
READ_ATTEMPTS = 20
"""Attempts, 10 ms apart, to read a file that another process may be replacing."""


@contextmanager
def write_errors_explained(place: str | os.PathLike[str]) -> Iterator[None]:
    """Raise InputError, one line with the reason and what to do, in place of an error of the system in the body, which
    writes to this file or directory: an OSError, or what safetensors and tokenizers raise for one."""
    try:
        yield
    except Exception as error:
        found = None if isinstance(error, InputError) else RUST_ERROR.search(str(error))
        if not isinstance(error, OSError):
            if found is None:
                raise
            error = OSError(int(found[1]), os.strerror(int(found[1])))
        where = os.fspath(place)
        where = where if len(where) <= MAX_NAME_BYTES else f"{where[:60]}…"
        reason = (error.strerror or str(error)).partition("\n")[0]
        remedy = REMEDIES.get(error.errno, "give a place that can be written to")
        raise InputError(f"cannot write to {where}: {reason}; {remedy}") from error


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
    Raise InputError if it cannot be written; nothing of it stays."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"cannot write to {path}: a directory or a device has that name; give another one")
    unfinished = path.with_name(f".{path.name}.unfinished")
    with write_errors_explained(path), created(path.parent):
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
    new files. Raise InputError if another process keeps publishing this set, or, with the old files in their places,
    if a file cannot be written."""
    with write_errors_explained(directory), created(directory), _publishing_alone(directory, name):
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
    """Call `complete_set` for every set of a directory. Raise InputError where that fails."""
    with write_errors_explained(directory):
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
    file = directory / LOCK

    def refusal() -> str:
        holder = "another process"
        with suppress(OSError):
            holder = f"process {number}" if (number := file.read_text(encoding="utf-8").strip()) else holder
        return f"{directory} is in use by {holder}; wait until it has ended, or give another directory"

    with ExitStack() as stack:
        with write_errors_explained(directory):
            stack.enter_context(created(directory))
            stack.enter_context(_alone(file, 0, refusal))
            with suppress(PermissionError):  # Windows locks the content too.
                file.write_text(f"{os.getpid()}\n", encoding="utf-8")
        yield


def check_writable(directory: Path | None) -> None:
    """Raise InputError if no file can be written to a directory, or it cannot be created. A file without a name, which
    is gone at once, is written to it, or to the nearest directory above it that exists."""
    if directory is None:
        return
    above = next(place for place in (directory, *directory.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(above):
        named = "it" if above == directory else os.fspath(above)
        raise InputError(f"cannot write to {directory}: {named} is a file; give a directory")
    longest = max(directory.parts, key=lambda part: len(os.fsencode(part)), default="")
    if len(os.fsencode(longest)) > MAX_NAME_BYTES:
        raise InputError(f"cannot write to {longest[:60]}…, a name of {len(longest):,} characters; give a shorter one")
    with write_errors_explained(directory), suppress(FileNotFoundError):
        os.lstat(directory)  # The whole path may be too long.
    with write_errors_explained(directory), tempfile.TemporaryFile(dir=above) as file:
        file.write(b"\n")
