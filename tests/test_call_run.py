"""A call's run: loaded models and read inputs, the function's arguments, and the written files."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pandas as pd
import pytest
from refusals import refuses
import ssmscope.loading.load as loading
from ssmscope.api import analyses as registry
from ssmscope.api.analysis import CACHE, Call, analysis
from ssmscope.api.inputs import Input
from ssmscope.api.options import NO_EFFECT, Option, Range
from ssmscope.api.results import Result
from ssmscope.api.sharding import parts
from ssmscope.api.signatures import options_of
from ssmscope.core import progress


@dataclass(frozen=True)
class Made(Result, kind="test-run"):
    number: int

    def to_frame(self) -> Any:
        return pd.DataFrame({"number": [self.number]})

    def to_html(self) -> str:
        return "a page"


@dataclass(frozen=True)
class Other(Made, kind="test-run-other"):
    pass


def _inputs(*, word: Annotated[str, "A word."] = "w") -> None: ...


class Words(Input):
    """An input that tells how it is read."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    @property
    def options(self) -> Mapping[str, Option]:  # type: ignore[override]
        return options_of(_inputs)

    def once(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**values, "word": values["word"] + " once"}

    def read(self, values: Any, options: Any, models: Any) -> Any:
        self.asked.append(("read", values["word"], options["size"], [each.name for each in models]))
        return f"{values['word']} of {','.join(each.name for each in models)}"

    def read_besides(self, values: Any, options: Any, models: Any) -> Any:
        self.asked.append(("besides", values["word"], options["size"], [each.name for each in models]))
        return {"size": options["size"] + len(models)}


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the arguments of functions; models are loaded by name alone."""
    found: list[Any] = []

    def load(name: str, **how: Any) -> Any:
        found.append((name, how))
        return SimpleNamespace(name=name)

    monkeypatch.setattr(registry.ANALYSES, "_found", dict(registry.ANALYSES._entries()))
    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(Result, "_drawn", lambda self, suffix: b"a picture")
    return found


def declared(received: list[Any], results: Any = None, **declaration: Any) -> None:
    @analysis("own thing", **declaration)
    def function(
        model: Any, given: Any = None, *, size: Annotated[int, "A size.", Range(1)] = 5,
        cache: Annotated[str | Path | None, "A cache.", NO_EFFECT] = None,
        progress: Annotated[bool, "A bar.", NO_EFFECT] = True,
        out: Annotated[str | Path | None, "A place.", NO_EFFECT] = None,
    ) -> Any:  # fmt: skip
        names = [
            each if isinstance(each, str) else each.name for each in (model if isinstance(model, list) else [model])
        ]
        kept = parts._keeping.get()
        received.append((names, given, size, cache, out, None if kept is None else kept[0].file))
        return Made({"model": names[0]}, len(received)) if results is None else results

    del function


LOADING = {"tokenizer": None, "device": "cpu", "dtype": None, "labels": None}


class TestModels:
    def test_one(self, received) -> None:
        words = Words()
        declared(received, reads=words, dtype="float32")
        (found,) = Call.of("own thing", ["m"], {"word": "x"}, tokenizer="t", device="cuda").run()
        assert received == [
            ("m", {"tokenizer": "t", "device": "cuda", "dtype": "float32", "labels": None}),
            (["m"], "x of m", 6, None, None, None),
        ]
        assert words.asked == [("read", "x", 5, ["m"]), ("besides", "x", 5, ["m"])] and found.number == 2

    def test_a_pair_reads_its_input_once(self, received, monkeypatch) -> None:
        words = Words()
        joining = SimpleNamespace(join=lambda found: Other({}, sum(each.number for each in found)))
        monkeypatch.setitem(sys.modules, "ssmscope.joining", joining)
        declared(received, reads=words, pair="joining:join")
        (found,) = Call.of("own thing", ["m", "n"], {"size": 3}, dtype="float64").run()
        loads = [(name, {**LOADING, "dtype": "float64"}) for name in "mn"]
        assert received == [
            *loads,
            (["m"], "w once of m", 5, None, None, None),
            (["n"], "w once of n", 5, None, None, None),
        ]
        assert words.asked[2] == ("besides", "w", 3, ["m", "n"]) and (found.number, found.kind) == (7, "test-run-other")
        assert Call.of("own thing", ["m"], {}).run()[0].kind == "test-run"

    def test_several_are_read_together(self, received) -> None:
        declared(received, reads=Words(), several=True)
        Call.of("own thing", ["m", "n", "o"], {}).run()
        assert received[3:] == [(["m", "n", "o"], "w of m,n,o", 8, None, None, None)]

    def test_names_alone(self, received) -> None:
        declared(received, loads=False)
        Call.of("own thing", ["m"], {}).run()
        assert received == [(["m"], None, 5, None, None, None)]


class TestOutput:
    def test_files_are_named_by_the_verb(self, received, tmp_path) -> None:
        declared(received)
        call = Call.of("own thing", ["m"], {})
        call.run(tmp_path / "a", ["csv"])
        assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["own-thing.csv", "own-thing.json"]
        call.run(tmp_path / "b")
        names = ["own-thing.csv", "own-thing.html", "own-thing.json", "own-thing.png"]
        assert sorted(file.name for file in (tmp_path / "b").iterdir()) == names
        refuses("unknown format 'cvs'", call.run, tmp_path / "c", ["cvs"])
        assert not (tmp_path / "c").exists()

    def test_several_results_are_named_by_their_kinds(self, received, tmp_path) -> None:
        declared(received, results=(Made({}, 1), Other({}, 2)))
        found = Call.of("own thing", ["m"], {}).run(tmp_path, [])
        assert [each.number for each in found] == [1, 2]
        names = ["own-thing-test-run-other.json", "own-thing-test-run.json"]
        assert sorted(file.name for file in tmp_path.iterdir()) == names

    def test_answers_are_kept_next_to_the_results_unless_elsewhere(self, received, tmp_path) -> None:
        declared(received)
        for given, out, cache in (
            ({}, tmp_path, tmp_path / CACHE),
            ({}, None, None),
            ({"cache": "mine"}, tmp_path, Path("mine")),
        ):
            Call.of("own thing", ["m"], given).run(out, [])
            assert received[-1][3:] == (cache, None, None)

    def test_parts_are_kept_where_it_goes_over_a_data_set(self, received, tmp_path) -> None:
        declared(received, sharded=True)
        Call.of("own thing", ["m"], {}).run(tmp_path, [])
        assert received[-1][5] == tmp_path / parts.PARTS
        Call.of("own thing", ["m"], {}).run()
        assert received[-1][5] is None

    def test_a_verb_that_writes_its_own_files(self, received, tmp_path) -> None:
        declared(received, writes=True)
        call = Call.of("own thing", ["m"], {})
        refuses("own thing writes its own files; give out=…, the directory for them", call.run)
        call.run(tmp_path)
        assert received[-1][4] == tmp_path and list(tmp_path.iterdir()) == []
        (tmp_path / "file").write_text("")
        refuses("is a file; give a directory", call.run, tmp_path / "file")

    @pytest.mark.parametrize("shown", [True, False])
    def test_progress_is_told_unless_it_is_not_wanted(self, received, monkeypatch, shown) -> None:
        told: list[Any] = []
        own = progress.pulse
        monkeypatch.setattr(progress, "pulse", lambda name, shown: told.append((name, shown)) or own(name, shown))
        declared(received)
        Call.of("own thing", ["m"], {"progress": shown}).run()
        assert told == [("own thing", shown)]
