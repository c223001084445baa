"""Model cards from a report: metadata read back by the hub's own reader, the section, and the model's own card."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from bags import bag, texts
from huggingface_hub import EvalResult, ModelCard
from refusals import refuses
from reported import entry, failed
import ssmscope
from ssmscope.core.bootstrap import Estimate
from ssmscope.reports.cards import BEGIN, END, card, section, write_cards
from ssmscope.reports.gates import decide
from ssmscope.reports.requirements import read_requirement
from ssmscope.reports.scores import report_scores
from ssmscope.reports.store import Report

OWN = """---
license: mit
model-index:
- name: mine
  results:
  - task:
      type: text-classification
    dataset:
      name: toy
      type: toy
      split: test
    metrics:
    - type: accuracy
      value: 0.1
    - type: f1
      value: 0.2
---
# My model

Some words.
"""


@pytest.fixture(scope="module")
def result():
    return ssmscope.evaluate(bag({"good": 2.0, "bad": -1.0}), texts("bad bad", "good", "good", "good bad"))


def made(*results, place: Path | str = "somewhere", names=("a_b",), **more) -> Report:
    entries = tuple(entry("evaluate", one, heading="How | good", models=names) for one in results)
    models = {name: {"model": str(place), "kind": "text-classifier", "files": "0"} for name in names}
    about = {"date": "2026-01-02T03:04:05+00:00", "versions": {"ssmscope": "9.8"}, "models": models}
    return Report("Films", (*entries, failed("words", "an error", "")), about, **more)


def test_metadata(result):
    data = ModelCard(card(made(result), "a_b")).data
    assert data.model_name == "a_b" and data.to_dict()["tags"] == ["ssmscope"]
    accuracy, loss = data.eval_results
    interval = {"interval": [0.300642, 0.954413], "level": 0.95, "examples": 4}
    assert accuracy == EvalResult(
        task_type="text-classification", dataset_type="toy", dataset_name="toy", dataset_split="test",
        metric_type="accuracy", metric_value=0.75, metric_args={"unit": "share", "better": "higher", **interval},
    )  # fmt: skip
    assert loss.metric_value == pytest.approx(0.673511) and loss.metric_args["better"] == "lower"


@pytest.mark.parametrize(
    ("name", "repository", "configuration"),
    [("wnli", "nyu-mll/glue", "wnli"), ("sst2", "SetFit/sst2", None), ("runs/own films.csv", "own films.csv", None)],
)
def test_data_sets_go_by_their_names_on_the_hub(result, name, repository, configuration):
    data = {**result.provenance["data"], "name": name}
    moved = replace(result, provenance={**result.provenance, "data": data})
    found = ModelCard(card(made(moved), "a_b")).data.eval_results[0]
    assert (found.dataset_type, found.dataset_config) == (repository, configuration)
    assert found.dataset_name == name.removeprefix("runs/")


def test_what_is_not_defined_or_not_on_data_is_no_metadata(result):
    nan = replace(result.scores[0], estimate=Estimate(math.nan, math.nan, math.nan))
    without = replace(result, provenance={key: value for key, value in result.provenance.items() if key != "data"})
    assert "model-index" not in card(made(without), "a_b") and "cross-entropy" in card(made(without), "a_b")
    undefined = ModelCard(card(made(replace(result, scores=(nan, result.scores[1]))), "a_b"))
    assert [each.metric_type for each in undefined.data.eval_results] == ["cross-entropy"]


def test_the_section(result):
    report = made(result, replace(result, scores=result.scores[:1]))
    gates = decide([read_requirement("accuracy >= 0.9")], report_scores(report)[:2])
    other = replace(gates[0], score=replace(gates[0].score, model="other"))
    told = section(replace(report, gates=(*gates, other)), "a_b")
    assert told.startswith(f"{BEGIN}\n\n## Films\n\nMeasured with ssmscope 9.8 on 2026-01-02.\n\n- **How \\| good** (")
    assert "`analyze evaluate`): accuracy 0.750 \\[0.301, 0.954\\] on toy (test)\n" in told
    assert "| accuracy | 0.750 [0.301, 0.954] | share | higher | toy (test) | 4 |\n" in told
    assert "| cross-entropy | 0.6735 [" in told and "| nats | lower |" in told
    assert "**1 gate: 1 missed, 0 met.**" in told and "| accuracy \\>= 0.9 | a\\_b | ✗ missed | 0.750" in told
    accuracies = [told.index(f"| {name} |") for name in ("accuracy", "cross-entropy")]
    assert accuracies == sorted(accuracies) and told.count("| accuracy | 0.750") == 2
    assert told.endswith(f".\n\n{END}\n") and "gate" not in section(report, "a_b")


def test_the_models_own_card_is_completed(result):
    once = card(made(result), "a_b", OWN)
    data, text = ModelCard(once).data, ModelCard(once).text
    assert data.license == "mit" and data.model_name == "mine"
    # Numbers of the same task, data and measure are replaced, others stay.
    assert [(each.metric_type, each.metric_value) for each in data.eval_results] == [
        ("f1", 0.2), ("accuracy", 0.75), ("cross-entropy", pytest.approx(0.673511)),
    ]  # fmt: skip
    assert text.startswith(f"# My model\n\nSome words.\n\n{BEGIN}\n\n## Films")
    again = card(replace(made(result), title="Other"), "a_b", once + "\nMore words.\n")
    assert again.count(BEGIN) == 1 and "## Films" not in again and "## Other" in again
    assert again.endswith(f"{END}\n\nMore words.\n") and len(ModelCard(again).data.eval_results) == 3
    assert "# Plain" in card(made(result), "a_b", "# Plain\n") and "\n# a\\_b\n" in card(made(result), "a_b")
    broken = ModelCard(card(made(result), "a_b", "---\nmodel-index: [{name: x}]\nlicense: mit\n---\n"))
    assert broken.data.license == "mit" and len(broken.data.eval_results) == 2
    refuses("the metadata of a_b's card cannot be read", card, made(result), "a_b", "---\n[1\n---\n")


def test_files(result, tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    (place / "README.md").write_text(OWN)
    (path,) = write_cards(made(result, place=place), tmp_path / "out")
    assert path == tmp_path / "out" / "cards" / "a-b.md" and path.read_text() == card(made(result), "a_b", OWN)
    assert (place / "README.md").read_text() == OWN
    (place / "README.md").write_bytes(b"\xff\xfe\xfa")
    refuses(r"README.md cannot be read", write_cards, made(result, place=place), tmp_path / "out")
    nothing = replace(made(), entries=(failed("words", "an error", ""),))
    assert write_cards(nothing, tmp_path / "none") == []
