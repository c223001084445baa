"""Classifiers whose logits have no softmax: several labels, of which any may be right, and numbers."""

import math

import numpy as np
import pytest
import torch
from loud import loud
from refusals import refuses
from transformers import JambaConfig, JambaForSequenceClassification, Mamba2Config
from ssmscope.attacks.effect import attack_effect
from ssmscope.attacks.insertion import insertion_sweep
from ssmscope.attacks.overflow import state_overflow
from ssmscope.attacks.position import position_bias
from ssmscope.attacks.prompts import prompt_attack
from ssmscope.attacks.words import word_attack
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.ablate import ablate
from ssmscope.interp.explain import explain
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.interp.knockout import knockout
from ssmscope.interp.objective import objective
from ssmscope.interp.patch import patch
from ssmscope.interp.plausibility import plausibility
from ssmscope.interp.steer import steer
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.lens import trajectory
from ssmscope.zoo.documents import symbol_tokenizer

WORDS = [f"w{at}" for at in range(48)]
TEXTS = ["w5 w1 w17 w3 w9 w20 w2", "w8 w30 w4"]
SEVERAL, NUMBER = dict(num_labels=4, problem_type="multi_label_classification"), dict(num_labels=1)
HEADS = {"several": SEVERAL, "number": NUMBER}


def of_ssmscope(**head) -> torch.nn.Module:
    backbone = Mamba2Config(
        vocab_size=48, hidden_size=16, num_hidden_layers=2, expand=2, state_size=4, num_heads=4, head_dim=8, n_groups=1
    )
    return SSMForSequenceClassification(SSMClassifierConfig(backbone, **head))


def of_transformers(**head) -> torch.nn.Module:
    sizes = dict(vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    layers = dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2)
    mixers = dict(num_key_value_heads=1, mamba_d_state=4, mamba_dt_rank=3, use_mamba_kernels=False)
    return JambaForSequenceClassification(JambaConfig(**sizes, **layers, **mixers, **head))


@pytest.fixture(params=[of_ssmscope, of_transformers], ids=["ours", "theirs"])
def make(request):
    def made(**head) -> Model:
        torch.manual_seed(0)
        return Model(loud(request.param(**head)), symbol_tokenizer(WORDS), "own")

    return made


def own(model: Model, text: str) -> torch.Tensor:
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    with torch.no_grad():
        return model.module(input_ids=ids).logits[0].double()


def test_the_answer_of_several_labels_is_the_likeliest_by_its_sigmoid(make):
    model = make(**SEVERAL)
    for (name, p), text in zip(model.trace(TEXTS).answers, TEXTS):
        logits = own(model, text)
        assert name == f"LABEL_{int(logits.argmax())}"
        assert p == pytest.approx(float(logits.sigmoid().max()), rel=1e-4)
    found = explain(model, TEXTS, methods=("gradxinput",))
    assert [text.probability for text in found.texts] == pytest.approx([p for _, p in model.trace(TEXTS).answers])
    asked = objective(model, model.encode(TEXTS), target="LABEL_1", probability=True).values()
    assert asked.tolist() == pytest.approx([float(own(model, text)[1].sigmoid()) for text in TEXTS], rel=1e-4)


@pytest.mark.parametrize("target", ["LABEL_1", 1, "1", ["LABEL_1"], ["LABEL_1", 1], np.int64(1)])
def test_a_target_by_name(make, target):
    found = explain(make(num_labels=3), TEXTS, methods=("gradxinput",), target=target)
    assert [text.target for text in found.texts] == ["LABEL_1"] * 2
    assert [text.value for text in found.texts] == pytest.approx(
        [float(own(make(num_labels=3), text)[1]) for text in TEXTS], rel=1e-4
    )


def test_a_label_is_knocked_out_by_its_sigmoid(make):
    model = make(**SEVERAL)
    found = knockout(model, TEXTS[0], from_="0", answer="LABEL_3")
    logits = own(model, TEXTS[0])
    assert found.probability.tolist() == pytest.approx([float(logits[3].sigmoid())], rel=1e-4)
    assert found.probabilities == pytest.approx(1 / (1 + np.exp(-found.logits)), rel=1e-5)


def test_the_answer_of_a_regression_is_its_number(make):
    model = make(**NUMBER)
    for (said, p), text in zip(model.trace(TEXTS).answers, TEXTS):
        name, _, value = said.partition(" = ")
        assert name == "LABEL_0" and float(value) == pytest.approx(float(own(model, text)), rel=1e-3) and math.isnan(p)
    found = explain(model, TEXTS, methods=("gradxinput", "lrp"))
    assert [text.value for text in found.texts] == pytest.approx([float(own(model, text)) for text in TEXTS], rel=1e-4)
    for view in (selection_heatmap(model, TEXTS), found):
        html = view.to_html()
        assert "“LABEL_0 = " in html and "p = " not in html


@pytest.mark.parametrize("head, labels", [
    (SEVERAL, [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]),
    (NUMBER, [0.5, -2.0]),
    (dict(num_labels=2, problem_type="regression"), [[0.5, 1.0], [-2.0, 3.0]]),
    (dict(num_labels=3), [2, 0]),
])  # fmt: skip
def test_the_loss_is_that_of_transformers(head, labels):
    ids, given = torch.tensor([[5, 1, 17], [9, 4, 2]]), torch.tensor(labels)
    module = loud(of_ssmscope(**head))
    logits = module(input_ids=ids).logits
    expected = of_transformers(**head).loss_function(labels=given, pooled_logits=logits, config=module.config)
    torch.testing.assert_close(module(input_ids=ids, labels=given).loss, expected)


def test_several_numbers_are_all_said(make):
    model = make(num_labels=2, problem_type="regression")
    first, second = own(model, TEXTS[0]).tolist()
    assert model.trace(TEXTS[0]).answers[0][0] == f"LABEL_0 = {first:.4g}, LABEL_1 = {second:.4g}"


def data(model: Model):
    names = model.labels if len(model.labels) > 1 else ["LABEL_0", "other"]
    return text_data("own", "test", TEXTS * 2, [0, 1] * 2, names, [((0, 2),)] * 4)


NEED_CLASSES = {
    "fidelity": lambda model: fidelity_auc(model, data(model), methods=("gradxinput",)),
    "plausibility": lambda model: plausibility(model, data(model), methods=("gradxinput",)),
    "position": lambda model: position_bias(model, data(model)),
    "insertion": lambda model: insertion_sweep(model, data(model)),
    "overflow": lambda model: state_overflow(model, data(model)),
    "words": lambda model: word_attack(model, data(model)),
    "prompts": lambda model: prompt_attack(model, data(model), template="w1 {content}"),
    "ablate": lambda model: ablate(model, data(model)),
    "lens": lambda model: trajectory(model, TEXTS),
}
NEED_PROBABILITIES = {
    "patch": lambda model: patch(model, clean=TEXTS[1], corrupted="w8 w30 w5", answer=0, contrast=1),
    "steer": lambda model: steer(model, TEXTS[:1], toward=TEXTS[:1], away=TEXTS[1:]),
    "effect": lambda model: attack_effect(model, clean=TEXTS[0], corrupted=TEXTS[1]),
}


@pytest.mark.parametrize("verb", NEED_CLASSES)
@pytest.mark.parametrize("head", HEADS)
def test_measures_of_classes_are_refused(make, head, verb):
    said = "own gives (labels of which several may be right|numbers, as a regression does), and .* needs one class"
    refuses(said, lambda: NEED_CLASSES[verb](make(**HEADS[head])))


@pytest.mark.parametrize("verb", NEED_PROBABILITIES)
def test_a_number_has_no_probability(make, verb):
    with pytest.raises(InputError, match="own gives numbers, as a regression does, and no probabilities"):
        NEED_PROBABILITIES[verb](make(num_labels=2, problem_type="regression"))


def test_a_lens_reads_another_librarys_classifier(make):
    model = make(num_labels=3)
    for lensed, text in zip(trajectory(model, TEXTS).texts, TEXTS):
        p = own(model, text).softmax(-1)
        assert lensed.answer_probability[-1] == pytest.approx([float(p.max())], rel=1e-4)
        assert lensed.answers[-1] == (f"LABEL_{int(p.argmax())}",)
