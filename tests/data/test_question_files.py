"""Questions of a user's own file, in every format, and what is refused."""

from __future__ import annotations

import json

import pytest

from ssmscope.data.babi import load_questions
from ssmscope.errors import InputError

ROWS = [
    {"context": "Ann is in the hall.\nBo is in the attic.", "question": "Where is Ann?", "answer": "hall"},
    {"context": " Cy has the key, the lamp. ", "question": "What has Cy?", "answer": "key"},
]
DISTRACTORS = [["attic", "cellar"], []]


def written(path, rows):
    if path.suffix == ".parquet":
        import pandas as pd

        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        import pandas as pd

        pd.DataFrame(rows).to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("form", ["list", "json", "commas"])
def test_every_format_is_read_alike(tmp_path, suffix, form):
    given = {"list": DISTRACTORS, "json": list(map(json.dumps, DISTRACTORS)), "commas": ["attic, cellar", ""]}[form]
    if form == "list" and suffix == ".csv":
        given = list(map(json.dumps, DISTRACTORS))
    rows = [{**row, "distractors": words} for row, words in zip(ROWS, given)]
    data = load_questions(written(tmp_path / f"mine{suffix}", rows))
    assert (data.name, data.split, len(data)) == ("mine", "all", 2)
    assert data.contexts == (ROWS[0]["context"], "Cy has the key, the lamp.")
    assert data.questions == ("Where is Ann?", "What has Cy?") and data.answers == ("hall", "key")
    assert [one.distractors for one in data.examples] == [("attic", "cellar"), ()]
    assert data.candidates == ("attic", "cellar", "hall", "key")
    assert all(one.facts == one.needles == () for one in data.examples)


def test_distractors_may_be_absent(tmp_path):
    plain = load_questions(written(tmp_path / "mine.jsonl", ROWS))
    assert [one.distractors for one in plain.examples] == [(), ()]
    empty = [{**ROWS[0], "distractors": None}, {**ROWS[1], "distractors": ["lamp", "lamp"]}]
    assert [one.distractors for one in load_questions(written(tmp_path / "b.jsonl", empty)).examples] == [(), ("lamp",)]
    tabs = load_questions(written(tmp_path / "c.tsv", [{**ROWS[1], "distractors": "lamp,cup"}]))
    assert tabs.examples[0].distractors == ("lamp", "cup") and tabs.examples[0].answer == "key"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": " "}, r"row 2 of .*mine.jsonl has an empty answer"),
        ({"distractors": ["key"]}, "row 2 of .* has its answer 'key' among the distractors"),
        ({"distractors": ["lamp", ""]}, r"row 2 of .* has the distractors \['lamp', ''\]; allowed is a list of words"),
        ({"distractors": 5}, "has the distractors 5; allowed is a list of words"),
        ({"distractors": '["lamp"'}, "allowed is a list of words"),
    ],
)
def test_what_is_refused(tmp_path, row, says):
    with pytest.raises(InputError, match=says):
        load_questions(written(tmp_path / "mine.jsonl", [ROWS[0], {**ROWS[1], **row}]))


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="there is no file of questions absent.csv; give one ending in .csv, .tsv"):
        load_questions("absent.csv")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match="with the columns context, question, answer"):
        load_questions(tmp_path / "a.txt")
    with pytest.raises(InputError, match="has no column 'answer'; its columns are context, question"):
        load_questions(written(tmp_path / "b.csv", [{"context": "a", "question": "b"}]))
