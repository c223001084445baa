"""Contracts of models that are ours, which transformers' models meet too."""

from __future__ import annotations

import json

import pytest
import torch
from examples import EXAMPLES, VARIANTS, random_example, relative
from exhaustive import CONTRACTS
from loud import loud
from transformers import AutoModel, AutoModelForCausalLM

from ssmscope.architectures.own.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.core.model import Model

LANGUAGE = [
    name
    for name in EXAMPLES
    if (CONTRACTS or name not in VARIANTS)
    and (kind := type(random_example(name))).__module__.startswith("ssmscope.")
    and kind.__name__.endswith("ForCausalLM")
]
BACKBONES = [name for name in LANGUAGE if not name.startswith("selective-ssm")]  # which has a classifier of its own
PADDED = torch.tensor([[3, 9, 17, 4], [0, 0, 21, 8]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def pads(model) -> bool:
    """Return True if padding before a text changes nothing; transformers' mixers with biases convolve that of
    padding."""
    return not getattr(model.config, "use_bias", False)


@pytest.fixture(params=LANGUAGE)
def language(request):
    return loud(random_example(request.param))


def test_generation_runs_the_whole_sequence(language):
    language.generation_config.eos_token_id = None
    ids, mask = PADDED
    made = language.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (2, 8)
    for row, start in ((0, 0), (1, 2))[: 1 + pads(language)]:
        for n in range(4, 8):
            with torch.no_grad():
                assert language(made[row : row + 1, start:n]).logits[0, -1].argmax() == made[row, n]


def test_auto_classes_open_what_was_saved(language, tmp_path):
    language.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(language)
    for name, weight in language.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    backbone = AutoModel.from_pretrained(tmp_path)
    assert isinstance(backbone, type(language.backbone)) and backbone.config_class is language.config_class


def test_half_precision_stays_near(language):
    ids = torch.tensor([[3, 9, 17, 4]])
    with torch.no_grad():
        whole = language(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            mixed = language(ids).logits
        half = language.bfloat16()(ids).logits
    for other in (mixed, half):
        assert 0 < relative(other.float(), whole) < 0.1


@pytest.mark.parametrize("language", BACKBONES, indirect=True)
def test_it_is_a_classifiers_backbone(language, tmp_path):
    torch.manual_seed(0)
    config = SSMClassifierConfig(backbone=language.config.to_dict(), num_labels=3)
    classifier = loud(SSMForSequenceClassification(config))
    assert isinstance(classifier.backbone, type(language.backbone))
    assert classifier.backbone.config_class is language.config_class
    ids, mask = torch.tensor([[0, 0, 5, 6, 7], [5, 6, 7, 0, 0]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        left, right = classifier(ids, attention_mask=mask).logits
        embeds = classifier.get_input_embeddings()(ids)
        torch.testing.assert_close(classifier(inputs_embeds=embeds, attention_mask=mask).logits[0], left)
    if pads(language):
        torch.testing.assert_close(left, right)
    classifier.save_pretrained(tmp_path)
    again = SSMForSequenceClassification.from_pretrained(tmp_path)
    assert type(again.backbone) is type(AutoModel.from_config(again.config.backbone))
    assert json.loads(again.config.to_json_string()) == json.loads(classifier.config.to_json_string())
    model = Model(again.eval())
    torch.testing.assert_close(model.logits(model.encode(ids=[5, 6, 7]))[0], right)
