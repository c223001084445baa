"""The classifier: any backbone, the last real position, transformers' save and load."""

import pytest
import torch
import transformers
from examples import EXAMPLES, FEW, SAME, VARIANTS
from exhaustive import ALL, CONTRACTS
from loud import loud
from refusals import refuses
from transformers import AutoModelForSequenceClassification, MambaConfig
import ssmscope
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification, last_real

OURS = {name for name, made in EXAMPLES.items() if type(made.models[name]).__module__.startswith("ssmscope.")}
BACKBONES = {
    name: made.models[name].config
    for at, (name, made) in enumerate(EXAMPLES.items())
    if hasattr(made.models[name], "lm_head")
    and (ALL or name in FEW or (at % 2 and name not in VARIANTS | SAME and (name in OURS) != CONTRACTS))
}
"""One for every way in which layers are read, and half of our own on release 4, of transformers' on release 5."""
IDS = torch.tensor([[5, 17, 3, 9, 22, 1], [7, 8, 9, 0, 0, 0]])
MASK = torch.tensor([[1] * 6, [1] * 3 + [0] * 3])


@pytest.fixture(params=BACKBONES)
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
    untold = {"RecurrentGemmaModel", "xLSTMModel", *(["Lfm2Model"] if transformers.__version__ < "5" else [])}
    if type(classifier.backbone).__name__ not in untold:  # their blocks do not learn what is padding
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
    refuses("backbone type 'mambo' is unknown; did you mean 'mamba'", SSMClassifierConfig, {"model_type": "mambo"})
    refuses("needs the configuration of its backbone", SSMForSequenceClassification, SSMClassifierConfig())


PIXEL_BACKBONES = ["mamba2", "baleen-e-mamba2", "gla"]


def of_one_token(config):
    """The configuration with the class token as its only token."""
    fields = {**config.to_dict(), "vocab_size": 1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return type(config).from_dict(fields)


@pytest.fixture(params=PIXEL_BACKBONES)
def pixels(request):
    torch.manual_seed(0)
    backbone = of_one_token(EXAMPLES[request.param].models[request.param].config)
    config = SSMClassifierConfig(backbone, channels=2, image_size=(2, 3), num_labels=3)
    return loud(SSMForSequenceClassification(config))


VALUES = torch.rand(4, 6, 2, generator=torch.Generator().manual_seed(0))


class TestPixels:
    def test_the_class_token_comes_last_and_is_read(self, pixels):
        embeds = pixels.embed_values(VALUES)
        assert embeds.shape == (4, 7, pixels.config.hidden_size)
        torch.testing.assert_close(embeds[:, :-1], VALUES @ pixels.embed.weight.T + pixels.embed.bias)
        assert torch.equal(embeds[:, -1], pixels.get_input_embeddings().weight.expand(4, -1))
        with torch.no_grad():
            hidden = pixels.backbone(inputs_embeds=embeds).last_hidden_state
            logits = pixels(input_values=VALUES).logits
            torch.testing.assert_close(pixels.head(hidden[:, -1]), logits)
            torch.testing.assert_close(pixels(inputs_embeds=embeds).logits, logits)
            padded = torch.cat([embeds, torch.randn(4, 2, embeds.shape[-1])], 1)
            mask = torch.tensor([[1] * 7 + [0] * 2] * 4)
            with ssmscope.fast_scan(pixels):
                torch.testing.assert_close(pixels(inputs_embeds=padded, attention_mask=mask).logits, logits)

    def test_every_pixel_counts_and_order_does(self, pixels):
        model = ssmscope.load(pixels)
        logits = model.logits(model.encode(values=VALUES))
        for position in range(6):
            changed = VALUES.clone()
            changed[:, position] = 1 - changed[:, position]
            assert not torch.allclose(model.logits(model.encode(values=changed)), logits, atol=1e-4)
        assert not torch.allclose(model.logits(model.encode(values=VALUES.flip(1))), logits, atol=1e-4)

    def test_save_load_and_auto_class(self, pixels, tmp_path):
        pixels.save_pretrained(tmp_path)
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
        assert again.config.channels == 2 and tuple(again.config.image_size) == (2, 3)
        assert again.main_input_name == "input_values"
        with torch.no_grad():
            assert torch.equal(again.eval()(input_values=VALUES).logits, pixels(input_values=VALUES).logits)
        model = ssmscope.load(tmp_path)
        assert model.channels == 2 and model.vocabulary == 1 and model.fingerprint == ssmscope.load(pixels).fingerprint

    def test_gradients_reach_the_pixels_and_the_class_token(self, pixels):
        values = VALUES.clone().requires_grad_()
        with ssmscope.fast_scan(pixels):
            loss = pixels(input_values=values, labels=torch.tensor([0, 1, 2, 0])).loss
        loss.backward()
        assert (values.grad.abs().amax((0, 2)) > 0).all()
        assert pixels.get_input_embeddings().weight.grad.abs().max() > 0 and pixels.embed.weight.grad.abs().max() > 0

    def test_refuses(self, pixels):
        refuses("reads pixels: give input_values", pixels, torch.zeros(1, 3, dtype=torch.long))
        with pytest.raises(InputError, match=r"input_values is \(1, 6, 3\); it must be \(batch, length, 2\)"):
            pixels(input_values=torch.zeros(1, 6, 3))
        refuses("give one of input_values", pixels, torch.zeros(1, 3, dtype=torch.long), input_values=VALUES)


def test_a_token_classifier_refuses_pixels_and_knows_no_channels(classifier):
    refuses("reads tokens, not pixels", classifier, input_values=VALUES)
    assert "channels" not in classifier.config.to_dict() and classifier.config.channels is None


@pytest.mark.parametrize(("fields", "says"), [
    ({"channels": 0}, "channels is 0; allowed is a whole number from 1 on"),
    ({"channels": True}, "channels is True"),
    ({"channels": 3, "backbone": MambaConfig(vocab_size=2)}, "give it vocab_size=1, not 2"),
    ({"channels": 3, "image_size": (32,)}, r"image_size is \(32,\); allowed is \[height, width\]"),
    ({"channels": 3, "image_size": (32, 0)}, r"image_size is \(32, 0\); allowed is \[height, width\]"),
    ({"channels": 3, "image_size": (32, 2.0)}, r"image_size is \(32, 2.0\)"),
    ({"channels": 3, "image_size": (1, 2, 3)}, r"image_size is \(1, 2, 3\)"),
    ({"channels": 1.0}, "channels is 1.0; allowed"),
    ({"image_size": (2, 3)}, r"image_size \(2, 3\) needs channels"),
    *(
        ({"channels": 12, "image_size": size, "patch": patch}, r"patch is .*; allowed is \[size, step\] in pixels")
        for size, patch in (((2, 3), (2,)), ((2, 3), (0, 1)), ((2, 3), (1, 0)), ((2, 3), (2, True)), (None, (2, 1)))
    ),
    ({"channels": 6, "image_size": (2, 3), "patch": (2, 1)}, "channels 6 are not those of the 4 pixels of a patch"),
])  # fmt: skip
def test_pixel_configurations_that_are_refused(fields, says):
    refuses(says, SSMClassifierConfig, **{"backbone": MambaConfig(vocab_size=1), **fields})


def test_pixel_configurations_that_are_allowed():
    def made(**fields):
        return SSMClassifierConfig(MambaConfig(vocab_size=1), **fields)

    plain = made(channels=1)
    assert (plain.channels, plain.image_size, plain.patch) == (1, None, None)
    assert "patch" not in plain.to_dict() and "image_size" not in plain.to_dict()
    one = made(channels=4, image_size=(1, 1), patch=(1, 1))
    assert (one.channels, one.image_size, one.patch) == (4, [1, 1], [1, 1])
    found = made(channels=12, image_size=(2, 3), patch=(2, 5))
    assert (found.image_size, found.patch) == ([2, 3], [2, 5])
    again = SSMClassifierConfig.from_dict(found.to_dict())
    assert (again.channels, again.image_size, again.patch) == (12, [2, 3], [2, 5])
    assert again.hidden_size == again.backbone.hidden_size and again.vocab_size == 1
    own = SSMClassifierConfig(MambaConfig(pad_token_id=7), hidden_size=3, vocab_size=5)
    assert own.pad_token_id == 7 and own.hidden_size == 768 and own.vocab_size == 50280
    assert SSMClassifierConfig(MambaConfig(pad_token_id=7), pad_token_id=8).pad_token_id == 8


LOGITS = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]])


@pytest.mark.parametrize(("problem", "outputs", "labels", "expected"), [
    (None, 3, [2, 0], -(LOGITS.log_softmax(-1)[0, 2] + LOGITS.log_softmax(-1)[1, 0]) / 2),
    ("multi_label_classification", 3, [[1, 0, 1], [0, 1, 0]],
     -(LOGITS * torch.tensor([[1, -1, 1], [-1, 1, -1]])).sigmoid().log().mean()),
    ("regression", 3, [[1, 0, 2], [3, 0, 0]], (LOGITS - torch.tensor([[1, 0, 2], [3, 0, 0]])).square().mean()),
    ("regression", 1, [2, 3], torch.tensor(((0.5 - 2) ** 2 + (1.5 - 3) ** 2) / 2)),
])  # fmt: skip
def test_losses_by_kind(problem, outputs, labels, expected, monkeypatch):
    backbone = MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2, time_step_rank=2)
    config = SSMClassifierConfig(backbone, num_labels=outputs, problem_type=problem)
    module = SSMForSequenceClassification(config)
    monkeypatch.setattr("ssmscope.networks.classifier.applied", lambda head, hidden: LOGITS[:, :outputs])
    for training in (True, False):
        found = module.train(training)(torch.tensor([[1, 2], [3, 4]]), labels=torch.tensor(labels))
        torch.testing.assert_close(found.loss, expected)
        assert found.hidden_states is None
    states = module(torch.tensor([[1, 2], [3, 4]]), output_hidden_states=True)
    assert states.loss is None and len(states.hidden_states) == 2


def test_its_own_parts_are_initialised_by_their_width():
    torch.manual_seed(0)
    backbone = MambaConfig(vocab_size=1, hidden_size=64, num_hidden_layers=1)
    module = SSMForSequenceClassification(SSMClassifierConfig(backbone, channels=100, num_labels=200))
    for part, width in ((module.head, 64), (module.embed, 100)):
        assert float(part.weight.detach().std()) == pytest.approx(width**-0.5, rel=0.05) and not part.bias.any()
    assert module.backbone.layers[0].mixer.dt_proj.bias.any()


def test_a_divergence_is_added_in_training_alone(monkeypatch):
    backbone = MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2, time_step_rank=2)
    module = SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=3))
    module.config.backbone.kl_weight = 0.25
    ids, labels = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 0])
    plain = module.eval()(ids, labels=labels).loss
    monkeypatch.setattr("ssmscope.networks.classifier.information_loss", lambda part: torch.tensor(8.0))
    assert torch.equal(module(ids, labels=labels).loss, plain)
    torch.testing.assert_close(module.train()(ids, labels=labels).loss, plain + 2)
