"""A command line run in this process, and the conditions on how it ends."""

import contextlib
import csv
import io
import json
import os
import resource
import shlex
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssmscope import cli

CPU_SECONDS, SECONDS = 40, 400
"""After which a run counts as endless: of its own, and by the clock, where it may have to wait for the machine."""
MEMORY = 6 * 2**30
"""Bytes that may be asked for beside what this process has."""


class TooLong(BaseException):
    """A run that does not end. No `except Exception` catches it."""


@dataclass(frozen=True)
class Ended:
    """End of a command line."""

    code: int
    out: str
    err: str
    files: frozenset[Path]
    """What is there now and was not before, folders included."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within the context too much time or memory is an error."""

    def stop(number: int, frame: Any) -> None:
        raise TooLong(f"still running after {CPU_SECONDS} s of computing or {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    handlers = [signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), handlers):
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def ended(arguments: Sequence[str], folder: Path) -> Ended:
    """Run a command line in a folder, as `main` does but with its streams kept."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2)]
    kept, here, before = (sys.stdin, sys.stdout, sys.stderr), Path.cwd(), snapshot(folder)
    os.chdir(folder)
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"a dull film\n\xff\n"), encoding="utf-8")
    sys.stdout, sys.stderr = streams
    try:
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = cli.run(list(arguments))
    finally:
        sys.stdin, sys.stdout, sys.stderr = kept
        os.chdir(here)
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]
    after = snapshot(folder)
    assert all(after.get(path) == state for path, state in before.items() if path.name != "answers.sqlite"), (
        "a file that was there was changed"
    )
    return Ended(code, out, err, frozenset(set(after) - set(before)))


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Everything below a folder, with the size and the time of a file's last change."""
    found = {}
    for path in folder.rglob("*"):
        state = path.lstat()
        found[path] = (-1, -1) if path.is_dir() else (state.st_size, state.st_mtime_ns)
    return found


def judge(verb: str, arguments: Sequence[str], folder: Path) -> Ended:
    """Run a command line and check how it ended: a whole answer, or a refusal of one line that leaves nothing."""
    found = ended(arguments, folder)
    if found.code == 2:
        assert found.out == "", f"a refusal prints on stdout: {found.out[:200]!r}"
        assert found.err.startswith("analyze: ") and found.err.endswith("\n"), found.err
        assert found.err.count("\n") == 1 and found.err[:-1].isprintable(), f"not one line: {found.err!r}"
        assert not found.files, f"a refusal leaves {sorted(map(str, found.files))}"
        return found
    if found.code == 1 and verb == "report":
        _check_failures(folder)
    else:
        assert found.code == 0, f"exit code {found.code}: {found.err}"
    assert "Traceback" not in found.err, found.err
    if "--json" in arguments and not {"--help", "-h"} & set(arguments):
        json.loads(found.out, parse_constant=_no_number)
    for path in found.files:
        _check_whole(path)
    return found


def _check_failures(folder: Path) -> None:
    """Every job that failed was refused: its options are those of somebody else's model or data."""
    told = [json.loads(path.read_bytes())["traceback"].strip() for path in folder.glob("*/failed/*.json")]
    assert told, "exit code 1, and no job failed"
    for trace in told:
        assert "ssmscope.errors.InputError" in trace.rpartition("\n  File ")[2], trace


def _no_number(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _check_whole(path: Path) -> None:
    """Check that a file is complete, and no work in progress."""
    inside = path.name
    assert not inside.startswith(".") or path.suffix == ".lock", f"{path} is left over"
    assert path.suffix not in (".tmp", ".part", ".partial"), f"{path} is left over"
    if path.is_dir() or path.suffix == ".log":
        return
    content = path.read_bytes()
    assert content or path.suffix in (".lock", ".txt"), f"{path} is empty"
    if path.suffix == ".json":
        json.loads(content, parse_constant=_no_number if "results" in path.parts else None)
    elif path.suffix == ".csv":
        head, *rows = csv.reader(io.StringIO(content.decode()))
        assert all(row[head.index("model")] for row in rows), f"{path} does not say which model each row is of"
    elif path.suffix == ".png":
        assert content.startswith(b"\x89PNG") and b"IEND" in content[-12:]
    elif path.suffix == ".html":
        assert content.rstrip().endswith(b"</html>")


def told(verb: str, ends: Counter[int]) -> str:
    """Count how often command lines of a verb ended in which way."""
    failed = f", {ends[1]} with failed jobs" * bool(ends[1])
    return f"{verb}: {sum(ends.values())} examples, {ends[0]} answered, {ends[2]} refused{failed}"


def shown(arguments: Sequence[str]) -> str:
    return shlex.join(["analyze", *arguments])
