"""Batches of a data set with stored parts: their order, repeated measurements, and progress."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ssmscope.api.sharding import parts
from ssmscope.api.sharding.parts import PARTS, keeping, over
from ssmscope.api.store import Store
from ssmscope.core.progress import progress_bar

BATCHES = [[1], [2, 3], [4, 5, 6], [7], [8, 9]]
MODEL: Any = None


class Killed(BaseException):
    """A process that ends here."""


def measured(batch: list[int]) -> dict[str, np.ndarray]:
    return {"sum": np.array([sum(batch)], dtype=np.int16), "text": np.array([str(batch)])}


def engine(order: list[int], stop: int | None = None) -> Any:
    """Engine that measures the missing batches in this order, and ends the process after some."""

    def run(model: Any, measure: Any, batches: Any) -> Iterator[Any]:
        for at, place in enumerate(order):
            if at == stop:
                raise Killed
            number, batch = batches[place]
            yield number, measure(batch)

    return run


def run(order: list[int], stop: int | None = None, measure: Any = measured, **options: Any) -> list[tuple[Any, Any]]:
    token = parts.engine.set(engine(order, stop))
    try:
        found = over(MODEL, BATCHES, measure, **options)
        return [(batch, {name: values.tolist() for name, values in part.items()}) for batch, part in found]
    finally:
        parts.engine.reset(token)


EXPECTED = [(batch, {"sum": [sum(batch)], "text": [str(batch)]}) for batch in BATCHES]


def stored(out: Path) -> list[str]:
    connection = sqlite3.connect(out / PARTS)
    found = sorted(key.decode() for (key,) in connection.execute("SELECT key FROM kept"))
    connection.close()
    return found


def test_batches_come_in_their_order_as_soon_as_they_can() -> None:
    assert run([2, 0, 4, 1, 3]) == EXPECTED and [part for part in over(MODEL, [], measured)] == []
    asked: list[int] = []

    def told(model: Any, measure: Any, batches: Any) -> Iterator[Any]:
        for number in (2, 0, 1, 3, 4):
            asked.append(number)
            yield number, measured(BATCHES[number])

    token = parts.engine.set(told)
    seen = [(batch, list(asked)) for batch, _ in over(MODEL, BATCHES, measured)]
    parts.engine.reset(token)
    assert seen == [
        ([1], [2, 0]), ([2, 3], [2, 0, 1]), ([4, 5, 6], [2, 0, 1]), ([7], [2, 0, 1, 3]), ([8, 9], [2, 0, 1, 3, 4]),
    ]  # fmt: skip
    assert [part["sum"].item() for _, part in over(MODEL, iter(BATCHES), measured)] == [1, 5, 15, 7, 17]


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    again: list[list[int]] = []

    def counted(batch: list[int]) -> dict[str, np.ndarray]:
        again.append(batch)
        return measured(batch)

    given = {"provenance": {"seed": 1, "date": "today"}, "what": "texts"}
    with pytest.raises(Killed), keeping(tmp_path):
        run([4, 1, 0], 2, **given)
    first = stored(tmp_path)
    assert [key.partition("/")[2] for key in first] == ["1", "4"]
    assert len(first[0].partition("/")[0]) == 16 == len(f"{int(first[0].partition('/')[0], 16):016x}")
    with keeping(tmp_path):
        for other in ({"provenance": {"seed": 2}}, {"what": "images"}):  # what is kept is of others
            assert run([0, 1, 2, 3, 4], measure=counted, **{**given, **other}) == EXPECTED
        assert len(again) == 10 and len(stored(tmp_path)) == 12
        again.clear()
        given["provenance"]["date"] = "tomorrow"  # type: ignore[index]
        assert run([2, 0, 1], measure=counted, **given) == EXPECTED
        assert again == [[7], [1], [4, 5, 6]]
        assert run([], **given) == EXPECTED
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_kept_without_a_place_or_without_provenance(tmp_path: Path) -> None:
    with keeping(None):
        assert run([0, 1, 2, 3, 4], provenance={"seed": 1}) == EXPECTED
    with keeping(tmp_path):
        assert run([0, 1, 2, 3, 4]) == EXPECTED and list(tmp_path.iterdir()) == []
        assert run([0, 1, 2, 3, 4], provenance={}) == EXPECTED and len(stored(tmp_path)) == 5
    assert parts._keeping.get() is None


def test_a_store_has_a_file_while_it_has_values(tmp_path: Path) -> None:
    place = tmp_path / "new" / "own.sqlite"
    store = Store(place)
    assert store.known([b"a"]) == set() and store.get([b"a"]) == {}
    store.drop([b"a"])
    assert list(tmp_path.iterdir()) == []
    store.add({b"a": b"1", b"b": b"2", b"c": b"3"})
    store.add({b"a": b"other", b"d": b"4"})
    other = Store(place)
    assert other.known([b"a", b"x", b"d"]) == {b"a", b"d"} and other.get([b"d", b"a", b"x"]) == {b"a": b"1", b"d": b"4"}
    other.drop([b"a", b"b", b"x"])
    assert place.exists() and store.get([b"a", b"c", b"d"]) == {b"c": b"3", b"d": b"4"}
    store.drop(iter([b"c", b"d"]))
    assert list(place.parent.iterdir()) == []
    store.add({b"e": b"5"})
    assert Store(place).get([b"e"]) == {b"e": b"5"}
    nothing = Store(None)
    nothing.add({b"a": b"1"})
    nothing.drop([b"a"])
    assert nothing.known([b"a"]) == set()


def test_progress_counts_the_items_of_what_is_missing(tmp_path: Path, monkeypatch) -> None:
    bars: list[Any] = []

    def bar() -> Any:
        bars.append(progress_bar())
        return bars[-1]

    monkeypatch.setattr(parts, "progress_bar", bar)
    given = {"provenance": {}, "what": "texts", "size": lambda batch: 10 * len(batch)}
    with pytest.raises(Killed), keeping(tmp_path):
        run([4, 1, 0], 2, **given)
    seen = []
    with keeping(tmp_path):
        for batch, _ in over(MODEL, BATCHES, measured, **given):
            (task,) = bars[-1].tasks
            seen.append((batch, task.description, task.completed, task.total))
    assert seen == [
        ([1], "texts", 50, 90), ([2, 3], "texts", 50, 90), ([4, 5, 6], "texts", 80, 90), ([7], "texts", 90, 90),
        ([8, 9], "texts", 90, 90),
    ]  # fmt: skip
    assert json.dumps([task.completed for bar in bars for task in bar.tasks]) == "[40, 90]"
