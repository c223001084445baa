"""transformers' classifiers of every family that has one: a text batched with a longer one is as it is alone."""

import numpy as np
import pytest
import torch
from examples import EXAMPLES, TEXTS, random_example, relative
from exhaustive import CONTRACTS, few
from loud import doubled, loud
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification
from ssmscope.attacks.position import position_bias
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.interp.explain import explain
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.methods import METHODS
from ssmscope.zoo.documents import symbol_tokenizer

BATCH = [TEXTS[1], TEXTS[0], TEXTS[2]]
PADDED_WITH = {"nothing": None, "a token of the texts": TEXTS[1][-1], "another": 33}


def of_transformers(name: str) -> bool:
    kind = type(random_example(name).config)
    known = kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    return known and MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[kind].__module__.startswith("transformers.")


FAMILIES = [name for name in EXAMPLES if of_transformers(name)]


def classifier(name: str, pad: int | None = None, **config):
    torch.manual_seed(0)
    settings = random_example(name).config
    settings.update({"pad_token_id": pad, "num_labels": 3, **config})
    return loud(AutoModelForSequenceClassification.from_config(settings))


def test_families_are_known():
    assert {"jamba", "minimax", "qwen3_next", "zamba", "zamba2"} <= set(FAMILIES)


def own(module, text: list[int]) -> torch.Tensor:
    """Return the library's logits of a text alone, by embeddings, of which it reads the last, whichever token that
    is."""
    with torch.no_grad():
        embeddings = module.get_input_embeddings()(torch.tensor([text]))
        return module(inputs_embeds=embeddings, use_cache=False).logits[0]


def turned(batch: Batch) -> Batch:
    """The batch padded on the left."""
    shifts = [batch.input_ids.shape[1] - length for length in batch.lengths]
    ids, mask = (torch.stack([row.roll(by) for row, by in zip(t, shifts)]) for t in (batch.input_ids, batch.mask))
    return Batch(ids, mask, batch.tokens, batch.words)


@pytest.mark.parametrize("pad", PADDED_WITH.values(), ids=PADDED_WITH)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_read_at_their_last_real_position(family, pad):
    module = classifier(family, pad)
    model = Model(module)
    expected = torch.stack([own(module, text) for text in BATCH])
    assert relative(expected[0], expected[1]) > 0.01  # what is read matters
    batch = model.encode(ids=BATCH)
    for each in (batch, turned(batch)):
        assert relative(model.logits(each), expected) < 1e-4
        with torch.no_grad(), model.running(mask=each.mask):
            assert relative(model.forward_embeddings(model.embed(each), each.mask), expected) < 1e-4
    assert module.config.pad_token_id == pad


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_the_last_real_position(family):
    """∂ logit / ∂ embeddings of every row, from the library's own forward pass of the text alone."""
    module = doubled(classifier(family))
    model = Model(module)
    batch = model.encode(ids=BATCH)
    together = model.embed(batch).detach().requires_grad_()
    with model.running(mask=batch.mask):
        model.forward_embeddings(together, batch.mask)[:, 1].sum().backward()
    for row, text in enumerate(BATCH):
        alone = module.get_input_embeddings()(torch.tensor([text])).detach().requires_grad_()
        module(inputs_embeds=alone, use_cache=False).logits[0, 1].backward()
        assert relative(together.grad[row, : len(text)], alone.grad[0]) < 1e-5
        assert not together.grad[row, len(text) :].any()


@pytest.mark.parametrize("family", few(FAMILIES, "jamba" if CONTRACTS else "qwen3_next"))
def test_every_method_explains_a_text_beside_a_longer_one_as_alone(family):
    model = Model(doubled(classifier(family)))
    methods = [name for name in METHODS if name != "random"]
    asked = dict(methods=methods, target=1, option={"ig": {"cap": 24, "tolerance": 1.0}, "smoothgrad": {"samples": 4}})
    together = explain(model, model.encode(ids=BATCH[:2]), **asked)
    alone = explain(model, model.encode(ids=BATCH[:1]), **asked)
    one, other = together.texts[0], alone.texts[0]
    assert one.value == pytest.approx(other.value, rel=1e-5)
    for found, expected in zip(one.attributions, other.attributions, strict=True):
        assert found.scores == pytest.approx(expected.scores, rel=1e-4, abs=1e-6 * float(abs(expected.scores).max())), (
            found.method
        )
    assert sum(bool(found.scores.any()) for found in one.attributions) >= len(methods) - 1  # Grad-CAM's may be all zero


@pytest.mark.parametrize("family", few(FAMILIES, "jamba" if CONTRACTS else "qwen3_next"))
def test_measures_over_data_are_those_of_every_text_alone(family):
    """With the library's own answers as labels nothing is wrong, whatever a text is batched with."""
    module = classifier(family)
    words = [f"w{at}" for at in range(module.config.vocab_size)]
    model = Model(module, symbol_tokenizer(words))
    drawn = np.random.default_rng(1).integers(0, len(words), (12, 14))
    rows = [ids[: 3 + at].tolist() for at, ids in enumerate(drawn)]
    labels = [int(own(module, row).argmax()) for row in rows]
    assert len(set(labels)) > 1
    data = text_data("own", "test", [" ".join(words[at] for at in row) for row in rows], labels, model.labels)
    found = position_bias(model, data, regions="0:3", replacement="zeros")
    assert found.clean.value == 1
    with torch.no_grad():
        spoiled = [module.get_input_embeddings()(torch.tensor([row])) for row in rows]
        for row in spoiled:
            row[:, :3] = 0
        kept = [int(module(inputs_embeds=row, use_cache=False).logits[0].argmax()) for row in spoiled]
    assert found.regions[0].accuracy.value == pytest.approx(np.mean(np.equal(kept, labels)))
    whole = fidelity_auc(model, data, methods=["gradxinput"], random_rankings=20)
    assert whole.predicted.tolist() == labels
    for at in (0, 5):
        alone = text_data("own", "test", data.texts[at : at + 1], labels[at : at + 1], model.labels)
        one = fidelity_auc(model, alone, methods=["gradxinput"], random_rankings=20)
        assert whole.clean[at] == pytest.approx(float(own(module, rows[at]).softmax(-1).max()), rel=1e-4)
        assert whole.values[0, at] == pytest.approx(one.values[0, 0], rel=1e-3, abs=1e-4)
