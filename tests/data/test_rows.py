"""Files of rows: every fault is refused in one line, and nothing that is right. Questions of a user's own file, in
every format, and what is refused. The labels of a file are names, or indices: all of them, and which is decided once.
Documents: every character is asked for once, and bits per character of a model that is known in closed form."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import hostile
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from refusals import refused, refuses
from written_rows import write_rows
from ssmscope.data import rows
from ssmscope.data.babi import load_questions
from ssmscope.data.language import load_lines
from ssmscope.data.rows import class_ids, label_column, sorted_names
from ssmscope.data.text import load_text
from ssmscope.data.tokens import IGNORED
from ssmscope.errors import InputError
from ssmscope.zoo.documents import (
    bits_per_character,
    byte_tokenizer,
    characters_of_tokens,
    document_data,
    load_documents,
    word_tokenizer,
)
from ssmscope.zoo.tokenizers import train_byte_pairs
from ssmscope.zoo.training.card import score_record
from ssmscope.zoo.training.objectives import NextTokens

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
kinds = pytest.fixture(scope="module")(lambda: {suffix: labelled(suffix) for suffix in FINE})


def told_shortly(read, path: Path) -> None:
    assert len(refused(read, path)) < 700 + 2 * len(str(path))


@pytest.mark.parametrize(("suffix", "name"), CASES)
def test_hostile_files_of_labelled_texts_are_refused(tmp_path, kinds, suffix, name) -> None:
    path = tmp_path / f"file{suffix}"
    path.write_bytes(kinds[suffix][name])
    told_shortly(lambda file: load_text(file, label_names=("a", "b")), path)


@pytest.mark.parametrize("name", sorted(hostile.NOT_TEXT))
def test_what_is_no_text_is_no_filler_and_no_questions(tmp_path, name) -> None:
    for suffix, read in ((".txt", load_lines), (".jsonl", load_questions), (".csv", load_lines)):
        path = tmp_path / f"file{suffix}"
        path.write_bytes(hostile.NOT_TEXT[name])
        told_shortly(read, path)


@pytest.mark.parametrize("field", ["context", "question", "answer", "distractors"])
def test_hostile_questions_are_refused(tmp_path, field) -> None:
    fine = {"null-field", "absent-field", "list-field"} if field == "distractors" else set()
    for name, content in hostile.jsonl({**hostile.ASKED, "distractors": ["cellar"]}, field).items():
        (tmp_path / "file.jsonl").write_bytes(content)
        if name in fine:
            assert len(load_questions(tmp_path / "file.jsonl")) == 2
        else:
            told_shortly(load_questions, tmp_path / "file.jsonl")


def test_paths_that_are_no_files_are_refused(tmp_path) -> None:
    for path in hostile.folders(tmp_path / "paths").values():
        for read in (load_text, load_lines, load_questions):
            told_shortly(read, path)
            told_shortly(read, path.with_name(f"{path.name}.csv"))


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.csv", "text,label\na film, which is bad,1\n", "row 1 of .* has 3 fields, its header 2; .*double quotes"),
    ("a.tsv", "text\tlabel\na\tfilm\t1\n", "row 1 of .* has 3 fields, its header 2; put a text that holds a"),
    ("a.csv", "text,label,text\nx,0,y\n", "the column 'text' twice"),
    ("a.jsonl", '{"text": "a", "text": "b", "label": 0}\n', "line 1: it has 'text' twice"),
    ("a.csv", f'text,label\n"{"x" * 140_000}",0\n', "field larger than field limit .*save it as jsonl"),
    ("a.jsonl", '{"text": "a\\ud800", "label": 0}\n', r"line 1 has \\ud800, which is not a character"),
])  # fmt: skip
def test_it_is_said_what_to_do(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_text(content)
    refuses(message, load_text, tmp_path / name)


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
    write_rows(tmp_path / "a.parquet", [{"text": "a", "label": 0}] * 5)
    monkeypatch.setattr(rows, "MAX_ROWS", 4)
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    refuses("has 5 rows; allowed are up to 4", load_text, tmp_path / "a.parquet")


ROWS = [
    {"context": "Ann is in the hall.\nBo is in the attic.", "question": "Where is Ann?", "answer": "hall"},
    {"context": " Cy has the key, the lamp. ", "question": "What has Cy?", "answer": "key"},
]
DISTRACTORS = [["attic", "cellar"], []]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("form", ["list", "json", "commas"])
def test_every_format_is_read_alike(tmp_path, suffix, form):
    given = {"list": DISTRACTORS, "json": list(map(json.dumps, DISTRACTORS)), "commas": ["attic, cellar", ""]}[form]
    if form == "list" and suffix == ".csv":
        given = list(map(json.dumps, DISTRACTORS))
    rows = [{**row, "distractors": words} for row, words in zip(ROWS, given)]
    data = load_questions(write_rows(tmp_path / f"mine{suffix}", rows))
    assert (data.name, data.split, len(data)) == ("mine", "all", 2)
    assert data.contexts == (ROWS[0]["context"], "Cy has the key, the lamp.")
    assert data.questions == ("Where is Ann?", "What has Cy?") and data.answers == ("hall", "key")
    assert [one.distractors for one in data.examples] == [("attic", "cellar"), ()]
    assert data.candidates == ("attic", "cellar", "hall", "key")
    assert all(one.facts == one.needles == () for one in data.examples)


def test_distractors_may_be_absent(tmp_path):
    plain = load_questions(write_rows(tmp_path / "mine.jsonl", ROWS))
    assert [one.distractors for one in plain.examples] == [(), ()]
    empty = [{**ROWS[0], "distractors": None}, {**ROWS[1], "distractors": ["lamp", "lamp"]}]
    assert [one.distractors for one in load_questions(write_rows(tmp_path / "b.jsonl", empty)).examples] == [
        (),
        ("lamp",),
    ]
    tabs = load_questions(write_rows(tmp_path / "c.tsv", [{**ROWS[1], "distractors": "lamp,cup"}]))
    assert tabs.examples[0].distractors == ("lamp", "cup") and tabs.examples[0].answer == "key"


@pytest.mark.parametrize(("row", "says"), [
    ({"answer": " "}, r"row 2 of .*mine.jsonl has an empty answer"),
    ({"distractors": ["key"]}, "row 2 of .* has its answer 'key' among the distractors"),
    ({"distractors": ["lamp", ""]}, r"row 2 of .* has the distractors \['lamp', ''\]; allowed is a list of words"),
    ({"distractors": 5}, "has the distractors 5; allowed is a list of words"),
    ({"distractors": '["lamp"'}, "allowed is a list of words"),
])  # fmt: skip
def test_what_is_refused(tmp_path, row, says):
    refuses(says, load_questions, write_rows(tmp_path / "mine.jsonl", [ROWS[0], {**ROWS[1], **row}]))


def test_files_that_are_none(tmp_path):
    refuses("there is no file of questions absent.csv; give one ending in .csv, .tsv", load_questions, "absent.csv")
    (tmp_path / "a.txt").write_text("x")
    refuses("with the columns context, question, answer", load_questions, tmp_path / "a.txt")
    with pytest.raises(InputError, match="has no column 'answer'; its columns are context, question"):
        load_questions(write_rows(tmp_path / "b.csv", [{"context": "a", "question": "b"}]))


STARS = ("1", "2", "3")
SWAPPED = ("1", "0")


@pytest.mark.parametrize(("labels", "names", "expected"), [
    (["negative", "positive"], ("negative", "positive"), [0, 1]), (["0", "1"], ("negative", "positive"), [0, 1]),
    (["1", "2", "3", "1"], STARS, [0, 1, 2, 0]), (["3"], STARS, [2]), (["0", "2", "1"], STARS, [0, 2, 1]),
    (["0", "1"], ("0", "1"), [0, 1]), (["1", "1"], ("0", "1", "two"), [1, 1]),
])  # fmt: skip
def test_all_are_names_or_all_indices(labels, names, expected) -> None:
    assert class_ids(labels, names, "a.csv", "label") == expected


@pytest.mark.parametrize(("labels", "names", "message"), [
    (["1", "2"], STARS, "'1' of a.csv is the name of one class and the index of another .*1, 2, 3.*label_name"),
    (["0", "1"], SWAPPED, "'0' of a.csv is the name of one class and the index of another"),
    (["0", "1", "3"], STARS, r"'3' \(row 3\), a class's name, and '0' \(row 1\), a class's index"),
    (["positive", "1", "0"], ("negative", "positive"), r"'positive' \(row 1\), a class's name, and '1' \(row 2\)"),
    (["1", "4"], STARS, "row 2 of a.csv has the label '4'; allowed are 1, 2, 3"),
    (["01"], ("a", "b"), "row 1 of a.csv has the label '01'"),
])  # fmt: skip
def test_what_is_ambiguous_or_unknown_is_refused(labels, names, message) -> None:
    refuses(message, class_ids, labels, names, "a.csv", "label")


def test_the_column_says_what_labels_are() -> None:
    assert class_ids(["1", "2"], STARS, "a.csv", "label_name") == [0, 1]
    assert class_ids(["1", "2"], STARS, "a.csv", "label_index") == [1, 2]
    refuses("label '3'; allowed are 0 to 2", class_ids, ["3"], STARS, "a.csv", "label_index")
    refuses("label '0'; allowed are 1, 2, 3", class_ids, ["0"], STARS, "a.csv", "label_name")
    assert label_column({"text": "", "label_name": ""}) == "label_name"
    assert label_column({"label_name": "", "label": ""}) == label_column({}) == "label"
    assert class_ids(["1", "2"], STARS, "a.csv", "label", as_written=True) == [0, 1]
    assert class_ids(["0", "2"], STARS, "a.csv", "label", as_written=True) == [0, 2]


def test_no_reading_depends_on_the_order_of_rows() -> None:
    draw = random.Random(0)
    for _ in range(300):
        names = tuple(draw.sample(["0", "1", "2", "3", "a", "b"], draw.randint(2, 4)))
        labels = [draw.choice([*names, "0", "1"]) for _ in range(draw.randint(1, 5))]
        shuffled = draw.sample(range(len(labels)), len(labels))
        found = []
        for order in (range(len(labels)), shuffled):
            try:
                ids = class_ids([labels[i] for i in order], names, "a.csv", "label")
                found.append(sorted(zip(order, ids)))
            except InputError:
                found.append(None)
        assert found[0] == found[1]
        if found[0] is not None:
            ids = [at for _, at in found[0]]
            assert ids == [names.index(x) if x in names else -1 for x in labels] or ids == [
                int(x) if x.isdecimal() else -1 for x in labels
            ]


def test_numbers_are_read_as_a_whole_and_sorted_by_value(tmp_path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("text,label\ndull,1\nfine,2\ngreat,3\n")
    assert load_text(path, label_names=STARS).labels == (0, 1, 2)
    path.write_text("text,label\ndull,0\nfine,1\ngreat,2\n")
    assert load_text(path, label_names=STARS).labels == (0, 1, 2)
    path.write_text("text,label\ndull,1\nfine,2\n")
    refuses("rename the column to label_name or to label_index", load_text, path, label_names=STARS)
    path.write_text("text,label_index\ndull,1\nfine,2\n")
    assert load_text(path, label_names=STARS).labels == (1, 2) and load_text(path).label_names == ("1", "2")
    assert sorted_names(["10", "9", "01", "1"]) == ("01", "1", "9", "10")
    assert sorted_names(["b", "10", "9"]) == ("10", "9", "b")


TEXTS = ["It was a café — naïve, “good”.\n\nThe end.", "Zoë 日本語 ran ran ran\n", "a"]
tokenizer = pytest.fixture(scope="module")(lambda: train_byte_pairs(TEXTS, vocabulary=280, lowercase=False))


def test_the_characters_of_a_text_are_those_of_its_tokens(tokenizer):
    counts = characters_of_tokens(tokenizer)
    for text in (*TEXTS, "ünknown 🙂 ‘x’ \t "):
        ids = tokenizer(text)["input_ids"]
        assert counts[ids].sum() == len(text) and tokenizer.decode(ids) == text
    assert counts[tokenizer.eos_token_id] == 0
    assert characters_of_tokens(byte_tokenizer()).sum() == 256 - 64  # all bytes but the continuation bytes


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_every_character_is_asked_for_once(tokenizer, length):
    data = document_data(TEXTS, tokenizer, length=length, name="tale", split="test")
    asked = data.targets[data.targets != IGNORED]
    end = tokenizer.eos_token_id
    assert tokenizer.decode(asked) == "[END]".join([*TEXTS, ""]) and (asked == end).sum() == len(TEXTS)
    assert data.ids[0, 0] == end and data.characters.sum() == sum(map(len, TEXTS))
    flat = data.ids.reshape(-1)[: len(asked)]
    assert (flat[1:] == asked[:-1]).all()
    counts = characters_of_tokens(tokenizer)
    for targets, characters in zip(data.targets, data.characters, strict=True):
        assert counts[targets[targets != IGNORED]].sum() == characters


def test_a_unigram_costs_its_entropy(tokenizer):
    """A model that always says log p of the tokens' own frequencies: Σ n log₂(1 / p) over the characters."""
    data = document_data(TEXTS, tokenizer, length=8)
    counts = Counter(data.targets[data.targets != IGNORED].tolist())
    total = sum(counts.values())
    logits = torch.full((len(tokenizer),), -1e9)
    for token, count in counts.items():
        logits[token] = math.log(count / total)
    module = torch.nn.Identity()
    module.forward = lambda input_ids: SimpleNamespace(logits=logits.expand(*input_ids.shape, -1))
    options = {"kind": "language", "precision": "fp32"}
    score = NextTokens({"test": data}, options, torch.device("cpu")).score(module, "test")
    exact = sum(n * math.log2(total / n) for n in counts.values()) / sum(map(len, TEXTS))
    assert bits_per_character(score.loss, data.characters) == pytest.approx(exact, rel=1e-5)
    record = score_record(score, data.characters)
    assert record["bits_per_character"] == pytest.approx(exact, rel=1e-5)
    low, high = record["bits_per_character_interval"]
    assert low < exact < high and record["characters"] == sum(map(len, TEXTS))
    assert bits_per_character(np.array([math.log(2)]), np.array([4])) == pytest.approx(0.25)


def test_what_cannot_be_counted_is_refused(tokenizer):
    refuses("tokenizers of bytes that take a text as it is", characters_of_tokens, word_tokenizer(["a b"]))
    with pytest.raises(InputError, match="tokenizers of bytes that take a text as it is"):
        characters_of_tokens(train_byte_pairs(TEXTS, vocabulary=270, lowercase=True))
    refuses("no end token", document_data, TEXTS, byte_tokenizer(), length=4)
    refuses("length is 0; allowed is a whole number from 1 on", document_data, TEXTS, tokenizer, length=0)
    refuses("no document", document_data, [], tokenizer, length=4)
    refuses("no character", bits_per_character, np.array([1.0]), np.array([0]))


def test_books_are_read_from_the_folder_alone(tmp_path, monkeypatch):
    write_rows(tmp_path / "books" / "test.parquet", [{"title": "T", "text": text} for text in (" one\n", "two")])
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    assert load_documents("books") == (" one\n", "two")
    refuses("books has no split 'train'", load_documents, "books", "train")
    refuses("unknown documents 'book'.*did you mean 'books'", load_documents, "book")
    write_rows(tmp_path / "books" / "test.parquet", [{"text": "one"}, {"text": " "}])
    refuses("row 2 of .* has no text", load_documents, "books")
    monkeypatch.delenv("SSMSCOPE_DATA")
    refuses("books is not on the hub; set SSMSCOPE_DATA", load_documents, "books")
