"""Implicit attention of models: maps, rollout and attention × gradient against the layers themselves."""

import copy

import numpy as np
import pytest
import torch
from examples import EXAMPLES, random_example
from exhaustive import few
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope import explain
from ssmscope.api.results import Result
from ssmscope.core.attention_layers import attention_layers, attention_numbers
from ssmscope.core.mixers import fast_scan
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.attention.measure import normalise_rows

IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9, 1, 2, 3, 30]]


def example(name: str) -> Model:
    return Model(loud(random_example(name)))


demo = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-baleen-e"))


def close(a, b, tolerance: float = 1e-5) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-12)


@pytest.mark.parametrize(
    "name", ["mamba", "mamba2", "diff-mamba", "gfssm", "groupmamba-mamba2", "rwkv", "gated-deltanet"]
)
@pytest.mark.parametrize("level", ["ssm", "block"])
def test_maps_are_those_of_the_layers_whatever_the_batch(name, level):
    model = example(name)
    together = implicit_attention(model.trace(ids=IDS), level=level)
    for row, ids in enumerate(IDS):
        trace = model.trace(ids=[ids])
        assert len(together[row].maps) == model.num_layers
        for each in together[row].maps:
            linearized = trace.linearized[int(each.layer)]
            close(each.values, linearized.attention(level)[0, 0])
            sink = linearized.sink(level)
            assert (each.sink is None) == (sink is None)
            if sink is not None:
                close(each.sink, sink[0, 0])


def test_rows_cells_heads_and_parts():
    model = example("diff-mamba")
    trace = model.trace(ids=IDS)
    whole = implicit_attention(trace, layers=1)[0].maps[0].values
    close(implicit_attention(trace, layers=[1], rows="last")[0].maps[0].values, whole[-1:])
    rows = implicit_attention(trace, layers=[1], rows=[0, -2])[0]
    close(rows.maps[0].values, whole[[0, 9]])
    assert rows.queries.tolist() == [0, 9]
    pooled = implicit_attention(trace, layers=[1], pool=3)[0]
    assert pooled.edges.tolist() == [0, 3, 7, 11]
    close(pooled.maps[0].values[2, 1], whole[7:11, 3:7].mean())
    close(pooled.maps[0].values[1, 1], np.tril(whole[3:7, 3:7]).sum() / 10)
    heads = implicit_attention(trace, layers=[1], heads="all")[0].maps
    assert [each.head for each in heads] == [str(h) for h in range(len(heads))]
    close(np.mean([each.values for each in heads], axis=0), whole)
    parts = {each.part: each.values for each in implicit_attention(trace, layers=[1], parts=True)[0].maps}
    assert list(parts) == ["", "kept", "subtracted"]
    close(parts["kept"] + parts["subtracted"], whole)
    lam = trace.layers[1].extras["lambda"].item()
    ssm_parts = {m.part: m.values for m in implicit_attention(trace, layers=[1], level="ssm", parts=True)[0].maps}
    second = ssmscope.ops.attention(trace.layers[1].recurrences[1], skip=True)[0, 0]
    close(ssm_parts["subtracted"], -lam * second)


def test_the_skip_is_the_diagonal(demo):
    trace = demo.trace("A fine film.")
    with_skip = implicit_attention(trace, layers=0, level="ssm")[0].maps[0].values
    without = implicit_attention(trace, layers=0, level="ssm", skip=False)[0].maps[0].values
    D = trace.layers[0].recurrence.D.mean().item()
    close(with_skip - without, D * np.eye(len(with_skip)), 1e-4)


@pytest.mark.parametrize(
    "name, heads", [("mamba2", "mean"), ("mamba2", "abs"), ("gfssm", "mean"), ("gated-deltanet", "mean")]
)
def test_rollout_is_the_product_of_normalised_maps(name, heads):
    model = example(name)
    trace = model.trace(ids=[IDS[0]])
    length = len(IDS[0])
    # The state before the first token is a token of its own, which keeps what it has.
    product = torch.eye(length + 1, dtype=torch.float64)
    for linearized in trace.linearized:
        map_ = linearized.attention(absolute=heads == "abs")[0, 0].double().abs()
        sink = linearized.sink(absolute=heads == "abs")
        step = torch.zeros(length + 1, length + 1, dtype=torch.float64)
        step[1:, 1:] = map_
        step[1:, 0] = 0 if sink is None else sink[0, 0].double().abs()
        step[1:] /= step[1:].sum(-1, keepdim=True)
        step[0, 0] = 1
        product = (0.3 * torch.eye(length + 1) + 0.7 * step) @ product
    (found,) = implicit_attention(trace, rollout=True, residual=0.3, heads=heads)[0].maps
    close(found.values, product[1:, 1:])
    assert np.triu(found.values, 1).max() == 0 and found.values.min() >= 0
    total = found.values.sum(-1)
    if name == "gfssm":
        close(found.sink, product[1:, 0])
        total = total + found.sink
    else:
        assert found.sink is None
    close(total, np.ones(length))
    (last,) = implicit_attention(trace, rollout=True, residual=0.3, heads=heads, rows="last")[0].maps
    close(last.values, found.values[-1:])
    (cells,) = implicit_attention(trace, rollout=True, residual=0.3, heads=heads, pool=2)[0].maps
    close(cells.values[1, 0], found.values[5:, :5].mean())


def test_a_row_of_nothing_is_the_identitys():
    weights, sink = normalise_rows(torch.tensor([[0.0, 0.0], [1.0, 3.0]]), torch.tensor([0.0, 4.0]))
    assert weights.tolist() == [[1, 0], [0.125, 0.375]] and sink.tolist() == [0, 0.5]


@pytest.mark.parametrize("target", [None, "negative", 1])
def test_attention_gradient_adds_up_to_what_the_gradient_sees(demo, target):
    batch = demo.encode(["A gripping, beautifully acted film.", "Dull."])
    found = implicit_attention(demo, batch, target=target, gradient=True)
    classes = {None: None, "negative": 0, 1: 1}[target]
    for row, text in enumerate(found):
        one = batch.rows([row])
        trace = demo.trace(one)
        kept: list[torch.Tensor] = []
        handles = [mixer.register_forward_hook(lambda m, i, o, k=kept: k.append(o)) for mixer in demo.mixers]
        with fast_scan(demo.module, mask=one.mask):
            logits = demo.forward(one)
        [handle.remove() for handle in handles]
        gradients = torch.autograd.grad(logits[0, logits.argmax() if classes is None else classes], kept)
        for each, linearized, gradient in zip(text.maps, trace.linearized, gradients, strict=True):
            linear = linearized.matvec(linearized.u)  # the demo's projections have no biases
            expected = (gradient * linear).sum().item()
            close(each.values.sum(), expected, 1e-4)
    by_head = implicit_attention(demo, batch, target=target, heads="all", gradient=True)[0].maps
    heads = [each.values for each in by_head if each.layer == "0"]
    assert len(heads) > 1
    close(np.sum(heads, axis=0), found[0].maps[0].values)


def test_attention_gradient_of_a_language_model_is_of_the_next_token():
    model = example("mamba")
    batch = model.encode(ids=IDS)
    found = implicit_attention(model, batch, target=42, gradient=True)
    assert found.provenance["options"]["target"] == ["42", "42"]
    alone = implicit_attention(model, model.encode(ids=[IDS[1]]), target=42, gradient=True)
    for a, b in zip(found[1].maps, alone[0].maps, strict=True):
        close(a.values, b.values, 1e-4)
    other = implicit_attention(model, batch, target=7, gradient=True)
    assert np.abs(other[0].maps[0].values - found[0].maps[0].values).max() > 1e-6


def test_a_span_is_marked_by_position_or_by_its_words(demo):
    text = "A gripping, beautifully acted film."
    trace = demo.trace(text)
    named = implicit_attention(trace, span="acted film")[0]
    first, last = named.span
    assert " ".join(token.strip() for token in named.tokens[first:last]) == "acted film"
    placed = implicit_attention(trace, span=f"{first}:{last}")[0]
    assert placed.span == named.span and placed.maps[0].readouts == named.maps[0].readouts
    values = np.abs(named.maps[0].values.astype(np.float64))
    share = 1 - values[:, first:last].sum(1) / values.sum(1)
    close(named.maps[0].readouts.outside, share[last:].mean())


def test_pixels_are_attended_to():
    model = ssmscope.load("demo/cifar10-mamba2")
    image = torch.randint(0, 256, (1024, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    trace = model.trace(values=image.unsqueeze(0), keep_inputs=[0])
    (text,) = implicit_attention(trace, layers=0, rows="last")
    np.testing.assert_allclose(text.pixels, image.reshape(32, 32, 3).float() / 255, rtol=1e-6)
    with torch.no_grad():
        whole = trace.linearized[0].attention("block", groups=1)[0, 0]
    assert whole.shape == (1025, 1025)  # the last is the class token
    close(text.maps[0].values, whole[-1:].numpy(), 1e-4)
    assert text.queries.tolist() == [1024] and np.unique(text.maps[0].values).size > 900


@pytest.mark.parametrize("options, message", [
    ({"level": "blok"}, "did you mean 'block'"), ({"heads": "al"}, "unknown heads 'al'"),
    ({"rows": "lats"}, "did you mean 'last'"), ({"rows": [50]}, "no row 50"), ({"layers": 2}, "no layer 2"),
    ({"layers": "some"}, "layers is 'some'; allowed are all or"), ({"layers": [0, 0]}, "each once"),
    ({"pool": 4, "rows": "last"}, "without rows=…"), ({"pool": 4, "heads": "abs"}, "cannot be pooled"),
    ({"rollout": True, "heads": "all"}, "whole layers"), ({"rollout": True, "parts": True}, "cannot be combined"),
    ({"target": 1}, "of gradient=…; give that too"), ({"gradient": True}, "give it before the texts"),
    ({"gradient": True, "rollout": True}, "gradient=True cannot be combined with rollout=True"),
    ({"rollout": True, "residual": 1.5}, "from 0 to 1"), ({"span": "zebra"}, "has no 'zebra'"),
    ({"span": "3:99"}, "3:99 is not within"),
])  # fmt: skip
def test_what_cannot_be_is_refused(demo, options, message):
    refuses(message, implicit_attention, demo.trace("A fine film."), **options)


@pytest.mark.parametrize(
    "options, message",
    [({"target": "negativ"}, "did you mean 'negative'"), ({"target": 2}, "no target 2"), ({"heads": "abs"}, "no sum")],
)
def test_targets_that_cannot_be_are_refused(demo, options, message):
    refuses(message, implicit_attention, demo, demo.encode("A fine film."), **options, gradient=True)


def test_a_trace_without_inputs_is_refused(demo):
    trace = demo.trace("A fine film.", keep_inputs=False)
    with pytest.raises((InputError, ValueError), match="keep_inputs"):
        implicit_attention(trace)


@pytest.mark.parametrize("name", few(EXAMPLES, "bamba", "qwen3_next"))
def test_softmax_attention_stands_beside_the_implicit_one(name):
    """Its rows are the weights by which the model's own eager attention multiplies its values."""
    model = example(name)
    batch = model.encode(ids=IDS)
    whole = implicit_attention(model, batch, heads="all")
    numbers = attention_numbers(model.module)
    other = copy.deepcopy(model.module)
    other.set_attn_implementation("eager")
    with torch.no_grad():
        own = other(batch.input_ids[:1], output_attentions=True, use_cache=False).attentions
    own = [each for each in own if each is not None and each.ndim == 4]
    assert len(own) == len(numbers)
    for layer, expected in zip(numbers, own):
        maps = [each for each in whole[0].maps if each.layer == f"{layer} attention"]
        assert all(each.softmax for each in maps) and len(maps) == expected.shape[1]
        close(np.stack([each.values for each in maps]), expected[0])
        mean = implicit_attention(model, batch, layers=[layer])[1]
        (one,) = [each for each in mean.maps if each.softmax]
        assert np.allclose(one.values.sum(1), 1, atol=1e-5) and (np.triu(one.values, 1) == 0).all()
    rows = implicit_attention(model, batch, layers=[numbers[0]], rows="last")[0]
    first = implicit_attention(model, model.trace(batch), layers=[numbers[0]])[0]
    (last,), (every,) = ([each.values for each in text.maps if each.softmax] for text in (rows, first))
    close(last, every[-1:])
    assert f"{numbers[0]} attention" in set(whole.to_frame()["layer"])
    assert Result.from_dict(whole.to_dict()) == whole and whole.figure() is not None


def eager(model, ids):
    """The weights of every layer of attention on one text, (heads, length, length), by the model's own code, and, where
    f is the last logit of token 3, the product of each with values, (heads, length, length), g at the layer's output
    being pulled back through its projection."""
    other = copy.deepcopy(model.module)
    other.set_attn_implementation("eager")
    parts, seen = list(attention_layers(other).values()), {}
    for at, part in enumerate(parts):
        part.v_proj.register_forward_hook(lambda m, a, y, at=at: seen.update({("v", at): y}))
        part.o_proj.register_forward_hook(lambda m, a, y, at=at: seen.update({("o", at): y}))
    run = other(torch.tensor([ids]), output_attentions=True, use_cache=False)
    weights = [each[0] for each in run.attentions if each is not None and each.ndim == 4]
    made = []
    for at, (part, A) in enumerate(zip(parts, weights)):
        (g,) = torch.autograd.grad(run.logits[0, -1, 3], seen["o", at], retain_graph=True)
        heads, length = A.shape[:2]
        pulled = (g[0] @ part.o_proj.weight).view(length, heads, -1)
        v = seen["v", at][0].view(length, -1, pulled.shape[-1])
        products = torch.zeros_like(A)
        for h in range(heads):
            for t in range(length):
                for s in range(t + 1):
                    products[h, t, s] = A[h, t, s] * (pulled[t, h] @ v[s, h * v.shape[1] // heads])
        made.append(products.detach())
    return [A.detach() for A in weights], made


@pytest.mark.parametrize("name", ["bamba", "falcon_h1"])
def test_softmax_attention_is_in_rollouts_and_gradients(name):
    model = example(name)
    batch = model.encode(ids=IDS)
    numbers = attention_numbers(model.module)
    rolled, last = implicit_attention(model, batch, rollout=True, residual=0.3), []
    contributed = implicit_attention(model, batch, target=3, gradient=True)
    for row, ids in enumerate(IDS):
        weights, products = eager(model, ids)
        R, trace = torch.eye(len(ids)), model.trace(ids=[ids])
        for layer in reversed(range(model.config.num_hidden_layers)):
            factors = [A.mean(0) for number, A in zip(numbers, weights) if number == layer]
            if layer in model.layer_numbers:
                A = trace.linearized[model.layer_numbers.index(layer)].attention("block")[0, 0].abs()
                factors.append(A / A.sum(-1, keepdim=True))
            A = sum(factors) / len(factors)
            R = R @ (0.3 * torch.eye(len(ids)) + 0.7 * A)
        close(rolled[row].maps[0].values, R)
        for number, expected in zip(numbers, products):
            (one,) = [each for each in contributed[row].maps if each.layer == f"{number} attention"]
            close(one.values, expected.sum(0))
        last.append(np.sum([each.values.sum(0) for each in contributed[row].maps], axis=0))
    found = explain(model, batch, methods=["attention-rollout", "attention-gradient"], target=3)
    for text, map_, expected in zip(found, implicit_attention(model, batch, rollout=True, rows="last"), last):
        close(text.attributions[0].scores, map_.maps[0].values[0])
        close(text.attributions[1].scores, torch.from_numpy(expected))


def test_maps_of_softmax_attention_that_are_too_large_are_left_out(monkeypatch):
    model = example("bamba")
    monkeypatch.setattr("ssmscope.interp.attention.measure.MAX_MAP_WEIGHTS", 2 * 7**2)
    found = implicit_attention(model, model.encode(ids=IDS))
    assert [each.layer for each in found[0].maps] == ["0", "2"]
    assert [each.layer for each in found[1].maps] == ["0", "1 attention", "2"]
    with pytest.raises(InputError, match="text 0 has 11 tokens, too many for whole maps of attention layers"):
        implicit_attention(model, model.encode(ids=IDS), rollout=True)
    with pytest.raises(InputError, match="there is no layer 3; this model has the layers 0 to 2"):
        implicit_attention(model, model.encode(ids=IDS), layers=[3])
