"""A classifier on labelled data: accuracy and cross-entropy as computed by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bags import LABELS, bag, texts
from planned import jobs_of, tiny_model
from refusals import refusal
import ssmscope
from ssmscope.core.bootstrap import INTERVALS
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import text_data
from ssmscope.probes.evaluate.result import TaskScore

MODEL = {"good": 2.0, "bad": -1.0}
"""Weights of words: the logits are 0 and their sum."""
LINES = ("bad bad", "good", "good", "good bad")
"""Sums −2, 2, 2 and 1, for the classes 0, 1, 0 and 1: the third answer is wrong."""


def ends(score: TaskScore) -> tuple[float, float, float]:
    return score.estimate.value, score.estimate.low, score.estimate.high


def test_accuracy_and_cross_entropy() -> None:
    found = ssmscope.evaluate(bag(MODEL), texts(*LINES), batch_size=3)
    accuracy, loss = found.scores
    # Wilson's interval of 3 in 4, and the mean of ln(1 + e^−2) twice, ln(1 + e^2) and ln(1 + e^−1).
    assert ends(accuracy) == pytest.approx((0.75, 0.3006418, 0.9544127), abs=1e-6)
    assert loss.estimate.value == pytest.approx((0.1269280 * 2 + 2.1269280 + 0.3132617) / 4, abs=1e-6)
    assert 0.1269 <= loss.estimate.low < loss.estimate.value < loss.estimate.high <= 2.127
    assert (accuracy.measure, loss.measure, accuracy.higher, loss.higher) == ("accuracy", "cross-entropy", True, False)
    assert {(one.task, one.examples, one.shots) for one in found.scores} == {("toy (test)", 4, None)}
    assert found.verdict() == "accuracy 0.750 [0.301, 0.954] on toy (test)"
    assert found.tables()[0].columns == ("value", "examples")
    assert INTERVALS.replace("'", "&#39;").replace(" %", "\u00a0%") in found.to_html()
    # Texts run by length; their values stand in the order of the data.
    assert found.values[:, 0].tolist() == [1, 1, 0, 1]
    assert found.values[:, 1] == pytest.approx([0.1269280, 0.1269280, 2.1269280, 0.3132617], abs=1e-6)
    assert found.provenance["data"]["examples"] == 4 and found.provenance["options"]["batch_size"] == 3


def test_accuracy_by_class_and_the_largest_losses() -> None:
    found = ssmscope.evaluate(bag(MODEL), texts(*LINES))
    _, by_class, worst = found.tables()
    assert [labels for labels, _ in by_class.rows] == [("bad",), ("good",)]
    # Wilson's lower ends of 1 in 2 and of 2 in 2.
    ends = [(cells[0].found.value, cells[0].found.low, cells[1].value) for _, cells in by_class.rows]
    assert ends == [(0.5, pytest.approx(0.0945312), "2"), (1.0, pytest.approx(0.3423802), "2")]
    assert [labels for labels, _ in worst.rows][:2] == [("2", "bad"), ("3", "good")] and len(worst.rows) == 4
    shown = [[cell.value for cell in cells] for _, cells in worst.rows]
    assert shown[:2] == [["2.13", "wrong", "good"], ["0.31", "right", "good bad"]]
    # Another order of the data's classes changes no row.
    turned = ssmscope.evaluate(bag(MODEL), text_data("toy", "test", LINES, [1, 0, 1, 0], LABELS[::-1]))
    assert turned.tables()[1] == by_class and turned.tables()[2].rows[:2] == worst.rows[:2]


def test_one_class_and_repeated_texts_are_noted() -> None:
    def notes(lines: Sequence[str], labels: list[int], verb: str = "evaluate") -> list[str]:
        data = text_data("toy", "test", lines, labels, LABELS)
        return getattr(ssmscope, verb)(bag(MODEL), data).provenance.get("notes", [])

    assert notes(LINES, [0, 1, 0, 1]) == ["1 of the 4 texts of toy are repeated: intervals are too narrow"]
    alone = ["toy has one class alone, good: accuracy is that of one class"]
    assert notes(["bad", "good"], [1, 1]) == notes(["bad", "good"], [1, 1], "position") == alone
    many = ["bad " * at for at in range(1, 41)]
    assert notes(many, [0, 1] * 20) == notes([*many[:-2], "bad ", "bad bad "], [0, 1] * 20) == []


def test_classes_are_matched_by_name_and_batches_change_nothing() -> None:
    turned = text_data("toy", "test", LINES, [1, 0, 1, 0], LABELS[::-1])
    one, other = (ssmscope.evaluate(bag(MODEL), turned, batch_size=size).scores for size in (1, 16))
    first = ssmscope.evaluate(bag(MODEL), texts(*LINES)).scores
    for a, b, c in zip(first, one, other, strict=True):
        assert ends(a)[0] == pytest.approx(ends(b)[0]) and ends(b) == pytest.approx(ends(c))


def test_a_limit_draws_from_all_classes() -> None:
    data = text_data("sorted", "test", ["bad"] * 500 + ["good"] * 500, [0] * 500 + [1] * 500, LABELS)
    accuracy = ssmscope.evaluate(bag({"good": 2.0, "bad": 1.0}), data, limit=200).scores[0]
    assert accuracy.examples == 200 and 0.3 < accuracy.estimate.value < 0.7


def test_images_are_labelled_data_too() -> None:
    model = ssmscope.load("demo/cifar10-gla")
    image = np.zeros((3, 1024, 3), dtype=np.uint8)
    data = PixelData("cifar10", "test", image, np.array([0, 1, 2]), tuple(model.labels), (32, 32))
    accuracy, loss = ssmscope.evaluate(model, data).scores
    assert accuracy.estimate.value in (0, pytest.approx(1 / 3)) and loss.estimate.value > 0


def test_what_is_refused() -> None:
    model = bag(MODEL)
    told = refusal(ssmscope.evaluate, model)
    assert told is not None and told.startswith("no data; give data=…, one of sst2, imdb")
    assert refusal(ssmscope.evaluate, model, texts("bad"), shots=2) == "shots=… is an option of tasks; give tasks=… too"
    odd = text_data("toy", "test", ["bad"], [0], ("odd", "even"))
    told = refusal(ssmscope.evaluate, model, odd)
    assert told is not None and "toy has the classes odd, even; bag tells apart bad, good" in told
    told = refusal(ssmscope.evaluate, ssmscope.load("demo/books-mamba2"))
    given = "give data=…, labelled texts, or of a language model tasks=…"
    assert told == f"there is nothing to measure demo/books-mamba2 on; {given}"


def test_a_language_model_answers_with_the_likeliest_label(tmp_path: Path) -> None:
    """Labels of several tokens count whole; a plan without data is refused before anything runs."""
    model = ssmscope.load("demo/babi-mamba2")
    rows = [("Clara walked to the attic . Where is Clara ?", "attic"), ("Bob went to the office .", "kitchen")]
    rows += [("Tom went to the kitchen . Where is Tom ?", "kitchen"), ("Clara went to the office .", "Where is")]
    file = tmp_path / "rows.csv"
    file.write_text("text,label\n" + "\n".join(map(",".join, rows)))
    names, values = ["attic", "kitchen", "Where is"], []
    for text, label in rows:
        logs = []
        for name in names:
            start, ids = (model.encode([one]).input_ids[0] for one in (text, f"{text} {name}"))
            p = model.module(input_ids=ids[None]).logits[0].double().log_softmax(-1)
            logs.append(sum(float(p[at - 1, ids[at]]) for at in range(len(start), len(ids))))
        own = names.index(label)
        values.append((float(np.argmax(logs) == own), -logs[own]))
    found = ssmscope.evaluate(model, str(file))
    np.testing.assert_allclose(found.values, values, rtol=1e-4, atol=1e-6)
    accuracy, loss = (one.estimate.value for one in found.scores)
    np.testing.assert_allclose((accuracy, loss), np.mean(values, 0), rtol=1e-4)
    assert {0.0, 1.0} == {right for right, _ in values}
    refused = refusal(jobs_of, {"models": ["demo/books-mamba2"], "analyses": ["evaluate"]})
    assert refused is not None and "analysis 1 (evaluate): there is nothing to measure a language model on" in refused


def test_plans_give_a_classifier_its_own_data_and_a_language_model_none(tmp_path: Path) -> None:
    models = ["demo/sst2-mamba", str(tiny_model(tmp_path / "m"))]
    analyses = [
        {"evaluate": {}, "for": ["text-classifier"]},
        {"evaluate": {"tasks": ["wnli"]}, "for": ["language-model"]},
    ]
    jobs = jobs_of({"models": models, "analyses": analyses})
    assert [job.call.inputs["data"] for job in jobs.every] == ["sst2", None]
