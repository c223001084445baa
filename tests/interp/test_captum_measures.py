"""captum's measures of explanations: against their formulas and captum called by hand, and as columns of fidelity."""

import numpy as np
import pytest
import torch
from captum.metrics import sensitivity_max
from prompted import few, reader
import ssmscope
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import kind_of
from ssmscope.interp.fidelity.captum_measures import RADIUS, SAMPLES, infidelity_of, moved, sensitivity_of
from ssmscope.interp.fidelity.measure import replacement_vector
from ssmscope.interp.fidelity.measures import INFIDELITY, SENSITIVITY, more_is_better
from ssmscope.interp.methods import METHODS, bind_method
from ssmscope.interp.objective import objective

TEXTS = ["a good film with music", "bad but great acting", "dull"]
model = pytest.fixture(scope="module")(lambda: reader())
goal = pytest.fixture(scope="module")(lambda model: objective(model, model.encode(TEXTS)))


def ordinary(goal, text: int) -> list[int]:
    return [at for at, word in enumerate(goal.batch.words[text]) if word is not None]


def test_infidelity_is_its_formula(model, goal):
    """min over β of E[(β Iᵀ scores − Δf)²], I the halves that torch draws from the seed."""
    fill = replacement_vector(model, "mean")
    for text in range(2):
        places, embeddings = ordinary(goal, text), goal.embeddings()[text : text + 1, : goal.lengths[text]]
        torch.manual_seed(5)
        hidden = torch.bernoulli(torch.full((SAMPLES, len(places)), 0.5))
        with torch.no_grad():
            runs = embeddings.repeat(SAMPLES, 1, 1)
            for row in range(SAMPLES):
                runs[row, [place for place, off in zip(places, hidden[row]) if off]] = fill
            change = (goal(embeddings, [text]) - goal(runs, [text] * SAMPLES)).double().numpy()
        scores = np.arange(1.0, 1 + len(places)) * (-1) ** np.arange(len(places))
        told = hidden.double().numpy() @ scores
        beta = (told @ change) / (told @ told)
        expected = ((beta * told - change) ** 2).mean()
        assert infidelity_of(goal, text, scores, fill, 5) == pytest.approx(expected, rel=1e-3)
        assert infidelity_of(goal, text, -3 * scores, fill, 5) == pytest.approx(expected, rel=1e-3)
        assert expected < (change**2).mean()


@pytest.mark.parametrize("text", [0, 1])
def test_sensitivity_is_captums(model, goal, text):
    """captum called by hand with the gradient times input of transformers' model."""
    module, target = model.module, goal.targets[text][0]
    inputs = goal.embeddings()[text : text + 1, : goal.lengths[text]]

    def explain(given):
        with torch.enable_grad():
            x = given[0].clone().requires_grad_()
            logits = module(inputs_embeds=x, attention_mask=torch.ones(x.shape[:2])).logits[:, target]
            return ((x * torch.autograd.grad(logits.sum(), x)[0]).sum(-1).detach(),)

    torch.manual_seed(7)
    radius = RADIUS * float(inputs.square().mean().sqrt())
    by_hand = float(sensitivity_max(explain, (inputs,), perturb_radius=radius, n_perturb_samples=SAMPLES))
    found = sensitivity_of(goal, text, bind_method("gradxinput"), 7)
    assert found == pytest.approx(by_hand, rel=1e-3) and 0 < found < 1


@pytest.mark.parametrize("name", [name for name in METHODS if kind_of(METHODS[name]).embeddings])
def test_methods_explain_the_embeddings_that_are_given(goal, name):
    """The other order of the same texts, by their embeddings alone."""
    pair = goal.rows([0, 0])
    method, other = bind_method(name), goal.embeddings()[:1, : pair.lengths[0]]
    both = method(moved(pair, torch.cat([other, 1.5 * other]))).scores
    torch.testing.assert_close(both[0], method(goal.rows([0])).scores[0, : both.shape[1]], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(both[0], both[1], rtol=0.01)


def test_as_columns_of_fidelity(model):
    data, names = few("dull", "great").take(range(6)), ("gradxinput", "survival")
    given = dict(methods=names, steps=4, measures=[SENSITIVITY, INFIDELITY])
    found = ssmscope.fidelity(model, data, **given)
    assert found.measures[-2:] == (SENSITIVITY, INFIDELITY) and not more_is_better(INFIDELITY)
    assert np.isnan(found.estimate("survival", SENSITIVITY).value) and np.isnan(found.random[:, -2]).all()
    plain = ssmscope.fidelity(model, data, methods=names, steps=4)
    np.testing.assert_array_equal(found.values[..., :-2], plain.values)
    goal, fill = objective(model, model.encode(data.texts[0])), replacement_vector(model, "mean")
    from ssmscope.interp.objective import text_generator

    draws = int(text_generator(goal, 0, 0).integers(2**31))
    method = bind_method("gradxinput")
    scores = method(goal).scores[0, ordinary(goal, 0)].double().numpy()
    expected = (sensitivity_of(goal, 0, method, draws), infidelity_of(goal, 0, scores, fill, draws))
    assert found.values[0, 0, -2:] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert "infidelity ↓" in str(found) and "–" in str(found)
    with pytest.raises(InputError, match="unknown among measures: 'captum:infidelty'.*did you mean"):
        ssmscope.fidelity(model, data, measures=["captum:infidelty"])
