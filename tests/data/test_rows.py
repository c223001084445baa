"""Files of rows: every fault is refused in one line, and nothing that is right."""

from __future__ import annotations

from pathlib import Path

import hostile
import pytest

from ssmscope.data import rows
from ssmscope.data.babi import load_questions
from ssmscope.data.language import load_lines
from ssmscope.data.text import load_text
from ssmscope.errors import InputError

FINE = {
    ".jsonl": {"text-flag-field", "rationale-null-field", "rationale-absent-field"},
    ".csv": set(),
    ".tsv": set(),
    ".parquet": set(),
}
"""What is right after all: a column that need not be there."""


def labelled(suffix: str) -> dict[str, bytes]:
    """Hostile files of labelled texts."""
    if suffix == ".jsonl":
        kinds = {f"text-{name}": content for name, content in hostile.jsonl(hostile.LABELLED, "text").items()}
        kinds |= {f"label-{name}": content for name, content in hostile.jsonl(hostile.LABELLED, "label").items()}
        marked = hostile.jsonl({**hostile.LABELLED, "rationale": "good"}, "rationale")
        kinds |= {f"rationale-{name}": content for name, content in marked.items()}
        kinds["rationale-deep-text"] = b'{"text": "a", "label": 0, "rationale": "' + b"[" * hostile.DEEP + b'"}'
        for name in ("label-flag-field", "label-escaped-nul"):
            del kinds[name]
    elif suffix == ".parquet":
        kinds = dict(hostile.parquet())
    else:
        kinds = hostile.csv("\t" if suffix == ".tsv" else ",") | (hostile.CSV_ONLY if suffix == ".csv" else {})
    return {**kinds, **hostile.NOT_TEXT}


CASES = [(suffix, name) for suffix in FINE for name in labelled(suffix) if name not in FINE[suffix]]


@pytest.fixture(scope="module")
def kinds() -> dict[str, dict[str, bytes]]:
    return {suffix: labelled(suffix) for suffix in FINE}


def refused(read, path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700 + 2 * len(str(path))


@pytest.mark.parametrize(("suffix", "name"), CASES)
def test_hostile_files_of_labelled_texts_are_refused(tmp_path, kinds, suffix, name) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(kinds[suffix][name])
    refused(lambda file: load_text(file, label_names=("a", "b")), path)


@pytest.mark.parametrize("name", sorted(hostile.NOT_TEXT))
def test_what_is_no_text_is_no_filler_and_no_questions(tmp_path, name) -> None:
    for suffix, read in ((".txt", load_lines), (".jsonl", load_questions), (".csv", load_lines)):
        path = tmp_path / f"file{suffix}"
        path.write_bytes(hostile.NOT_TEXT[name])
        refused(read, path)


@pytest.mark.parametrize("field", ["context", "question", "answer", "distractors"])
def test_hostile_questions_are_refused(tmp_path, field) -> None:
    fine = {"null-field", "absent-field", "list-field"} if field == "distractors" else set()
    for name, content in hostile.jsonl({**hostile.ASKED, "distractors": ["cellar"]}, field).items():
        (tmp_path / "file.jsonl").write_bytes(content)
        if name in fine:
            assert len(load_questions(tmp_path / "file.jsonl")) == 2
        else:
            refused(load_questions, tmp_path / "file.jsonl")


def test_paths_that_are_no_files_are_refused(tmp_path) -> None:
    for path in hostile.folders(tmp_path / "paths").values():
        for read in (load_text, load_lines, load_questions):
            refused(read, path)
            refused(read, path.with_name(f"{path.name}.csv"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\na film, which is bad,1\n", "row 1 of .* has 3 fields, its header 2; .*double quotes"),
        ("a.tsv", "text\tlabel\na\tfilm\t1\n", "row 1 of .* has 3 fields, its header 2; put a text that holds a"),
        ("a.csv", "text,label,text\nx,0,y\n", "the column 'text' twice"),
        ("a.jsonl", '{"text": "a", "text": "b", "label": 0}\n', "line 1: it has 'text' twice"),
        ("a.csv", f'text,label\n"{"x" * 140_000}",0\n', "field larger than field limit .*save it as jsonl"),
        ("a.jsonl", '{"text": "a\\ud800", "label": 0}\n', r"line 1 has \\ud800, which is not a character"),
    ],
)
def test_it_is_said_what_to_do(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        load_text(tmp_path / name)


def test_blank_lines_and_empty_fields_beyond_the_header_do_no_harm(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("\ntext,label,,\n\na film,0,\na play,1,,,\nmore,1,,\n")
    assert load_text(tmp_path / "a.csv").texts == ("a film", "a play", "more")
    (tmp_path / "b.csv").write_bytes(b'label,text\r\n1,one\r\n0,"two\r\nlines"\r\n')
    assert load_text(tmp_path / "b.csv").texts == ("one", "two\r\nlines")
    (tmp_path / "c.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "one \\u00e9", "label": 1}\r\n\r\n{"text": "two", "label": 0}'
    )
    assert load_text(tmp_path / "c.jsonl").texts == ("one é", "two")


def test_rows_beyond_the_limit_are_counted_and_not_read(tmp_path, monkeypatch) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 5, "label": [0] * 5}), tmp_path / "a.parquet")
    monkeypatch.setattr(rows, "MAX_ROWS", 4)
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read", None)
    with pytest.raises(InputError, match="has 5 rows; allowed are up to 4"):
        load_text(tmp_path / "a.parquet")
