"""Files that appear whole, sets of files that appear together, and directories that one process at a time works in.

After a kill at any moment a file that `write_atomically` writes has its old content or its new one, and of a set that
`publish` writes only files of one generation are there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = "lock"
"""The file by which a directory is held."""
PATIENCE = 60.0
"""For how many seconds a set waits until another process has published its own of the same name."""
LONGEST_NAME = 255
"""How many bytes the name of a file or directory has at most."""
LOOKS = 20
"""How often a file is looked for that another process may just be replacing, every 10 ms."""


class _Watched:
    """A stream that remembers why a write failed: some writers, torch's among them, report it as something else."""

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
    """`path` has its old content or the new one, also if the process or the machine dies on the way.

    Raises:
        OSError: it cannot be written; nothing of it stays.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with made(path.parent):
        try:
            with unfinished.open("wb") as stream:
                watched = _Watched(stream)
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
    """As `write_atomically`, all of a content; what is no character of a text is written as its escape.

    Raises:
        OSError: as said.
    """
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    write_atomically(path, lambda stream: stream.write(data))


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """A directory, made with its parents if need be; those that were made go again, if empty, when the body raises.

    Raises:
        OSError: it cannot be made.
    """
    new = [place for place in (directory, *directory.parents) if not os.path.lexists(place)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for place in new:
            with suppress(OSError):
                place.rmdir()
        raise


# ---- sets of files


def publish(directory: Path, name: str, files: Mapping[str, bytes]) -> None:
    """Write files of these names into a directory, all or none, in place of older ones.

    They are written beside their places, in `.NAME.staged`, and count from the moment that this is renamed to
    `.NAME.pending`. Then the old files are moved away, all of them, and only then the new ones to their places. Killed
    before that moment the old set stays, killed after it `settle`, with which `publish` begins, goes on; until then
    `current` gives the new files. At no moment are files of two generations in their places.

    Raises:
        InputError: another process is publishing this set all the time.
        OSError: something cannot be written; the old files are in their places.
    """
    with made(directory), _alone(directory / f".{name}.lock"):
        settle(directory, name)
        staged = directory / f".{name}.staged"
        try:
            staged.mkdir()
            for file, content in files.items():
                (staged / file).write_bytes(content)
            os.replace(staged, directory / f".{name}.pending")
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        settle(directory, name)


def settle(directory: Path, name: str) -> None:
    """Bring a set to its end, or back to its beginning, where a killed process left it between the two.

    Raises:
        OSError: a file cannot be moved.
    """
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


def settle_all(directory: Path) -> None:
    """`settle` every set of a directory.

    Raises:
        OSError: a file cannot be moved.
    """
    for left in sorted(directory.glob(".*.pending")):
        name = left.name[1 : -len(".pending")]
        with _alone(directory / f".{name}.lock"):
            settle(directory, name)


def read_current(path: Path) -> bytes:
    """What a file holds, the new content where a killed process left a set of which it is one half-published.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    for _ in range(LOOKS):
        for place in (*sorted(path.parent.glob(".*.pending")), path.parent):
            with suppress(FileNotFoundError, NotADirectoryError):
                return (place / path.name).read_bytes()
        if not any((place / path.name).exists() for place in path.parent.glob(".*")):
            break
        time.sleep(0.01)
    return path.read_bytes()


@contextmanager
def _alone(lock_file: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file, timeout=PATIENCE)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(f"another process writes to {lock_file.parent}; wait until it has ended") from error
    try:
        yield
    finally:
        _give_back(lock, lock_file)


# ---- directories


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep every other run away from a directory, which is made if need be. A run that is killed holds it no more.

    Raises:
        InputError: another process runs in it, or it cannot be written to.
    """
    from filelock import FileLock, Timeout

    file = directory / LOCK
    lock = FileLock(file, timeout=0)
    entered = False
    try:
        with made(directory):
            try:
                lock.acquire()
            except Timeout as error:
                raise InputError(
                    f"{directory} is in use by {_holder(file)}; wait until it has ended, or give another directory"
                ) from error
            try:
                with suppress(PermissionError):  # Windows locks the content too
                    file.write_text(f"{os.getpid()}\n", encoding="utf-8")
                entered = True
                yield
            finally:
                _give_back(lock, file)
    except OSError as error:
        if entered:
            raise
        raise InputError(f"cannot write to {directory}: {error.strerror or error}") from error


def _give_back(lock: BaseFileLock, file: Path) -> None:
    with suppress(OSError):  # Windows deletes no open file
        file.unlink()
    lock.release()


def _holder(file: Path) -> str:
    with suppress(OSError):
        if number := file.read_text(encoding="utf-8").strip():
            return f"process {number}"
    return "another process"


def check_writable(out: Path | None) -> None:
    """Refuse a directory that cannot be written to before the work begins; nothing is created.

    Raises:
        InputError: it is a file, lies under a file, or is somebody else's.
    """
    if out is None:
        return
    if os.path.exists(out) and not os.path.isdir(out):
        raise InputError(f"out {out} is a file; give a directory")
    existing = next(parent for parent in (out, *out.absolute().parents) if os.path.lexists(parent))
    if not os.path.isdir(existing):
        raise InputError(f"out {out} lies under {existing}, which is a file; give a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"out {out}: {existing} cannot be written to; give a directory of yours")
    longest = next((part for part in out.parts if len(os.fsencode(part)) > LONGEST_NAME), None)
    if longest is not None:
        raise InputError(f"out has a name of {len(longest):,} characters; give a shorter one")
