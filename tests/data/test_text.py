import json
import math
import re
import sys
import types

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refuses
from written_rows import write_rows
from ssmscope.data.language import load_lines
from ssmscope.data.text import PAIR_SEPARATOR, SOURCES, load_text, text_data
from ssmscope.errors import InputError

ROWS = [("good film", "pos"), ("bad film", "neg"), ("a good day", "pos")]


def write(path, rows, columns=("text", "label")):
    return write_rows(path, [dict(zip(columns, row)) for row in rows])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data folder with sst2 and snli in it, as SSMSCOPE_DATA."""
    write(tmp_path / "sst2" / "train.parquet", [("fine", 1), ("dull", 0), ("dire", 0)])
    write(tmp_path / "sst2" / "test.parquet", [("fun", 1)])
    write(
        tmp_path / "snli" / "test.parquet",
        [("a man runs", "a man moves", 0), ("a man runs", "he is late", -1), ("a man runs", "he sleeps", 2)],
        ("premise", "hypothesis", "label"),
    )
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_data(tmp_path, suffix):
    data = load_text(write(tmp_path / f"films{suffix}", ROWS))
    assert data.texts == ("good film", "bad film", "a good day") and data.labels == (1, 0, 1)
    assert data.label_names == ("neg", "pos")
    assert (data.name, data.split) == ("films", "all")
    assert data.fingerprint == text_data("other", "x", data.texts, data.labels, data.label_names).fingerprint


def test_the_fingerprint_follows_texts_labels_and_their_order(tmp_path):
    whole = load_text(write(tmp_path / "a.csv", ROWS))
    prints = {
        whole.fingerprint,
        load_text(write(tmp_path / "b.csv", ROWS[::-1])).fingerprint,
        load_text(write(tmp_path / "c.csv", [*ROWS[:2], ("a good day", "neg")])).fingerprint,
        load_text(write(tmp_path / "d.csv", [*ROWS[:2], ("a good night", "pos")])).fingerprint,
        whole.take([0, 1]).fingerprint,
    }
    assert len(prints) == 5


def test_fields_may_hold_commas_quotes_and_line_ends_in_csv_and_tsv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('label,text\n1,"good, ""very"" good\nindeed"\n0,bad\n', encoding="utf-8-sig")
    assert load_text(path).texts == ('good, "very" good\nindeed', "bad")
    texts = ['he said "so it goes"', "a\ttab", "two\n\nlines", "plain", '"whole"', "it's"]
    frame = pd.DataFrame({"text": texts, "label": [0, 1, 0, 1, 0, 1]})
    frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False)
    assert load_text(tmp_path / "a.tsv").texts == tuple(texts)
    frame[frame["text"].str.contains("said|plain")].to_csv(tmp_path / "b.tsv", sep="\t", index=False)
    assert load_text(tmp_path / "b.tsv").texts == (texts[0], texts[3])


def test_quotes_of_a_plain_tsv_are_a_part_of_the_text(tmp_path):
    texts = ['"whole"', 'so "it" goes', 'say ""x"" ok', '"', 'an "open']
    lines = ["text\tlabel", *(f"{text}\t{at % 2}" for at, text in enumerate(texts))]
    (tmp_path / "a.tsv").write_text("\n".join(lines), encoding="utf-8")
    assert load_text(tmp_path / "a.tsv").texts == tuple(texts)


def test_whole_numbers_may_have_a_fraction_in_any_file(tmp_path):
    """pandas writes such labels where one was missing once."""
    names = ("negative", "positive")
    rows = [("x", "1.0"), ("y", "0.0"), ("z", "1")]
    for suffix in (".csv", ".tsv", ".jsonl", ".parquet"):
        assert load_text(write(tmp_path / f"a{suffix}", rows), label_names=names).labels == (1, 0, 1)
        assert load_text(write(tmp_path / f"a{suffix}", rows)).label_names == ("0", "1")
    stars = load_text(write(tmp_path / "b.csv", rows[:2]), label_names=("0.0", "1.0"))
    assert stars.labels == (1, 0)
    with pytest.raises(InputError, match="label '1.5'; allowed are negative, positive"):
        load_text(write(tmp_path / "c.csv", [("x", "1.5")]), label_names=names)


@pytest.mark.parametrize("value, said", [
    (["a film"], "the list ['a film']"),
    ({"a": "film"}, "the struct {'a': 'film'}"),
    (3.5, "the number 3.5"),
    (True, "the value True"),
])  # fmt: skip
def test_what_is_no_text_is_called_by_its_kind(tmp_path, value, said):
    rows = [{"text": "a", "label": 0}, {"text": value, "label": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for read in (load_text, load_lines):
        refuses(re.escape(f"has {said} as its text; give a text in quotes"), read, tmp_path / "a.jsonl")
    pq.write_table(pa.table({"text": [value], "label": [0]}), tmp_path / "a.parquet")
    refuses(re.escape(f"row 1 of {tmp_path}/a.parquet has {said} as its text"), load_text, tmp_path / "a.parquet")


def test_whole_numbers_are_sorted_by_value_and_need_not_start_at_0(tmp_path):
    data = load_text(write(tmp_path / "a.parquet", [("x", 10.0), ("y", 9.0), ("z", 10.0)]))
    assert data.label_names == ("9", "10") and data.labels == (1, 0, 1)


def test_labels_are_read_by_the_names_or_the_ids_of_a_model(tmp_path):
    names = ("negative", "positive")
    by_name = load_text(write(tmp_path / "a.csv", [("x", "positive"), ("y", "positive")]), label_names=names)
    by_id = load_text(write(tmp_path / "b.csv", [("x", 1), ("y", 1)]), label_names=names)
    assert by_name.labels == by_id.labels == (1, 1)
    with pytest.raises(InputError, match="label 'mixed'; allowed are negative, positive"):
        load_text(write(tmp_path / "c.csv", [("x", "mixed")]), label_names=names)


@pytest.mark.parametrize(("content", "message"), [
    ("text,label\n", "holds no rows"),
    ("", "holds no rows"),
    ("sentence,label\nx,1\n", "its columns are sentence, label: name it, columns='text=sentence'"),
    ("Text,Label\nx,1\n", "no column 'text'; its columns are Text, Label: name it, columns='text=Text'"),
    ("text, label\nx,1\n", "no column 'label'; its columns are text, ' label': name it, columns='label= label'"),
    ("text\nx\n", "no column 'label'; its columns are text: add it"),
    ("text;label\nx;1;2\n", "put a text that holds a semicolon in double quotes"),
    ("text,class\nx,1\n", "no column 'label'; its columns are text, class"),
    ("text,label\nx,1\n  ,0\n", "row 2 .* empty text"),
    ("text,label\nx,1\ny,\n", "row 2 .* no label"),
    ("text,label\nx,1\ny\n", "row 2 .* no label"),
    ('text,label\n"x,1\n', "could not be read as csv"),
    ('{"text": "x", "label": 1', "line 2"),
    ("[1, 2]", "line 2 is not an object"),
    ('{"text": "x", "label": null}', "no label"),
    ('{"text": "x", "label": NaN}', "no label"),
    ('{"text": 3, "label": 1}', "row 2 of .* has the number 3 as its text; give a text in quotes"),
    ('{"label": 1}', "row 2 .* no column 'text'"),
])  # fmt: skip
def test_bad_tables_and_second_lines_of_json_are_refused(tmp_path, content, message):
    json_lines = content.startswith(("{", "["))
    path = tmp_path / ("a.jsonl" if json_lines else "a.csv")
    path.write_text(f'{{"text": "fine", "label": 0}}\n{content}\n' if json_lines else content, encoding="utf-8")
    refuses(message, load_text, path)


def test_files_that_are_not_what_they_claim_are_refused(tmp_path):
    for name, content, message in (
        ("a.parquet", b"no parquet", "could not be read as parquet"),
        ("a.csv", "text,label\ncafé,1\n".encode("latin-1"), "not UTF-8"),
        ("a.xml", b"x", "must end in .csv, .tsv, .jsonl, .parquet"),
    ):
        (tmp_path / name).write_bytes(content)
        refuses(message, load_text, tmp_path / name)
    refuses("there is no file", load_text, tmp_path / "absent.csv")
    refuses("give one of sst2, imdb, .*did you mean 'sst2'", load_text, "sst-2")
    refuses("split 'test' was asked for", load_text, write(tmp_path / "b.csv", ROWS), "test")


def test_known_names_are_read_from_the_data_folder(folder):
    data = load_text("sst2", "train")
    assert (data.texts, data.labels) == (("fine", "dull", "dire"), (1, 0, 0))
    assert data.label_names == ("negative", "positive")
    assert load_text("sst2").split == "test"
    refuses("no split 'validation' in .*; there are test, train", load_text, "sst2", "validation")
    refuses("imdb .* holds no parquet file", load_text, "imdb", "train")


def test_pairs_are_joined_and_rows_without_a_gold_label_left_out(folder):
    data = load_text("snli")
    assert data.texts == (f"a man runs{PAIR_SEPARATOR}a man moves", f"a man runs{PAIR_SEPARATOR}he sleeps")
    assert data.labels == (0, 2) and data.label_names == ("entailment", "neutral", "contradiction")


def test_a_known_data_set_without_labels_is_refused(folder):
    write(folder / "sst2" / "validation.parquet", [("fine", -1)])
    refuses(r"label '-1'; allowed are 0 \(negative\), 1 \(positive\)", load_text, "sst2", "validation")


@pytest.fixture
def hub(monkeypatch):
    """`datasets` replaced by a module whose `load_dataset` notes its calls and gives `answer`."""
    calls = []
    module = types.ModuleType("datasets")
    module.answer = [{"text": "fine", "label": 1}]

    def load_dataset(path, name=None, *, split):
        calls.append((path, name, split))
        if isinstance(module.answer, Exception):
            raise module.answer
        return module.answer

    module.load_dataset, module.calls = load_dataset, calls
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("ssmscope.data.hub.check_reach", lambda name: None)
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    return module


def test_without_a_folder_known_names_come_from_the_hub(hub):
    assert load_text("sst2", "validation").texts == ("fine",)
    hub.answer = [{"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0}]
    wnli = load_text("wnli")
    assert wnli.texts == (f"a{PAIR_SEPARATOR}b",) and wnli.label_names == ("not_entailment", "entailment")
    assert hub.calls == [("SetFit/sst2", None, "validation"), ("nyu-mll/glue", "wnli", "validation")]


def test_splits_without_labels_are_not_asked_for(hub):
    refuses("wnli has no labelled split 'test'; there are train, validation", load_text, "wnli", "test")
    refuses("imdb has no labelled split 'unsupervised'", load_text, "imdb", "unsupervised")
    assert hub.calls == []


def test_a_hub_out_of_reach_is_an_input_error(hub, monkeypatch):
    hub.answer = ConnectionError("no route\nto host")
    refuses(r"\(no route\); set SSMSCOPE_DATA", load_text, "sst2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses("'datasets', which is not installed", load_text, "sst2")


def test_a_sample_is_seeded_and_keeps_the_order():
    data = text_data("d", "all", [str(i) for i in range(50)], [i % 2 for i in range(50)], ["a", "b"])
    sample = data.sample(10, seed=3)
    assert sample == data.sample(10, seed=3) and sample.texts != data.sample(10, seed=4).texts
    assert list(sample.texts) == sorted(sample.texts, key=int)
    assert data.sample(50) is data
    refuses("n is 0; allowed is a whole number from 1 on", data.sample, 0)


def test_a_division_is_disjoint_complete_and_keeps_the_classes_shares():
    labels = [0] * 30 + [1] * 10
    data = text_data("d", "train", [str(i) for i in range(40)], labels, ["a", "b"])
    rest, held = data.divide(0.2, seed=1)
    assert sorted(rest.texts + held.texts, key=int) == list(data.texts)
    assert (held.labels.count(0), held.labels.count(1)) == (6, 2)
    assert all(data.labels[int(text)] == label for text, label in zip(held.texts, held.labels))
    assert (rest, held) == data.divide(0.2, seed=1)
    assert held.texts != data.divide(0.2, seed=2)[1].texts
    for share in (0.0, 1.0, math.nan):
        refuses("between 0 and 1", data.divide, share)
    refuses("class 'b' of d has one example", data.take([0, 1, 39]).divide, 0.5)


@pytest.mark.parametrize(("name", "split", "size"), [
    ("sst2", "train", 6920), ("sst2", "validation", 872), ("sst2", "test", 1821),
    ("rotten_tomatoes", "train", 8530), ("rotten_tomatoes", "validation", 1066), ("imdb", "test", 25000),
    ("snli", "test", 9824), ("wnli", "train", 565), ("wnli", "validation", 70),
])  # fmt: skip
def test_the_real_data_sets_have_their_known_sizes(real_data, name, split, size):
    real_data(name, split)
    data = load_text(name, split)
    assert len(data) == size and set(data.labels) == set(range(len(SOURCES[name].labels)))


@pytest.mark.parametrize("separator", ";\t")
def test_a_csv_file_that_no_commas_separate(tmp_path, separator):
    file = tmp_path / "rows.csv"
    file.write_text(f'text{separator}label\nA film, a good one{separator}1\n"a{separator}b"{separator}0\n')
    found = load_text(file)
    assert (found.texts, found.labels) == (("A film, a good one", f"a{separator}b"), (1, 0))
    file.write_text("text,label;note\nA film;a good one,1\n")
    refuses("no column 'label'; its columns are text, label;note", load_text, file)
