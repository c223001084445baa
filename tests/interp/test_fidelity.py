"""Fidelity AUC: closed forms on bags of words, a slow reference on a state-space model, planted truths."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from bags import bag, by_position, by_word, texts
from faithful import WORDS, lines, random_scores, reader

import ssmscope
from ssmscope.data.text import text_data
from ssmscope.interp.fidelity import fidelity_auc, measure
from ssmscope.interp.fidelity.measure import (
    SHARES,
    counts,
    hidden_sets,
    measures,
    ranking,
    replacement_vector,
    run_hidden,
)
from ssmscope.interp.fidelity.measures import MEASURES
from ssmscope.interp.fidelity.result import Fidelity
from ssmscope.interp.objective import objective

GRID = [Fraction(i, 20) for i in range(21)]
LOGIT = dict(value="logit", replacement="zero")


def estimates(found: Fidelity, method: str) -> list[float]:
    return [found.estimate(method, measure).value for measure in MEASURES]


class TestClosedForms:
    def test_a_constant_output_has_nothing_to_explain(self):
        model = bag(dict.fromkeys(WORDS, 1.0), link=lambda total: 0 * total + 1.5)
        found = fidelity_auc(model, texts("a b c d", "e f g h i j"), methods={"own": by_position})
        f = 1 / (1 + np.exp(-1.5))
        for row in ("own", "random"):
            assert estimates(found, row) == pytest.approx([0, f, f, 0, 0], abs=1e-7)
        assert found.clean == pytest.approx([f, f])

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

    def test_areas_by_hand(self):
        weights = {"a": 0.3, "b": 0.1, "c": 0.4, "d": 0.2}
        model, data = bag(weights), texts("a b c d")
        toys = {"true": by_word(weights), "wrong": by_word({word: -w for word, w in weights.items()})}
        found = fidelity_auc(model, data, methods=toys, steps=4, **LOGIT)
        # most relevant first f is 1, .6, .3, .1, 0, and least relevant first 1, .9, .7, .4, 0
        morf, lerf = (0.5 + 0.6 + 0.3 + 0.1) / 4, (0.5 + 0.9 + 0.7 + 0.4) / 4
        top = (0 + 0 + 0.4 + 0.7) / 4  # of 4 tokens the shares .05, .1, .2, .5 are 0, 0, 1, 2
        assert estimates(found, "true") == pytest.approx([lerf - morf, morf, lerf, top, 1 - top], abs=1e-6)
        bottom = (0 + 0 + 0.1 + 0.3) / 4
        assert estimates(found, "wrong") == pytest.approx([morf - lerf, lerf, morf, bottom, 1 - bottom], abs=1e-6)

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

    def test_running_each_set_once_changes_nothing(self, monkeypatch):
        model, data = reader(), texts(*lines(4))
        whole = fidelity_auc(model, data, methods={"own": random_scores})
        monkeypatch.setattr(measure, "distinct", lambda sets: (list(range(len(sets))), np.arange(len(sets))))
        again = fidelity_auc(model, data, methods={"own": random_scores})
        assert again.values == pytest.approx(whole.values, abs=1e-5)
        assert again.random == pytest.approx(whole.random, abs=1e-5)

    def test_the_seed_draws_rankings_and_resamples(self):
        model, data = reader(), texts(*lines(12))
        first, again, other = (fidelity_auc(model, data, methods={"own": by_position}, seed=seed) for seed in (3, 3, 4))
        assert (first.random == again.random).all() and (first.estimates == again.estimates).all()
        assert (first.random != other.random).any()
        assert other.values == pytest.approx(first.values, abs=1e-5)
        assert not np.allclose(first.estimates[0, :, 1:], other.estimates[0, :, 1:], atol=1e-4)

    def test_a_probability_and_a_logit(self):
        model = bag({"a": 2.0, "b": -0.5})
        logit, share = (
            fidelity_auc(model, texts("a b"), methods={"own": by_position}, value=value, replacement="zero")
            for value in ("logit", "probability")
        )
        assert logit.clean == pytest.approx([1.5]) and share.clean == pytest.approx([1 / (1 + np.exp(-1.5))])
        assert share.curve[0, 0, -1, 0] == pytest.approx(0.5)

    def test_the_class_is_the_one_predicted(self):
        found = fidelity_auc(bag({"a": -2.0, "b": 1.0}), texts("a a", "b b"), methods={"own": by_position})
        assert found.predicted.tolist() == [0, 1]
        assert found.clean == pytest.approx([1 / (1 + np.exp(-4)), 1 / (1 + np.exp(-2))])


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

    def test_deletion_is_replacement_by_nothing_in_a_sum(self):
        model = bag({"a": 0.1, "b": 0.9, "c": 2.0}, ending=0.25)
        sets = list(itertools.product([0, 1], repeat=3))
        gone, zero = (self.run(model, "a b c", sets, mode=mode) for mode in ("delete", "replace"))
        assert gone == pytest.approx(zero, abs=1e-6) and zero[0] == pytest.approx(3.25)
        mean = self.run(model, "a b c", sets, replacement="mean")
        assert not np.allclose(gone, mean)

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


@pytest.fixture(scope="module")
def trained():
    """A state-space classifier that finds one of two words among others, and its texts."""
    draw = np.random.default_rng(0)

    def examples(n):
        labels = draw.integers(0, 2, n)
        words = draw.choice(WORDS[2:], (n, 8))
        words[np.arange(n), draw.integers(0, 8, n)] = np.array(WORDS[:2])[labels]
        return [" ".join(row) for row in words], labels

    model = reader(labels=2)
    optimizer = torch.optim.Adam(model.module.parameters(), 1e-2)
    with ssmscope.fast_scan(model.module):
        for _ in range(400):
            rows, labels = examples(256)  # new ones at every step: nothing can be learnt by heart
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model.forward(model.encode(rows)), torch.from_numpy(labels))
            if loss < 0.02:
                break
            loss.backward()
            optimizer.step()
    rows, labels = examples(60)
    accuracy = (model.logits(model.encode(rows)).argmax(-1).numpy() == labels).mean()
    assert accuracy > 0.95
    return model, text_data("planted", "test", rows, labels.tolist(), ("class 0", "class 1"))


class TestPlanted:
    def test_the_true_ranking_beats_every_other(self):
        weights = {"a": 1.5, "b": -0.7, "c": 0.9, "d": 0.2, "e": -1.2}
        model = bag(weights)
        batch = model.encode(["a b c d e"])
        rankings = np.array(list(itertools.permutations(range(5))))
        hidden = hidden_sets(rankings, GRID)
        (values,) = run_hidden(model, batch, [1], [hidden.sets], fill=replacement_vector(model, "zero"))
        assert len(hidden.sets) == 2**5
        delta, morf, lerf, comprehensive, sufficient = measures(
            values[hidden.asked], values[hidden.without], values[hidden.only]
        ).T
        true = rankings.tolist().index(ranking(np.array([list(weights.values())]))[0].tolist())
        wrong = rankings.tolist().index((4 - rankings[true]).tolist())
        assert delta.argmax() == true and np.sort(delta)[-2] < delta[true] - 1e-3
        assert delta.argmin() == wrong and delta[wrong] == pytest.approx(-delta[true])
        assert morf.argmin() == lerf.argmax() == true
        assert comprehensive[true] == comprehensive.max() and sufficient[true] == sufficient.min()

    def test_a_state_space_model_is_explained_by_its_planted_word(self, trained):
        model, data = trained
        planted = {word: float(word in WORDS[:2]) for word in WORDS}
        toys = {
            "oracle": by_word(planted),
            "reversed": by_word({word: -score for word, score in planted.items()}),
        }
        found = fidelity_auc(model, data, methods=toys)
        assert found.estimate("oracle").low > 0.1 and found.difference("oracle").low > 0.1
        assert found.estimate("reversed").high < -0.1 and found.best("delta") == ("oracle",)
        each = found.rankings[:, 0]  # of mean 0, as a ranking and its reverse are as likely
        assert abs(each.mean()) < 4 * each.std(ddof=1) / len(each) ** 0.5 and each.min() < 0 < each.max()
        assert (found.estimate("oracle").value > found.rankings[:, 0]).all()
