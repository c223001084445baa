"""Training of classifiers: accuracy, resuming, files, and refusals."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from examples import random_example
from exhaustive import few
from killed import killed_training
from refusals import refuses
from safetensors.torch import load_file
import ssmscope
from ssmscope.core.bootstrap import wilson_interval
from ssmscope.errors import InputError
from ssmscope.zoo.training import train_model
from ssmscope.zoo.training.architectures import ARCHITECTURES, SIZES
from ssmscope.zoo.training.fitting import parameter_groups, schedule

PRAISE = ("lovely", "brilliant", "moving", "funny", "superb")
BLAME = ("awful", "dull", "clumsy", "boring", "stale")
NEUTRAL = ("the", "film", "a", "story", "about", "two", "friends", "is", "and", "of", "it", "with", "some", "scenes")
OPTIONS = {"width": 16, "state": 4, "head_width": 8, "vocabulary": 120, "batch_size": 16, "progress": False}
BACKBONES = {
    **{"mamba": "mamba", "mamba2": "mamba2", "baleen-b": "baleen-mamba2", "baleen-e": "baleen-mamba2"},
    **{"diff-mamba": "diff-mamba", "groupmamba": "groupmamba-mamba2", "gfssm": "gfssm", "gla": "ssm-gla"},
    **{"deltanet": "ssm-deltanet", "retnet": "ssm-retnet", "rwkv": "rwkv", "selective": "selective-ssm"},
    "hybrid": "bamba",
}
EPOCHS = {"baleen-e": 14, "deltanet": 30, "diff-mamba": 10, "gla": 10, "retnet": 10, "rwkv": 10, "selective": 10}
"""The slowest and the fastest to learn the planted words."""
GENTLE = {"dropout": 0.0, "embedding_dropout": 0.1, "token_dropout": 0.05}


def write_reviews(path: Path, count: int, seed: int = 0) -> Path:
    """Texts of neutral words with one planted word that decides the class, at a random place."""
    draw = random.Random(seed)
    lines = ["text,label"]
    for i in range(count):
        words = draw.choices(NEUTRAL, k=draw.randint(3, 12))
        words.insert(draw.randint(0, len(words)), draw.choice((BLAME, PRAISE)[i % 2]))
        lines.append(" ".join(words) + "," + ("bad", "good")[i % 2])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reviews")
    return {
        part: write_reviews(folder / f"{part}.csv", count, seed)
        for seed, (part, count) in enumerate({"train": 240, "validation": 60, "test": 60}.items())
    }


@pytest.fixture(scope="module")
def trained(reviews, tmp_path_factory):
    """A Mamba-2 trained on the planted words, and its training record."""
    out = tmp_path_factory.mktemp("models") / "mamba2"
    train_model(
        "mamba2", reviews["train"], out, validation=reviews["validation"], test=reviews["test"], epochs=8,
        learning_rate=1e-2, **OPTIONS, **GENTLE,
    )  # fmt: skip
    return out, json.loads((out / "training.json").read_text())


def weights(out):
    return load_file(out / "model.safetensors")


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def sizes_of(architecture: str) -> dict:
    """Return `OPTIONS` without options that the architecture does not have, and without dropout if its recipe has
    none."""
    foreign = {name for names in SIZES.values() for name in names} - {*SIZES[ARCHITECTURES[architecture].bases[0]]}
    return {name: value for name, value in OPTIONS.items() if name not in foreign}


@pytest.mark.parametrize("architecture", few(ARCHITECTURES, "baleen-e", "diff-mamba", "selective"))
def test_every_architecture_learns_planted_words(architecture, reviews, tmp_path):
    out = train_model(
        architecture, reviews["train"], tmp_path / "out", validation=reviews["validation"], test=reviews["test"],
        epochs=EPOCHS.get(architecture, 20), learning_rate=1e-2, **sizes_of(architecture), **GENTLE,
    )  # fmt: skip
    record = json.loads((out / "training.json").read_text())
    assert record["test"]["accuracy"] >= 0.8 and record["backbone"] == BACKBONES[architecture]
    model = ssmscope.load(out)
    assert model.trace("some scenes with a superb friends story").answers[0][0] == "good"


def test_the_directory_is_complete_and_nothing_else(trained):
    out, _ = trained
    names = {path.name for path in out.iterdir()} - {"special_tokens_map.json"}
    assert names == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training.json",
    }  # fmt: skip


def test_the_record_is_measured_on_the_stored_half_precision_weights(trained, reviews):
    out, record = trained
    assert {t.dtype for t in weights(out).values()} == {torch.bfloat16}
    assert record["parameters"] == sum(t.numel() for t in weights(out).values())
    model = ssmscope.load(out)
    data = ssmscope.data.text.load_text(reviews["test"], label_names=model.labels)
    answers = [name for name, _ in model.trace(list(data.texts)).answers]
    right = sum(answer == model.labels[label] for answer, label in zip(answers, data.labels))
    test = record["test"]
    assert (test["correct"], test["examples"]) == (right, 60)
    assert test["accuracy"] == right / 60 and test["interval"] == list(wilson_interval(right, 60))


def test_the_card_tells_data_recipe_accuracy_and_command(trained, reviews):
    out, record = trained
    card = (out / "README.md").read_text()
    assert record["data"]["train"]["fingerprint"] in card
    assert "bad: 120, good: 120" in card
    assert f"{record['parameters']:,} parameters" in card
    assert f"{record['test']['accuracy']:.4f} | {record['test']['interval'][0]:.4f}" in card
    assert f"train_model('mamba2', '{reviews['train']}', '{out}', " in card
    assert "learning_rate=0.01" in card
    assert "Seed 0, precision fp32, on cpu" in card
    for name, value in record["recipe"].items():
        assert f"| {name} | {'–' if value is None else value} |" in card
    assert f"torch {torch.__version__}" in card
    assert record["command"] in card


def test_the_reading_position_of_a_cut_text_is_the_end_token(reviews, tmp_path):
    long = tmp_path / "long.csv"
    long.write_text("text,label\n" + "".join(f"{('good', 'bad')[i % 2]} {'so ' * 60}{i},{i % 2}\n" for i in range(20)))
    out = train_model("mamba2", long, tmp_path / "o", epochs=1, max_length=8, **OPTIONS)
    tokenizer = ssmscope.load(out).tokenizer
    ids = tokenizer("so " * 60, truncation=True)["input_ids"]
    assert len(ids) == 8 and ids[-1] == tokenizer.cls_token_id


@pytest.mark.parametrize("saved_as", ["float16", "float32"])
def test_the_stored_type_is_as_asked(saved_as, reviews, tmp_path):
    out = train_model(
        "mamba2", reviews["validation"], tmp_path / "o", epochs=1, saved_as=saved_as, subword_dropout=0.1, **OPTIONS
    )
    assert {t.dtype for t in weights(out).values()} == {getattr(torch, saved_as)}


def test_nothing_is_printed_without_progress(reviews, tmp_path, capfd):
    train_model("mamba", reviews["validation"], tmp_path / "o", epochs=1, width=16, vocabulary=120, progress=False)
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_the_callers_generators_are_left_as_they_were(reviews, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train_model("mamba2", reviews["validation"], tmp_path / "o", epochs=1, **OPTIONS)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("architecture", ["baleen-b", "baleen-e"])
def test_a_mamba2_becomes_a_baleen_without_new_parameters(architecture, trained, reviews, tmp_path):
    source, record = trained
    out = train_model(
        architecture, reviews["train"], tmp_path / "o", validation=reviews["validation"], init_from=source, epochs=1,
        learning_rate=1e-9, saved_as="float32", progress=False,
    )  # fmt: skip
    converted = json.loads((out / "training.json").read_text())
    assert converted["parameters"] == record["parameters"] and converted["backbone"] == "baleen-mamba2"
    before, after = weights(source), weights(out)
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name].float(), rtol=0, atol=1e-6)
    texts = ["a superb film", "an awful film"]
    assert ssmscope.load(out).tokenizer(texts)["input_ids"] == ssmscope.load(source).tokenizer(texts)["input_ids"]
    assert "Trained from the weights of" in (out / "README.md").read_text()


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(trained, reviews, tmp_path):
    source, _ = trained
    out = tmp_path / "o"
    with pytest.raises(InputError, match="is a mamba2, which cannot become mamba;"):
        train_model("mamba", reviews["train"], out, init_from=source, progress=False)
    with pytest.raises(InputError, match="width cannot be chosen for baleen-b trained from"):
        train_model("baleen-b", reviews["train"], out, init_from=source, width=32, progress=False)
    assert not out.exists()


def test_a_killed_run_goes_on_and_ends_with_the_weights_of_an_unbroken_one(reviews, tmp_path, capfd):
    options = {
        **{k: v for k, v in OPTIONS.items() if k != "progress"}, "epochs": 3, "subword_dropout": 0.1,
        "saved_as": "float32", "checkpoint_minutes": 0.0, "validation": str(reviews["validation"]), "batch_size": 12,
    }  # fmt: skip
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    arguments = ["baleen-b", str(reviews["train"])]
    said = killed_training(*arguments, broken, options)
    refuses("broken is unfinished: .* the same command continues it$", ssmscope.load, broken)
    for out in (broken, unbroken):
        train_model(*arguments, out, **options)
    assert capfd.readouterr().err.count(said) == 1
    assert_same_weights(weights(broken), weights(unbroken))
    one, other = (json.loads((out / "training.json").read_text()) for out in (broken, unbroken))
    assert one["history"] == other["history"]
    assert not (broken / "checkpoint").exists()


def test_a_finished_run_is_left_as_it_is(trained, reviews, capsys):
    out, record = trained
    stamps = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = train_model(
        "mamba2", reviews["train"], out, validation=reviews["validation"], test=reviews["test"], epochs=8,
        learning_rate=1e-2, **{**OPTIONS, "progress": True}, **GENTLE, device="cpu",
    )  # fmt: skip
    assert again == out
    assert "finished: nothing to do" in capsys.readouterr().err
    assert stamps == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}


def test_another_run_in_the_same_directory_is_refused(trained, reviews, tmp_path):
    out, _ = trained
    given = {"validation": reviews["validation"], "test": reviews["test"], "learning_rate": 1e-2, **OPTIONS, **GENTLE}
    refuses(r"another epochs \(8, now 9\)", train_model, "mamba2", reviews["train"], out, epochs=9, **given)
    with pytest.raises(InputError, match=r"another architecture \(mamba2, now baleen-b\)"):
        train_model("baleen-b", reviews["train"], out, epochs=8, **given)
    other = write_reviews(tmp_path / "train.csv", 240, seed=9)
    refuses("another train data", train_model, "mamba2", other, out, epochs=8, **given)


def test_a_directory_with_other_things_is_refused(reviews, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refuses("holds no training run", train_model, "mamba2", reviews["train"], tmp_path, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_damaged_checkpoint_is_refused(reviews, tmp_path, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ssmscope.zoo.training.card.save", die)
    with pytest.raises(KeyboardInterrupt):
        train_model("mamba2", reviews["validation"], tmp_path / "o", epochs=1, **OPTIONS)
    state = tmp_path / "o" / "checkpoint" / "state.pt"
    state.write_bytes(state.read_bytes()[:100])
    monkeypatch.undo()
    with pytest.raises(InputError, match="checkpoint .* cannot be read"):
        train_model("mamba2", reviews["validation"], tmp_path / "o", epochs=1, **OPTIONS)


@pytest.mark.parametrize(("architecture", "options", "message"), [
    ("mamba3", {}, "unknown architecture 'mamba3'; choose one of .*did you mean"),
    ("mamba2", {"epochs": 0}, "epochs is 0; it must be at least 1"),
    ("mamba2", {"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
    ("mamba2", {"learning_rate": float("nan")}, "learning_rate is nan; it must be above 0"),
    ("mamba2", {"precision": "fp16"}, "precision is 'fp16'; choose one of fp32, tf32, bf16"),
    ("mamba2", {"beta": 0.1}, "beta does not apply to mamba2"),
    ("baleen-e", {"tau": 0.5}, "tau does not apply to baleen-e"),
    ("baleen-b", {"kl": "true"}, "kl does not apply to baleen-b"),
    ("baleen-b", {"prior": 1.5}, "prior is 1.5; for baleen-b"),
    ("mamba2", {"base": "mamba"}, "base does not apply to mamba2"),
    ("mamba", {"head_width": 8}, "head_width does not apply to mamba"),
    ("mamba2", {"width": 20, "head_width": 16}, "head_width 16 does not divide"),
    ("mamba2", {"device": "abacus"}, "device 'abacus' cannot be used here"),
    ("mamba2", {"vocabulary": 10}, "a vocabulary of 10 is smaller"),
    ("mamba2", {"split": "train"}, "split 'train' was asked for, but file"),
    ("mamba2", {"test": "sst2"}, "sst2 .*"),
    ("mamba2", {"init_from": "demo/absent"}, "demo/absent"),
])  # fmt: skip
def test_impossible_options_are_refused_before_anything_is_written(
    architecture, options, message, reviews, tmp_path, monkeypatch
):
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    refuses(message, train_model, architecture, reviews["train"], tmp_path / "o", progress=False, **options)
    assert not (tmp_path / "o").exists()


def test_a_loss_that_diverges_is_told(reviews, tmp_path):
    with pytest.raises(InputError, match="the loss is (nan|inf) in epoch 1, .*; lower learning_rate"):
        train_model("mamba2", reviews["train"], tmp_path / "o", learning_rate=1e30, clip=1e30, warmup=0.0, **OPTIONS)


def test_biases_norms_and_the_recurrences_own_parameters_do_not_decay():
    for kind in ("mamba", "mamba2"):
        module = random_example(kind)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        decayed, undecayed = parameter_groups(module, 0.3)
        assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
        still = {names[id(p)].rsplit("layers.0.")[-1] for p in undecayed["params"]}
        assert {"norm.weight", "mixer.A_log", "mixer.D", "mixer.conv1d.bias"} <= still
        assert all("weight" in names[id(p)] and p.ndim > 1 for p in decayed["params"])
        assert len(decayed["params"]) + len(undecayed["params"]) == len(names)


def test_the_learning_rate_rises_linearly_and_falls_as_half_a_cosine():
    shares = [schedule(step, 110, 10 / 110) for step in range(110)]
    assert shares[:10] == pytest.approx([(i + 1) / 10 for i in range(10)]) and shares[10] == pytest.approx(1.0)
    assert shares[60] == pytest.approx(0.5) and shares[-1] < 1e-3
    assert all(a > b for a, b in zip(shares[10:], shares[11:]))


def test_sst2_is_learnt(real_data, tmp_path):
    for split in ("train", "validation", "test"):
        real_data("sst2", split)
    options = {"width": 32, "epochs": 1, "embedding_dropout": 0.2, "token_dropout": 0.1, "subword_dropout": 0.0}
    out = train_model("mamba2", "sst2", tmp_path / "o", learning_rate=1e-2, progress=False, **options)
    record = json.loads((out / "training.json").read_text())
    assert record["data"]["train"]["examples"] == 6920 and record["test"]["examples"] == 1821
    assert record["test"]["accuracy"] > 0.6
    assert os.path.getsize(out / "model.safetensors") < 700_000
