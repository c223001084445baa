"""The cache: nothing is run twice, a killed run goes on to the same bits, and no other file is taken for one."""

import gc
import signal
import sqlite3
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation.slow import FILLING, PHRASES, TEXTS, WORDS, language_model, sentences
from refusals import refuses
from warm import TRANSFORMERS
from ssmscope.api import store
from ssmscope.api.store import Store
from ssmscope.evaluation import Evaluator, evaluator, running

OPTIONS = dict(words=PHRASES, tokens_at_once=45)
MORE = [f"{start} {end}" for start in sentences(4, 9, 9, seed=1) for end in sentences(3, 1, 9, seed=2)]
WAVES = (MORE[::4], TEXTS + MORE, MORE + [" ".join(FILLING[at : at + 12]) for at in range(0, 40, 5)])
"""The second knows some rows from the first, the third from both."""
FOLDER = Path(__file__).resolve().parent


class Stopped(Exception):
    pass


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(evaluator, "BATCHES_PER_CHUNK", 2)


@pytest.fixture
def watched(monkeypatch):
    """`watched(evaluator)` is the list that each chunk's rows are written to as it is run; with `most`, the chunk after
    so many raises."""

    def watch(asked: Evaluator, most: int | None = None) -> list[list[bytes]]:
        run, found = asked._scores, []

        def scores(rows):
            if len(found) == most:
                raise Stopped
            found.append([row for row, _ in rows])
            return run(rows)

        monkeypatch.setattr(asked, "_scores", scores)
        return found

    return watch


@pytest.mark.parametrize("chunks, fork, states", [(0, True, 2**29), (2, False, 0), (4, True, 2**15)])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, watched, small_chunks, chunks, fork, states):
    monkeypatch.setattr(running, "MAX_STATE_BYTES", states)
    model = language_model("mamba2")
    unbroken = Evaluator(model, cache=tmp_path / "unbroken", fork=fork, **OPTIONS)
    expected = [unbroken.scores(WAVES[0])]
    second = watched(unbroken)
    expected.append(unbroken.scores(WAVES[1]))
    assert len(second) > 4
    expected.append(unbroken.scores(WAVES[2]))
    broken = Evaluator(model, cache=tmp_path / "broken", fork=fork, **OPTIONS)
    broken.scores(WAVES[0])
    watched(broken, chunks)
    with pytest.raises(Stopped):
        broken.scores(WAVES[1])
    again = Evaluator(model, cache=tmp_path / "broken", fork=fork, **OPTIONS)
    rest = watched(again)
    for wave, scores in zip(WAVES, expected):
        assert (again.scores(wave) == scores).all()
    assert rest == second[chunks:]  # the same chunks, and only those that were missing
    assert again.run + broken.run == unbroken.run == len({*WAVES[0], *WAVES[1], *WAVES[2]})
    assert again.seconds > broken.seconds > 0


def test_a_stopped_wave_goes_on_in_the_same_process(watched, small_chunks):
    model = language_model("mamba2")
    expected = Evaluator(model, **OPTIONS).scores(TEXTS)
    asked = Evaluator(model, **OPTIONS)
    own = asked._scores
    watched(asked, 2)
    with pytest.raises(Stopped):
        asked.scores(TEXTS)
    asked._scores = own
    assert (asked.scores(TEXTS) == expected).all() and asked.run == len(TEXTS)


KILLED = """
import os, signal, sqlite3, sys
sys.path[:0] = [{tests!r}]
from evaluation.slow import language_model
from evaluation.test_store import OPTIONS, WAVES
from ssmscope.api import store
from ssmscope.evaluation import Evaluator, evaluator

evaluator.BATCHES_PER_CHUNK = 2
asked = Evaluator(language_model("mamba2"), cache={cache!r}, **OPTIONS)
asked.scores(WAVES[0])
transaction, chunks = store._transaction, []

@store.contextmanager
def killed(connection):
    with transaction(connection):
        yield
        chunks.append(None)
        if len(chunks) == 3:  # written, and not committed
            os.kill(os.getpid(), signal.SIGKILL)

store._transaction = killed
asked.scores(WAVES[1])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system kills otherwise")
def test_a_killed_process_leaves_a_file_to_go_on_from(tmp_path, watched, small_chunks, monkeypatch):
    monkeypatch.setattr(evaluator, "plan_pieces", running.plan_pieces)  # as the process has them
    cache = tmp_path / "scores.sqlite"
    done = TRANSFORMERS.run(KILLED.format(tests=str(FOLDER.parent), cache=str(cache)), cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    model = language_model("mamba2")
    unbroken = Evaluator(model, **OPTIONS)
    expected = [unbroken.scores(WAVES[0])]
    second = watched(unbroken)
    expected.append(unbroken.scores(WAVES[1]))
    again = Evaluator(model, cache=cache, **OPTIONS)
    rest = watched(again)
    assert all((again.scores(wave) == scores).all() for wave, scores in zip(WAVES, expected))
    assert rest == second[2:]
    connection = sqlite3.connect(cache)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


class TestCache:
    @pytest.mark.parametrize("scoring", ["likelihood", "generated"])
    def test_nothing_is_run_twice(self, tmp_path, scoring):
        model, options = language_model("mamba"), dict(words=PHRASES, scoring=scoring, cache=tmp_path / "scores")
        first = Evaluator(model, **options)
        expected = first.scores(TEXTS[:9])
        again = Evaluator(model, **options)
        assert (again.scores(TEXTS[:9][::-1]) == expected[::-1]).all()
        assert (again.run, again.asked, first.run) == (0, 9, 9)
        assert again.seconds == pytest.approx(first.seconds)  # what it once took
        assert (again.scores(TEXTS[3:12])[:6] == expected[3:]).all() and again.run == 3
        more = Evaluator(model, tokens_at_once=7, fork=False, **options)  # rows are rows, however they were run
        more.scores(TEXTS[:12])
        assert more.run == 0

    def test_scores_are_of_the_weights_as_they_are(self, tmp_path):
        model = language_model("mamba2")
        asked = Evaluator(model, words=WORDS, cache=tmp_path / "scores")
        before = asked.scores(TEXTS[:3])
        with torch.no_grad():
            model.mixers[0].D.mul_(2)
        after = asked.scores(TEXTS[:3])
        assert asked.run == 6 and (before != after).all()
        assert (after == Evaluator(model, words=WORDS).scores(TEXTS[:3])).all()

    def test_two_at_a_time(self, tmp_path):
        model = language_model("mamba2")
        first, second = (Evaluator(model, words=WORDS, cache=tmp_path / "scores") for _ in range(2))
        expected = first.scores(TEXTS[:5])
        assert (second.scores(TEXTS[:5]) == expected).all() and second.run == 0
        second.scores(TEXTS[5:8])
        first.scores(TEXTS[5:8])
        assert first.run == 5


class TestFiles:
    def test_of_something_else(self, tmp_path):
        text = tmp_path / "notes.txt"
        text.write_text("Not a cache, but a page of notes. " * 40)
        refuses(r"notes.txt is not a cache of scores \(file is not a database\): give another", Store, text)
        other = sqlite3.connect(tmp_path / "other.sqlite")
        other.execute("CREATE TABLE rows (name TEXT)")
        other.commit()
        other.close()
        for name in ("notes.txt", "other.sqlite"):
            before = (tmp_path / name).read_bytes()
            refuses(f"{name} is ", Evaluator, language_model("mamba2"), words=WORDS, cache=tmp_path / name)
            assert (tmp_path / name).read_bytes() == before

    @pytest.mark.parametrize(
        "damage", ["7", f"'{'x' * 32}'", "'words'", "x'00'", "zeroblob(24)", "zeroblob(16)", "{nan}"]
    )
    def test_rows_that_are_damaged(self, tmp_path, damage):
        model, file = language_model("mamba2"), tmp_path / "scores"
        Evaluator(model, words=WORDS, cache=file).scores(TEXTS[:3])
        other = sqlite3.connect(file)
        nan = f"x'{np.array([1.0] + [np.nan] * len(WORDS)).tobytes().hex()}'"
        other.execute(f"UPDATE kept SET value = {damage.format(nan=nan)}")
        other.commit()
        other.close()
        refuses("malformed rows", Evaluator(model, words=WORDS, cache=file).scores, TEXTS[:3])

    def test_that_cannot_be(self, tmp_path):
        (tmp_path / "file").touch()
        refuses(r"cannot write to .*file: it is a file; give a directory", Store, tmp_path / "file" / "scores")
        refuses("could not be used", Store, tmp_path)

    def test_that_are_locked(self, tmp_path, monkeypatch):
        monkeypatch.setattr(store, "LOCK_TIMEOUT_SECONDS", 0.05)
        held = Store(tmp_path / "scores")
        other = sqlite3.connect(tmp_path / "scores", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        for use in (lambda: Store(tmp_path / "scores"), lambda: held.add({b"a": b"1"})):
            refuses("scores is in use by another process: wait, or give another file", use)
        other.execute("ROLLBACK")
        other.close()
        assert held.known([b"a"]) == set()
        held.add({b"a": b"1"})
        assert Store(tmp_path / "scores").get([b"a", b"b"]) == {b"a": b"1"}

    def test_that_are_empty_are_filled(self, tmp_path):
        (tmp_path / "scores").touch()
        rows = {b"%d" % i: bytes(i) for i in range(1200)}
        first, second = Store(tmp_path / "scores"), Store(tmp_path / "scores")
        first.add(rows)
        assert second.get([*rows, b"other"]) == rows and second.known([b"5", b"other"]) == {b"5"}
        second.add({b"5": b"other"})
        assert first.get([b"5"]) == {b"5": bytes(5)}

    def test_that_hold_nothing_more_are_removed(self, tmp_path):
        kept = Store(tmp_path / "scores")
        kept.add({b"a": b"1", b"b": b"2"})
        kept.drop([b"a", b"other"])
        assert kept.get([b"a", b"b"]) == {b"b": b"2"}
        kept.drop([b"b"])
        assert not list(tmp_path.iterdir()) and kept.get([b"b"]) == {}
        kept.add({b"c": b"3"})
        assert Store(tmp_path / "scores").known([b"c"]) == {b"c"}


def test_without_a_file_nothing_is_stored():
    kept = Store(None)
    kept.add({b"a": b"1"})
    kept.drop([b"a"])
    assert kept.get([b"a"]) == {} and kept.known([b"a"]) == set()


def test_a_connection_is_closed_in_the_thread_that_opened_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches run in threads, any of which may collect a store, or use one that another thread made."""
    opened: list[int] = []
    closed: list[int] = []

    class Connection(sqlite3.Connection):
        def close(self) -> None:
            closed.append(threading.get_ident())
            super().close()

    def connect(*args, **kwargs) -> sqlite3.Connection:
        opened.append(threading.get_ident())
        return connected(*args, factory=Connection, **kwargs)

    connected = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    raised: list[BaseException] = []
    monkeypatch.setattr("sys.unraisablehook", lambda found: raised.append(found.exc_value))
    made = [Store(tmp_path / "file")]
    made[0].add({b"a": b"1"})
    gone, seen = weakref.ref(made[0]), list[dict[bytes, bytes]]()

    def elsewhere() -> None:
        seen.append(made[0].get([b"a", b"b"]))
        made.clear()
        gc.collect()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [{b"a": b"1"}] and gone() is None and not raised
    assert opened == closed and len({*closed}) == 2
