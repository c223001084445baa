"""Runs that are killed and started again end where an unbroken run ends, on every kind of data."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from killed import killed_training
from safetensors.torch import load_file

from ssmscope.zoo.training import train_model

OPTIONS: dict[str, Any] = {"width": 8, "layers": 1, "state": 4, "head_width": 8, "epochs": 3, "learning_rate": 1e-2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("mamba2", {**OPTIONS, "batch_size": 32, "dropout": 0.1, "share": 0.15}),
    "compression": (
        "baleen-b",
        {**OPTIONS, "embedding_dropout": 0.1, "length": 8, "vocabulary": 6, "examples": 300, "batch_size": 12},
    ),
}


@pytest.mark.parametrize("data", RUNS)
def test_a_killed_run_ends_as_an_unbroken_one(data, tmp_path, capfd) -> None:
    if data == "digits":
        pytest.importorskip("sklearn")
    architecture, options = RUNS[data]
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    given = {**options, "checkpoint_minutes": 0.0}
    said = killed_training(architecture, data, broken, given)
    for out in (broken, unbroken):
        train_model(architecture, data, out, **given)
    assert capfd.readouterr().err.count(said) == 1
    files = ["model.safetensors", *(["decoder.safetensors"] if data == "compression" else [])]
    for file in files:
        one, other = (load_file(out / file) for out in (broken, unbroken))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    one, other = (json.loads((out / "training.json").read_text()) for out in (broken, unbroken))
    assert one["history"] == other["history"] and one["best_epoch"] == other["best_epoch"]
    assert one["validation"] == other["validation"] and one["test"] == other["test"]
    assert not (broken / "checkpoint").exists()
