"""Sets of files are of one generation whenever the process dies, and a directory is one run's at a time."""

import errno
import json
import multiprocessing
import os
import shutil
import threading
from pathlib import Path

import pytest
from refusals import refusal, refuses
from warm import PLAIN, Warm
from ssmscope.api import writing
from ssmscope.errors import InputError

OLD, NEW = ({f"a.{suffix}": f"{age} {suffix}".encode() for suffix in ("json", "csv", "png")} for age in ("old", "new"))
WORK = """
import json, os, sys
from pathlib import Path
from ssmscope.api import writing

directory, files, left = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
written = Path.write_bytes

def counted(change):
    def run(*arguments, **options):
        global left
        if left == 0:
            if change is written:
                written(arguments[0], arguments[1][:2])
            os._exit(9)
        left -= 1
        return change(*arguments, **options)
    return run

for module, name in ((os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (Path, "write_bytes")):
    setattr(module, name, counted(getattr(module, name)))
if files is None:
    writing.complete_all_sets(directory)
else:
    writing.publish(directory, "a", {name: content.encode() for name, content in files.items()})
"""
WRITER = Warm("ssmscope.api.writing", "filelock", parent=PLAIN)


def dying(directory: Path, files: dict[str, bytes] | None, step: int) -> bool:
    """Publish files, or settle what is there, in a process of its own that dies, as by SIGKILL, before its change
    number `step`, or within it where that writes a file; whether it did."""
    told = None if files is None else {name: content.decode() for name, content in files.items()}
    status = WRITER.start(WORK, directory, json.dumps(told), step).wait()
    assert status in (0, 9)
    return status == 9


def seen(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file() and file.suffix != ".lock"}


@pytest.mark.parametrize("before", [{}, OLD])
def test_a_set_is_of_one_generation_whenever_the_process_dies(tmp_path, before) -> None:
    generations = set()
    step = 0
    while True:
        directory = tmp_path / str(step)
        directory.mkdir()
        if before:
            writing.publish(directory, "a", before)
        died = dying(directory, NEW, step)
        there = seen(directory).items()
        assert there <= before.items() or there <= NEW.items()
        current = {name: content for name in NEW if (content := found(directory / name)) is not None}
        assert current in (before, NEW)
        generations.add(bytes(current.get("a.json", b"")))
        if not died:
            break
        writing.publish(directory, "b", {"b.json": b"other"})  # another set minds its own
        writing.publish(directory, "a", {name: b"newest" for name in NEW})
        assert seen(directory) == {**dict.fromkeys(NEW, b"newest"), "b.json": b"other"}
        assert {file.name for file in directory.iterdir()} == {*NEW, "b.json"}
        step += 1
    assert step > 8 and generations == {before.get("a.json", b""), NEW["a.json"]}
    assert {file.name for file in directory.iterdir()} == {*NEW}


def found(path: Path) -> bytes | None:
    try:
        return writing.read_current(path)
    except FileNotFoundError:
        return None


def test_what_died_half_way_is_settled_without_a_new_set(tmp_path) -> None:
    outcomes = set()
    for step in range(60):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        writing.publish(tmp_path / "set", "a", OLD)
        if not dying(tmp_path / "set", NEW, step):
            break
        writing.complete_set(tmp_path / "set", "a")
        now = seen(tmp_path / "set")
        assert now in (OLD, NEW)
        outcomes.add(now["a.csv"])
    assert outcomes == {OLD["a.csv"], NEW["a.csv"]}


def test_settling_may_die_too(tmp_path) -> None:
    for first in range(2, 40):
        for second in range(40):
            shutil.rmtree(tmp_path / "set", ignore_errors=True)
            writing.publish(tmp_path / "set", "a", OLD)
            died = dying(tmp_path / "set", NEW, first)
            again = dying(tmp_path / "set", None, second)
            there = seen(tmp_path / "set").items()
            assert there <= OLD.items() or there <= NEW.items()
            if not again:
                break
        if not died:
            break
    assert first > 8


@pytest.mark.parametrize("number", range(8))
def test_where_a_move_fails_the_old_set_stays(tmp_path, monkeypatch, number) -> None:
    writing.publish(tmp_path, "a", OLD)
    replace, calls = os.replace, []

    def failing(source: object, target: object) -> None:
        calls.append(target)
        if len(calls) == number + 1:
            raise OSError(errno.EACCES, "Permission denied")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(writing.os, "replace", failing)
        try:
            writing.publish(tmp_path, "a", NEW)
        except InputError as error:
            assert "cannot write to" in str(error) and "Permission denied" in str(error)
            assert {name: writing.read_current(tmp_path / name) for name in OLD} in (OLD, NEW)
        else:
            assert number >= 7 and seen(tmp_path) == NEW
    writing.complete_set(tmp_path, "a")
    assert seen(tmp_path) in (OLD, NEW) and {file.name for file in tmp_path.iterdir()} == {*OLD}
    if number <= 3:
        assert seen(tmp_path) == OLD


def test_sets_of_many_threads_and_a_reader_never_mix(tmp_path) -> None:
    names = [f"a.{i}" for i in range(4)]
    writing.publish(tmp_path, "a", dict.fromkeys(names, b"first"))
    mixed, ended = [], threading.Event()

    def read() -> None:
        while not ended.is_set():
            writing.read_current(tmp_path / names[0])
            now = {content for name in names if (content := _there(tmp_path / name)) is not None}
            if len(now) > 1 and len({_there(tmp_path / name) for name in names} - {None}) > 1:
                mixed.append(now)

    reader = threading.Thread(target=read)
    reader.start()
    writers = [
        threading.Thread(
            target=lambda w=w: [writing.publish(tmp_path, "a", dict.fromkeys(names, b"%d" % w)) for _ in range(5)]
        )
        for w in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    ended.set()
    reader.join()
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1
    assert {file.name for file in tmp_path.iterdir()} == {*names}


def test_a_reader_waits_while_a_file_is_on_its_way(tmp_path, monkeypatch) -> None:
    """It is somewhere in its directory, in one place of several, for as long as it is being moved."""
    for place in (".a.old", ".b.pending", ".c.staged"):
        (tmp_path / place).mkdir()
    (tmp_path / ".a.old" / "x").write_bytes(b"old")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            (tmp_path / ".b.pending" / "x").write_bytes(b"new")

    monkeypatch.setattr(writing.time, "sleep", sleep)
    assert writing.read_current(tmp_path / "x") == b"new" and slept == [0.01] * 3
    (tmp_path / "x").write_bytes(b"older")
    assert writing.read_current(tmp_path / "x") == b"new" and len(slept) == 3
    with pytest.raises(FileNotFoundError):
        writing.read_current(tmp_path / "y")
    assert len(slept) == 3
    (tmp_path / ".b.pending" / "x").unlink()
    (tmp_path / "x").unlink()
    with pytest.raises(FileNotFoundError):
        writing.read_current(tmp_path / "x")
    assert len(slept) == 3 + writing.READ_ATTEMPTS


def _there(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def test_a_full_disk_leaves_nothing_of_a_set(tmp_path, monkeypatch) -> None:
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if path.name == "a.csv":
            write(path, content[:2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    refuses("No space left on device; make room", writing.publish, tmp_path / "new" / "folder", "a", NEW)
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_or_absent(tmp_path) -> None:
    file = tmp_path / "new" / "file"

    def fails(stream) -> None:
        stream.write(b"half")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        writing.write_atomically(file, fails)
    assert not list(tmp_path.iterdir())
    writing.write_atomically(file, lambda stream: stream.write(b"whole"))
    with pytest.raises(RuntimeError):
        writing.write_atomically(file, fails)
    assert file.read_bytes() == b"whole" and len(list(file.parent.iterdir())) == 1


def test_the_disks_error_is_told_where_a_writer_hides_it(tmp_path) -> None:
    with Path("/dev/full").open("wb", buffering=0) if Path("/dev/full").exists() else pytest.skip("needs /dev/full"):
        pass

    def hides(stream) -> None:
        stream.stream = Path("/dev/full").open("wb", buffering=0)
        try:
            stream.write(b"much")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0") from None
        finally:
            stream.stream.close()

    refuses("No space left on device; make room", writing.write_atomically, tmp_path / "file", hides)
    assert not list(tmp_path.iterdir())


def test_made_directories_go_again_only_where_they_are_empty_and_were_made(tmp_path) -> None:
    (tmp_path / "old").mkdir()
    for keep in (False, True):
        with pytest.raises(ValueError), writing.created(tmp_path / "old" / "new" / "newer"):
            if keep:
                (tmp_path / "old" / "new" / "file").touch()
            raise ValueError
        assert (tmp_path / "old" / "new").exists() == keep
    assert not (tmp_path / "old" / "new" / "newer").exists()


class TestHeld:
    def test_by_one_process_at_a_time_and_nothing_is_left(self, tmp_path) -> None:
        folder = tmp_path / "new" / "folder"
        with writing.locked(folder):
            with pytest.raises(InputError, match=f"in use by process {os.getpid()}; wait until it has ended"):
                with writing.locked(folder):
                    pass
        assert not list(folder.iterdir())
        with pytest.raises(KeyError), writing.locked(tmp_path / "other"):
            raise KeyError
        assert not (tmp_path / "other").exists()

    def test_a_killed_process_holds_it_no_more(self, tmp_path) -> None:
        context = multiprocessing.get_context("fork")
        ready = context.Event()

        def hold() -> None:
            with writing.locked(tmp_path):
                ready.set()
                threading.Event().wait(60)

        process = context.Process(target=hold)
        process.start()
        assert ready.wait(20)
        with pytest.raises(InputError, match=f"process {process.pid}"), writing.locked(tmp_path):
            pass
        process.kill()
        process.join()
        with writing.locked(tmp_path):
            pass

    def test_an_error_within_is_not_taken_for_one_of_the_lock(self, tmp_path) -> None:
        with pytest.raises(FileNotFoundError), writing.locked(tmp_path):
            (tmp_path / "absent").read_bytes()


LONG = "x" * 256


@pytest.mark.parametrize(("place", "said"), [
    ("file/new", "a file is where a directory is meant"),
    ("file/deep/new", "Not a directory; a file is where a directory is meant"),
    ("folder", "a directory or a device has that name; give another one"),
    (f"{LONG}/new", "File name too long; give a shorter name"),
    (LONG, "File name too long; give a shorter name"),
    ("/proc/nope/new", "No such file or directory; give a place that can be written to"),
    ("/dev/null", "a directory or a device has that name; give another one"),
])  # fmt: skip
def test_why_a_file_cannot_be_written(tmp_path, place, said) -> None:
    if place.startswith("/") and not Path(place).parents[-2].exists():
        pytest.skip(f"needs {place}")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    told = refusal(writing.write_whole, tmp_path / place, "much")
    shown = str(tmp_path / place) if LONG not in place else str(tmp_path / place)[:60]
    assert told.startswith(f"cannot write to {shown}") and told.endswith(said)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("fails", ["open", "write"])
def test_a_directory_is_tried_before_the_work(tmp_path, monkeypatch, fails) -> None:
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def write(self, content):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(dir):
        asked.append(dir)
        if fails == "open":
            raise OSError(errno.EROFS, "Read-only file system")
        return Full()

    asked: list[Path] = []
    monkeypatch.setattr(writing.tempfile, "TemporaryFile", opened)
    told = refusal(writing.check_writable, tmp_path / "a" / "b")
    why = {"open": "Read-only file system; give a place that can be written to"}
    assert told == f"cannot write to {tmp_path / 'a' / 'b'}: {why.get(fails, 'No space left on device; make room')}"
    assert asked == [tmp_path] and not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_directory_that_takes_no_files_is_refused_before_anything_is_read() -> None:
    told = "cannot write to /proc/nope: No such file or directory; give a place that can be written to"
    assert refusal(writing.check_writable, Path("/proc/nope")) == told
