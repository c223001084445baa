"""Selective SSMs trained in a stack, in benchmarks/stacked.py, against `analyze train`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import ssmscope
from ssmscope.zoo.sequences import majority
from ssmscope.zoo.training import train_model


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import experiments_authors

    return experiments_authors


def test_a_stack_learns_as_analyze_train_does(experiments, tmp_path) -> None:
    runs = [
        experiments.Run("experiment2", "majority", 12, 0.05, arm, seed) for arm, seed in (("authors", 3), ("scaled", 4))
    ]
    sizes = {"length": 12, "examples": 128, "epochs": 2, "batch_size": 64, "width": 4, "state": 4, "progress": False}
    drawn = [
        experiments.Examples(d.ids, np.full(128, 12), d.labels)
        for d, _ in (majority(12, examples=128, seed=run.seed) for run in runs)
    ]
    store = experiments.Store(drawn, None, "cpu")
    stack = experiments.Stack([experiments.start_of(run, 2) for run in runs], [True, True], "cpu", experiments.state)
    history = experiments.fit(stack, store, [run.seed for run in runs], 64, 2)
    for run, found, score in zip(runs, history, stack.score(store)):
        chosen = {"optimizer": "adam", "weight_decay": 1e-5, "start": experiments.ARMS[run.arm][0]}
        train_model(
            "selective", "majority", tmp_path / run.name, seed=run.seed, spectral_abscissa=0.05, **sizes, **chosen
        )
        record = json.loads((tmp_path / run.name / "training.json").read_text())
        assert record["train"]["accuracy"] == score["accuracy"]
        assert record["train"]["cross_entropy"] == pytest.approx(score["cross_entropy"], rel=1e-4)
        for ours, theirs in zip(found[1:], record["history"], strict=True):
            for name in ("training_loss", "spectral_abscissa", "norm_q", "norm_W_B_entrywise", "norm_u"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


def test_padding_is_held_or_read(experiments) -> None:
    run = experiments.Run("experiment2", "imdb", 6, 0.0, "held", 0)
    ids = np.array([[1, 2, 3, 0, 0, 0], [4, 1, 2, 3, 4, 1]])
    store = experiments.Store([experiments.Examples(ids, np.array([3, 6]), np.array([0, 1]))] * 2, None, "cpu")
    module = experiments.start_of(run, 5)
    stack = experiments.Stack([module, module], [False, True], "cpu", experiments.state)
    held, read = stack.logits(store, store.rows)
    mask = store.ids.new_tensor([[1, 1, 1, 0, 0, 0], [1] * 6])
    assert np.allclose(held.detach(), module(input_ids=store.ids, attention_mask=mask).logits.detach(), rtol=1e-4)
    assert np.allclose(read.detach(), module(input_ids=store.ids).logits.detach(), rtol=1e-4)


def test_the_authors_start_has_the_norms_that_they_log(experiments) -> None:
    """Their logs at epoch 0 (d = 16, N = 4): W_B entrywise 51 = 64 √(2/π), Frobenius 8 = √64, |p| not 0."""
    found = [
        experiments.start_of(experiments.Run("experiment1", "imdb", 9, 0.1, "authors", seed), 5) for seed in range(20)
    ]
    entrywise = [module.ssm.W_B.abs().sum().item() for module in found]
    assert np.mean(entrywise) == pytest.approx(51, abs=3) and np.std(entrywise) == pytest.approx(8 * 0.603, abs=2)
    assert np.mean([module.ssm.W_C.norm().item() for module in found]) == pytest.approx(8, abs=0.5)
    assert np.std([module.ssm.p_delta.item() for module in found]) == pytest.approx(1, abs=0.4)
    assert np.mean([module.head.weight.norm().item() ** 2 for module in found]) == pytest.approx(16, abs=5)
    assert all(module.ssm.spectral_abscissa == pytest.approx(0.1) for module in found)
    scaled = experiments.start_of(experiments.Run("experiment1", "imdb", 9, 0.1, "scaled", 0), 5)
    assert scaled.ssm.p_delta.item() == 0 and scaled.ssm.W_B.abs().sum().item() == pytest.approx(51 / 4, abs=4)


def test_a_text_is_padded_to_its_full_length_and_its_padding_read(tmp_path) -> None:
    words = ["good film", "bad film indeed", "good and good", "bad bad bad bad"]
    (tmp_path / "texts.csv").write_text("text,label\n" + "".join(f"{w},{w[0] == 'g'}\n" for w in words * 2))
    options = {"epochs": 1, "batch_size": 4, "max_length": 9, "vocabulary": 40, "held_out": 0, "progress": False}
    out = train_model(
        "selective", tmp_path / "texts.csv", tmp_path / "out", padding="read", test=tmp_path / "texts.csv", **options
    )
    record, model = json.loads((out / "training.json").read_text()), ssmscope.load(out)
    ids = [model.tokenizer(word)["input_ids"] for word in words * 2]
    whole = torch.tensor([[*row, *[model.tokenizer.pad_token_id] * (9 - len(row))] for row in ids])
    labels = torch.tensor([int(word[0] == "g") for word in words * 2])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model.module(input_ids=whole).logits, labels).item()
    assert record["test"]["cross_entropy"] == pytest.approx(loss, rel=1e-4)
