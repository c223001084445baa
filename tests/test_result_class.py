"""Common parts of results: their verdicts, pictures and pages, and the modules that define them."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from refusals import refuses
from ssmscope.api import analyses as registry
from ssmscope.api import results
from ssmscope.api.provenance import record_provenance
from ssmscope.api.results import OverTexts, Result, save_together
from ssmscope.errors import InputError


@dataclass(frozen=True)
class Told(Result, kind="test-told"):
    said: str = ""

    @property
    def headline(self) -> str:
        return self.said or super().headline

    def to_frame(self) -> Any:
        return pd.DataFrame({"a": [1]})

    def draw(self, frame: Any, **options: Any) -> Any:
        return SimpleNamespace(frame=frame, **options)


@pytest.mark.parametrize(("headline", "verdict"), [
    ("Told of m: a of m: b", "a of m: b"), ("Told on m: a on m: b", "a on m: b"), ("Told on m: a of m: b", "b"),
    ("Told of n: a", "Told of n: a"), ("", "test-told of m"),
])  # fmt: skip
def test_a_verdict_is_the_headline_without_the_model(headline: str, verdict: str) -> None:
    assert Told({"model": "m"}, headline).verdict() == verdict
    assert Told({}, "").headline == "test-told of a model" and Told({}).queries_made == ""


def test_a_figure_is_drawn_in_a_frame_of_the_users_wishes() -> None:
    own = Told({}).figure(title="t", size=3.0, start=2)
    assert own.start == 2 and (own.frame.ax, own.frame.title, own.frame.size) == (None, "t", 3.0)


def test_only_the_module_of_a_kind_that_is_unknown_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(results, "importlib", SimpleNamespace(import_module=imported.append))
    refuses("damaged result of kind 'test-told'", Result.from_dict, {"kind": "test-told", "said": 3})
    with pytest.raises(InputError, match="unknown kind of result 'test-tol'; known are .*did you mean 'test-told'"):
        Result.from_dict({"kind": "test-tol"})
    assert imported == []
    kind, home = next(iter(registry.result_homes().items()))
    monkeypatch.setattr(Result, "_kinds", {name: each for name, each in Result._kinds.items() if name != kind})
    refuses(f"unknown kind of result '{kind}'", Result.from_dict, {"kind": kind})
    assert imported == [home]


def test_results_that_are_saved_together_are_one_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    monkeypatch.setattr(results, "publish", lambda *given: published.append(given))
    found = save_together({"b": Told({}, "x"), "a": Told({}, "y")}, tmp_path, ["csv", "json"])
    ((folder, name, files),) = published
    assert (folder, name, list(files)) == (tmp_path, "b", ["b.json", "b.csv", "a.json", "a.csv"])
    assert found == {name: {end: tmp_path / f"{name}.{end}" for end in ("json", "csv")} for name in "ba"}
    assert files["a.csv"] == b"model,a\na model,1\n" and b'"said": "y"' in files["a.json"]


def test_a_provenance_is_of_a_source_and_its_data() -> None:
    data = type("Data", (), {"__len__": lambda self: 3, "name": "own", "split": "test", "fingerprint": "5"})()
    found = record_provenance({"model": "m"}, options={"top": 3}, seed=4, data=data)
    assert (found["model"], found["options"], found["seed"]) == ("m", {"top": 3}, 4)
    assert found["data"] == {"name": "own", "split": "test", "fingerprint": "5", "examples": 3}
    assert "data" not in record_provenance({}) and record_provenance({})["options"] == {}


def test_a_page_lists_where_its_numbers_come_from() -> None:
    rows = results._flatten({"a": {"b": None, "c": [1, "x"]}, "d": "text", "e": {}})
    assert rows == [("a b", "none"), ("a c", '[1, "x"]'), ("d", "text")]


def test_texts_of_a_result_are_its_items() -> None:
    class Several(OverTexts[str]):
        texts = ("a", "b", "c")

    assert len(Several()) == 3 and list(Several()) == ["a", "b", "c"] and (Several()[0], Several()[-1]) == ("a", "c")
