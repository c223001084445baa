"""Fidelity AUC as its users meet it: tables, files, views, and the table of several models."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from bags import bag, by_position, by_word, texts
from faithful import WORDS, lines, random_scores, reader

import ssmscope
from ssmscope.errors import InputError
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.result import Fidelity


@pytest.fixture(scope="module")
def found() -> Fidelity:
    toys = {"own": random_scores, "first_$x$": by_position, "tied": by_word(dict.fromkeys(WORDS, 1.0))}
    return fidelity_auc(reader(), texts(*lines(15, seed=1), "a"), methods=toys)


class TestResult:
    def test_one_token_has_no_ranking(self, found):
        short = [at for at, text in enumerate([*lines(15, seed=1), "a"]) if len(text.split()) == 1]
        assert found.texts.tolist() == [at for at in range(16) if at not in short] and len(short) > 1
        assert found.notes[0] == f"{len(short)} of 16 texts have a single token and are left out"
        with pytest.raises(InputError, match="no text of toy .test. has two tokens"):
            fidelity_auc(reader(), texts("a", "b"), methods={"own": by_position})

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"mode": "remove"}, "unknown mode 'remove'; allowed are replace, delete"),
            ({"value": "logits"}, "did you mean 'logit'"),
            ({"replacement": "maen"}, "did you mean 'mean'"),
            ({"steps": 0}, "steps is 0; allowed is a whole number from 1 to 10,000"),
            ({"random_rankings": 19}, "random_rankings is 19; allowed is a whole number from 20 to 100,000"),
            ({"batch_size": 0}, "batch_size is 0"),
            ({"seed": -1}, "seed is -1"),
            ({"limit": 0}, "limit is 0; allowed is a whole number from 1 on"),
            ({"methods": []}, "methods is empty; allowed are ig, "),
            ({"methods": {}}, "no method was given"),
            ({"methods": ["random"]}, "no method was given but random, which is always there"),
            ({"methods": ["igg"]}, "unknown among methods: 'igg'"),
            ({"methods": {"random": by_position}}, "'random' is always there"),
            ({"methods": ["ig", "ig"]}, "methods is ig, ig; name each once"),
            (
                {"methods": ["ig", "random"], "option": {"random": {"seed": 1}}},
                "option is given for 'random', which is not among",
            ),
            ({"option": {"owm": {}}}, "option is given for 'owm', which is not among the methods; did you mean 'own'?"),
            ({"methods": {"own": lambda goal: Scores(torch.zeros(1, 2))}}, "gives scores of shape (1, 2)"),
            ({"methods": {"own": lambda goal: Scores(goal.batch.mask / 0.0)}}, "own are not finite"),
        ],
    )
    def test_refuses(self, options, says):
        with pytest.raises(InputError, match=re.escape(says)) as raised:
            fidelity_auc(
                bag(dict.fromkeys(WORDS, 0.1)), texts("a b", "c d"), **({"methods": {"own": by_position}} | options)
            )
        assert "\n" not in str(raised.value)

    def test_refuses_texts_that_cannot_be_read_and_other_models(self):
        model = bag(dict.fromkeys(WORDS, 0.1))
        with pytest.raises(InputError, match="row 2 of toy .test.: the text has only characters"):
            fidelity_auc(model, texts("a b", "z"), methods={"own": by_position})
        with pytest.raises(InputError, match="has no tokenizer"):
            fidelity_auc(ssmscope.Model(model.module), texts("a b"), methods={"own": by_position})
        broken = bag(dict.fromkeys(WORDS, 0.1), link=lambda total: total / 0)
        with pytest.raises(InputError, match="the logits of bag are not finite"):
            fidelity_auc(broken, texts("a b"), methods={"own": by_position})

    def test_our_methods_by_name(self):
        model, data = reader(), texts(*lines(3, shortest=3))
        named = fidelity_auc(model, data, methods=["gradxinput", "self-write"])
        assert named.methods == ("gradxinput", "self-write") and np.isfinite(named.values).all()
