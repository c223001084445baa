"""Shipped models, the data in records of training, and the types of models that can be read. Labels of data and classes
of a model that has no names for them, in Python and on the command line."""

import copy
import html
import json
from pathlib import Path

import pytest
import torch
from refusals import refusal, refuses
import ssmscope
from ssmscope import cli
from ssmscope.core import known_models as readable
from ssmscope.core.known_models import LAYERS, MODELS, data_set_of, demos, readable_types, training_data
from ssmscope.data.text import load_text, text_data
from ssmscope.interp.scoring import MEASURES


def test_shipped_models_are_listed_by_name(tmp_path, monkeypatch):
    names = [f"m{(7 * number) % 20:02}" for number in range(20)]
    for name in names:
        (tmp_path / "demo" / name).mkdir(parents=True)
        (tmp_path / "demo" / name / "config.json").touch()
    (tmp_path / "demo" / "none").mkdir()
    monkeypatch.setattr(readable, "PACKAGE", tmp_path)
    assert list(demos()) == [f"demo/{name}" for name in sorted(names)]
    assert demos()["demo/m03"] == tmp_path / "demo" / "m03"


def test_the_data_of_a_record_of_training(tmp_path):
    record = tmp_path / "training.json"
    assert training_data(tmp_path) == {}
    record.write_text(json.dumps({"data": {"train": {"name": "sst2", "rows": 3}}}))
    assert training_data(tmp_path) == {"name": "sst2", "rows": 3}
    for broken in ("{", "[]", '{"data": {}}', '{"data": {"train": 3}}', '{"data": null}'):
        record.write_text(broken)
        assert training_data(tmp_path) == {}
    names = {"sst2": "sst2", "ag_news-4": "ag_news-4", "": None, "own.csv": None, "a/b": None, "a\\b": None, "..": None}
    assert {name: data_set_of({"name": name}) for name in names} == names and data_set_of({}) is None


def test_types_of_models_are_ours_and_those_of_the_installed_transformers():
    import transformers

    known = {name.split(".")[2] for name in LAYERS if name.startswith("transformers.")}
    families = {name for name in known if hasattr(transformers.models, name)}
    text = {name: f"{name}_text" for name in ("glm5_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")}
    found = readable_types()
    assert {"ssm-classifier", "mamba2attn", "baleen-mamba2"} < set(found) and "mamba2" in families
    assert list(found) == sorted(found) and set(found) == {*MODELS, *(text.get(f, f) for f in families)}


TEXTS = ("A great film.", "A moving film.", "An awful film.", "A dull, lifeless film.") * 2
TRUE = (1, 1, 0, 0) * 2
REPEATED = "4 of the 8 texts of films are repeated: intervals are too narrow"
NLI = ("entailment", "neutral", "contradiction")
VERBS = "evaluate", "noise", "position", "words", "insertion", "overflow", "ablate"


def unnamed(classes: int = 2) -> torch.nn.Module:
    """The demo under transformers' names of classes; a third class, never the answer, where three are asked for."""
    module = copy.deepcopy(ssmscope.load("demo/sst2-mamba2").module)
    if classes == 3:
        weight = torch.cat([module.head.weight, torch.zeros(1, module.head.in_features)])
        module.head = torch.nn.Linear(module.head.in_features, 3)
        module.head.weight.data, module.head.bias.data = weight.detach(), torch.tensor([0.0, 0.0, -1e4])
        module.config.num_labels = 3
    module.config.id2label = {i: f"LABEL_{i}" for i in range(classes)}
    module.config.label2id = {f"LABEL_{i}": i for i in range(classes)}
    return module


@pytest.fixture(scope="module")
def model() -> ssmscope.Model:
    return ssmscope.load(unnamed(), tokenizer=ssmscope.load("demo/sst2-mamba2").tokenizer)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    where = tmp_path_factory.mktemp("unnamed")
    model.module.save_pretrained(where)
    model.tokenizer.save_pretrained(where)
    return where


def file(where: Path, *names: str, column: str = "label") -> Path:
    where.write_text(f"text,{column}\n" + "".join(f'"{text}",{names[y]}\n' for text, y in zip(TEXTS, TRUE)))
    return where


@pytest.fixture(scope="module")
def right(model) -> float:
    """Share of texts whose class is the argmax of the module's own logits."""
    logits = [model.module(input_ids=torch.tensor([model.tokenizer(text)["input_ids"]])).logits for text in TEXTS]
    return sum(int(each.argmax()) == y for each, y in zip(logits, TRUE)) / len(TRUE)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("names", [("poor", "good"), ("negative", "positive")])
def test_text_labels_of_unnamed_classes_are_refused(verb, names, model, folder, tmp_path, capsys):
    path = file(tmp_path / "films.csv", *names)
    told = refusal(getattr(ssmscope, verb), model, load_text(path)) or ""
    assert "LABEL_0, LABEL_1: say which is which by labels=[…]" in told and "\n" not in told
    out = tmp_path / "out"
    assert cli.run([verb, str(folder), "--data", str(path), "--out", str(out)]) == 2
    assert "LABEL_0, LABEL_1: say which is which" in capsys.readouterr().err and not list(out.glob("*"))


@pytest.mark.parametrize("names", [("poor", "good"), ("good", "poor")])
def test_labels_name_the_classes_in_the_order_of_the_logits(names, model, folder, right, tmp_path, capsys):
    path = file(tmp_path / "films.csv", *names)
    named = ssmscope.load(model.module, tokenizer=model.tokenizer, labels=names)
    found = ssmscope.evaluate(named, load_text(path))
    assert right > 0.5 and found.scores[0].estimate.value == right and named.labels == list(names)
    assert found.provenance["labels"] == list(names) and found.provenance["notes"] == [REPEATED]
    assert model.labels == ["LABEL_0", "LABEL_1"] and ssmscope.load(model.module).labels == model.labels
    turned = ssmscope.load(model.module, tokenizer=model.tokenizer, labels=names[::-1])
    assert ssmscope.evaluate(turned, load_text(path)).scores[0].estimate.value == 1 - right
    assert cli.run(["evaluate", str(folder), "--data", str(path), "--labels", ",".join(names), "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert answer["scores"][0]["estimate"]["value"] == right and answer["provenance"]["labels"] == list(names)


@pytest.mark.parametrize("column", ["label", "label_index"])
def test_numbers_are_indices_and_that_is_said(column, model, folder, right, tmp_path, capsys):
    path = file(tmp_path / "films.csv", "0", "1", column=column)
    found = ssmscope.evaluate(model, load_text(path))
    said = "the labels of films are matched with the model's classes by number: 0 = LABEL_0, 1 = LABEL_1"
    assert found.scores[0].estimate.value == right and found.provenance["notes"] == [REPEATED, said]
    assert said in " ".join(str(found).split()) and said in html.unescape(found.to_html())
    assert cli.run(["evaluate", str(folder), "--data", str(path), "--json"]) == 0
    printed = capsys.readouterr()
    assert said in printed.err and json.loads(printed.out)["scores"][0]["estimate"]["value"] == right


def test_known_data_have_numbers_of_their_own(model, right):
    data = text_data("films", "all", TEXTS, TRUE, ("poor", "good"))
    found = ssmscope.evaluate(model, data)
    assert found.scores[0].estimate.value == right and "by number: poor = LABEL_0" in found.provenance["notes"][1]


def test_three_classes_of_pairs(tmp_path, right):
    tokenizer = ssmscope.load("demo/sst2-mamba2").tokenizer
    model = ssmscope.load(unnamed(3), tokenizer=tokenizer)
    path = file(tmp_path / "pairs.csv", *NLI)
    path.write_text(path.read_text() + "A film.,contradiction\n")
    told = refusal(ssmscope.evaluate, model, load_text(path)) or ""
    assert "pairs has the classes contradiction, entailment, neutral" in told and "labels=[…]" in told
    named = ssmscope.load(model.module, tokenizer=tokenizer, labels=NLI)
    found = ssmscope.evaluate(named, load_text(path)).scores[0]
    assert found.estimate.value == pytest.approx(right * 8 / 9)


def test_ablation_reads_labels_by_name(model, right):
    """Classes in another order than the data's, alphabetical one."""
    path_names = ("zero", "a one")
    named = ssmscope.load(model.module, tokenizer=model.tokenizer, labels=path_names)
    data = text_data("films", "all", TEXTS, [1 - y for y in TRUE], path_names[::-1])
    assert ssmscope.ablate(named, data).plain[MEASURES.index("accuracy"), 0] == right


def test_labels_that_do_not_fit(model, folder, tmp_path, capsys):
    for labels, said in (
        (["a"], r"labels are a; .* has 2 classes: give a name for each"),
        (["a", "a"], "give names that differ"), ("ab", "give a list of names"), ([0, 1], "give names that differ"),
    ):  # fmt: skip
        refuses(said, ssmscope.load, model.module, labels=labels)
    refuses("books-mamba2 is not a classifier", ssmscope.load, "demo/books-mamba2", labels=["a", "b"])
    assert cli.run(["evaluate", str(folder), "--data", "sst2", "--labels", "a,b,c"]) == 2
    assert "has 2 classes: give a name for each" in capsys.readouterr().err
