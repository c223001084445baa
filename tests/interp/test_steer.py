"""Steering: the direction by hand, strengths that undo one another, plain runs, random directions, and refusals."""

import numpy as np
import pytest
import torch
from examples import random_example, relative
from exhaustive import in_turns
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.api.results import Result
from ssmscope.core.edits import edited, recorded
from ssmscope.core.model import Model
from ssmscope.data.tokens import TokenData
from ssmscope.errors import InputError
from ssmscope.interp.steer.measure import draw_like, held_out_examples, mean_difference, norm, steering_edit, summarise

TOWARD, AWAY, TEXTS = [[5, 17, 3], [9, 22, 1, 4]], [[60, 2, 7]], [[7, 8, 9, 2, 40], [30, 2, 7]]
NAMES = ("mamba", "mamba2", "diff-mamba", "groupmamba", "rwkv", "gated-deltanet", "bamba")
IDS = np.random.default_rng(0).integers(1, 60, (3, 8))
DATA = TokenData("drawn", "all", IDS, np.roll(IDS, -1, axis=1), tuple(map(str, range(97))))
models = pytest.fixture(scope="module")(lambda: {name: Model(loud(random_example(name)), name=name) for name in NAMES})


def probability(model, ids, answer, edits=()) -> float:
    return model.run(model.encode(ids=ids), last_only=True, edits=edits).logits[0].double().softmax(-1)[answer].item()


def by_hand(model, site, layer):
    means = []
    for texts in (TOWARD, AWAY):
        if site == "state":
            found = [model.run(model.encode(ids=ids)).states[layer].ssm[0][0] for ids in texts]
        else:
            found = []
            for ids in texts:
                kept = {}
                model.run(model.encode(ids=ids), edits=recorded("residual", kept))
                found.append(kept[model.layer_numbers[layer]][0, -1])
        means.append(sum(found) / len(found))
    return means[0] - means[1]


@pytest.mark.parametrize(("name", "site"), in_turns(NAMES, ["residual", "state"]))
def test_the_direction_and_its_doses(models, name, site):
    model = models[name]
    layer = model.layer_numbers[1]
    options = dict(toward=TOWARD, away=AWAY, site=site, layer=layer, answer=3, random=2)
    result = ssmscope.steer(model, model.encode(ids=TEXTS), **options, strengths=[0.0, 2.0, -1.0], data=DATA)
    expected = by_hand(model, site, 1)
    assert relative(torch.from_numpy(result.direction[0]), expected.double()) < 1e-5
    direction = mean_difference(model, TOWARD, AWAY, site, layer)
    assert result.norm == pytest.approx(norm(direction))
    for place, strength in enumerate((0.0, 2.0, -1.0)):
        edit = steering_edit(site, layer, direction, strength)
        found = np.mean([probability(model, ids, 3, edit) for ids in TEXTS])
        assert result.probability[0, place, 0] == pytest.approx(found, rel=1e-3)
    assert (result.costs[0, 0] == result.costs[1, 0]).all() and (result.costs[2, 0] == 0).all()  # the plain run
    assert (result.by_direction[:, 0] == result.by_direction[0, 0]).all()
    assert not np.allclose(result.by_direction[0, 1:], result.by_direction[1, 1:], rtol=1e-4)
    logits = model.run(model.encode(ids=IDS.tolist()), edits=steering_edit(site, layer, direction, 2.0)).logits.double()
    targets = torch.from_numpy(DATA.targets)
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets).item()
    assert result.held_out(metric="loss")[1].value == pytest.approx(loss, rel=1e-4)
    assert Result.from_dict(result.to_dict()) == result


@pytest.mark.parametrize("site", ["residual", "state"])
def test_nothing_added_is_the_plain_run_and_what_is_added_can_be_taken_away(models, site):
    for model in models.values():
        direction, batch = mean_difference(model, TOWARD, AWAY, site, 0), model.encode(ids=TEXTS)
        plain = model.logits(batch)
        with edited(model, steering_edit(site, 0, direction, 0.0)):
            nothing = model.logits(batch)
        if site == "residual":
            assert torch.equal(nothing, plain)  # states are added between two pieces of a scan
        with edited(model, [steering_edit(site, 0, direction, 1.0), steering_edit(site, 0, direction, -1.0)]):
            both = model.logits(batch)
        with edited(model, steering_edit(site, 0, direction, 1.0)):
            once = model.logits(batch)
        real = batch.mask
        assert relative(nothing[real], plain[real]) < 1e-5 and relative(both[real], plain[real]) < 1e-4
        assert relative(once[real], plain[real]) > 1e-3


def test_random_directions_have_the_norm():
    direction = (torch.ones(3, 4, dtype=torch.float64), 2 * torch.ones(5, dtype=torch.float64))
    first, second = (draw_like(direction, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert norm(first) == pytest.approx(norm(direction)) == pytest.approx(32**0.5)
    assert not torch.allclose(first[0], second[0])


@pytest.mark.parametrize(("options", "says"), [
    ({"layer": 2}, "there is no layer 2; this model has the layers 0 to 1"),
    ({"away": TOWARD}, "have the same mean there"),
    ({"away": []}, "no text to steer to or from"),
    ({"strengths": [1, 1.0]}, "strengths has a number twice: 1, 1"),
    ({"site": "state", "texts": [[5]]}, "a text has one token"),
])  # fmt: skip
def test_refused(models, options, says):
    model = models["mamba"]
    batch = model.encode(ids=options.pop("texts", TEXTS))
    refuses(says, ssmscope.steer, model, batch, **{"toward": TOWARD, "away": AWAY, **options})


def test_the_layer_in_the_middle_and_texts_of_two_tokens(models):
    model = models["mamba2"]
    given = dict(toward=TOWARD, away=AWAY, strengths=(0.0, 1.0, 2.0), answer=3, random=1)
    result = ssmscope.steer(model, model.encode(ids=[[5, 9], [7, 8, 1]]), **given, site="state")
    assert result.layer == 1 and result.costs.shape == (3, 3, 0, 3) and not result.classifies
    assert result.provenance["options"]["layer"] == 1 and result.provenance["options"]["strengths"] == [0, 1, 2]
    with pytest.raises(InputError, match="a text has one token, after which no state is read"):
        ssmscope.steer(model, model.encode(ids=[[5], [7, 8, 1]]), **given, site="state")
    assert ssmscope.steer(model, model.encode(ids=[[5], [7, 8, 1]]), **given).by_direction.shape == (2, 3)
    some = ssmscope.steer(model, model.encode(ids=[[5]]), **given, layer=0, data=DATA, limit=2, seed=4)
    assert some.layer == 0 and some.provenance["data"]["examples"] == 2 and some.answers == ("3",)
    whole = ssmscope.steer(model, model.encode(ids=[[5]]), **given, layer=0, data=DATA)
    assert whole.provenance["data"]["examples"] == 3 and whole.costs.shape == (3, 3, 3, 3)


def test_means_over_examples_of_a_direction_and_of_random_ones():
    values = np.random.default_rng(0).random((4, 3, 5, 2))  # directions, strengths, examples, measures
    found = summarise(values, 1)
    drawn = values[1:].mean(0)
    for part, expected in zip(found, (values[0], drawn, values[0] - drawn)):
        np.testing.assert_allclose(part[..., 0], expected.mean(1))
        assert (part[..., 1] < part[..., 0]).all() and (part[..., 0] < part[..., 2]).all()


def test_a_classifiers_own_data_are_held_out(monkeypatch):
    demo, asked = ssmscope.load("demo/sst2-mamba2"), []
    monkeypatch.setattr("ssmscope.interp.steer.measure.load_examples", lambda *given: asked.append(given) or DATA)
    assert len(held_out_examples(demo, None, None, 128, 2, 0)) == 2
    assert held_out_examples(demo, "books", "validation", 128, None, 0) is DATA
    assert asked == [(demo, "sst2", None, 128), (demo, "books", "validation", 128)]
    assert held_out_examples(demo, DATA, None, 128, None, 0) is DATA and len(asked) == 2
    for known in (None, "nowhere"):
        monkeypatch.setattr("ssmscope.loading.load.trained_on", lambda name, known=known: known)
        assert held_out_examples(demo, None, None, 128, 5, 0) is None
    steered = ssmscope.steer(demo, ["A fine film.", "Dull."], toward=["good"], away=["bad"], random=1, strengths=(0, 1))
    batch = demo.encode(["A fine film.", "Dull."])
    shares = demo.logits(batch).double().softmax(-1).max(-1).values
    assert steered.classifies and steered.probability[0, 0, 0] == pytest.approx(shares.mean().item(), rel=1e-5)
