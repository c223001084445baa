"""Integrated Gradients of a sum of cubes, whose quadratures are known, and methods by their names and options."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from faithful import reader
from loud import loud
from refusals import refuses
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.methods import bind_method, bind_methods, check_methods, integrated, method_function, method_names
from ssmscope.interp.methods.integrated import ig
from ssmscope.interp.methods.memory import attention_gradient, self_retention, self_write
from ssmscope.interp.objective import objective


class Cubes:
    """f = Σ_t w_t e_t³ of embeddings of one number, 1 at the end of every path and 0 at its beginning."""

    def __init__(self, *weights: list[float], meter: Any = None) -> None:
        self.weights = [torch.tensor(own, dtype=torch.float64) for own in weights]
        self.lengths, self.meter, self.ran = [len(own) for own in weights], meter, []
        longest = max(self.lengths)
        mask = torch.tensor([[at < size for at in range(longest)] for size in self.lengths])
        words = [tuple(range(size)) for size in self.lengths]
        self.batch = SimpleNamespace(words=words, mask=mask)

    def __len__(self):
        return len(self.weights)

    def by_token(self, products):
        return products.sum(-1)

    def terms(self, embeddings, texts, power):
        rows = torch.nn.utils.rnn.pad_sequence([self.weights[text] for text in texts], batch_first=True)
        return rows[:, : embeddings.shape[1]] * embeddings[..., 0].double() ** power

    def __call__(self, embeddings, texts):
        return self.terms(embeddings, texts, 3).sum(1)

    def values(self, embeddings):
        return self(embeddings, range(len(self)))

    def embeddings(self):
        return self.batch.mask.unsqueeze(-1).double()

    def gradient(self, embeddings, texts):
        self.ran.append(list(texts))
        return (3 * self.terms(embeddings, texts, 2)).unsqueeze(-1)

    def batches(self, texts, **_):
        yield list(range(len(texts)))


@pytest.fixture
def from_zero(monkeypatch):
    monkeypatch.setattr(integrated, "baseline_embeddings", lambda goal, _: torch.zeros_like(goal.embeddings()))
    monkeypatch.setattr(integrated, "baseline_name", lambda *_: "nothing")
    monkeypatch.setattr(integrated, "singularity_note", lambda *_: "a note")


def test_pieces_are_halved_until_the_error_is_borne(from_zero):
    """A piece [a, b] of the path of e³ with one node gives 3 ((a + b) / 2)² (b − a), too little by (b − a)³ / 4."""
    whole = ig(Cubes([1.0, 2.0]), steps=1, cap=3, tolerance=0.2)
    assert whole.scores.tolist() == [[0.9375, 1.875]] and whole.steps.tolist() == [3]
    assert whole.error.tolist() == [0.2] and whole.converged.tolist() == [True]  # 0.375 of 1.875
    assert whole.delta.tolist() == [0.0625] and (whole.baseline, whole.note) == ("nothing", "a note")
    for cap in (3, 6):
        few = ig(Cubes([1.0, 2.0]), steps=1, cap=cap, tolerance=0.19)
        assert few.steps.tolist() == [3] and not few.converged.any() and few.scores.tolist() == whole.scores.tolist()
    for cap, used in ((7, 7), (10, 7), (11, 11), (15, 15)):
        assert ig(Cubes([1.0, 2.0]), steps=1, cap=cap, tolerance=1e-9).steps.tolist() == [used]
    finer = ig(Cubes([1.0, 2.0]), steps=1, cap=1000, tolerance=0.19)
    # Each half of the path in two halves leaves a quarter of the error.
    assert finer.steps.tolist() == [7] and finer.scores.tolist() == [[0.984375, 1.96875]]
    assert finer.error.tolist() == [pytest.approx(0.09375 / 1.96875)] and finer.converged.all()
    exact = ig(Cubes([1.0, 2.0]), steps=2, cap=6)
    assert exact.scores.tolist() == [[pytest.approx(1), pytest.approx(2)]] and exact.error[0] < 1e-12


def test_unchecked_scores_and_paths_on_which_nothing_moves(from_zero):
    found = ig(Cubes([1.0, 2.0, -4.0], [8.0]), steps=1, cap=2)
    assert found.scores.tolist() == [[0.75, 1.5, -3.0], [6.0, 0, 0]] and found.steps.tolist() == [1, 1]
    assert found.error.tolist() == [float("inf")] * 2 and not found.converged.any()
    assert found.delta.tolist() == [0.25, 0.25]
    balanced = ig(Cubes([1.0, -1.0]), steps=1, cap=1)
    assert balanced.delta.tolist() == [0]


def test_a_text_that_is_its_own_baseline_has_converged():
    model = reader()
    goal = objective(model, model.encode(["a a", "b c"]), target=1)
    for cap in (3, 24):
        still = ig(goal, baseline="a", steps=3, cap=cap, tolerance=0.0)
        assert still.error[0] == 0 and still.delta[0] == 0 and still.converged.tolist() == [True, False]
        assert not still.scores[0].any() and still.scores[1].any()


def test_every_text_takes_its_own_steps_and_tells_the_meter(from_zero):
    told, planned = [], []
    meter = SimpleNamespace(plan=lambda *given: planned.append(given), ran=lambda *given: told.append(given))
    goal = Cubes([0.0, 0.0], [1.0], [1.0, 2.0, 4.0], meter=meter)
    found = ig(goal, steps=1, cap=11, tolerance=0.15)
    assert planned == [("ig", [2, 1, 3], 3, 11)] and found.steps.tolist() == [3, 7, 7]
    assert told[0] == (1, 2, 0) and goal.ran[0] == [0]  # the first alone, for an early estimate
    assert sum(gradients for gradients, *_ in told) == 17 and [done for *_, done in told][-1] == 1
    assert sum(tokens for _, tokens, _ in told) == 3 * 2 + 7 * 1 + 7 * 3
    planned.clear()
    ig(goal, steps=2, cap=5)
    assert planned == [("ig", [2, 1, 3], 2, 2)]


def test_the_worst_pieces_are_halved_first_and_as_few_as_will_do():
    def piece(*errors: float, missed: float = 0.0, scores=(4.0, -8.0)):
        return SimpleNamespace(
            errors=torch.tensor(errors), scores=torch.tensor(scores), missed=missed, worst=max(*errors, missed)
        )

    small, second, first = piece(0.1, 0.2), piece(0.3, 0.1), piece(0.0, 0.4, missed=0.6)
    given = [small, second, first]  # the largest |score| is 24
    assert integrated._error(given) == pytest.approx(0.7) and integrated._total(given).tolist() == [12, -24]
    assert integrated._worst(given, 0.7 / 24 + 1e-6) == []
    assert integrated._worst(given, 0.5 / 24) == [first, second]  # small alone has 0.2, less than half of 0.5
    assert integrated._worst(given, 0.69 / 24) == [first, second]
    assert integrated._worst(given, 0.1 / 24) == [first, second, small]
    alone = [piece(0.5, 0.1, missed=0.25)]
    assert integrated._worst(alone, 0.01) == alone


@pytest.mark.parametrize(("options", "line"), [
    ({"steps": 0}, "steps is 0"),
    ({"tolerance": -0.5}, "tolerance is -0.5"),
    ({"cap": 0}, "cap is 0; allowed is a whole number from 1 on"),
    ({"special": 0}, "special is 0; allowed is true or false"),
    ({"steps": 3, "cap": 2}, "cap is 2, fewer gradients than the 3 steps of one quadrature; raise it"),
])  # fmt: skip
def test_refused(from_zero, options, line):
    refuses(line, ig, Cubes([1.0]), **options)


plain = pytest.fixture(scope="module")(lambda: Model(loud(random_example("mamba2")), name="plain"))


def test_methods_are_found_by_name_and_bound_with_their_options():
    assert method_function("ig") is ig and method_names(None) == ["lrp", "gradxinput", "survival"]
    assert method_names("ig") == ["ig"] and method_names({"a": 1, "b": 2}) == ["a", "b"]
    assert bind_method("random", seed=3).keywords == {"seed": 3} and bind_method("ig", seed=3).keywords == {}
    assert bind_method("random", {"seed": 4}, seed=3).keywords == {"seed": 4}
    refuses("unknown method 'igg'; choose one of ig, .*; did you mean 'ig'", method_function, "igg")
    refuses("gradxinput has no option 'x'; it has none", bind_method, "gradxinput", {"x": 1})
    with pytest.raises(InputError, match="occlusion has no option 'windw'; allowed are baseline, window; did you mean"):
        bind_method("occlusion", {"windw": 1})


def test_methods_named_twice_and_options_of_others():
    check_methods(methods=["ig", "lrp"], option={"ig": {"steps": 3}}, top=3)
    check_methods(methods={"mine": len}, option={"mine": {"anything": 3}})
    check_methods(methods=None, option={"lrp": {"half": False}})
    for methods, option, line in (
        (["ig", "lrp", "ig"], None, "methods is ig, lrp, ig; name each once"),
        (["ig"], {"lrp": {}}, "option is given for 'lrp', which is not among the methods"),
        (["ig"], {"ig": {"stps": 3}}, "ig has no option 'stps'"),
        ([], None, "no method was given; allowed are ig, "),
    ):
        refuses(line, check_methods, methods=methods, option=option)


def test_a_default_method_that_does_not_fit_is_left_out_and_said(plain, capsys):
    assert list(bind_methods(None, model=plain)) == ["lrp", "gradxinput", "survival"]
    assert capsys.readouterr().err == ""
    module = random_example("mamba2")
    module.backbone.norm_f = torch.nn.Softmax(-1)
    found = bind_methods(None, {"gradxinput": {}}, model=Model(module))
    assert list(found) == ["gradxinput", "survival"]
    said = capsys.readouterr().err.strip()
    assert said.startswith("lrp is left out: lrp has no rule for Softmax (backbone.norm_f), which may not be linear; ")
    own = bind_methods({"mine": lambda goal, size=1: size, "other": len}, {"mine": {"size": 3}}, model=plain, seed=2)
    assert own["mine"](None) == 3 and own["other"] is len


def test_what_a_gradient_or_a_memory_does_not_explain(plain, monkeypatch):
    with pytest.raises(InputError, match="attention-gradient explains one token; give one as target"):
        attention_gradient(objective(plain, plain.encode(ids=TEXTS), target=[[1, 2], [3], [4]]))
    hybrid = Model(random_example("bamba"))
    goal = objective(hybrid, hybrid.encode(ids=TEXTS), target=3)
    monkeypatch.setattr("ssmscope.interp.attention.measure.MAX_MAP_WEIGHTS", 2 * 11**2 - 1)
    refuses("a text has 11 tokens, too many for whole maps of the layers of attention", attention_gradient, goal)
    monkeypatch.setattr("ssmscope.interp.attention.measure.MAX_MAP_WEIGHTS", 2 * 11**2)
    assert attention_gradient(goal).scores.any()
    goal = objective(plain, plain.encode(ids=TEXTS), target=3)
    kept, written = self_retention(goal).scores, self_write(goal).scores
    assert ((kept + written) == goal.batch.mask).all() and (kept[goal.batch.mask] > 0).all()
    for layer, line in (
        (2, "no layer 2; allowed are 0 to 1"), (-3, "no layer -3"), (True, "no layer True"), (0.0, "0.0"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=line):
            bind_method("gradcam", {"layer": layer})(goal)
    scores = [bind_method("gradcam", {"layer": layer})(goal).scores for layer in (0, -2, np.int64(1), -1)]
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[2], scores[3])
    assert isinstance(bind_method("gradcam")(goal), Scores)
