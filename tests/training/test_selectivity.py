"""Selectivity of a model, as its card reports it."""

import json
import math
import statistics

import pytest
import torch
import ssmscope
from ssmscope.core.known_models import demos
from ssmscope.core.mixers import fast_scan
from ssmscope.zoo.baleen import exponential_kl, prior_of
from ssmscope.zoo.training.card import Selectivity, model_card

TEXTS = ["A gripping film.", "Flat.", "The jokes fall flat, but the music is lovely and the cast is good."]
model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-baleen-e"))


def watched(model, batches):
    found = Selectivity(model.module)
    with torch.no_grad(), fast_scan(model.module, visit=found.visit):
        for texts in batches:
            given = model.tokenizer(texts, padding=True, return_tensors="pt")
            model.module(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
    return found.records()


def test_padding_is_left_out(model):
    alone, together = watched(model, [[text] for text in TEXTS]), watched(model, [TEXTS])
    for one, other in zip(alone, together, strict=True):
        assert one["variation"] == pytest.approx(other["variation"], abs=2e-4)
        assert one["half_life"] == pytest.approx(other["half_life"], rel=1e-3)
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-4) and math.isfinite(one["kl"])


def test_of_one_text_what_its_trace_says(model):
    layers = model.trace(TEXTS[2]).layers
    for record, layer, mixer in zip(
        watched(model, [[TEXTS[2]]]), layers, Selectivity(model.module).mixers, strict=True
    ):
        delta = layer.recurrence.delta[0].double()
        variation = delta.std(0, correction=0) / delta.mean(0)
        assert record["variation"] == pytest.approx(variation.tolist(), abs=1e-4)
        assert record["selective"] == (variation >= 0.1).double().mean()
        life = math.log(2) / -layer.recurrence.log_decay()[0].double().mean((0, 2))
        assert record["half_life"] == pytest.approx(life.tolist(), rel=1e-3, abs=6e-3)
        kl = exponential_kl(delta, torch.as_tensor(prior_of(mixer)).to(delta), mixer.baleen.kl).mean()
        assert record["kl"] == pytest.approx(kl.item(), rel=1e-4)


def test_a_card_says_whether_the_model_selects(model):
    record = json.loads((demos()["demo/sst2-baleen-e"] / "training.json").read_text())
    layers = watched(model, [TEXTS])
    card = model_card({**record, "selectivity": {"part": "validation", "layers": layers}})
    rows = [
        line.split(" | ") for line in card.split("## Selection")[1].splitlines() if line.startswith(("| 0 ", "| 1 "))
    ]
    assert len(rows) == len(layers) == 2
    for row, layer in zip(rows, layers, strict=True):
        assert row[1].startswith(f"{statistics.median(layer['variation']):.3g} (")
        assert row[2] == f"{100 * layer['selective']:.0f} %" and row[4] == f"{layer['kl']:.3f} |"
    assert "## Selection" not in model_card({**record, "selectivity": {"part": "validation", "layers": []}})
