"""Cascading randomisation: the order of randomised parts, the unchanged model, and the methods that notice."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from bags import by_position
from examples import HALVES, TEXTS, random_example
from loud import loud
from refusals import refuses
from seen import render
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.objective import objective
from ssmscope.interp.sanity import cascading_randomisation
from ssmscope.interp.sanity.measure import parts_of, randomise
from ssmscope.interp.sanity.result import SanityCheck
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification


def language_model(name: str) -> Model:
    return Model(loud(random_example(name)), name=name)


@pytest.fixture(scope="module")
def classifier() -> Model:
    torch.manual_seed(0)
    backbone = language_model("mamba2").config
    return Model(loud(SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=2))), name="toy")


def gradient(goal) -> Scores:
    embeddings = goal.embeddings().requires_grad_()
    (found,) = torch.autograd.grad(goal(embeddings, range(len(goal))).sum(), embeddings)
    return Scores((found * embeddings).sum(-1).detach())


def retention(goal) -> Scores:
    return Scores(goal.model.trace(goal.batch).retention.mean(0).nan_to_num())


def embedding(goal) -> Scores:
    return Scores(goal.embeddings()[..., 0])


TOYS = {"gradient": gradient, "retention": retention, "position": by_position, "embedding": embedding}


@pytest.fixture(scope="module")
def found(classifier) -> SanityCheck:
    return cascading_randomisation(classifier, classifier.encode(ids=TEXTS), methods=TOYS)


class TestParts:
    @pytest.mark.parametrize("name", HALVES[0])
    def test_every_weight_is_in_one_part(self, name):
        model = language_model(name)
        parts = parts_of(model)
        held = [id(tensor) for tensors in parts.values() for tensor in tensors.values()]
        assert sorted(held) == sorted(id(parameter) for parameter in model.module.parameters())
        layers = [part for part in parts if part.startswith("layer ")]
        assert layers == [f"layer {number}" for number in reversed(model.layer_numbers)]
        assert list(parts)[-1] == "embeddings" and list(parts).index(layers[0]) in (0, 1, 2)
        for index, mixer in zip(model.layer_numbers, model.mixers):
            own = {id(tensor) for tensor in parts[f"layer {index}"].values()}
            assert {id(parameter) for parameter in mixer.parameters()} <= own
        table = model.module.get_input_embeddings().weight
        assert any(tensor is table for tensor in parts["embeddings"].values())

    def test_of_a_classifier_and_of_chosen_layers(self, classifier):
        parts = parts_of(classifier)
        assert list(parts) == ["head", "norm", "layer 1", "layer 0", "embeddings"]
        assert set(parts["head"]) == {"head.weight", "head.bias"}
        assert all("norm" in name for name in parts["norm"])
        assert list(parts_of(classifier, [0])) == ["head", "norm", "layer 0"]
        assert list(parts_of(classifier, [0, 1])) == ["head", "norm", "layer 1", "layer 0"]

    @pytest.mark.parametrize(("layers", "says"), [([2], "there is no layer 2"), ([0, 0], "name each once")])
    def test_refuses_layers(self, classifier, layers, says):
        refuses(says, parts_of, classifier, layers)


class TestRandomise:
    def test_mean_and_deviation_stay(self):
        tensors = {"a": torch.randn(300, 200) * 3 + 5, "b": torch.rand(50_000), "same": torch.full((7,), 2.5)}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        randomise(tensors, 0)
        for name in ("a", "b"):
            assert float(tensors[name].mean()) == pytest.approx(float(before[name].mean()), rel=0.02)
            assert float(tensors[name].std()) == pytest.approx(float(before[name].std()), rel=0.02)
            assert abs(np.corrcoef(tensors[name].flatten(), before[name].flatten())[0, 1]) < 0.03
        assert torch.equal(tensors["same"], before["same"])

    def test_the_seed_and_the_name_decide(self):
        def drawn(names, seed):
            tensors = {name: torch.arange(6.0) for name in names}
            randomise(tensors, seed)
            return tensors

        assert torch.equal(drawn("ab", 1)["b"], drawn("b", 1)["b"])
        assert not torch.equal(drawn("ab", 1)["a"], drawn("ab", 1)["b"])
        assert not torch.equal(drawn("a", 1)["a"], drawn("a", 2)["a"])


class TestCascade:
    def test_the_model_stays(self, classifier):
        weights = {name: tensor.clone() for name, tensor in classifier.module.state_dict().items()}
        before = classifier.fingerprint
        cascading_randomisation(classifier, classifier.encode(ids=TEXTS), methods={"gradient": gradient})
        assert classifier.fingerprint == before == Model(classifier.module).fingerprint
        assert all(torch.equal(tensor, weights[name]) for name, tensor in classifier.module.state_dict().items())
        assert all(parameter.grad is None for parameter in classifier.module.parameters())

    def test_each_method_notices_what_it_reads(self, found):
        assert found.parts == ("trained", "head", "norm", "layer 1", "layer 0", "embeddings")
        value = {method: [found.estimate(method, part).value for part in found.parts] for method in TOYS}
        assert all(value[method][0] == pytest.approx(1) for method in TOYS)
        assert value["position"] == pytest.approx([1] * 6)  # it reads no weight
        assert value["retention"][:3] == pytest.approx([1] * 3) and value["retention"][3] < 0.95
        assert value["embedding"][:5] == pytest.approx([1] * 5) and value["embedding"][5] < 0.9
        assert value["gradient"][1] < 0.95

    def test_the_headline_counts_its_methods(self, found):
        def told(*numbers: int) -> str:
            chosen = list(numbers)
            some = {"values": found.values[chosen], "estimates": found.estimates[chosen]}
            return replace(found, methods=tuple(found.methods[at] for at in chosen), **some).headline

        at = found.methods.index("position")
        assert told(at).startswith("Sanity check on toy: position (1.00) hardly depends on the weights (correlation")
        assert told(at, at).startswith("Sanity check on toy: position (1.00), position (1.00) hardly depend on the")

    def test_parts_stay_random_and_targets_stay(self, classifier):
        seen = []

        def watch(goal) -> Scores:
            seen.append((goal.targets, {n: p.detach().clone() for n, p in goal.model.module.named_parameters()}))
            return by_position(goal)

        goal = objective(classifier, classifier.encode(ids=TEXTS), target=1)
        cascading_randomisation(classifier, goal, methods={"watch": watch}, seed=5)
        assert all(targets == goal.targets for targets, _ in seen) and len(seen) == 6
        parts = list(parts_of(classifier).values())
        for stage, (_, weights) in enumerate(seen):
            for number, part in enumerate(parts):
                for name, tensor in part.items():
                    same = torch.equal(weights[name], tensor)
                    flat = bool((tensor == tensor.flatten()[0]).all())
                    assert same == (number >= stage or flat)
                    if number < stage:
                        assert torch.equal(weights[name], seen[-1][1][name])

    def test_the_seed(self, classifier, found):
        batch = classifier.encode(ids=TEXTS)
        again, other = (cascading_randomisation(classifier, batch, methods=TOYS, seed=seed) for seed in (0, 1))
        assert np.array_equal(again.values, found.values, equal_nan=True)
        assert not np.array_equal(other.values, found.values, equal_nan=True)

    def test_one_text_has_no_interval(self, classifier):
        found = cascading_randomisation(classifier, classifier.encode(ids=TEXTS[:1]), methods=TOYS)
        assert np.isnan(found.estimates[..., 1:]).all() and np.isfinite(found.estimates[..., 0]).any()
        assert "mean of 1 text. " in render(found) and "[" not in found.headline
        found.figure()

    def test_the_headline_has_the_interval_of_the_verdict(self, found):
        for method in found.methods:
            last = found.estimate(method, found.parts[-1])
            ends = f"{last.value:.2f} [{last.low:.2f}, {last.high:.2f}]".replace("-", "−")
            assert not last.has_interval or f"{method} ({ends})" in found.headline
        assert found.headline.count("[") > 0

    def test_absolute_scores(self, classifier):
        def flipped(goal) -> Scores:
            sign = -1.0 if goal.model.module is not classifier.module else 1.0
            return Scores(sign * gradient(objective(classifier, goal.batch)).scores)

        turned = cascading_randomisation(classifier, classifier.encode(ids=TEXTS), methods={"flipped": flipped})
        assert turned.estimate("flipped", "head").value == pytest.approx(-1)
        assert turned.estimate("flipped", "head", "absolute").value == pytest.approx(1)

    def test_what_is_not_defined_is_left_out(self, classifier):
        def broken(goal) -> Scores:
            scores = gradient(goal).scores
            if goal.model.module is not classifier.module:
                scores[0] = torch.nan
            return Scores(scores)

        result = cascading_randomisation(classifier, classifier.encode(ids=[*TEXTS, [4]]), methods={"broken": broken})
        frame = result.to_frame().query("measure == 'signed'")
        assert frame["texts"].tolist() == [3, *[2] * 5]
        assert np.isfinite(frame["correlation"]).all()

    @pytest.mark.parametrize(("options", "says"), [
        ({"layers": [7]}, "there is no layer 7"),
        ({"layers": "al"}, "did you mean 'all'"),
        ({"layers": [True]}, "layers is True; allowed are all or a whole number"),
        ({"methods": ["gradixnput"]}, "did you mean 'gradxinput'"),
        ({"methods": {"x": lambda goal: Scores(goal.batch.mask / 0.0)}}, "method x are not finite"),
    ])  # fmt: skip
    def test_refuses(self, classifier, options, says):
        with pytest.raises(InputError, match=re.escape(says)):
            cascading_randomisation(classifier, classifier.encode(ids=TEXTS), **({"methods": TOYS} | options))

    def test_refuses_an_objective_of_another_model(self, classifier):
        other = language_model("mamba2")
        with pytest.raises(InputError, match="the objective is of another model"):
            cascading_randomisation(classifier, objective(other, other.encode(ids=TEXTS)), methods=TOYS)

    def test_of_a_language_model_by_our_methods(self):
        model = language_model("mamba2")
        result = cascading_randomisation(model, model.encode(ids=TEXTS), methods=["gradxinput"], layers=[1])
        assert result.parts[-1] == "layer 1" and result.estimate("gradxinput", "layer 1").value < 0.95
