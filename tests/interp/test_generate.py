"""What is written and from what: survival and scores of every written token are those of its prefix alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud

import ssmscope
from ssmscope.api.results import Result
from ssmscope.core.model import Model
from ssmscope.errors import InputError

NAMES = ("mamba", "mamba2", "diff-mamba", "groupmamba", "rwkv", "gated-deltanet", "bamba")
PROMPTS = [[5, 17, 3, 9, 22], [7, 8, 9]]


@pytest.fixture(scope="module")
def models():
    return {name: Model(loud(random_example(name)), name=name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_each_prefix_alone(models, name):
    model = models[name]
    methods = ["gradxinput", "occlusion", "survival", "random"]
    methods += ["lrp"] * ("lrp" in ssmscope.explain(model, model.encode(ids=PROMPTS)).methods)
    options = dict(option={"occlusion": {"window": 2}}, contrast=3)
    result = ssmscope.generate(model, model.encode(ids=PROMPTS), max_new_tokens=5, explain=methods, **options)
    for text, prompt in zip(result, PROMPTS):
        whole = [*prompt, *map(int, text.tokens[text.first :])]
        assert text.first == len(prompt) and len(whole) == len(text)
        for number in range(len(text.written)):
            end = text.first + number
            batch = model.encode(ids=whole[:end])
            alone = ssmscope.explain(model, batch, methods=methods, target=[[whole[end]]], **options)
            for own in alone[0].attributions:
                scores = next(map_ for map_ in text.maps if map_.name == own.method).values[number]
                np.testing.assert_allclose(scores[:end], own.scores, atol=2e-4 * np.abs(own.scores).max() + 2e-6, rtol=1e-3)
                assert not scores[end:].any()
