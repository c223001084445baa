"""Logging of a training run by transformers' callbacks: what TensorBoard and Weights & Biases are given."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal, refused
from ssmscope.zoo.training import train_model
from ssmscope.zoo.training.tracking import TRACKERS, epoch_numbers, trackers_of

OPTIONS: dict[str, Any] = dict(
    width=8, layers=1, state=4, head_width=8, length=8, vocabulary=6, examples=600, batch_size=8, epochs=2,
    progress=False,
)  # fmt: skip


def test_unknown_and_missing_trackers_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    assert trackers_of(None) == () and trackers_of("tensorboard, tensorboard,") == ("tensorboard",)
    unknown = refusal(trackers_of, "tensorboad") or ""
    assert unknown.startswith("log is 'tensorboad'; choose of tensorboard, wandb; did you mean")
    assert refusal(trackers_of, "wandb") == "log wandb needs a package that is not installed: pip install wandb"
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert trackers_of("tensorboard") == ("tensorboard",)
    assert "unset it" in refused(trackers_of, "tensorboard,wandb")


def test_an_epoch_is_logged_by_the_names_of_the_trainer():
    entry = {"epoch": 2, "training_loss": 1.0, "validation_accuracy": 0.5, "validation_accuracy_sst2": 0.4}
    logged = {"epoch": 2, "training_loss": 1.0, "eval_accuracy": 0.5, "eval_accuracy_sst2": 0.4}
    assert epoch_numbers(entry) == logged


def events(folder: Path) -> dict[str, dict[int, float]]:
    """Numbers of TensorBoard's files by name and step."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder))
    found.Reload()
    return {tag: {each.step: each.value for each in found.Scalars(tag)} for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_what_a_run_logs(tmp_path, tracker, monkeypatch):
    package = pytest.importorskip(tracker)
    written: dict[str, dict[int, float]] = {}
    if tracker == "wandb":
        monkeypatch.setenv("WANDB_MODE", "disabled")
        run = package.init(mode="disabled")
        monkeypatch.setattr(package, "log", lambda numbers: note(written, numbers))
    train_model("mamba2", "associative-recall", tmp_path / "run", **OPTIONS, log=tracker)
    if tracker == "tensorboard":
        written = events(tmp_path / "run" / "logs")
    else:
        assert package.run is run  # It was the caller's.
        run.finish()
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    steps = record["data"]["train"]["examples"] * 9 // 10 // 8 + 1
    assert [*written["train/loss"]] == [1, 51, 101] and steps * 2 > 101
    last = {name: max(numbers) for name, numbers in written.items()}
    assert last["eval/loss"] == last["train/training_loss"] == last["test/accuracy"] == 2 * min(written["eval/loss"])
    for at, entry in zip(sorted(written["eval/loss"]), record["history"]):
        assert written["eval/loss"][at] == pytest.approx(entry["validation_loss"])
        assert written["eval/accuracy"][at] == pytest.approx(entry["validation_accuracy"])
        assert written["train/training_loss"][at] == pytest.approx(entry["training_loss"])
    assert written["test/accuracy"][last["eval/loss"]] == pytest.approx(record["test"]["accuracy"])
    assert written["train/learning_rate"][101] < OPTIONS.get("learning_rate", 2e-3) and "log" not in record["recipe"]


def test_a_tracker_that_cannot_begin_says_so(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def raises(error: Exception):
        def on_train_begin(*given, **options):
            raise error

        return on_train_begin

    for error in (wandb.Error("no account\nhere"), ValueError("no account here")):
        monkeypatch.setattr("transformers.integrations.WandbCallback.on_train_begin", raises(error))
        said = refusal(train_model, "mamba2", "associative-recall", tmp_path / "run", **OPTIONS, log="wandb") or ""
        assert said == "log wandb cannot begin (no account here): log in by wandb login, or set WANDB_MODE=offline"


def note(written: dict[str, dict[int, float]], numbers: dict[str, float]) -> None:
    for name, value in numbers.items():
        written.setdefault(name, {})[int(numbers["train/global_step"])] = value
