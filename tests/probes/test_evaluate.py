"""Benchmarks of lm-evaluation-harness: its own tasks on local files, scored as in its own run through transformers."""

import json
import math

import pandas as pd
import pytest
import torch
from loud import loud
from refusals import refuses
from transformers import Mamba2Config, Mamba2ForCausalLM
import ssmscope
from ssmscope.zoo.tokenizers import train_byte_pairs

lm_eval = pytest.importorskip("lm_eval", reason="benchmarks need lm-eval: pip install '.[lm-eval]'")

from lm_eval.models.huggingface import HFLM  # noqa: E402
import ssmscope.probes.evaluate.harness  # noqa: E402, F401  (it tells the harness of our model)
from ssmscope.probes.evaluate import measure  # noqa: E402

PAIRS = [("The cup fell on the plate, and it broke.", "The cup broke."), ("Ann saw Bea when she came.", "Ann came.")]
ROWS = {
    "sentence1": [one for one, _ in PAIRS] * 6,
    "sentence2": [other for _, other in PAIRS] * 6,
    "label": [0, 1, 1, 0] * 3,
}
ROLLING = """
task: own_text
dataset_path: parquet
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{sentence1}}}}"
metric_list:
  - metric: word_perplexity
"""


@pytest.fixture(scope="module")
def model():
    tokenizer = train_byte_pairs([text for pair in PAIRS for text in pair], vocabulary=280)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, state_size=4, expand=2)
    torch.manual_seed(0)
    return ssmscope.load(
        loud(Mamba2ForCausalLM(Mamba2Config(**sizes, head_dim=8, num_heads=4, n_groups=1))), tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("data")
    write_wnli(found, ROWS)
    (found / "own.yaml").write_text(ROLLING.format(file=found / "wnli" / "validation.parquet"))
    return found


def write_wnli(folder, rows):
    (folder / "wnli").mkdir()
    for split in ("train", "validation"):
        pd.DataFrame(rows).to_parquet(folder / "wnli" / f"{split}.parquet")


@pytest.fixture(scope="module")
def index(folder):
    """The harness' index of its tasks and ours: making it takes seconds."""
    return measure.task_manager(str(folder))


@pytest.fixture
def data(folder, index, tmp_path, monkeypatch):
    def indexed(include: str):
        assert include == str(folder)
        return index

    monkeypatch.setattr(measure, "task_manager", indexed)
    monkeypatch.setattr(measure, "own_tasks", lambda: index)
    monkeypatch.setenv("SSMSCOPE_DATA", str(folder))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return folder


def test_scores_are_those_of_a_run_through_transformers(model, data, index, tmp_path):
    found = ssmscope.evaluate(model, tasks=["wnli", "own_text"], include=data, batch_size=5)
    files = tmp_path / "wnli.yaml"
    base = index.task_index["wnli"].yaml_path
    files.write_text(json.dumps({"task": "wnli", "include": str(base), **measure.local_files("wnli")}))
    plain = HFLM(pretrained=model.module, tokenizer=model.tokenizer, backend="causal", batch_size=1)
    own = lm_eval.simple_evaluate(plain, tasks=[str(files), str(data / "own.yaml")], task_manager=index)["results"]
    scores = {(one.task, one.measure): one for one in found.scores}
    accuracy, perplexity = scores["wnli", "acc"], scores["own_text", "word_perplexity"]
    assert accuracy.estimate.value == own["wnli"]["acc,none"] and accuracy.examples == len(ROWS["label"])
    half = 1.96 * own["wnli"]["acc_stderr,none"]
    assert accuracy.estimate.high - accuracy.estimate.low == pytest.approx(2 * half)
    assert perplexity.estimate.value == pytest.approx(own["own_text"]["word_perplexity,none"], rel=1e-4)
    assert accuracy.higher and not perplexity.higher and math.isnan(perplexity.estimate.low)
    assert found.provenance["versions"]["lm-eval"] and f"acc {accuracy.estimate.value:.3f}" in found.verdict()
    assert list(found.to_frame().task) == ["wnli", "own_text"] and "wnli" in found.to_html()
    rows = [(axes.get_xlabel(), [label.get_text() for label in axes.get_yticklabels()]) for axes in found.figure().axes]
    assert rows == [("acc", ["wnli"]), ("word_perplexity", ["own_text"])]
    assert ssmscope.Result.load(found.save(tmp_path, "scores")["json"]) == found


def test_shots_and_limit_change_what_is_asked(model, data):
    one = ssmscope.evaluate(model, tasks=["wnli"], shots=2, limit=3, seed=1).scores[0]
    assert (one.shots, one.examples) == (2, 3)


def test_the_harness_knows_our_model_by_name(model, data, index):
    found = lm_eval.simple_evaluate(
        "ssmscope", model_args={"pretrained": model}, tasks=[str(data / "own.yaml")], limit=2, task_manager=index
    )
    assert found["results"]["own_text"]["word_perplexity,none"] > 1


def test_what_is_refused(model, data, tmp_path, monkeypatch):
    refuses("'wnly' is not a task of lm-eval; did you mean 'wnli'", ssmscope.evaluate, model, tasks=["wnly"])
    refuses("classifier", ssmscope.evaluate, ssmscope.load("demo/sst2-mamba2"), tasks=["wnli"])
    write_wnli(tmp_path, {"text": ["a"], "label": [0]})
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    refuses("wnli: the data cannot be read .*sentence1", ssmscope.evaluate, model, tasks=["wnli"])
