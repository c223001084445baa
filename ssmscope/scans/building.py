"""Where the C kernels come from: a wheel that was built with them, for this processor, or else the user's own compiler
($CC, cc, gcc or clang) on first use, in seconds. What it compiled is kept in the user's cache directory under a name
that holds the hash of the sources, the compiler and the processor. Without either, or with SSMSCOPE_NATIVE=0,
`Library.why_not` says so. `build_kernels.py` beside the package puts kernels into wheels.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "SSMSCOPE_NATIVE"
HEADERS = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "panels.h", "tiles.h"))
# Contraction and no errno change no special value: NaN and infinity still propagate.
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
CHOICES = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())  # the first that compiles
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
}
"""For which processors a wheel has kernels, the fastest first, and what they must have beside what is further below."""
BROUGHT = Path(__file__).with_name("brought")
"""Where a wheel's kernels are."""


_SETTINGS, _KEY = getattr(os.environ, "_data", None), os.environ.encodekey(SWITCH)


def switched_off() -> bool:
    """Whether SSMSCOPE_NATIVE=0. Every scan asks, and os.environ takes almost as long for what is not set as torch to
    make a tensor: so what it reads from is asked, where that is known."""
    found = os.environ.get(SWITCH) if _SETTINGS is None else _SETTINGS.get(_KEY)
    return found in ("0", b"0")


class Unavailable(Exception):
    """The kernels cannot be had; the message says why."""


class Library:
    """The kernels of one C file, compiled if need be; tried once per process.

    Args:
        source: the C file.
        file: what the kernels are called in file names.
        name: what they are called in messages.
        declare: gives the functions of the loaded library their types.
    """

    def __init__(self, source: Path, file: str, name: str, declare: Callable[[ctypes.CDLL], None]) -> None:
        self.source, self.file, self.name, self.declare = source, file, name, declare
        self.found = functools.cache(self.look)

    def available(self) -> bool:
        """Whether work in float32 on a CPU runs through the kernels; compiles them when that was not yet tried."""
        return self.why_not() is None

    def why_not(self) -> str | None:
        """Why the kernels are not in use, in one line, or None when they are."""
        if switched_off():
            return f"{SWITCH}=0"
        found = self.found()
        return found if isinstance(found, str) else None

    def look(self) -> ctypes.CDLL | str:
        """The kernels, or why there are none; `found` keeps the answer."""
        keep_freed_memory()
        return library(self.source, self.file, self.declare)

    def loaded(self) -> ctypes.CDLL:
        """The kernels.

        Raises:
            RuntimeError: there are none.
        """
        found = self.found()
        if isinstance(found, str):
            raise RuntimeError(f"{self.name} is not available: {found}")
        return found


KEPT = 2**28  # bytes
LARGEST = 2**25  # that glibc takes


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep up to KEPT bytes that tensors leave, where it would give the end of its heap back to the system
    layer after layer: pages that come back have to be cleared again. What is above LARGEST goes back at once."""
    with contextlib.suppress(OSError, AttributeError):
        system = ctypes.CDLL(None)
        if hasattr(system, "gnu_get_libc_version"):
            system.mallopt(-1, KEPT)  # M_TRIM_THRESHOLD
            system.mallopt(-3, LARGEST)  # M_MMAP_THRESHOLD


def address(t: Tensor | None) -> int | None:
    """Where a tensor's numbers begin, as C takes it; None for none."""
    return None if t is None else t.data_ptr()


def library(source: Path, name: str, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | str:
    """The kernels of one C file, compiled if need be, with the types that `declare` gives to their functions, or why
    there are none. `name` is what they are called in file names and messages."""

    def loaded(path: Path) -> ctypes.CDLL:
        found = ctypes.CDLL(str(path))
        declare(found)
        return found

    if not hasattr(os, "getuid"):
        return "it is built on POSIX systems only"
    for ready in brought(source, name):
        with contextlib.suppress(OSError):  # what it needs of the system is not there
            return loaded(ready)
    try:
        compiler = _compiler()
        file = f"{name}-{_key(compiler, source)}.so"
        directory = cache_directory()
        if directory is None:
            with tempfile.TemporaryDirectory(prefix="ssmscope-") as private:  # a loaded library outlives its file
                return loaded(_compile(compiler, source, name, Path(private, file)))
        built = directory / file
        if built.exists() and is_only_ours(built):
            with contextlib.suppress(OSError):  # a damaged file is compiled again
                return loaded(built)
        return loaded(_compile(compiler, source, name, built))
    except (Unavailable, OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())


def brought(source: Path, name: str) -> list[Path]:
    """The kernels that came with a wheel and that this processor can run, the fastest first; none where $CC asks for
    the user's own, or the source is another than theirs."""
    found: list[Path] = []
    if not BROUGHT.is_dir() or os.environ.get("CC"):
        return found
    flags = _flags()
    for level in reversed(LEVELS):
        if not LEVELS[level] <= flags:
            break
        found.insert(0, BROUGHT / file_of(source, name, level))
    return [file for file in found if file.exists()]


def file_of(source: Path, name: str, level: str) -> str:
    """What kernels for a level of processors are called in a wheel: with a hash of the source."""
    digest = hashlib.sha256(repr([file.read_text("utf-8") for file in (source, *HEADERS)]).encode()).hexdigest()[:16]
    return f"{name}-{level}-{digest}.so"


def _flags() -> set[str]:
    """What this processor can do, in the words of Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _compiler() -> list[str]:
    """The command of the C compiler: $CC when it is set, else the first of cc, gcc and clang."""
    wanted = shlex.split(os.environ.get("CC", ""))
    for command in [wanted] if wanted else [["cc"], ["gcc"], ["clang"]]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    raise Unavailable(f"no C compiler: {wanted[0] if wanted else 'cc, gcc, clang'} not found")


def _key(compiler: Sequence[str], source: Path) -> str:
    """A hash of all that the compiled code depends on: source, flags, compiler and this processor's features."""
    binary = Path(compiler[0]).resolve()
    status = binary.stat()
    texts = [file.read_text("utf-8") for file in (source, *HEADERS)]
    parts = [*texts, FLAGS, CHOICES, compiler[1:], str(binary), status.st_size, status.st_mtime_ns]
    return hashlib.sha256(repr(parts + processor()).encode()).hexdigest()[:24]


def processor() -> list[str]:
    """What this processor is called and what it can do."""
    parts = [platform.system(), platform.machine(), platform.processor()]
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = described.read_text("utf-8", "replace").split("\n\n")[0].splitlines()
        names = ("vendor_id", "cpu family", "model", "model name", "flags", "Features")
        parts += [line for line in lines if line.partition("\t")[0].strip() in names]
    return parts


def cache_directory() -> Path | None:
    """The user's own cache directory, made if need be; None where nobody else can be kept from writing to it."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))  # to be ignored when relative, says its specification
    directory = (root if root.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "ssmscope"
    if not directory.is_absolute() or not hasattr(os, "getuid"):
        return None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fit = is_only_ours(directory) and os.access(directory, os.W_OK | os.X_OK)
    except OSError:
        return None
    return directory if fit else None


def is_only_ours(path: Path) -> bool:
    """Whether this user owns it, no other may write to it, and it is no link."""
    status = path.lstat()
    ours = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return ours and not stat.S_ISLNK(status.st_mode)


def _compile(compiler: Sequence[str], source: Path, name: str, to: Path, choices: Sequence[Any] = CHOICES) -> Path:
    """Compile the source into `to`, which appears whole or not at all, whoever else is at it."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=to.parent) as work:
        made = Path(work, to.name)
        for choice in choices:
            command = [*compiler, *FLAGS, *choice, f"-I{HEADERS[0].parent}", str(source), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, cwd=work)
            if done.returncode == 0 and made.exists():
                made.chmod(0o700)
                os.replace(made, to)
                return to
    message = done.stderr.strip().splitlines()
    raise Unavailable(f"{compiler[0]} could not compile the {name}{': ' + message[0] if message else ''}")
