"""C kernels as loaded libraries, compiled once by the user's C compiler and kept in the user's cache directory.

A library's file name holds a hash of all that the machine code depends on (sources, flags, compiler and processor), and
one of the file's contents, by which a damaged file is recognized before it is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

# Contracted products and the absence of errno and traps change no special value: NaN and infinity still propagate.
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
OPTIONAL_FLAGS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
"""Optional compiler flags, of which the first that work are used."""
COMPILERS = ("cc", "gcc", "clang")
MAX_COMPILE_SECONDS = 120


class Unavailable(Exception):
    """Error of an unavailable kernel; the message says why in one line."""


def load(source: Path) -> ctypes.CDLL:
    """Return the library compiled from a C file, or cached. Raises Unavailable if there is no compiler, or it fails."""
    if not hasattr(os, "getuid"):
        raise Unavailable("C kernels are compiled on POSIX systems only")
    try:
        compiler = find_compiler()
        stem = f"{source.stem}-{_hash_inputs(compiler, source)}"
        directory = cache_directory()
        if directory is None:
            with tempfile.TemporaryDirectory(prefix="ssmscope-") as private:  # A loaded library outlives its file.
                return _compile(compiler, source, Path(private), stem)
        for built in directory.glob(f"{stem}-*.so"):
            if built.name == _file_name(stem, built):
                with contextlib.suppress(OSError):
                    return ctypes.CDLL(str(built))
        return _compile(compiler, source, directory, stem)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(" ".join(str(error).split())) from error


def find_compiler() -> list[str]:
    """Return the C compiler's command: $CC where it is set, else the first of COMPILERS that is installed."""
    wanted = shlex.split(os.environ.get("CC", ""))
    for command in [wanted] if wanted else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    if wanted:
        raise Unavailable(f"the C compiler that CC names, {wanted[0]}, is not installed")
    raise Unavailable(f"no C compiler is installed; install one of {', '.join(COMPILERS)}")


def cache_directory() -> Path | None:
    """Return the user's cache directory for kernels, made where needed, or None where others could put a file there."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))  # Its specification ignores relative paths.
    directory = (root if root.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "ssmscope"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return directory if ours and not shared and os.access(directory, os.W_OK | os.X_OK) else None


def _compile(compiler: list[str], source: Path, directory: Path, stem: str) -> ctypes.CDLL:
    """Compile and load; the file appears in the directory whole or not at all, whichever processes do so at once."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as work:
        made = Path(work, f"{stem}.so")
        for optional in OPTIONAL_FLAGS:
            command = [*compiler, *FLAGS, *optional, str(source.resolve()), "-o", str(made)]
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", timeout=MAX_COMPILE_SECONDS, cwd=work
            )
            complaint = done.stderr
            if done.returncode or not made.exists():
                continue
            made.chmod(0o700)
            try:
                library = ctypes.CDLL(str(made))
            except OSError as error:  # It may need an OpenMP library that is not installed.
                complaint = str(error)
                continue
            os.replace(made, directory / _file_name(stem, made))
            return library
    reason = complaint.strip().partition("\n")[0]
    raise Unavailable(f"{compiler[0]} could not compile {source.name}{': ' + reason if reason else ''}")


def _file_name(stem: str, built: Path) -> str:
    return f"{stem}-{hashlib.sha256(built.read_bytes()).hexdigest()[:16]}.so"


def _hash_inputs(compiler: list[str], source: Path) -> str:
    """Return a hash of the machine code's origins: sources, flags, the compiler and the processor's features."""
    texts = [file.read_text("utf-8") for file in (source, *sorted(source.parent.glob("*.h")))]
    binary = Path(compiler[0]).resolve()
    status = binary.stat()
    machine = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").partition("\n\n")[0].splitlines()
        names = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU part", "Features")
        machine += [line for line in lines if line.partition(":")[0].strip() in names]
    parts = (texts, FLAGS, OPTIONAL_FLAGS, compiler[1:], str(binary), status.st_size, status.st_mtime_ns, machine)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
