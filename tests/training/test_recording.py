"""Steps of training that are recorded as a CUDA graph; on a machine without a GPU, that none is."""

import json
from pathlib import Path

import pytest
import torch
from ssmscope.data.pixels import load_pixels
from ssmscope.zoo.training import train_model
from ssmscope.zoo.training.fitting import Fit, Recording, can_record_training
from ssmscope.zoo.training.objectives import NextTokens, Pixels, Questions, Sequences

OPTIONS = dict(epochs=2, width=8, layers=1, state=4, head_width=8, batch_size=256, progress=False)


def test_what_can_be_recorded() -> None:
    assert all(each.settled for each in (Pixels, Sequences, NextTokens)) and not Questions.settled
    assert not can_record_training(torch.nn.Linear(2, 2), torch.device("cuda"))
    assert not can_record_training(torch.nn.Linear(2, 2), torch.device("cpu"))


def test_the_loss_of_examples_is_that_of_what_is_taken(small_pixels: Pixels) -> None:
    class Model(torch.nn.Module):
        def forward(self, input_values):
            return type("Output", (), {"logits": input_values.mean(1).repeat(1, 10)})

    rows = [3, 1, 4]
    taken = small_pixels.taken("train", rows)
    assert taken["pixels"].shape == (3, 64, 1)
    assert small_pixels.loss(Model(), rows) == small_pixels.loss_of(Model(), taken)


@pytest.fixture
def small_pixels() -> Pixels:
    options = {"precision": "fp32", "label_smoothing": 0.0, "spread_penalty": 0.0}
    return Pixels({"train": load_pixels("digits", "train")}, options, torch.device("cpu"))


def test_on_a_cpu_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("recorded")

    monkeypatch.setattr(Recording, "__init__", fail)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # takes ten seconds, and is not asked
    out = train_model("mamba2", "digits", tmp_path / "run", **{**OPTIONS, "epochs": 1}, compile=True, device="cpu")
    assert json.loads((out / "training.json").read_text())["epochs_run"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("architecture", ["mamba2", "baleen-e", "baleen-b"])
def test_a_recorded_run_is_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    annealed = dict(prior_from=0.9, prior_every=1) if architecture == "baleen-b" else {}
    losses = []
    for name in ("recorded", "single"):
        if name == "single":
            monkeypatch.setattr(Fit, "_record", lambda self: None)
        out = train_model(architecture, "digits", tmp_path / name, **OPTIONS, **annealed, compile=True, device="cuda")
        losses.append([each["training_loss"] for each in json.loads((out / "training.json").read_text())["history"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
