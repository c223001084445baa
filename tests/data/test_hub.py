"""Data sets on the hub, for which folders stand that `datasets` reads in the same way, in whole and streamed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError
from refusals import refusal, refused
from ssmscope.data import hub
from ssmscope.data.hub import check_reach, hub_rows, is_hub_id, part_of
from ssmscope.data.language import load_lines
from ssmscope.data.text import load_text
from ssmscope.reports.sources import check_data
from ssmscope.zoo.training.data import _texts, kind_of

ROWS = [("a film", 1), ("no film", 0), ("the film", 1), ("an end", 0)]


@pytest.fixture
def repository(tmp_path, monkeypatch) -> str:
    """An id on a hub that has a data set of classes neg and pos, in a file per split."""
    labels = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    for split, rows in (("train", ROWS * 2), ("test", ROWS)):
        columns = {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
        datasets.Dataset.from_dict(columns, labels).to_parquet(tmp_path / "them" / f"{split}.parquet")
    load, cache = datasets.load_dataset, str(tmp_path / "cache")
    place = {"them/films": str(tmp_path / "them")}
    monkeypatch.setattr(hub, "check_reach", lambda name: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, *more, **options: load(place[name], *more, **options, cache_dir=cache)
    )
    return "them/films"


def test_a_split_is_cut_as_datasets_writes_it():
    assert part_of("test") == ("test", None) and part_of("test[:200]") == ("test", 200)
    assert part_of("test[5:]") == ("test[5:]", None)  # which the hub's library reads
    assert "at least 1" in refused(part_of, "test[:0]")


def test_ids_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a", "b").mkdir(parents=True)
    for name in ("owner/name", "owner/na-me.2", "owner/name:config"):
        assert is_hub_id(name)
    for name in (
        "a/b", "sst2", "a/b/c", "own/er.csv", "/owner/name", "~/films", Path("owner/name"), "owner/", "own er/x",
    ):  # fmt: skip
        assert not is_hub_id(name)


def test_the_same_rows_in_whole_and_streamed(repository):
    whole, features = hub_rows(repository, None, "train", "")
    assert [row["text"] for row in whole] == [text for text, _ in ROWS * 2]
    first, streamed = hub_rows(repository, None, "train[:3]", "")
    assert first == whole[:3] and streamed["label"].names == features["label"].names == ["neg", "pos"]


def test_a_stream_reads_no_further(repository, monkeypatch):
    """Only the first rows of an endless data set are read."""
    asked: list[int] = []

    def endless():
        for number in range(sys.maxsize):
            asked.append(number)
            yield {"text": f"text {number}", "label": number % 2}

    def load_dataset(*_, streaming, **options):
        assert streaming
        return datasets.IterableDataset.from_generator(endless)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_text(repository, "test[:3]")
    assert data.texts == ("text 0", "text 1", "text 2") and data.split == "test[:3]" and data.name == repository
    assert len(asked) < 10


@pytest.mark.parametrize(("classes", "names"), [
    (None, ("neg", "pos")), (("pos", "neg"), None), (("negative", "positive"), None),
    (("POSITIVE", "NEUTRAL", "NEGATIVE"), None), (("LABEL_0", "LABEL_1"), None),
])  # fmt: skip
def test_labels_are_the_models_classes_by_their_names(repository, classes, names):
    data = load_text(repository, label_names=classes)
    assert data.label_names == (names or classes) and data.split == "test"
    shown = [data.label_names[label].lower()[:3] for label in data.labels]
    expected = ["pos", "neg", "pos", "neg"]
    assert shown == expected or [data.labels, data.label_names[0]] == [(1, 0, 1, 0), "LABEL_0"]


def test_other_classes_and_what_the_hub_does_not_have(repository):
    said = refusal(load_text, repository, label_names=("good", "bad")) or ""
    assert said == "row 1 of them/films (test) has the label 'pos'; allowed are good, bad"
    assert refusal(load_text, repository, label_names=("LABEL_0", "LABEL_1", "LABEL_2")) is not None
    said = refusal(load_text, repository, "unknown") or ""
    assert said.startswith("them/films could not be read from the hub (") and said.endswith("a split of it, or a file")
    assert "\n" not in said


def test_lines_of_a_language_model(repository):
    assert load_lines(repository, "train[:2]") == ("a film", "no film")
    assert load_lines(repository) == tuple(text for text, _ in ROWS)


def test_known_data_sets_are_cut(monkeypatch, tmp_path):
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    whole, first = load_text("planted-words", "test"), load_text("planted-words", "test[:5]")
    assert first.texts == whole.texts[:5] and first.labels == whole.labels[:5]
    datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, 1]}).to_parquet(
        tmp_path / "sst2" / "test.parquet"
    )
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    assert load_text("sst2", "test[:2]").texts == ("a", "b")
    check_data("sst2", "test[:2]", "text-classifier")
    check_data("them/films", "test[:2]", "text-classifier")
    assert "no split 'tset'" in refused(check_data, "sst2", "tset[:2]", "text-classifier")
    assert refusal(check_data, "them/films", None, "pixel-classifier") is not None


def test_a_classifier_is_trained_on_the_training_split(repository):
    options = {"data": repository, "split": None, "validation": None, "test": None}
    train, validation, test = _texts(options)
    assert kind_of(repository) == "text" and train.texts == tuple(text for text, _ in ROWS * 2)
    assert (train.split, validation, test) == ("train", None, None)
    assert _texts({**options, "split": "train[:3]"})[0].texts == train.texts[:3]


def test_a_hub_that_does_not_answer_is_asked_once_and_briefly(monkeypatch, tmp_path):
    """`datasets` decides where the data set may be in a cache, or where it does not ask."""
    asked, cached = [], []

    def answering(answer: Exception | None):
        def info(api, name, **options):
            asked.append((name, options))
            if answer is not None:
                raise answer

        for kind in ("dataset", "model"):
            monkeypatch.setattr(HfApi, f"{kind}_info", info)

    response = SimpleNamespace(headers={}, status_code=404, request=None)
    missing = RepositoryNotFoundError("no such data set", response=response)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file, *, repo_type: next(iter(cached), None))
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **options: [{"text": "a film"}])
    for answer in (None, missing, OfflineModeIsEnabled("offline")):
        answering(answer)
        check_reach("them/films")
    answering(ConnectionError("no route\nto host"))
    assert refusal(hub_rows, "them/films", None, "test", "or so") == (
        "them/films could not be read from the hub (the hub is out of reach); or so"
    )
    with pytest.raises(ConnectionError, match="the hub is out of reach"):
        check_reach("them/films", "model")
    cached.append("README.md")
    assert hub_rows("them/films", None, "test", "or so")[0] == [{"text": "a film"}]
    assert {name for name, _ in asked} == {"them/films"} and all(0 < each["timeout"] <= 5 for _, each in asked)
