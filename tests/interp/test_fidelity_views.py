"""Fidelity AUC as its users meet it: tables, files, views, and the table of several models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bags import by_position, by_word, texts
from drawn import drawn, outside, overlapping
from faithful import WORDS, lines, random_scores, reader

from ssmscope.errors import InputError
from ssmscope.interp.explain.result import Scores
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.result import Fidelity


@pytest.fixture(scope="module")
def found() -> Fidelity:
    toys = {"own": random_scores, "first_$x$": by_position, "tied": by_word(dict.fromkeys(WORDS, 1.0))}
    return fidelity_auc(reader(), texts(*lines(15, seed=1), "a"), methods=toys)


class TestResult:
    def test_intervals_and_differences_are_paired(self, found):
        for a, b in found.pairs:
            for place, measure in enumerate(found.measures):
                own = [found.random if name == "random" else found.values[found.methods.index(name)] for name in (a, b)]
                apart = (own[0] - own[1])[:, place]
                e = found.difference(a, b, measure)
                assert e.value == pytest.approx(apart.mean()) and e.low <= e.value <= e.high
                back = found.difference(b, a, measure)
                assert (back.value, back.low, back.high) == (-e.value, -e.high, -e.low)
                assert (e.high - e.low) == pytest.approx(4 * apart.std() / len(apart) ** 0.5, rel=0.35, abs=1e-9)
        assert found.difference("own", "own").value == 0

    def test_one_token_has_no_ranking(self, found):
        short = [at for at, text in enumerate([*lines(15, seed=1), "a"]) if len(text.split()) == 1]
        assert found.texts.tolist() == [at for at in range(16) if at not in short] and len(short) > 1
        assert found.notes[0] == f"{len(short)} of 16 texts have a single token and are left out"
        with pytest.raises(InputError, match="no text of toy .test. has two tokens"):
            fidelity_auc(reader(), texts("a", "b"), methods={"own": by_position})

    def test_ties_are_counted(self, found):
        assert [note for note in found.notes if "position decides" in note][-1].startswith("tied gives 100 %")
        assert not any(note.startswith("first") for note in found.notes)

    def test_the_figure_has_no_overlaps(self, found):
        figure, texts = drawn(found)
        assert not overlapping(texts) and not outside(figure, texts)

    def test_our_methods_by_name(self):
        model, data = reader(), texts(*lines(3, shortest=3))
        named = fidelity_auc(model, data, methods=["gradxinput", "self-write"])
        assert named.methods == ("gradxinput", "self-write") and np.isfinite(named.values).all()

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"methods": {}}, "no method was given"),
            ({"methods": {"own": lambda goal: Scores(torch.zeros(1, 2))}}, "gives scores of shape"),
            ({"methods": {"own": lambda goal: Scores(goal.batch.mask / 0.0)}}, "own are not finite"),
            ({"random_rankings": 19}, "random_rankings is 19; allowed is a whole number from 20 to 100,000"),
        ],
    )
    def test_refuses(self, options, says):
        with pytest.raises(InputError, match=says):
            fidelity_auc(reader(), texts("a b", "c d"), **({"methods": {"own": by_position}} | options))
