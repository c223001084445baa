"""The classifier: any backbone, the last real position, transformers' save and load."""

from __future__ import annotations

import pytest
import torch
from loud import loud
from transformers import AutoModelForSequenceClassification, MambaConfig

import ssmscope
from ssmscope.errors import InputError
from ssmscope.models import architectures
from ssmscope.models.classifier import SSMClassifierConfig, SSMForSequenceClassification, last_real

BACKBONES = {
    name: module.config
    for architecture in architectures().values()
    for name, module in architecture.examples().items()
    if hasattr(module, "lm_head")
}
IDS = torch.tensor([[5, 17, 3, 9, 22, 1], [7, 8, 9, 0, 0, 0]])
MASK = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])


@pytest.fixture(params=list(BACKBONES))
def classifier(request):
    torch.manual_seed(0)
    config = SSMClassifierConfig(BACKBONES[request.param], num_labels=3, id2label={0: "no", 1: "perhaps", 2: "yes"})
    return loud(SSMForSequenceClassification(config))


def test_reads_the_last_real_position(classifier):
    with torch.no_grad(), ssmscope.fast_scan(classifier):
        together = classifier(IDS, attention_mask=MASK).logits
        hidden = classifier.backbone(input_ids=IDS[:1]).last_hidden_state
        alone = classifier(IDS[1:, :3]).logits
        left = classifier(IDS[1:].roll(3, 1), attention_mask=MASK[1:].roll(3, 1)).logits
    torch.testing.assert_close(together[:1], classifier.head(hidden[:, -1]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1:], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(left, alone, rtol=1e-4, atol=1e-4)


def test_save_load_and_auto_class(classifier, tmp_path):
    classifier.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is SSMForSequenceClassification
    assert type(again.config.backbone) is type(classifier.config.backbone)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(IDS, MASK).logits, classifier(IDS, MASK).logits)
    model = ssmscope.load(tmp_path)
    assert model.labels == ["no", "perhaps", "yes"] and model.is_classifier
    assert model.architecture == classifier.config.backbone.model_type
    trace = model.trace(ids=[[5, 17, 3], [7, 8]])
    assert trace.logits.shape == (2, 3) and {a for a, _ in trace.answers} <= set(model.labels)


def test_embeddings_as_input_and_loss(classifier):
    embeds = classifier.get_input_embeddings()(IDS)
    with torch.no_grad():
        by_ids = classifier(IDS, MASK, labels=torch.tensor([2, 0]))
        by_embeds = classifier(inputs_embeds=embeds, attention_mask=MASK)
        pair = classifier(IDS, MASK, return_dict=False)
    torch.testing.assert_close(by_ids.logits, by_embeds.logits)
    torch.testing.assert_close(by_ids.logits, pair[0])
    expected = torch.nn.functional.cross_entropy(by_ids.logits, torch.tensor([2, 0]))
    torch.testing.assert_close(by_ids.loss, expected)


def test_dropout_acts_in_training_only():
    config = SSMClassifierConfig(MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1), dropout=0.5)
    model = SSMForSequenceClassification(config)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, model(ids).logits)
        assert not torch.equal(model.train()(ids).logits, model(ids).logits)


def test_last_real():
    hidden = torch.arange(12.0).view(2, 3, 2)
    assert last_real(hidden, None).tolist() == [[4, 5], [10, 11]]
    assert last_real(hidden, torch.tensor([[1, 1, 0], [0, 1, 1]])).tolist() == [[2, 3], [10, 11]]


def test_unknown_backbone():
    with pytest.raises(InputError, match="backbone type 'mambo' is unknown; did you mean 'mamba'"):
        SSMClassifierConfig({"model_type": "mambo"})
    with pytest.raises(InputError, match="needs the configuration of its backbone"):
        SSMForSequenceClassification(SSMClassifierConfig())
