"""Ablation against weights that are set to zero and runs of its own, and what is refused."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from refusals import refuses
from torch.nn.functional import cross_entropy
import ssmscope
from ssmscope.api.results import Result
from ssmscope.api.sharding.parts import over
from ssmscope.core.edits import Edit, recorded, replaced
from ssmscope.core.model import Model
from ssmscope.data.text import TextData
from ssmscope.data.tokens import IGNORED, SequenceData, TokenData
from ssmscope.errors import InputError
from ssmscope.interp import partial_runs
from ssmscope.interp.ablate import measure
from ssmscope.interp.ablate.result import Unit

IDS = np.random.default_rng(0).integers(1, 60, (4, 10))
TARGETS = np.where(np.arange(10) < 8, np.roll(IDS, -1, axis=1), IGNORED)
DATA = TokenData("drawn", "all", IDS, TARGETS, tuple(map(str, range(97))))
UNASKED = np.where(np.arange(4)[:, None] == 2, IGNORED, TARGETS)
"""In one row of the four nothing is asked."""
NAMES = ("mamba", "mamba2", "diff-mamba-hybrid", "groupmamba", "rwkv-deeper", "gated-deltanet", "bamba")


@pytest.fixture(scope="module")
def models():
    return {name: Model(loud(random_example(name)), name=name) for name in (*NAMES, "retnet")}


def losses(model, edits=()) -> np.ndarray:
    """Compute every example's loss by torch's own cross-entropy."""
    logits = model.run(model.encode(ids=IDS.tolist()), edits=edits).logits.double()
    each = cross_entropy(logits.transpose(1, 2), torch.from_numpy(TARGETS), ignore_index=IGNORED, reduction="none")
    return each.sum(1).numpy() / 8


def changed(model, change) -> Model:
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        change(module.backbone.layers[1].mixer)
    return Model(module)


def zero(*tensors):
    for tensor in tensors:
        tensor.zero_()


def rows_of(linear, rows):
    return [each[rows] for each in (linear.weight, linear.bias) if each is not None]


WEIGHTS = {
    ("mamba", "skip"): (Unit(1), lambda mixer: zero(mixer.D)),
    ("mamba2", "skip"): (Unit(1), lambda mixer: zero(mixer.D)),
    ("mamba2", "layer"): (Unit(1), lambda mixer: zero(*rows_of(mixer.out_proj, slice(None)))),
    ("mamba", "head"): (Unit(1, head=5), lambda mixer: zero(mixer.out_proj.weight[:, 5])),
    ("mamba2", "head"): (
        Unit(1, head=2),
        lambda mixer: zero(*rows_of(mixer.conv1d, slice(2 * mixer.head_dim, 3 * mixer.head_dim))),
    ),
    ("mamba2", "recurrence"): (
        Unit(1, 0),
        lambda mixer: zero(*rows_of(mixer.conv1d, slice(0, mixer.intermediate_size))),
    ),
    ("mamba", "convolution"): (Unit(1), lambda mixer: zero(*rows_of(mixer.in_proj, slice(0, mixer.intermediate_size)))),
    ("mamba", "gate"): (Unit(1), lambda mixer: zero(*rows_of(mixer.in_proj, slice(mixer.intermediate_size, None)))),
}


@pytest.mark.parametrize(("name", "what"), WEIGHTS)
def test_zero_is_that_of_the_weights(models, name, what):
    model = models[name]
    unit, change = WEIGHTS[name, what]
    expected = losses(changed(model, change)).mean() - losses(model).mean()
    result = ssmscope.ablate(model, DATA, what=what, by="zero", steps=1)
    assert abs(expected) > 1e-4
    assert result.harm(result.units.index(unit)).value == pytest.approx(expected, rel=1e-3, abs=5e-6)
    assert result.mean().value == pytest.approx(losses(model).mean(), rel=1e-5)


def test_progress_counts_examples(models, monkeypatch):
    """A line is "3 of 4" and this noun, with what is done to each after it."""
    said = []
    monkeypatch.setattr(measure, "over", lambda *given, **how: said.append(how["what"]) or over(*given, **how))
    ssmscope.ablate(models["mamba"], DATA, what="layer", by="zero", steps=1)
    layers = models["mamba"].num_layers
    assert said[0] == f"examples, {layers} ablations each" and said[1].startswith("examples, ")


def test_a_block_of_rwkv_passes_on_what_enters_it(models):
    model = models["rwkv-deeper"]
    module = copy.deepcopy(model.module)
    module.rwkv.blocks[2].forward = lambda hidden, **_: (hidden, None, None)
    module.rwkv.blocks[2].__class__ = torch.nn.Identity
    expected = losses(Model(module)).mean() - losses(model).mean()
    result = ssmscope.ablate(model, DATA, what="layer", by="zero", steps=1)
    assert result.harm(2).value == pytest.approx(expected, rel=1e-3) and abs(expected) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_layers_below_are_run_once_and_nothing_changes(models, name, monkeypatch):
    model = models[name]
    batch = model.encode(ids=IDS[:1].tolist())
    assert partial_runs.can_start_at_layer(model, batch) == (name != "groupmamba")  # its layers read those before
    found = ssmscope.ablate(model, DATA, what="recurrence", by="resample", steps=1)
    monkeypatch.setattr(measure, "can_start_at_layer", lambda *_: False)
    whole = ssmscope.ablate(model, DATA, what="recurrence", by="resample", steps=1)
    np.testing.assert_allclose(found.harms, whole.harms, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba2", "diff-mamba-hybrid", "bamba"])
def test_means_and_other_examples_are_put_in(models, name):
    model = models[name]
    kept = {}
    model.run(model.encode(ids=IDS.tolist()), edits=recorded("scans", kept))
    means = {key: value.mean((0, 1), keepdim=True) for key, value in kept.items()}
    result = ssmscope.ablate(model, DATA, by="mean", steps=1)
    layer = model.layer_numbers[1]
    put = replaced("scans", means, layers=[layer], heads=[2])
    expected = losses(model, put).mean() - losses(model).mean()
    assert result.harm(result.units.index(Unit(layer, head=2))).value == pytest.approx(expected, rel=1e-3, abs=1e-5)
    two = DATA.take([0, 1])
    result = ssmscope.ablate(model, two, by="resample", what="layer", steps=1)  # each has the other's
    outputs = {}
    model.run(model.encode(ids=IDS.tolist()), edits=recorded("output", outputs))
    put = replaced("output", {layer: value[[1, 0, 2, 3]] for layer, value in outputs.items()}, layers=[0])
    assert result.harm(0).value == pytest.approx((losses(model, put) - losses(model))[:2].mean(), rel=1e-3, abs=1e-5)


def test_what_does_nothing_can_go_first(models):
    model = changed(models["mamba2"], lambda mixer: zero(*rows_of(mixer.out_proj, slice(None))))
    result = ssmscope.ablate(model, DATA, by="zero", steps=12)
    dead = [number for number, unit in enumerate(result.units) if unit.layer == 1]
    assert set(dead) <= set(result.can_go) and (result.harms[dead] == 0).all()
    assert result.can_go == tuple(n for n in range(12) if result.harm(n).high <= 0.02)  # not: whose interval has 0
    assert result.counts == tuple(range(13)) and sorted(result.order) == list(range(12))
    np.testing.assert_allclose(result.curves[0, -1], result.curves[1, -1], rtol=1e-4)  # all of them
    np.testing.assert_allclose(result.curves[0, 0], result.curves[1, 0])
    assert result.curve()[0].value != pytest.approx(result.curve()[-1].value, rel=1e-3)
    assert Result.from_dict(result.to_dict()) == result


def test_classes_of_texts_of_other_lengths():
    model = ssmscope.load("demo/sst2-mamba2")
    texts = ["A gripping film.", "A dull, tedious and overlong film, without a single idea.", "Fine."]
    data = TextData("three", "all", tuple(texts), (1, 0, 1), tuple(model.labels), "f")
    found = ssmscope.ablate(model, data, by="resample", what="layer", steps=1)
    plain = model.logits(model.encode(texts)).double().softmax(-1)
    assert found.mean("probability").value == pytest.approx(plain[range(3), [1, 0, 1]].mean().item(), rel=1e-5)
    assert found.mean("accuracy").value == (plain.argmax(-1) == torch.tensor([1, 0, 1])).double().mean()


@pytest.mark.parametrize(("name", "options", "says"), [
    ("retnet", {"what": "convolution"}, "the layers of retnet have no convolution; ablate another part"),
    ("rwkv-deeper", {"what": "skip"}, "have no skip D x"),
    ("mamba", {"data": DATA.take([0])}, "has one example"),
    ("mamba", {"data": SequenceData("s", "all", IDS, IDS[:, 0], ("a",), ("b",))}, "give rows of text"),
    ("mamba", {"what": "heads"}, "did you mean 'head'"),
    ("mamba", {"data": dataclasses.replace(DATA, targets=UNASKED)}, "a row of drawn .all. asks for nothing"),
])  # fmt: skip
def test_refused(models, name, options, says):
    refuses(says, ssmscope.ablate, models[name], **{"data": DATA, **options})


@pytest.mark.parametrize(("name", "what", "zeroed"), [
    ("bamba", "attention", "model.layers.1.self_attn.o_proj"),
    ("bamba", "feed-forward", "model.layers.1.feed_forward.down_proj"),
    ("granitemoehybrid", "feed-forward", "model.layers.1.shared_mlp.output_linear"),
    ("granitemoehybrid", "feed-forward", "model.layers.1.block_sparse_moe."),  # the experts with their router
    ("mamba2attn", "feed-forward", "backbone.layers.1.mlp.fc2"),
])  # fmt: skip
def test_a_part_outside_the_recurrences_is_its_output(models, name, what, zeroed):
    """Ablated to zero it is the model whose last projection there is zero, and only that part is named so."""
    model = models.get(name) or Model(loud(random_example(name)), name=name)
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for parameter in module.get_submodule(zeroed.rstrip(".")).parameters():
            parameter.zero_()
    expected = losses(Model(module)).mean() - losses(model).mean()
    result = ssmscope.ablate(model, DATA, what=what, by="zero", steps=1)
    short = zeroed.split(".")[-2]
    called = f"{what} of block 1{f' ({short})' if what == 'feed-forward' else ''}"
    (at,) = (number for number, unit in enumerate(result.units) if unit.name == called)
    assert abs(expected) > 1e-3 and result.harm(at).value == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert len({unit.name for unit in result.units}) == len(result.units)
    assert not [part for part in model.module.modules() if part._forward_hooks]


def test_means_of_parts_outside_are_put_in(models):
    model, kept = models["bamba"], {}

    def keep(value, site):
        kept[site.layer] = value
        return value

    model.run(model.encode(ids=IDS.tolist()), edits=Edit("kept", "feed-forward", keep))
    put = Edit("mean", "feed-forward", lambda y, site: kept[1].mean((0, 1), keepdim=True).expand_as(y), layers=(1,))
    result = ssmscope.ablate(model, DATA, what="feed-forward", by="mean", steps=1)
    assert result.harm(1).value == pytest.approx((losses(model, put) - losses(model)).mean(), rel=1e-3, abs=1e-5)
    refuses("no layer 7; the model has the layers 0 to", losses, model, Edit("far", "feed-forward", keep, layers=(7,)))


def test_models_without_such_parts_are_refused(models):
    for what, place in (("attention", "attention-output"), ("feed-forward", "feed-forward")):
        with pytest.raises(InputError, match=f"the layers of mamba2 have no {what}; ablate another part"):
            ssmscope.ablate(models["mamba2"], DATA, what=what)
        with pytest.raises(InputError, match="the model has no (feed-forward parts|layers of softmax attention)"):
            losses(models["mamba2"], Edit("none", place, lambda y, site: y, layers=(0,)))
