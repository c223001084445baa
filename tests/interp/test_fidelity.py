"""Fidelity AUC: closed forms on bags of words, a slow reference on a state-space model, planted truths."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from bags import bag, by_position, by_word, texts
from faithful import WORDS, lines, random_scores, reader
from refusals import refuses
import ssmscope
from ssmscope.errors import InputError
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.fidelity import fidelity_auc
from ssmscope.interp.fidelity.measure import SHARES, counts, ranking, replacement_vector, run_hidden
from ssmscope.interp.fidelity.measures import MEASURES
from ssmscope.interp.fidelity.result import Fidelity
from ssmscope.interp.objective import objective

GRID = [Fraction(i, 20) for i in range(21)]
LOGIT = dict(value="logit", replacement="zero")


def estimates(found: Fidelity, method: str) -> list[float]:
    return [found.estimate(method, measure).value for measure in MEASURES]


class TestClosedForms:
    @pytest.mark.parametrize("mode", ["replace", "delete"])
    def test_the_share_of_kept_tokens(self, mode):
        model = bag(dict.fromkeys(WORDS, 0.1))
        found = fidelity_auc(model, texts(" ".join(WORDS)), methods={"own": by_position}, mode=mode, **LOGIT)
        # of 10 tokens are hidden 0, 0, 1, 2, 2, 2, 3, 4, …: the even number where q n ends in .5
        hidden = [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 8, 8, 8, 9, 10, 10]
        for row in ("own", "random"):
            assert estimates(found, row) == pytest.approx([0, 0.5, 0.5, 0.2, 0.8], abs=1e-6)
            for order in ("MoRF", "LeRF"):
                curve = found.curves().query(f"method == {row!r} and ranking == {order!r}")
                assert curve["mean"].to_numpy() == pytest.approx(1 - np.array(hidden) / 10, abs=1e-6)

    def test_halves_are_rounded_to_the_even_number_and_no_float_decides(self):
        assert counts(GRID, 10).tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 8, 8, 8, 9, 10, 10]
        assert counts([Fraction(11, 20)], 50)[0] == 28 and round(0.15 * 30) == counts([Fraction(3, 20)], 30)[0] == 4
        assert counts(SHARES, 20).tolist() == [1, 2, 4, 10]


class TestRankings:
    def test_signed_scores_from_the_highest_on_ties_by_position(self):
        scores = np.array([[0.5, -2.0, 3.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
        assert ranking(scores).tolist() == [[1, 4, 0, 2, 3], [0, 1, 2, 3, 4]]

    def test_every_set_is_run_once(self):
        model = bag(dict.fromkeys(WORDS, 0.1))
        data = texts("a b c d e f g h i j")
        fidelity_auc(model, data, methods={"own": by_position, "same": by_position}, random_rankings=30)
        asked = {
            frozenset(order[:k].tolist())
            for scores in (-np.arange(10.0)[None], np.random.default_rng([0, 0]).random((30, 10)))
            for own in ranking(scores)
            for order in (np.argsort(own), np.argsort(-own))
            for k in range(11)
        }
        assert model.module.calls == len(asked)

    def test_special_tokens_stay_and_never_rank(self):
        model = bag(dict.fromkeys(WORDS, 0.1), ending=5.0)
        toys = {"own": by_word({})}  # [CLS] gets as much as the words, at the end
        found = fidelity_auc(model, texts("a b c", "d e"), methods=toys, value="logit", replacement="zero")
        assert found.curve[:, :, -1, 0] == pytest.approx(5.0) and found.curve[:, :, 0, 0] == pytest.approx(5.25)


def slow(model, text, places, mode, value, known):
    """All measures of one ranking of one text, a run at a time, without padding; `known` remembers runs."""
    batch = model.encode([text])
    embeddings = model.embed(batch).detach()[0]
    table = model.module.get_input_embeddings().weight.detach()
    fill = table.mean(0)
    target = int(model.logits(batch)[0].argmax())
    own = [at for at, word in enumerate(batch.words[0]) if word is not None]
    order = [own[at] for at in np.argsort(places)]

    def f(hidden):
        if frozenset(hidden) not in known:
            known[frozenset(hidden)] = run(hidden)
        return known[frozenset(hidden)]

    def run(hidden):
        rows = [
            fill if at in hidden else row for at, row in enumerate(embeddings) if mode == "replace" or at not in hidden
        ]
        copy = torch.stack(rows).unsqueeze(0)
        with torch.no_grad():
            logits = model.module(inputs_embeds=copy, attention_mask=torch.ones(1, len(rows))).logits[0].double()
        return float(logits.softmax(-1)[target] if value == "probability" else logits[target])

    n = len(order)
    morf, lerf = ([f(set(o[: round(Fraction(i, 20) * n)])) for i in range(21)] for o in (order, order[::-1]))
    areas = [sum((c[i] + c[i + 1]) / 2 / 20 for i in range(20)) for c in (morf, lerf)]
    tops = [set(order[: round(Fraction(share) * n)]) for share in SHARES]
    without = sum(morf[0] - f(top) for top in tops) / 4
    only = sum(morf[0] - f(set(order) - top) for top in tops) / 4
    return [areas[1] - areas[0], *areas, without, only]


class TestReference:
    @pytest.mark.parametrize(("mode", "value"), [("replace", "probability"), ("delete", "logit")])
    def test_is_the_slow_one(self, mode, value):
        model, data = reader(), texts(*lines(2, shortest=2, longest=5))
        found = fidelity_auc(model, data, methods={"own": random_scores}, mode=mode, value=value)
        for line, text in enumerate(data.texts):
            batch = model.encode([text])
            n = batch.lengths[0] - 1
            known = {}
            scores = random_scores(objective(model, batch)).scores[:, :n].double().numpy()
            expected = slow(model, text, ranking(scores)[0], mode, value, known)
            assert found.values[0, line] == pytest.approx(expected, abs=2e-5)
            drawn = ranking(np.random.default_rng([0, line]).random((20, n)))
            expected = np.mean([slow(model, text, places, mode, value, known) for places in drawn], axis=0)
            assert found.random[line] == pytest.approx(expected, abs=2e-5)

    def test_batches_and_the_order_of_texts_change_nothing(self):
        model, data = reader(), texts(*lines(3))
        toys = {"own": random_scores, "other": by_position}
        whole = fidelity_auc(model, data, methods=toys)
        found = fidelity_auc(model, data, methods=toys, batch_size=2)
        for name in ("values", "curve", "paired"):
            assert getattr(found, name) == pytest.approx(getattr(whole, name), abs=1e-5)
        backwards = fidelity_auc(model, texts(*data.texts[::-1]), methods=toys)
        assert backwards.values == pytest.approx(whole.values[:, ::-1], abs=1e-5)

    def test_the_seed_draws_rankings_and_resamples(self):
        model, data = reader(), texts(*lines(12))
        first, again, other = (fidelity_auc(model, data, methods={"own": by_position}, seed=seed) for seed in (3, 3, 4))
        assert (first.random == again.random).all() and (first.estimates == again.estimates).all()
        assert (first.random != other.random).any()
        assert other.values == pytest.approx(first.values, abs=1e-5)
        assert not np.allclose(first.estimates[0, :, 1:], other.estimates[0, :, 1:], atol=1e-4)


class TestHiding:
    def run(self, model, text, sets, **options):
        batch = model.encode([text])
        fill = replacement_vector(model, options.pop("replacement", "zero"))
        return run_hidden(model, batch, [1], [np.array(sets, dtype=bool)], fill=fill, value="logit", **options)[0]

    def test_what_tokens_become(self):
        model = bag({"a": 0.1, "b": 0.9, "c": 2.0}, ending=0.0)
        sets = [[0, 0], [1, 0], [1, 1]]
        for replacement, put in (("zero", 0.0), ("mean", 0.5), ("pad", 0.0), ("c", 2.0), ("[UNK]", 0.0)):
            found = self.run(model, "a b", sets, replacement=replacement)
            assert found == pytest.approx([1.0, 0.9 + put, 2 * put], abs=1e-6)

    def test_deleted_tokens_close_up(self):
        model = reader()
        sets = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
        found = self.run(model, "a b c d e", sets, mode="delete")
        for value, left in zip(found, ("b c e", "a b c d", "a b c d e")):
            assert value == pytest.approx(float(model.logits(model.encode([left]))[0, 1]), abs=1e-4)

    def test_nothing_left_is_one_token_of_the_replacement(self):
        model = bag({"a": 0.1, "b": 0.9}, ending=None)
        assert self.run(model, "a b", [[1, 1], [1, 0]], mode="delete", replacement="b") == pytest.approx([0.9, 0.9])
        batch, both = model.encode(["a b a", "a b"]), [np.ones((1, 3), dtype=bool), np.ones((1, 2), dtype=bool)]
        found = run_hidden(
            model, batch, [1, 1], both, fill=replacement_vector(model, "b"), mode="delete", value="logit"
        )
        assert found == [pytest.approx([0.9]), pytest.approx([0.9])]  # batched with a longer text too
        kept = bag({"a": 0.1, "b": 0.9}, ending=0.25)
        assert self.run(kept, "a b", [[1, 1]], mode="delete", replacement="b") == pytest.approx([0.25])


@pytest.mark.parametrize(("options", "says"), [
    ({"mode": "remove"}, "unknown mode 'remove'; allowed are replace, delete"),
    ({"value": "logits"}, "did you mean 'logit'"),
    ({"replacement": "maen"}, "did you mean 'mean'"),
    ({"steps": 0}, "steps is 0; allowed is a whole number from 1 to 10,000"),
    ({"random_rankings": 19}, "random_rankings is 19; allowed is a whole number from 20 to 100,000"),
    ({"methods": []}, "methods is empty; allowed are ig, "),
    ({"methods": {}}, "no method was given"),
    ({"methods": ["random"]}, "no method was given but random, which is always there"),
    ({"methods": {"random": by_position}}, "'random' is always there"),
    ({"methods": ["ig", "random"], "option": {"random": {"seed": 1}}},
     "option is given for 'random', which is not among"),
    ({"option": {"owm": {}}}, "option is given for 'owm', which is not among the methods; did you mean 'own'?"),
    ({"methods": {"own": lambda goal: Scores(torch.zeros(1, 2))}}, "gives scores of shape (1, 2)"),
    ({"methods": {"own": lambda goal: Scores(goal.batch.mask / 0.0)}}, "own are not finite"),
])  # fmt: skip
def test_refuses(options, says):
    with pytest.raises(InputError, match=re.escape(says)) as raised:
        fidelity_auc(
            bag(dict.fromkeys(WORDS, 0.1)), texts("a b", "c d"), **({"methods": {"own": by_position}} | options)
        )
    assert "\n" not in str(raised.value)


def test_refuses_texts_that_cannot_be_read_and_other_models():
    model = bag(dict.fromkeys(WORDS, 0.1))
    with pytest.raises(InputError, match="row 2 of toy .test.: the text has only characters"):
        fidelity_auc(model, texts("a b", "z"), methods={"own": by_position})
    refuses("has no tokenizer", fidelity_auc, ssmscope.Model(model.module), texts("a b"), methods={"own": by_position})
    broken = bag(dict.fromkeys(WORDS, 0.1), link=lambda total: total / 0)
    refuses("the logits of bag are not finite", fidelity_auc, broken, texts("a b"), methods={"own": by_position})
