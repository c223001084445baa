"""Models of one's own: any module around a backbone, and a backbone alone."""

import numpy as np
import pytest
import torch
from examples import random_example, relative
from loud import doubled, loud
from refusals import refuses
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    MambaModel,
    MambaPreTrainedModel,
    MiniMaxForTokenClassification,
    Qwen3NextForQuestionAnswering,
)
from transformers.modeling_outputs import SequenceClassifierOutput
import ssmscope
from ssmscope.attacks.effect import attack_effect
from ssmscope.data.text import text_data
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.explain import explain
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.interp.methods import METHODS
from ssmscope.probes.lens import trajectory
from ssmscope.zoo.documents import symbol_tokenizer

TEXTS = [[7, 8, 9], [5, 17, 3, 9, 22, 1, 4, 60, 61], [90, 1, 2, 3, 4]]


def backbone(name: str = "mamba") -> nn.Module:
    return random_example(name).base_model


class Wrapper(nn.Module):
    """Module that reads the last of the given positions, after a norm."""

    def __init__(self, inner: nn.Module, classes: int = 3):
        super().__init__()
        self.encoder = inner
        width = inner.config.hidden_size
        self.norm, self.classify = nn.LayerNorm(width), nn.Linear(width, classes)

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, -1]

    def forward(self, input_ids, attention_mask=None):
        return self.classify(self.norm(self.pooled(self.encoder(input_ids)[0])))


class First(Wrapper):
    def pooled(self, hidden):
        return hidden[:, 0] + hidden[:, 1]


class Mean(Wrapper):
    """Module that reads the mean of every position, padding or not, with arguments of its own names."""

    def forward(self, tokens, temperature=2.0):
        return {"loss": None, "logits": self.classify(self.encoder(tokens).last_hidden_state.mean(1)) / temperature}


class Attending(Wrapper):
    """Module that pools by the softmax of scores, which is not linear, and also takes embeddings."""

    def __init__(self, inner):
        super().__init__(inner)
        self.weigh = nn.Linear(inner.config.hidden_size, 1)

    def forward(self, input_ids=None, inputs_embeds=None):
        hidden = self.encoder(input_ids, inputs_embeds=inputs_embeds)[0]
        return (self.classify((hidden * self.weigh(hidden).softmax(1)).sum(1)),)


class Embedding(Wrapper):
    """Module that embeds the ids itself, and adds the mean of the embeddings to its backbone's output."""

    def __init__(self, inner):
        super().__init__(inner)
        self.table = nn.Embedding(97, inner.config.hidden_size)

    def forward(self, ids):
        x = self.table(ids)
        return self.classify(self.encoder(inputs_embeds=x).last_hidden_state[:, -1] + x.mean(1))


class Within(nn.Module):
    """Module with the backbone deep within it."""

    def __init__(self, inner):
        super().__init__()
        self.deep = nn.ModuleDict({"model": Wrapper(inner)})

    def forward(self, input_ids):
        return self.deep["model"](input_ids)


MODULE_CLASSES = {each.__name__: each for each in (Wrapper, First, Mean, Attending, Embedding, Within)}


def made(kind: str, name: str = "mamba") -> nn.Module:
    torch.manual_seed(0)
    return doubled(loud(MODULE_CLASSES[kind](doubled(backbone(name)))))


def alone(module: nn.Module, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found = module(torch.tensor([text]))
    found = found["logits"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found
    return found[0]


@pytest.mark.parametrize("kind", MODULE_CLASSES)
@pytest.mark.parametrize("name", ["mamba", "jamba", "gated-deltanet"])
def test_logits_are_those_of_the_text_alone(kind, name):
    module = made(kind, name)
    model = ssmscope.load(module)
    expected = torch.stack([alone(module, text) for text in TEXTS])
    batch = model.encode(ids=TEXTS)
    assert model.gives == "classes" and model.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert relative(model.logits(batch), expected) < 1e-6 and relative(model.trace(batch).logits, expected) < 1e-6
    with torch.no_grad(), model.running(mask=batch.mask):
        assert relative(model.forward_embeddings(model.embed(batch), batch.mask), expected) < 1e-6


@pytest.mark.parametrize("kind", MODULE_CLASSES)
def test_gradients_are_those_of_the_text_alone(kind):
    module = made(kind)
    model = ssmscope.load(module)
    found = explain(model, model.encode(ids=TEXTS), methods=("gradxinput", "occlusion"), target=1)
    table = model.module.get_input_embeddings()
    for text, ids in zip(found.texts, TEXTS):
        kept = []
        hook = table.register_forward_hook(lambda part, args, output: kept.append(output.requires_grad_()))  # noqa: B023
        logits = module(torch.tensor([ids]))
        logits = logits["logits"] if isinstance(logits, dict) else logits[0] if isinstance(logits, tuple) else logits
        (gradient,) = torch.autograd.grad(logits[0, 1], kept[0])
        hook.remove()
        expected = (gradient * kept[0]).sum(-1)[0].detach().float().numpy()
        np.testing.assert_allclose(text.attributions[0].scores, expected, rtol=2e-3, atol=5e-6)
        assert text.value == pytest.approx(float(logits[0, 1].detach()), rel=1e-5)


@pytest.mark.parametrize("kind", MODULE_CLASSES)
def test_every_method_says_of_a_text_what_it_says_alone(kind):
    model = ssmscope.load(made(kind))
    methods = [name for name in METHODS if name not in ("random", "lrp")]
    asked = dict(methods=methods, target=2, option={"ig": {"cap": 24, "tolerance": 1.0}, "smoothgrad": {"samples": 3}})
    one = explain(model, model.encode(ids=TEXTS[:2]), **asked).texts[0]
    other = explain(model, model.encode(ids=TEXTS[:1]), **asked).texts[0]
    for found, expected in zip(one.attributions, other.attributions, strict=True):
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-6, err_msg=found.method)


class Activated(Wrapper):
    """A head of two layers with an activation between."""

    def __init__(self, inner, act=nn.ReLU):
        super().__init__(inner)
        width = inner.config.hidden_size
        self.act = nn.Sequential(nn.Linear(width, width), act())

    def pooled(self, hidden):
        return self.act(hidden[:, -1])


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid])
def test_relevance_adds_up_through_an_activation(act):
    model = ssmscope.load(loud(Activated(backbone(), act)))
    (attribution,) = explain(model, model.encode(ids=TEXTS[:1]), methods=("lrp",), target=1).texts[0].attributions
    assert attribution.converged and attribution.delta < 1e-4


@pytest.mark.parametrize("kind", ["Wrapper", "First", "Mean", "Embedding", "Within"])
def test_relevance_adds_up_where_the_head_is_linear(kind):
    model = ssmscope.load(made(kind))
    found = explain(model, model.encode(ids=TEXTS), methods=("lrp",), target=0)
    assert all(text.attributions[0].converged and text.attributions[0].delta < 1e-4 for text in found.texts)
    assert "lrp" in explain(model, model.encode(ids=TEXTS), target=0).methods


class Bent(Wrapper):
    def forward(self, input_ids):
        return super().forward(input_ids).tanh()


class Normed(Activated):
    def __init__(self, inner):
        super().__init__(inner, lambda: nn.Softmax(-1))


@pytest.mark.parametrize("make, said", [
    (Bent, r"its own forward pass is not linear; lrp reads heads that are made of linear layers"),
    (Attending, r"its own forward pass is not linear"),
    (Normed, r"lrp has no rule for Softmax \(act\.1\)"),
])  # fmt: skip
def test_relevance_is_refused_where_a_head_bends(make, said):
    model = ssmscope.load(loud(make(backbone())))
    refuses(said, explain, model, model.encode(ids=TEXTS), methods=("lrp",))
    assert "lrp" not in explain(model, model.encode(ids=TEXTS)).methods


def test_measures_over_data():
    module = made("Mean")
    words = [f"w{at}" for at in range(97)]
    model = ssmscope.load(module, tokenizer=symbol_tokenizer(words))
    labels = [int(alone(module, text).argmax()) for text in TEXTS]
    texts = [" ".join(words[at] for at in text) for text in TEXTS]
    data = text_data("own", "test", texts, labels, model.labels)
    found = fidelity_auc(model, data, methods=("gradxinput",), random_rankings=20)
    assert found.predicted.tolist() == labels
    assert found.clean == pytest.approx([float(alone(module, text).softmax(-1).max()) for text in TEXTS], rel=1e-5)


@pytest.mark.parametrize("kind", ["Mean", "Embedding"])
def test_an_effect_compares_what_the_head_reads_of_each_text_alone(kind):
    module, words = made(kind), [f"w{at}" for at in range(97)]
    model = ssmscope.load(module, tokenizer=symbol_tokenizer(words))
    before, after = [5, 17, 3, 9, 22], [5, 17, 4]
    clean, corrupted = (" ".join(words[at] for at in ids) for ids in (before, after))
    found = attack_effect(model, clean=clean, corrupted=corrupted)
    answer = int(alone(module, before).argmax())
    assert found.kept == pytest.approx(float(alone(module, after).softmax(-1)[answer]), rel=1e-5)
    kept = []
    hook = module.encoder.register_forward_hook(lambda part, args, output: kept.append(output[0][0]))
    for text in (before, after):
        alone(module, text)
    hook.remove()
    expected = (kept[0][:2] - kept[1][:2]).norm(dim=-1) / kept[0][:2].norm(dim=-1)
    assert found.distance[-1] == pytest.approx(expected.numpy(), rel=1e-4)


def test_a_lens_reads_a_head_that_is_one_linear_map():
    class Plain(Wrapper):
        def forward(self, input_ids):
            return self.classify(self.encoder(input_ids)[0][:, -1])

    module = doubled(loud(Plain(backbone())))
    model = ssmscope.load(module)
    for lensed, text in zip(trajectory(model, model.encode(ids=TEXTS)).texts, TEXTS):
        assert lensed.answer_probability[-1][0] == pytest.approx(float(alone(module, text).softmax(-1).max()), rel=1e-4)
    refuses("do not give its own logits", trajectory, ssmscope.load(made("Wrapper")), model.encode(ids=TEXTS))


class Language(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.out = inner, nn.Linear(inner.config.hidden_size, 97)

    def forward(self, input_ids):
        return self.out(self.inner(input_ids)[0]) * 2


def test_a_language_model_of_ones_own():
    module = doubled(loud(Language(backbone())))
    model = ssmscope.load(module)
    assert model.gives == "next tokens" and model.labels is None
    batch = model.encode(ids=TEXTS)
    for row, text in enumerate(TEXTS):
        with torch.no_grad():
            own = module(torch.tensor([text]))[0]
        assert relative(model.logits(batch)[row, : len(text)], own) < 1e-6
        assert relative(model.trace(batch).logits[row], own[-1]) < 1e-6
    found = explain(model, model.encode(ids=TEXTS), methods=("lrp",), target=[4, 6, 7])
    assert all(text.attributions[0].delta < 1e-4 for text in found.texts)
    follow = explain(model, model.encode(ids=TEXTS), methods=("gradxinput",), target=[[4, 5], 6, 7]).texts[0]
    with torch.no_grad():
        own = module(torch.tensor([[*TEXTS[0], 4]]))[0].log_softmax(-1)
    assert follow.value == pytest.approx(float(own[-2, 4] + own[-1, 5]), rel=1e-5)


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_language_model_of_ones_own_continues_from_its_states(name):
    """Its backbone is given the ids first, not by name."""
    model = ssmscope.load(loud(Language(backbone(name))))
    assert model.continues
    whole = model.run(model.encode(ids=TEXTS[1]))
    first = model.run(model.encode(ids=TEXTS[1][:4]))
    second = model.run(model.encode(ids=TEXTS[1][4:]), first.states)
    assert relative(torch.cat([first.logits, second.logits], 1), whole.logits) < 1e-5
    assert len(whole.states) == len(second.states) > model.num_layers - (name == "mamba")


def test_a_fingerprint_knows_what_the_user_has_written():
    module = made("Wrapper")
    other = First(module.encoder)
    other.load_state_dict(module.state_dict())
    assert ssmscope.load(module).fingerprint == ssmscope.load(module).fingerprint
    assert ssmscope.load(module).fingerprint != ssmscope.load(other.double().eval()).fingerprint


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_module_stays_as_it_is(dtype):
    module = loud(Wrapper(backbone("jamba")))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model = ssmscope.load(module, dtype=dtype)
    assert (model.module.module is module) == (dtype == "float32")
    assert {p.dtype for p in model.module.parameters()} == {getattr(torch, dtype)}
    model.logits(model.encode(ids=TEXTS))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "rwkv", "gated-deltanet"])
def test_a_backbone_alone_is_read(name):
    whole = doubled(loud(random_example(name)))
    model, known = ssmscope.load(whole.base_model), ssmscope.load(whole)
    trace, expected = model.trace(ids=TEXTS), known.trace(ids=TEXTS)
    torch.testing.assert_close(trace.retention, expected.retention, equal_nan=True)
    torch.testing.assert_close(trace.survival(), expected.survival(), equal_nan=True)
    assert trace.answers == (("no head", pytest.approx(float("nan"), nan_ok=True)),) * 3
    heat, theirs = (selection_heatmap(each, each.encode(ids=TEXTS)) for each in (model, known))
    for one, other in zip(heat, theirs):
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5)
    assert "no head" in heat.to_html()
    implicit_attention(model, model.encode(ids=TEXTS))
    for verb in (explain, trajectory):
        refuses("has no head and gives no answer: its layers can be read", verb, model, model.encode(ids=TEXTS))


class Same(nn.Module):
    """Computation of transformers' classifier, written anew."""

    def __init__(self, module):
        super().__init__()
        self.inner, self.head = module.model, module.score

    def forward(self, input_ids):
        return self.head(self.inner(input_ids)[0][:, -1])


def test_explanations_are_those_of_the_librarys_classifier():
    torch.manual_seed(0)
    theirs = AutoModelForSequenceClassification.from_config(random_example("jamba").config)
    theirs = doubled(loud(theirs))
    one, other = ssmscope.load(theirs), ssmscope.load(Same(theirs))
    asked = dict(methods=("lrp", "gradxinput", "attention-gradient", "gradcam"), target=1)
    for first, second in zip(*(explain(each, each.encode(ids=TEXTS), **asked).texts for each in (one, other))):
        for found, expected in zip(first.attributions, second.attributions, strict=True):
            np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-6, err_msg=found.method)


class OwnForSequenceClassification(MambaPreTrainedModel):
    """Classifier named and built as transformers' are, with a head that reads the mean."""

    def __init__(self, config):
        super().__init__(config)
        self.backbone = MambaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        hidden = self.backbone(input_ids, inputs_embeds=inputs_embeds).last_hidden_state
        return SequenceClassifierOutput(logits=self.score(hidden.mean(1)))


def test_a_classifier_of_ones_own_on_transformers_base():
    config = random_example("mamba").config
    config.id2label = {0: "a", 1: "b", 2: "c"}
    module = doubled(loud(OwnForSequenceClassification(config)))
    model = ssmscope.load(module)
    with torch.no_grad():
        expected = torch.cat([module(torch.tensor([text])).logits for text in TEXTS])
    assert relative(model.logits(model.encode(ids=TEXTS)), expected) < 1e-6 and model.labels == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [MiniMaxForTokenClassification, Qwen3NextForQuestionAnswering])
def test_heads_of_tokens_are_refused(kind):
    name = "minimax" if kind is MiniMaxForTokenClassification else "qwen3_next"
    what = "logits at every position" if name == "minimax" else "a beginning and an end among a text's tokens"
    module = kind(random_example(name).config)
    refuses(f"{kind.__name__} gives {what}.*; .* one answer per text: .* whose layers", ssmscope.load, module)
    assert ssmscope.load(module.base_model).trace(ids=TEXTS).answers[0][0] == "no head"


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_a_backbone_alone_in_a_directory(name, tmp_path):
    module = loud(random_example(name)).base_model
    module.save_pretrained(tmp_path)
    model, known = ssmscope.load(tmp_path), ssmscope.load(module)
    assert model.gives == "nothing"
    torch.testing.assert_close(model.trace(ids=TEXTS).survival(), known.trace(ids=TEXTS).survival(), equal_nan=True)


def test_a_head_of_tokens_in_a_directory(tmp_path):
    MiniMaxForTokenClassification(random_example("minimax").config).save_pretrained(tmp_path)
    refuses("is a MiniMaxForTokenClassification, which gives an answer per token", ssmscope.load, tmp_path)
