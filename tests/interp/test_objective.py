"""The objective: f of embeddings equals the model's own output, for every kind of target."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope import ops
from ssmscope.core import batching
from ssmscope.core.intercept import observe
from ssmscope.core.mixers import fast_scan
from ssmscope.core.model import Model
from ssmscope.interp import objective as module
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.objective import last_logits, objective

CLOSE = dict(rtol=1e-4, atol=1e-5)


def example(name: str = "mamba") -> Model:
    return Model(loud(random_example(name)))


model = pytest.fixture(scope="module")(lambda: example())
demo = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-mamba2"))

SENTENCES = ["A gripping, beautifully acted film.", "Dull.", "A mess."]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "diff-mamba", "gfssm", "rwkv", "gla", "gated-deltanet"])
def test_f_is_the_models_own_logit_of_the_next_token(name):
    model = example(name)
    found = objective(model, model.encode(ids=TEXTS), target=[3, 50, 7])
    values = found.values()
    for row, (ids, target) in enumerate(zip(TEXTS, [3, 50, 7])):
        alone = model.module(torch.tensor([ids]), use_cache=False).logits[0, -1, target]
        torch.testing.assert_close(values[row], alone.detach(), **CLOSE)


def test_contrast_and_probability(model):
    batch = model.encode(ids=TEXTS)
    logits = last_logits(model, batch)
    difference = objective(model, batch, target=[3, 50, 7], contrast=9)
    torch.testing.assert_close(difference.values(), logits[[0, 1, 2], [3, 50, 7]] - logits[:, 9], **CLOSE)
    assert difference.names == ("3 − 9", "50 − 9", "7 − 9")
    probability = objective(model, batch, target=3, probability=True)
    torch.testing.assert_close(probability.values(), logits.softmax(-1)[:, 3], **CLOSE)


def test_a_continuation_is_the_sum_of_its_log_probabilities(model):
    follow = [[4, 9, 1], [8], [2, 2]]
    found = objective(model, model.encode(ids=TEXTS), target=follow)
    assert found.continues
    values, probabilities = found.values(), replace(found, probability=True).values()
    for row, (ids, targets) in enumerate(zip(TEXTS, follow)):
        logits = model.module(torch.tensor([ids + targets]), use_cache=False).logits[0].detach()
        if len(targets) == 1:
            expected = logits[len(ids) - 1, targets[0]]
            own = logits[len(ids) - 1].softmax(-1)[targets[0]]
        else:
            log = logits.log_softmax(-1)
            expected = sum(log[len(ids) - 1 + step, each] for step, each in enumerate(targets))
            own = expected.exp()
        torch.testing.assert_close(values[row], expected, **CLOSE)
        torch.testing.assert_close(probabilities[row], own, **CLOSE)


def test_by_default_it_is_what_the_model_predicts(demo, model):
    batch = demo.encode(SENTENCES)
    found = objective(demo, batch)
    logits = demo.logits(batch)
    assert found.names == ("positive", "negative", "negative")
    torch.testing.assert_close(found.values(), logits.max(-1).values, **CLOSE)
    named = objective(demo, batch, target="negative", contrast="positive")
    torch.testing.assert_close(named.values(), logits[:, 0] - logits[:, 1], **CLOSE)
    assert objective(demo, batch, target="1").targets == objective(demo, batch, target=1).targets == ((1,),) * 3
    one = objective(model, model.encode(ids=TEXTS))
    assert one.targets == tuple((int(i),) for i in last_logits(model, one.batch).argmax(-1))


def test_pixels():
    model = ssmscope.load("demo/cifar10-mamba")
    pixels = np.random.default_rng(0).integers(0, 256, (1, 40, 3)).astype(np.uint8)
    found = objective(model, model.encode(values=pixels), target="truck")
    torch.testing.assert_close(found.values(), model.logits(found.batch)[:, model.labels.index("truck")], **CLOSE)
    grey = baseline_embeddings(found)
    own = model.module.embed
    torch.testing.assert_close(grey[0, 0], own(torch.full((3,), 0.5)).detach())
    torch.testing.assert_close(grey[0, -1], found.embeddings()[0, -1])  # the class token stays
    torch.testing.assert_close(baseline_embeddings(found, 0.25)[0, 3], own(torch.full((3,), 0.25)).detach())
    torch.testing.assert_close(baseline_embeddings(found, "0.25"), baseline_embeddings(found, 0.25))
    refuses("a grey from 0 to 1", baseline_embeddings, found, 2)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv"])
def test_gradients_are_those_of_the_slow_path(name):
    model = example(name)
    found = objective(model, model.encode(ids=TEXTS), target=[3, 50, 7])
    e = found.embeddings()
    gradient = found.gradient(e, range(3))
    for row, (ids, target) in enumerate(zip(TEXTS, [3, 50, 7])):
        own = e[row : row + 1, : len(ids)].clone().requires_grad_()
        logit = model.module(inputs_embeds=own, use_cache=False).logits[0, -1, target]
        (expected,) = torch.autograd.grad(logit, own)
        torch.testing.assert_close(
            gradient[row, : len(ids)], expected[0], rtol=1e-3, atol=1e-4 * float(expected.abs().max())
        )
        assert not gradient[row, len(ids) :].any()


def test_nothing_is_left_behind_and_no_weight_has_a_gradient(model):
    asking = [p.requires_grad for p in model.module.parameters()]
    asking_first = next(model.module.parameters())
    asking_first.requires_grad_(False)
    found = objective(model, model.encode(ids=TEXTS), target=3)
    found.gradient(found.embeddings(), [0, 1, 2])
    with pytest.raises(RuntimeError):
        found.gradient(torch.zeros(1, 4, 3), [0])
    assert not asking_first.requires_grad
    asking_first.requires_grad_(True)
    assert [p.requires_grad for p in model.module.parameters()] == asking
    assert all(p.grad is None for p in model.module.parameters())
    assert all("forward" not in mixer.__dict__ for mixer in model.mixers) and "_kept_of_each" not in model.__dict__


def test_batches_hold_every_run_once_and_fit(model, monkeypatch):
    found = objective(model, model.encode(ids=TEXTS), target=3)
    runs = [0, 1, 2, 0, 1, 2, 2]
    monkeypatch.setattr(batching, "TOKENS_AT_ONCE", 12)
    parts = list(found.batches(runs))
    assert sorted(sum(parts, [])) == list(range(7)) and len(parts) > 2
    for part in parts:
        sizes = [found.lengths[runs[place]] for place in part]
        assert len(part) == 1 or max(sizes) * len(part) <= 12
    width = model.config.hidden_size
    monkeypatch.setattr(batching, "MAX_NUMBERS_KEPT", module.KEPT_NUMBERS_PER_TOKEN * model.num_layers * width * 6)
    assert max(map(len, found.batches(runs, gradients=True))) == 2  # two texts of three tokens
    torch.testing.assert_close(found.values(), last_logits(model, found.batch)[:, 3], **CLOSE)
    assert list(found.batches([])) == []


def test_rows_are_the_same_texts_alone(model):
    found = objective(model, model.encode(ids=TEXTS), target=[3, 50, 7], contrast=9)
    part = found.rows([2, 1])
    assert part.targets == ((7,), (50,)) and part.names == ("7 − 9", "50 − 9") and part.batch.mask.shape == (2, 6)
    torch.testing.assert_close(part.values(), found.values()[[2, 1]], **CLOSE)


def test_gradients_flow_through_the_fast_scan(model):
    called, scan = [], ops.scan_all
    found = objective(model, model.encode(ids=TEXTS[:1]), target=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "scan_all", lambda *args, **kwargs: (called.append(1), scan(*args, **kwargs))[1])
        assert found.gradient(found.embeddings(), [0]).abs().sum() > 0
    assert len(called) == model.num_layers


def test_inference_alone_needs_no_gradient(demo):
    found = objective(demo, demo.encode(SENTENCES))
    assert not found.values().requires_grad and not found.embeddings().requires_grad
    with fast_scan(demo.module, mask=found.batch.mask):
        assert demo.forward_embeddings(found.embeddings(), found.batch.mask).requires_grad


@pytest.mark.parametrize("contrast", [None, 9])
def test_the_logit_of_a_model_in_half_precision_is_a_product_in_float32(model, contrast):
    half = Model(copy.deepcopy(model.module).bfloat16())
    found = objective(half, half.encode(ids=TEXTS[:1]), target=3, contrast=contrast)
    read = []
    head = half.module.get_output_embeddings()
    with observe(before=[(head, lambda module, args, kwargs: read.append(args[0]))]):
        value = found.values()[0]
    row = head.weight[3].float() - (0 if contrast is None else head.weight[contrast].float())
    torch.testing.assert_close(value, read[0][0, -1].float() @ row, rtol=1e-5, atol=1e-6)
    own = last_logits(half, found.batch)[0]
    assert value != own[3] - (0 if contrast is None else own[9])
