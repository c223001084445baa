"""Analyses within a caller's `torch.inference_mode` or `torch.no_grad`: gradients are what they are outside."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
import ssmscope
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.explain import explain
from ssmscope.interp.methods import METHODS
from ssmscope.interp.patch import patch
from ssmscope.interp.sanity import cascading_randomisation
from ssmscope.probes.influence import influence

IDS = [[5, 17, 3, 9, 22, 1], [7, 8, 9, 4]]
OTHER_IDS = [5, 17, 3, 9, 22, 2]


def numbers(result) -> list[np.ndarray]:
    return [result.to_frame().select_dtypes("number").to_numpy(float, na_value=np.nan)]


OUTPUTS = {
    "explain": lambda model: [
        found.scores
        for text in explain(model, model.encode(ids=IDS), methods=list(METHODS), target=3).texts
        for found in text.attributions
    ],
    "attention": lambda model: numbers(implicit_attention(model, model.encode(ids=IDS), gradient=True)),
    "influence": lambda model: numbers(influence(model, texts=model.encode(ids=IDS[:1]))),
    "sanity": lambda model: numbers(cascading_randomisation(model, model.encode(ids=IDS), methods=("gradxinput",))),
    "patch": lambda model: numbers(
        patch(model, clean=IDS[0], corrupted=OTHER_IDS, answer=3, contrast=4, method="gradient")
    ),
}
module = pytest.fixture(scope="module")(lambda: loud(random_example("jamba")))
outside = pytest.fixture(scope="module")(lambda module: cache(lambda verb: OUTPUTS[verb](ssmscope.load(module))))


@pytest.mark.parametrize(
    ("without", "verb"), [*((torch.inference_mode, verb) for verb in OUTPUTS), (torch.no_grad, "explain")]
)
def test_gradients_are_those_outside(module, outside, verb, without):
    model, expected = ssmscope.load(module), outside(verb)
    with without():
        found = OUTPUTS[verb](model)
        assert torch.is_inference_mode_enabled() == (without is torch.inference_mode) and not torch.is_grad_enabled()
    for one, other in zip(found, expected, strict=True):
        assert one.size
        np.testing.assert_array_equal(one, other)


def test_a_model_made_in_inference_mode_is_copied(module, outside):
    with torch.inference_mode():
        made = copy.deepcopy(module)
        model = ssmscope.load(made)
        found = OUTPUTS["explain"](model)
    assert model.module is not made and not any(parameter.is_inference() for parameter in model.module.parameters())
    for one, other in zip(found, outside("explain"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_grad_stays(module):
    """Only inference mode is left: without it a run within `torch.no_grad` keeps no graph."""
    model = ssmscope.load(module)
    with torch.no_grad():
        model.encode(ids=IDS)
        assert not torch.is_grad_enabled()
        with torch.inference_mode():
            logits = model.trace(ids=IDS).logits
            assert not logits.requires_grad and not logits.is_inference()
