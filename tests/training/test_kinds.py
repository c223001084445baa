"""Every kind of data, from the call to a working directory: accuracy, files and output."""

import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from warm import TRANSFORMERS
import ssmscope
from ssmscope.probes.bound.terms import norms_of, theorem_model
from ssmscope.zoo.baleen import information_loss
from ssmscope.zoo.training import build, train_model
from ssmscope.zoo.training.fitting import monitored

pytest.importorskip("sklearn", reason="one of the runs reads digits of scikit-learn, which is in the dev extra")
OPTIONS: dict[str, Any] = {"width": 16, "layers": 1, "state": 4, "head_width": 8, "batch_size": 16, "progress": False}
WORDS = ("red", "green", "blue", "one", "two", "three", "cat", "dog")


def write_text(path: Path, lines: int = 200, seed: int = 0) -> Path:
    """Words of which each is followed by one of two others: half of what the words alone would tell is known."""
    draw = random.Random(seed)
    following = {word: draw.sample(WORDS, 2) for word in WORDS}
    word, text = "red", []
    for _ in range(lines):
        row = [word := draw.choice(following[word]) for _ in range(12)]
        text.append(" ".join(row))
    path.write_text("\n".join(text) + "\n")
    return path


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("mamba2", {"epochs": 3, "width": 24, "layers": 1, "state": 8, "head_width": 8, "batch_size": 32}),
    "majority": ("selective", {"length": 20, "examples": 300, "epochs": 8}),
    "associative-recall": ("mamba2", {**OPTIONS, "length": 16, "vocabulary": 8, "examples": 400, "epochs": 5}),
    "fuzzy-recall": ("mamba", {"width": 16, "layers": 1, "length": 16, "vocabulary": 10, "examples": 100, "epochs": 1}),
    "compression": ("mamba2", {**OPTIONS, "length": 8, "vocabulary": 6, "examples": 400, "epochs": 2}),
    "qa1": ("gla", {"width": 16, "layers": 1, "length": 32, "examples": 60, "epochs": 1}),
    "babi": ("mamba2", {**OPTIONS, "length": 40, "examples": 50, "epochs": 1, "prompt_weight": 0.5}),
    "words": ("mamba2", {**OPTIONS, "length": 24, "epochs": 5}),
    "bytes": ("diff-mamba", {**OPTIONS, "unit": "byte", "length": 48, "epochs": 1}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Every run by its name: the directory, and its training record."""
    folder = tmp_path_factory.mktemp("kinds")
    text = write_text(folder / "text.txt")
    found = {}
    for name, (architecture, options) in RUNS.items():
        data = text if name in ("words", "bytes") else name
        rate = {} if architecture == "selective" else {"learning_rate": 2e-2 if name == "digits" else 1e-2}
        out = train_model(architecture, data, folder / name, **{**rate, **options, "progress": False})
        found[name] = out, json.loads((out / "training.json").read_text())
    return found


READER = """
import json, sys
import ssmscope
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
import numpy as np, torch
for out in sys.argv[1:]:
    model = ssmscope.load(out)
    kind = json.load(open(out + "/training.json"))["kind"]
    if kind == "pixels":
        trace = model.trace(values=np.random.default_rng(0).integers(0, 256, (2, 64, 1)).astype(np.uint8))
    else:
        trace = model.trace(ids=[[1, 0, 1, 1], [0, 1, 0, 0]])
    heatmap = ssmscope.heatmap(trace)
    auto = AutoModelForSequenceClassification if model.is_classifier else AutoModelForCausalLM
    other = auto.from_pretrained(out).eval()
    same = all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.module.state_dict().values()))
    scores = [len(text.mean) for text in heatmap.texts]
    print(json.dumps([out, kind, type(other).__name__, same, scores, [name for name, _ in trace.answers]]))
"""


def test_a_fresh_process_can_use_them_all(trained) -> None:
    done = TRANSFORMERS.run(READER, *(out for out, _ in trained.values()))
    assert done.returncode == 0, done.stderr
    told = {Path(out).name: rest for out, *rest in map(json.loads, done.stdout.splitlines())}
    assert told.keys() == trained.keys()
    for name, (kind, opened, same, scores, answers) in told.items():
        record = trained[name][1]
        assert kind == record["kind"] and same
        assert scores == ([65, 65] if kind == "pixels" else [4, 4])
        assert opened.endswith("ForCausalLM") == (record["labels"] is None)
        assert record["labels"] is None or {*answers} <= {*record["labels"]}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_written(trained, name) -> None:
    out, record = trained[name]
    files = {path.name for path in out.iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "training.json"} <= files
    assert ("decoder.safetensors" in files) == (name == "compression")
    assert ("tokenizer.json" in files) == (name != "digits")
    assert "checkpoint" not in files
    assert record["parameters"] == sum(t.numel() for t in load_file(out / "model.safetensors").values())
    if name == "compression":
        assert record["decoder"] == sum(t.numel() for t in load_file(out / "decoder.safetensors").values())


def test_majority_is_learnt_by_the_selective_ssm(trained) -> None:
    _, record = trained["majority"]
    assert record["validation"] is None and record["train"]["examples"] == 300 and record["test"]["accuracy"] > 0.75
    assert all(-1 < entry["spectral_abscissa"] < 1 for entry in record["history"])
    assert len({entry["spectral_abscissa"] for entry in record["history"]}) > 1


def test_the_last_norms_are_those_of_the_bound(trained) -> None:
    out, record = trained["majority"]
    last = record["history"][-1]
    norms = norms_of(theorem_model(ssmscope.load(out)), 0)
    expected = {"p": abs(norms.p), "q": norms.B_q, "W_B": norms.B_B, "W_C": norms.B_C, "A": norms.B_A}
    assert {name: last[f"norm_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert len({round(value, 4) for value in expected.values()}) == 5


def test_digits_and_recall_are_learnt(trained) -> None:
    # There are ten digits, of which the test has 360.
    assert trained["digits"][1]["test"]["accuracy"] > 3 * 0.1
    # There are four values: chance is a quarter.
    assert trained["associative-recall"][1]["test"]["accuracy"] > 2 * 0.25


def test_compression_is_better_than_chance(trained) -> None:
    """There are five symbols; the decoder is read back with the model."""
    out, record = trained["compression"]
    low, _ = record["test"]["interval"]
    assert low > 1.2 / 5


def test_a_text_is_learnt_beyond_the_frequency_of_its_words(trained) -> None:
    out, record = trained["words"]
    text = (out.parent / "text.txt").read_text()
    counts = Counter(text.replace("\n", " <eos> ").split())
    total = sum(counts.values())
    entropy = -sum(count / total * math.log(count / total) for count in counts.values())
    assert record["validation"]["cross_entropy"] < 0.7 * entropy


def test_the_mean_lambda_of_a_differential_mamba_is_told(trained) -> None:
    _, record = trained["bytes"]
    assert [0 < entry["mean_lambda"] < 1 for entry in record["history"]] == [True]
    assert all("mean_lambda" not in entry for entry in trained["words"][1]["history"])


def test_accuracies_are_those_of_the_directory_though_it_is_named_like_a_demo(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = {**OPTIONS, "length": 8, "vocabulary": 4, "examples": 60, "epochs": 1}
    records = []
    for out in ("demo/sst2-mamba2", "elsewhere"):
        assert train_model("mamba2", "associative-recall", out, **options) == Path(out)
        records.append(json.loads(Path(out, "training.json").read_text()))
    assert records[0]["test"] == records[1]["test"]
    assert ssmscope.load("demo/sst2-mamba2").is_classifier  # the shipped one, by this name


@pytest.mark.parametrize(("data", "options"), [("majority", {"length": 12}), ("associative-recall", {"length": 12})])
def test_beta_holds_the_gates_near_their_prior(data, options, tmp_path) -> None:
    sizes = {**OPTIONS, "examples": 160, "epochs": 4, "learning_rate": 1e-2, **options}
    divergences = []
    for beta in (0.0, 50.0):
        out = train_model("baleen-b", data, tmp_path / f"{beta}", beta=beta, **sizes)
        module = ssmscope.load(out).module.train()
        torch.manual_seed(0)
        with torch.no_grad():
            module(input_ids=torch.randint(0, 2, (16, 12)))
        divergence = information_loss(module)
        assert divergence is not None
        divergences.append(divergence.item())
    assert divergences[1] < 0.5 * divergences[0]


def test_experiment_1_starts_unstable_on_a_balanced_tenth(tmp_path, monkeypatch) -> None:
    starts, made = [], build.build

    def watch(*given):
        tokenizer, module = made(*given)
        starts.append(monitored(module)["spectral_abscissa"])
        return tokenizer, module

    monkeypatch.setattr(build, "build", watch)
    out = train_model("selective", "majority", tmp_path / "o", recipe="experiment1", length=10, progress=False)
    record = json.loads((out / "training.json").read_text())
    assert starts == [pytest.approx(0.1)]
    assert record["data"]["train"]["classes"] == {"more zeros": 50, "more ones": 50}
    assert record["recipe"]["share"] == 0.1 and len(record["history"]) == record["epochs_run"] == 10
    assert record["train"]["examples"] == 100 and record["test"]["examples"] == 1000


def test_listops_is_read_and_learnt_from(tmp_path) -> None:
    root = os.environ.get("SSMSCOPE_DATA")
    if not root or not Path(root, "listops", "T100_1000_train.parquet").exists():
        pytest.skip("set SSMSCOPE_DATA to the folder that holds listops/T100_1000_train.parquet")
    out = train_model("selective", "listops", tmp_path / "o", epochs=1, progress=False)
    record = json.loads((out / "training.json").read_text())
    assert record["labels"] == list("0123456789") and record["data"]["train"]["examples"] == 1000
    assert ssmscope.load(out).trace("[MAX 4 7 ]").answers[0][0] in record["labels"]
