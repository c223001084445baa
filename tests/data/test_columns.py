"""Columns of users' files under the names that the package reads: in every verb's data, from Python and typed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from bags import bag
from refusals import refuses
import ssmscope
from ssmscope.api.analysis import Call
from ssmscope.data.babi import load_questions
from ssmscope.data.columns import reading
from ssmscope.data.language import load_lines
from ssmscope.data.pairs import is_pairs, read_pairs
from ssmscope.data.series import read_series
from ssmscope.errors import InputError

FRAME = pd.DataFrame({"sentence": ["good", "bad bad", "good bad"], "text": ["x"] * 3, "mood": ["good", "bad", "bad"]})
COLUMNS = {"text": "sentence", "label": "mood"}
TYPED = "text=sentence,label=mood"


def csv_file(folder: Path) -> Path:
    FRAME.to_csv(folder / "r.csv", index=False)
    return folder / "r.csv"


def json_lines(folder: Path) -> Path:
    FRAME.to_json(folder / "r.jsonl", orient="records", lines=True)
    return folder / "r.jsonl"


def parquet(folder: Path) -> Path:
    FRAME.to_parquet(folder / "r.parquet")
    return folder / "r.parquet"


@pytest.mark.parametrize("write", [csv_file, json_lines, parquet, lambda folder: FRAME])
@pytest.mark.parametrize("columns", [COLUMNS, TYPED, TYPED.split(","), tuple(TYPED.split(","))])
def test_files_and_tables_are_read_alike(write: Callable, columns, tmp_path: Path) -> None:
    found = ssmscope.load_text(write(tmp_path), columns=columns)
    assert found.texts == ("good", "bad bad", "good bad") and found.label_names == ("bad", "good")
    assert found.labels == (1, 0, 0)
    refuses("no column 'label'", ssmscope.load_text, write(tmp_path))  # Nothing of the context is left.


@pytest.mark.parametrize("columns", [COLUMNS, TYPED])
def test_verbs_take_them(columns, tmp_path: Path) -> None:
    model = bag({"good": 2.0, "bad": -1.0})
    one = ssmscope.evaluate(model, FRAME, columns=columns)
    other = ssmscope.evaluate(model, data=csv_file(tmp_path), columns=columns)
    assert one.scores[0].estimate == other.scores[0].estimate
    assert one.scores[0].estimate.value == 2 / 3
    assert ssmscope.noise(model, FRAME, rates=[0.5], columns=columns).clean.value == 2 / 3
    assert "bad" in str(ssmscope.explain(model, FRAME, columns=columns))


def test_a_call_carries_them(tmp_path: Path) -> None:
    call = Call.of("evaluate", ["demo/sst2-mamba2"], {"data": str(csv_file(tmp_path)), "columns": TYPED})
    assert call.inputs["columns"] == TYPED.split(",") and call.arguments[-2:] == ["--columns", TYPED]


def test_known_texts_keep_their_columns(real_data) -> None:
    real_data("books", "test")
    with reading("text=sentence"):
        assert len(load_lines("books", "test")) > 100


def test_lines_pairs_questions_and_series(tmp_path: Path) -> None:
    pairs = pd.DataFrame({"good": ["a b"], "worse": ["a c"], "who": ["b"], "want": ["yes"]})
    with reading({"clean": "good", "corrupted": "worse", "target": "want"}):
        found = read_pairs(pairs)
        assert is_pairs(pairs) and (found.clean, found.corrupted, found.targets) == (("a b",), ("a c",), ("yes",))
        assert dict(found.spans) == {"who": ("b",)}
    assert not is_pairs(pairs)
    refuses("no column 'clean'; its columns are .*columns='clean=good'", read_pairs, pairs)
    with reading("text=sentence"):
        assert load_lines(FRAME) == ("good", "bad bad", "good bad")
    (tmp_path / "q.jsonl").write_text(json.dumps({"passage": "a b", "ask": "c ?", "reply": "b"}) + "\n")
    with reading({"context": "passage", "question": "ask", "answer": "reply"}):
        (one,) = load_questions(tmp_path / "q.jsonl").examples
    assert one.answer == "b"
    np.savez(tmp_path / "s.npz", x=np.arange(8.0).reshape(2, 4, 1), y=np.array([0, 1]))
    with reading("series=x,labels=y"):
        found = read_series(tmp_path / "s.npz")
    assert found.labels == [0, 1] and found.values[1].tolist() == [[4.0], [5.0], [6.0], [7.0]]


@pytest.mark.parametrize(("columns", "said"), [
    ({"text": "sentense", "label": "mood"}, "the data has no column 'sentense'; it has sentence, text, mood; did"),
    ({"txt": "sentence"}, "columns=… has txt=sentence; allowed are text, label, .*; did you mean 'text'"),
    ({"text": None}, "columns=… has text=None"),
    ("text=mood,text=sentence", "columns=… has text twice; keep one"), ("text", "columns=… has text=; allowed"),
    (3, "columns=… has 3=; allowed"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(columns, said: str) -> None:
    refuses(said, ssmscope.evaluate, bag({"good": 2.0, "bad": -1.0}), FRAME, columns=columns)


def test_columns_of_nothing_are_refused(real_data) -> None:
    real_data("sst2", "test")
    model = bag({"good": 2.0, "bad": -1.0})
    for verb, own, data in ((ssmscope.explain, model, "good"), (ssmscope.evaluate, "demo/sst2-mamba2", "sst2")):
        with pytest.raises(InputError, match="columns=… is for a file or a table of your own, and none was read"):
            verb(own, data, columns={"text": "sentence"}, **({"limit": 4} if data == "sst2" else {}))


def test_what_is_refused_at_the_end_leaves_no_files(tmp_path: Path) -> None:
    call = Call.of("heatmap", ["demo/sst2-mamba2"], {"text": ["good"], "columns": "text=sentence"})
    refuses("none was read", call.run, tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("column", ["label", "label_name"])
def test_a_named_column_of_labels_stands_before_the_files_own(column: str) -> None:
    data = ssmscope.load_text(FRAME.assign(label="x", label_index=0), columns=f"text=sentence, {column}=mood")
    assert data.label_names == ("bad", "good") and data.labels == (1, 0, 0)


def test_frames_with_a_column_twice_and_columns_alone_are_refused() -> None:
    model = bag({"good": 2.0, "bad": -1.0})
    with pytest.raises(InputError, match="the data has the column 'text' twice"):
        ssmscope.evaluate(model, pd.DataFrame([["a", "good", "good"]], columns=["text", "text", "label"]))
    refuses("data is 0 good.*give the name of a data set", ssmscope.evaluate, model, FRAME["mood"])


def test_labels_may_be_numbers_of_numpy_and_columns_numbers_of_pandas() -> None:
    assert ssmscope.load_text([("a", np.int64(1)), ("b", np.float32(0))]).labels == (1, 0)
    frame = pd.DataFrame([["a", 1], ["b", 0]])
    assert ssmscope.load_text(frame, columns="text=0,label=1").labels == (1, 0)
