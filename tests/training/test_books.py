"""Language models of documents: the recipe, a run, what its record and card say, and Baleen's options on the way."""

from __future__ import annotations

import inspect
import json
import math

import pytest
import torch
from refusals import refuses
from written_rows import write_rows
import ssmscope
from ssmscope.zoo.documents import bits_per_character, document_data, load_documents
from ssmscope.zoo.training import train_model
from ssmscope.zoo.training.fitting import matrix_products

SIZES = dict(width=16, layers=1, state=8, head_width=8, vocabulary=300, length=32, batch_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for split, number in (("train", 12), ("validation", 3), ("test", 2)):
        texts = [f"Chapter {i}\nThe {split} café was open, and “nobody” came in. " * 4 for i in range(number)]
        write_rows(root / "books" / f"{split}.parquet", [{"text": text} for text in texts])
    return root


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSMSCOPE_DATA", str(folder))
        out = tmp_path_factory.mktemp("runs") / "books"
        train_model("mamba2", "books", out, epochs=2, **SIZES, precision="tf32", progress=False)
        yield out


def test_the_record_has_bits_per_character_of_the_stored_weights(trained):
    record = json.loads((trained / "training.json").read_text())
    model = ssmscope.load(trained)
    data = document_data(load_documents("books", "test"), model.tokenizer, length=32)
    logits = model.module(input_ids=torch.from_numpy(data.ids)).logits
    targets = torch.from_numpy(data.targets)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    exact = bits_per_character(nats.sum(1).detach().numpy(), data.characters)
    measured = record["test"]
    assert measured["bits_per_character"] == pytest.approx(exact, rel=1e-5)
    assert measured["characters"] == sum(map(len, load_documents("books", "test")))
    nats_in_all = measured["cross_entropy"] * measured["asked"]
    assert measured["bits_per_character"] == pytest.approx(nats_in_all / math.log(2) / measured["characters"])
    card = (trained / "README.md").read_text()
    assert "# mamba2 language model for books\n" in card and "in rows of 32 tokens" in card
    for part in ("validation", "test"):
        assert f"| {part} | {record[part]['bits_per_character']:.4f} | " in card
    assert model.tokenizer.decode(model.tokenizer("The café\n“x”")["input_ids"]) == "The café\n“x”"


def test_a_baleen_starts_from_its_weights_and_tokenizer(trained, folder, tmp_path):
    given = dict(epochs=1, init_from=trained, batch_size=4, length=32, progress=False)
    annealed = dict(samples="soft", tau=1.0, prior_from=0.9, prior_step=0.2, prior_every=1, kl_over="sum")
    out = train_model("baleen-b", "books", tmp_path / "b", **given, **annealed)
    config = json.loads((out / "config.json").read_text())
    assert (config["samples"], config["kl_over"], config["tau"], config["prior"]) == ("soft", "sum", 1.0, None)
    assert ssmscope.load(out).tokenizer.get_vocab() == ssmscope.load(trained).tokenizer.get_vocab()
    recipe = json.loads((out / "training.json").read_text())["recipe"]
    assert recipe["prior_from"] == 0.9 and "vocabulary" not in recipe


def test_the_recipe_is_the_datas_own(folder):
    from ssmscope.zoo.training.options import DATA, defaults
    from ssmscope.zoo.training.plan import checked
    from ssmscope.zoo.training.run import train_model as called

    given = {name: p.default for name, p in inspect.signature(called).parameters.items()}
    settled = checked({**given, "architecture": "mamba2", "data": "books", "out": "x"})
    assert {name: settled[name] for name in DATA["books"]} == DATA["books"]
    assert settled["vocabulary"] == 4096 and settled["saved_as"] == "bfloat16" and settled["schedule"] == "cosine"
    assert defaults("mamba2", "language", None, "wikitext2")["width"] == 128


@pytest.mark.parametrize("given, message", [
    (dict(unit="byte"), "unit does not apply to books"),
    (dict(split="test"), "split does not apply to books"),
    (dict(vocabulary=100), "no room for 256 bytes"),
    (dict(architecture="baleen-b", prior_step=0.1), "give that too"),
    (dict(architecture="baleen-b", prior_from=1.0), "prior_from is 1.0; it must be above 0 and below 1"),
    (dict(architecture="baleen-e", samples="soft"), "samples does not apply to baleen-e"),
    (dict(architecture="baleen-e", kl_over="max"), "kl_over is 'max'; choose one of mean, sum"),
    (dict(architecture="mamba2", prior_per="head"), "prior_per does not apply to mamba2"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(folder, tmp_path, monkeypatch, given, message):
    monkeypatch.setenv("SSMSCOPE_DATA", str(folder))
    refuses(message, train_model, given.pop("architecture", "mamba2"), "books", tmp_path / "o", **given, progress=False)
    assert not (tmp_path / "o").exists()


def test_the_precision_of_products_is_as_before_afterwards():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(KeyError), matrix_products("high"):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before
