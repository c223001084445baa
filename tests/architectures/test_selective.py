"""The selective SSM's language model and classifier: one set of weights, two heads."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from ssmscope.zoo.selective import (
    SelectiveSSMConfig,
    SelectiveSSMForCausalLM,
    SelectiveSSMForSequenceClassification,
    SelectiveSSMModel,
)
from ssmscope.zoo.training.fitting import monitored

IDS = torch.tensor([[5, 17, 3, 9, 11], [7, 8, 9, 1, 2]])
SIZES = dict(vocab_size=23, hidden_size=6, state_size=3)
NAMES = ["embedding.weight", "ssm.A", "ssm.W_B", "ssm.W_C", "ssm.q_delta", "ssm.p_delta"]


@pytest.fixture
def language():
    torch.manual_seed(0)
    model = SelectiveSSMForCausalLM(SelectiveSSMConfig(**SIZES, spectral_abscissa=-0.1)).eval()
    nn.init.normal_(model.backbone.ssm.p_delta)
    return model


@pytest.fixture
def classifier():
    torch.manual_seed(1)
    return SelectiveSSMForSequenceClassification(SelectiveSSMConfig(**SIZES)).eval()


def by_hand(model, ids):
    """Logits (length, vocabulary) of one row, token by token (Honarpisheh et al., Eq. 3)."""
    w, ssm, x, logits = model.backbone.embedding.weight, model.backbone.ssm, torch.zeros(6, 3), []
    for token in ids:
        u = w[token]
        step = softplus(ssm.p_delta + ssm.q_delta @ u)
        x = torch.exp(step * ssm.A) * x + step * torch.outer(u, ssm.W_B @ u)
        logits.append(model.lm_head.weight @ (x @ (ssm.W_C @ u)))
    return torch.stack(logits)


@torch.no_grad()
def test_logits_and_loss(language):
    expected = torch.stack([by_hand(language, row) for row in IDS])
    labels = IDS.masked_fill(torch.tensor([0, 1, 0, 0, 1]).bool(), -100)
    found = language(IDS, labels=labels)
    torch.testing.assert_close(found.logits, expected)
    asked = [(row, t) for row in range(2) for t in range(4) if labels[row, t + 1] != -100]
    losses = [cross_entropy(expected[row, t], IDS[row, t + 1]) for row, t in asked]
    torch.testing.assert_close(found.loss, torch.stack(losses).mean())
    as_tuple = language(IDS, labels=labels, return_dict=False)
    torch.testing.assert_close(as_tuple[1], expected)
    torch.testing.assert_close(language(inputs_embeds=language.get_input_embeddings()(IDS)).logits, expected)


def test_names_and_heads(language, classifier):
    assert list(classifier.state_dict()) == [*NAMES, "head.weight"]
    assert list(language.state_dict()) == [*(f"backbone.{name}" for name in NAMES), "lm_head.weight"]
    assert language.get_output_embeddings().weight is not language.get_input_embeddings().weight
    assert language.base_model is language.backbone and type(language.backbone) is SelectiveSSMModel
    new = [nn.Embedding(4, 6), nn.Linear(6, 4, bias=False)]
    language.set_input_embeddings(new[0])
    language.set_output_embeddings(new[1])
    assert [language.get_input_embeddings(), language.get_output_embeddings()] == new


def test_a_head_is_drawn_once():
    """Embedding, SSM and head are drawn in this order, which gives a seed's classifier."""
    torch.manual_seed(5)
    model = SelectiveSSMForSequenceClassification(SelectiveSSMConfig(**SIZES, binary=False, num_labels=4))
    torch.manual_seed(5)
    embedding, _ = nn.Embedding(23, 6), type(model.ssm)(6, 3)
    assert torch.equal(embedding.weight, model.embedding.weight)
    assert torch.equal(nn.Linear(6, 4, bias=False).weight, model.head.weight)


def test_each_opens_the_others_directory(language, classifier, tmp_path):
    classifier.save_pretrained(tmp_path / "classifier")
    language.save_pretrained(tmp_path / "language")
    opened, about = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert type(opened) is SelectiveSSMForCausalLM and set(about["missing_keys"]) == {"lm_head.weight"}
    assert_drawn(opened.lm_head)
    for name in NAMES:
        assert torch.equal(opened.backbone.state_dict()[name], classifier.state_dict()[name])
    opened, about = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "language", output_loading_info=True
    )
    assert type(opened) is SelectiveSSMForSequenceClassification and set(about["missing_keys"]) == {"head.weight"}
    assert_drawn(opened.head)
    for name in NAMES:
        assert torch.equal(opened.state_dict()[name], language.backbone.state_dict()[name])
    backbone = transformers.AutoModel.from_pretrained(tmp_path / "language")
    torch.testing.assert_close(backbone(IDS).last_hidden_state, language.backbone(IDS).last_hidden_state)
    assert backbone(IDS, return_dict=False)[0].shape == (2, 5, 6)


def assert_drawn(head):
    """Assert that weights are uniform within 1 / √inputs, as a linear map's are."""
    assert 0 < head.weight.abs().max() <= head.in_features**-0.5 and head.weight.unique().numel() == head.weight.numel()


def test_a_configuration_makes_a_language_model():
    made = transformers.AutoModelForCausalLM.from_config(SelectiveSSMConfig(**SIZES, tie_word_embeddings=True))
    assert type(made) is SelectiveSSMForCausalLM and not made.config.tie_word_embeddings
    assert made.lm_head.weight is not made.backbone.embedding.weight


def test_norms_are_those_of_the_papers_table(language):
    """Table 3's columns, of weights whose norms are known."""
    ssm = language.backbone.ssm
    with torch.no_grad():
        ssm.W_B.copy_(torch.tensor([[3.0, -4.0, 0, 0, 0, 0], [0] * 6, [0] * 6]))
        ssm.W_C.copy_(torch.diag(torch.tensor([2.0, -1.0, 5.0])).repeat(1, 2))
        language.backbone.embedding.weight[7] = torch.tensor([10.0, 0, 0, 0, -10.0, 0])
    found = monitored(language)
    assert (found["norm_W_B"], found["norm_W_B_entrywise"]) == pytest.approx((5, 7))
    assert (found["norm_W_C"], found["norm_W_C_entrywise"]) == pytest.approx((5 * 2**0.5, 16))
    assert found["norm_u"] == pytest.approx(200**0.5)
    assert (found["norm_p"], found["norm_q"]) == pytest.approx((abs(float(ssm.p_delta)), float(ssm.q_delta.norm())))
    assert (found["norm_A"], found["spectral_abscissa"]) == pytest.approx((float(-ssm.A.min()), -0.1))
