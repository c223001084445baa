"""Folders of ERASER, written by hand in each of its shapes: texts, classes and the exact spans of their evidence."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from ssmscope.data.text import known_splits, load_text, text_data
from ssmscope.reports.sources import check_data
from ssmscope.zoo.training.data import parts_of


def evidence(docid: str, start: Any, stop: Any, **more: Any) -> dict[str, Any]:
    return {"docid": docid, "start_token": start, "end_token": stop, "start_sentence": -1, "end_sentence": -1, **more}


def row(name: str, label: str, *groups: list[dict[str, Any]], query: str | None = "", docids: Any = None) -> dict:
    fields = {"annotation_id": name, "classification": label, "query": query, "query_type": None, "docids": docids}
    return {**fields, "evidences": list(groups)}


def write(folder: Path, documents: dict[str, str], *, one_file: bool = False, **splits: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    if one_file:
        lines = [json.dumps({"docid": name, "document": text}) for name, text in documents.items()]
        (folder / "docs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    else:
        (folder / "docs").mkdir(exist_ok=True)
        for name, text in documents.items():
            (folder / "docs" / name).write_text(text, encoding="utf-8")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return folder


def marked(data: Any) -> list[list[str] | None]:
    return [
        None if spans is None else [text[start:end] for start, end in spans]
        for text, spans in zip(data.texts, data.rationales, strict=True)
    ]


MOVIES = {
    "negR_0.txt": "a film about  dogs .\nit is not very good , at all .\n",
    "posR_1.txt": "\n  funny and\u00a0warm ,\tthough long .\ni laughed .",
}
QUERY = "What is the sentiment of this review ?"


@pytest.fixture
def movies(tmp_path: Path) -> Path:
    rows = [
        row("negR_0.txt", "NEG", [evidence("negR_0.txt", 7, 10)], [evidence("negR_0.txt", 11, 13)], query=QUERY),
        row("posR_1.txt", "POS", [evidence("posR_1.txt", 0, 1), evidence("posR_1.txt", 1, 3)], query=QUERY),
        row("posR_1.txt", "POS", query=QUERY),
    ]
    return write(tmp_path / "movies", MOVIES, test=rows, train=rows[:2], val=rows[1:])


def test_reviews_are_documents_without_their_common_question(movies: Path) -> None:
    """Words are told apart by spaces alone; the groups of evidence are joined, and a row may have none."""
    data = load_text(movies, label_names=("negative", "positive"))
    assert data.texts == tuple(text.strip() for text in (*MOVIES.values(), MOVIES["posR_1.txt"]))
    assert (data.name, data.split, data.labels) == ("movies", "test", (0, 1, 1))
    assert marked(data) == [["not very good", "at all"], ["funny", "and\u00a0warm ,\tthough"], None]
    assert data.rationales[0] == ((27, 40), (43, 49))
    assert load_text(movies).label_names == ("NEG", "POS")
    same = text_data("any", "any", data.texts, data.labels, ("negative", "positive"), data.rationales)
    assert data.fingerprint == same.fingerprint


def test_each_split_has_its_file(movies: Path) -> None:
    assert known_splits(movies) == ("train", "validation", "test")
    assert [len(load_text(str(movies), split)) for split in known_splits(movies)] == [2, 2, 3]
    chosen = {name: None for name in ("split", "validation", "test", "held_out")}
    parts, _ = parts_of({"data": str(movies), "kind": "text", "share": 1, "seed": 0, **chosen})
    assert {name: (part.split, len(part)) for name, part in parts.items()} == {
        "train": ("train", 2),
        "validation": ("validation", 2),
        "test": ("test", 3),
    }
    (movies / "val.jsonl").unlink()
    assert known_splits(movies) == ("train", "test")
    told = refusal(load_text, movies, "validation")
    assert told is not None and "has no split 'validation'; there are train, test" in told
    assert refusal(check_data, str(movies), "validation", "text-classifier") == told
    assert refusal(check_data, str(movies), None, "text-classifier") is None


def test_a_claim_stands_after_its_document(tmp_path: Path) -> None:
    """FEVER, BoolQ and MultiRC: the question of each row is its second sentence."""
    documents = {"Ireland": "Ireland is an island .\nIts mountains are low ."}
    rows = [
        row("1", "REFUTES", [evidence("Ireland", 5, 9)], query="Ireland has no low mountains ."),
        row("2", "SUPPORTS", [evidence("Ireland", 0, 4), evidence("Ireland", 3, 5)], query=" Ireland is an island. "),
        row("Ireland", "SUPPORTS", query="It is green."),
    ]
    data = load_text(write(tmp_path / "fever", documents, test=rows), "test")
    assert data.texts[0] == "Ireland is an island .\nIts mountains are low . ||| Ireland has no low mountains ."
    assert data.texts[1].endswith(" ||| Ireland is an island.") and data.texts[2].endswith(" ||| It is green.")
    assert data.labels == (0, 1, 1) and data.label_names == ("REFUTES", "SUPPORTS")
    assert marked(data) == [["Its mountains are low"], ["Ireland is an island ."], None]


def test_a_premise_stands_before_its_hypothesis(tmp_path: Path) -> None:
    """e-SNLI: evidence may lie in either or in both, and both are read where one is named or neither."""
    documents = {
        **{"a#1_hypothesis": "A man sleeps .", "a#1_premise": "A man runs fast ."},
        **{"b#2_premise": "Two dogs .", "b#2_hypothesis": "Cats ."},
    }
    rows = [
        row("a#1", "contradiction", [evidence("a#1_hypothesis", 2, 3), evidence("a#1_premise", 2, 4)], query="?"),
        row("a#1", "contradiction", [evidence("a#1_hypothesis", 2, 3)], query="!"),
        row("b#2", "neutral", docids=["b#2_hypothesis", "b#2_premise"]),
        row("b#2", "neutral"),
    ]
    names = ("entailment", "neutral", "contradiction")
    data = load_text(write(tmp_path / "esnli", documents, one_file=True, test=rows), label_names=names)
    assert data.texts == (*["A man runs fast . ||| A man sleeps ."] * 2, *["Two dogs . ||| Cats ."] * 2)
    assert data.labels == (2, 2, 1, 1) and data.rationales == (((6, 15), (28, 34)), ((28, 34),), None, None)
    assert marked(data)[0] == ["runs fast", "sleeps"]


def test_documents_of_a_row_follow_each_other(tmp_path: Path) -> None:
    documents = {"one": "a b c\n", "two": "d e f"}
    rows = [row("x", "y", [evidence("two", 0, 2)], [evidence("one", 2, 3)], query="g"), row("z", "n", docids=["one"])]
    data = load_text(write(tmp_path / "several", documents, test=rows))
    assert data.texts == ("d e f\na b c ||| g", "a b c") and data.rationales == (((0, 3), (10, 11)), None)


@pytest.mark.parametrize(("given", "said"), [
    (row("x", "1", [evidence("gone", 0, 1)]), "row 1 of {file} is about the document 'gone', which is not in "),
    (row("gone", "1"), "row 1 of {file} is about the document 'gone', which is not in "),
    (row("x", "1", docids=["../test.jsonl"]), "is about the document '../test.jsonl', which is not in "),
    (row("x", "1", docids="one"), "row 1 of {file} has the docids 'one'; give a list"),
    (row("x", "1", [evidence("one", 0, 1)], docids=["two"]), "evidence in the document 'one', which is not among "),
    (row("x", "1", [evidence("one", 1, 4)]), "evidence from token 1 to 4 of 'one'; allowed are start < end"),
    (row("x", "1", [evidence("one", 2, 2)]), "evidence from token 2 to 2 of 'one'"),
    (row("x", "1", [evidence("one", -1, -1)]), "evidence from token -1 to -1 of 'one'"),
    (row("x", "1", [evidence("one", None, 1)]), "evidence from token None to 1 of 'one'"),
    (row("x", "1", [evidence("one", True, 2)]), "evidence from token True to 2 of 'one'"),
    (row("x", "1", docids=["empty"]), "the document 'empty' of row 1 of {file} is empty"),
    (row("x", "1", {"docid": "one"}), "row 1 of {file} has the evidences [{{'docid': 'one'}}]; give groups"),
    ({**row("x", "1"), "evidences": None}, "row 1 of {file} has the evidences None; give groups [[{{'docid': …}}"),
    ({"annotation_id": "one", "classification": "1"}, "{file} has no column 'evidences'; its columns are"),
    ({"annotation_id": "one", "evidences": []}, "{file} has no column 'classification'; its columns are"),
    (row("one", ""), "row 1 of {file} has no label"),
])  # fmt: skip
def test_bad_rows_are_refused_in_one_line(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    folder = write(tmp_path / "bad", {"one": "a b c", "two": "d", "empty": " \n"}, test=[given])
    told = refusal(load_text, folder)
    assert told is not None and said.format(file=folder / "test.jsonl") in told and "\n" not in told


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    told = refusal(load_text, tmp_path)
    assert told is not None and told.startswith(f"{tmp_path} is a folder without ERASER's files; give a file, or")
    (tmp_path / "docs").rmdir()
    (tmp_path / "test.jsonl").write_text("{}\n")
    assert refusal(load_text, tmp_path) == told == refusal(check_data, str(tmp_path), None, "text-classifier")


def test_a_label_that_begins_several_classes_is_none_of_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "short", {"one": "a"}, test=[row("one", "ne")])
    assert load_text(folder, label_names=("negative", "positive")).labels == (0,)
    told = refusal(load_text, folder, label_names=("negative", "neutral"))
    assert told is not None and "has the label 'ne'; allowed are negative, neutral" in told
    numbers = write(tmp_path / "numbers", {"one": "a"}, test=[row("one", "1")])
    assert load_text(numbers, label_names=("10", "2")).labels == (1,)
