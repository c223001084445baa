"""LFM2, whose layers are short convolutions and attention: answered questions, and refused ones about its memory."""

import numpy as np
import pytest
from bags import tokenizer
from examples import EXAMPLES, random_example, relative
from loud import loud
from seen import render
import ssmscope
from ssmscope.attacks.effect.measure import effect_of
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError, Unanswerable
from ssmscope.probes.lens.lenses import SSMUnembed, hidden_states

IDS = [5, 17, 3, 9, 22, 1, 4]
model = pytest.fixture(scope="module")(lambda: Model(loud(random_example("lfm2")), name="short"))


def test_what_is_about_a_memory_is_refused_in_one_line(model):
    batch, words = model.encode(ids=IDS), tokenizer(("a", "good", "film"))
    data = text_data("made-up", "test", ["a good film", "a film"], [0, 1], ("negative", "positive"))
    for ask, what in (
        (lambda: ssmscope.heatmap(model, batch), "a heatmap"),
        (lambda: ssmscope.heatmap(None, model.trace(batch), score="retention"), "a heatmap"),
        (lambda: ssmscope.heatmap(Model(model.module, words, "short"), data), "a heatmap"),
        (lambda: ssmscope.stability(model, batch), "stability"),
        (lambda: ssmscope.explain(model, batch, methods=["survival"]), "the method survival"),
        (lambda: ssmscope.explain(model, batch, methods=["self-write"]), "the method self-retention, or self-write,"),
        (lambda: ssmscope.bound(model), "the bound"),
        (lambda: ssmscope.steer(model, batch, toward=[IDS], away=[IDS[:3]], site="state"), "a state"),
    ):
        with pytest.raises(Unanswerable, match=f"^no layer of short has a recurrent memory, which {what} is about: .*"):
            ask()


def test_the_effect_of_a_change_has_no_states_to_compare(model):
    """One token of seven is another: the last convolution reads three, so its attention shares do not change unless one
    of these is it, and distances begin at the token."""
    batch = model.encode(ids=[IDS, [*IDS[:2], 40, *IDS[3:]]])
    found = effect_of(model, batch)
    assert np.isnan(found.state_cosine).all() and not np.isnan(found.hidden_cosine).any()
    for side in (found.clean, found.corrupted):
        assert side.text.scores.max() < 1e-30  # nothing is kept
        assert np.allclose(side.attention.sum(1), 1, atol=1e-6) and side.attention[:, :4].max() < 1e-30
    assert found.first_changed == 2 and [spread.first for spread in found.spreads] == [None, 3, 3]
    assert "nothing is retained, and there are no states to compare" in " ".join(render(found).split())


def test_explanations_and_lenses_answer(model):
    batch = model.encode(ids=IDS)
    methods = ["gradxinput", "occlusion", "lrp", "attention-rollout", "attention-gradient"]
    found = ssmscope.explain(model, batch, methods=methods)
    assert found.methods == tuple(methods)
    streams = hidden_states(model, batch)
    assert len(streams) == 4 and relative(SSMUnembed(model)(streams[-1]), model.logits(batch)) < 1e-5


def test_the_usual_methods_are_those_that_can_be_asked(model, capsys):
    """Methods that are named are refused all the same, as above."""
    batch = model.encode(ids=IDS)
    assert ssmscope.explain(model, batch).methods == ("lrp", "gradxinput")
    line = "survival is left out: no layer of short has a recurrent memory, which the method survival is about: its"
    assert capsys.readouterr().err.splitlines() == [f"{line} layers are short convolutions and attention"]
    assert ssmscope.sanity(model, batch, layers=[0]).methods == ("lrp", "gradxinput")
    whole = Model(loud(random_example("bamba")), name="whole")
    assert ssmscope.explain(whole, whole.encode(ids=IDS)).methods == ("lrp", "gradxinput", "survival")
    assert capsys.readouterr().err.count("left out") == 1


@pytest.mark.skipif("lfm2_moe" not in EXAMPLES, reason="transformers 4.57 has no LFM2 with experts")
def test_relevance_refuses_experts_whose_activation_is_a_function():
    experts = Model(loud(random_example("lfm2_moe")))
    with pytest.raises(InputError, match="no rule for a Lfm2MoeExperts, whose activation is not a module"):
        ssmscope.explain(experts, experts.encode(ids=IDS), methods=["lrp"])
    assert ssmscope.explain(experts, experts.encode(ids=IDS)).methods == ("gradxinput",)
