"""Sums of fidelity, text by text and over texts, of made-up numbers that are all distinct."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from bags import bag, by_position, by_word, texts
from faithful import reader
from refusals import refuses
from ssmscope.core.bootstrap import resampled_means
from ssmscope.core.ties import spearman
from ssmscope.errors import InputError
from ssmscope.interp.explain import explain
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.fidelity import fidelity_auc, measure
from ssmscope.interp.fidelity.measures import display_name, layer_measure, layer_of, more_is_better
from ssmscope.interp.objective import objective
from ssmscope.interp.plausibility import plausibility
from ssmscope.interp.plausibility.measure import agreement
from ssmscope.interp.sanity import cascading_randomisation


def test_a_texts_measures_are_those_of_every_ranking():
    draw = np.random.default_rng(0)
    scores, weights = draw.normal(size=(5, 7)), draw.random(7)
    grid = [Fraction(step, 4) for step in range(5)]
    hidden = measure.hidden_sets(measure.ranking(scores), grid)
    values = np.array([3 - (own * weights).sum() ** 2 for own in hidden.sets])  # f of every set
    mask = np.array([1, 0, 0, 1, 1, 0, 0], dtype=bool)
    effects = draw.normal(size=(2, 7))

    def f(gone) -> float:
        return 3 - weights[list(gone)].sum() ** 2

    found, curves = measure.text_measures(scores, hidden, values, mask, effects, methods=2, share=0.43)
    assert found.shape == (5, 5 + 3 + 2) and curves.shape == (3, 2, 5)
    every = []
    for own in scores:
        order = np.argsort(-own)
        morf, lerf = ([f(o[: round(share * 7)]) for share in grid] for o in (order, order[::-1]))
        every.append((morf, lerf))
    for own, row, (morf, lerf) in zip(scores, found, every):
        order = np.argsort(-own)
        area = [sum((a + b) / 2 for a, b in zip(c, c[1:])) / 4 for c in (morf, lerf)]
        tops = [order[: round(share * 7)] for share in measure.SHARES]
        without = np.mean([f(()) - f(top) for top in tops])
        only = np.mean([f(()) - f(set(range(7)) - set(top.tolist())) for top in tops])
        expected = [area[1] - area[0], *area, without, only, *agreement(own, mask, 3)]
        assert row.tolist() == pytest.approx([*expected, *(spearman(own, effect) for effect in effects)])
    assert curves == pytest.approx(np.stack([every[0], every[1], np.mean(every[2:], axis=0)]))
    for given, share in ((None, 0.43), (mask, None)):
        bare, _ = measure.text_measures(scores, hidden, values, given, None, methods=2, share=share)
        assert bare.shape == (5, 8) and np.isnan(bare[:, 5:]).all() and bare[:, :5] == pytest.approx(found[:, :5])


def made_up():
    """Measurements of four texts: two methods and three random rankings, 5 + 3 + 2 measures, three points of curves."""
    draw = np.random.default_rng(1)
    values = draw.normal(size=(4, 5, 10))
    values[1, :, 5:8] = math.nan  # a text without a rationale
    values[2, 3, 5:8] = math.nan
    values[3, :, 8] = values[[0, 3], :, 9] = math.nan  # texts that no knockout changes
    return {
        "values": values,
        "curves": draw.normal(size=(4, 3, 2, 3)),
        "targets": np.array([1, 0, 2, 1]),
        "tied": np.array([[0.0625, 0.25], [0.0625, 0.0], [0.0625, 0.0], [0.0625, 0.125]]),
        "unconverged": np.array([[True, False], [False, False], [True, False], [False, False]]),
    }


def summary(found, monkeypatch, **options):
    monkeypatch.setattr(measure, "MAX_TIED_SHARE", 0.0625)
    given = dict(total=9, used=np.array([0, 3, 4, 8]), long=2, share=0.375, notes=["noted"], seed=3)
    given |= dict(knocked=("knockout", "knockout-3")) | options
    provenance = {"model": "m", "options": {"value": "logit"}}
    return measure.summarise(provenance, ("a", "b"), found, [Fraction(0), Fraction(1, 2), Fraction(1)], **given)


def test_means_and_differences_over_texts(monkeypatch):
    found = made_up()
    result = summary(found, monkeypatch)
    names = ("delta", "morf", "lerf", "comprehensiveness", "sufficiency", "token_f1", "iou_f1", "auprc")
    assert result.measures == (*names, "knockout", "knockout-3") and result.value == "logit"
    assert result.texts.tolist() == [0, 3, 4, 8] and result.predicted.tolist() == [1, 0, 2, 1]
    assert result.shares.tolist() == [0, 0.5, 1] and result.marked == 0.375
    assert result.clean.tolist() == found["curves"][:, 0, 0, 0].tolist()
    columns = np.concatenate([found["values"][:, :2], found["values"][:, 2:].mean(1, keepdims=True)], axis=1)
    np.testing.assert_array_equal(result.values, columns[:, :2].transpose(1, 0, 2))
    np.testing.assert_array_equal(result.random, columns[:, 2])
    np.testing.assert_allclose(result.rankings, np.nanmean(found["values"][:, 2:], axis=0))
    np.testing.assert_allclose(result.estimates[..., 0], np.nanmean(columns, axis=0))
    np.testing.assert_allclose(result.curve[..., 0], found["curves"].mean(0))
    rows = resampled_means(columns.reshape(4, -1), seed=3).reshape(-1, 3, 10)
    for place, (a, b) in enumerate(((0, 1), (0, 2), (1, 2))):
        np.testing.assert_allclose(result.paired[place, :, 0], rows[0, a] - rows[0, b])
        low, high = np.nanquantile(rows[1:, a] - rows[1:, b], [0.025, 0.975], axis=0)
        np.testing.assert_allclose(result.paired[place, :, 1:], np.stack([low, high], axis=1))
    low, high = np.nanquantile(rows[1:], [0.025, 0.975], axis=0)
    np.testing.assert_allclose(result.estimates[..., 1:], np.stack([low, high], axis=-1))
    rows = resampled_means(found["curves"].reshape(4, -1), seed=3)[1:]
    np.testing.assert_allclose(result.curve[..., 1].ravel(), np.quantile(rows, 0.025, axis=0))
    found["values"][:, 4, 0] = math.nan
    assert np.isnan(summary(found, monkeypatch).rankings[2, 0])  # a mean of nothing


def test_what_is_said_of_the_texts(monkeypatch):
    found = made_up()
    assert summary(found, monkeypatch).notes == (
        "3 of 9 texts have a single token and are left out", "2 of 9 texts are longer than max_tokens and are left out",
        "b gives 9 % of the tokens a score that another one has too: position decides", "noted",
        "a did not converge on 2 of 4 texts", "in 1 of 4 texts no knockout changes the output",
        "in 2 of 4 texts no knockout in layer 3 changes the output",
        "2 of 4 texts have no rationale; plausibility leaves them out",
    )  # fmt: skip
    found["unconverged"][:] = False
    found["tied"][:] = 0.0
    found["values"][np.isnan(found["values"])] = 0.5
    assert summary(found, monkeypatch, total=6).notes == (
        "2 of 6 texts are longer than max_tokens and are left out",
        "noted",
    )
    bare = summary(found, monkeypatch, total=4, long=0, share=None, notes=[])
    assert bare.notes == () and bare.marked is None and bare.measures[4:] == ("sufficiency", "knockout", "knockout-3")
    np.testing.assert_array_equal(bare.values[1], found["values"][:, 1][:, [0, 1, 2, 3, 4, 8, 9]])


def test_names_of_measures():
    names = ("delta", "morf", "lerf", "sufficiency", "knockout", "knockout-12", "auprc")
    assert [more_is_better(name) for name in names] == [True, False, True, False, True, True, True]
    assert [layer_of(name) for name in names] == [None] * 5 + [12, None] and layer_measure(12) == "knockout-12"
    shown = ["ΔA", "A_MoRF", "A_LeRF", "sufficiency", "ρ knockout", "layer 12", "AUPRC"]
    assert [display_name(name) for name in names] == shown


def test_the_share_of_tokens_with_anothers_score():
    assert measure.tied_share(np.array([1.0, 2.0, 1.0, 3.0, 3.0, 3.0, -1.0, 0.0])) == 5 / 8
    assert measure.tied_share(np.array([2.0, 3.0])) == 0 and measure.tied_share(np.array([2.0, 2.0])) == 1


def test_replacements_are_tokens_of_the_model():
    model = bag({"a": 0.25, "b": 1.0})
    assert measure.replacement_vector(model, "[UNK]").tolist() == [0] and measure.replacement_vector(
        model, "[PAD]"
    ).tolist() == [0]
    assert (
        measure.replacement_vector(model, "mean").item() == pytest.approx(1.25 / 5)
        and measure.replacement_vector(model, "b") == 1
    )
    for replacement, line in (
        ("zebra", "replacement 'zebra' is not a token of bag; allowed are mean, zero, pad or a token"),
        (3, "replacement is 3; allowed are mean, zero, pad or a token"),
    ):
        refuses(line, measure.replacement_vector, model, replacement)
    model.tokenizer.pad_token = None
    refuses(
        "the tokenizer of bag has no padding token: give another replacement", measure.replacement_vector, model, "pad"
    )
    half = reader()
    table = half.module.get_input_embeddings().weight.data
    half.module.get_input_embeddings().weight.data = table.bfloat16()
    expected = table.bfloat16().float().mean(0).bfloat16()
    assert torch.equal(measure.replacement_vector(half, "mean"), expected)


def test_a_circular_baseline_is_named_for_each_method_that_has_it():
    model = reader()
    goal = objective(model, model.encode(["a b", "c"]))
    mean = measure.replacement_vector(model, "mean")

    def named(*methods: str, fill=mean, **option) -> list[str]:
        return [note.split(" is the ")[0] for note in measure.circular_notes(goal, methods, option, fill)]

    assert named("gradxinput", "occlusion", "ig", "random") == ["the baseline of occlusion"]
    both = ["the baseline of occlusion", "the baseline of ig"]
    assert named("gradxinput", "occlusion", "ig", ig={"baseline": "mean"}) == both
    assert named("occlusion", occlusion={"baseline": "zero"}) == []
    assert named("occlusion", "ig", fill=mean + 1e-4) == []


def noted(goal) -> Scores:
    return Scores(by_position(goal).scores, note="beware")


def test_texts_that_are_too_long_or_have_one_token_are_left_out():
    model = bag(dict(zip("abcde", (0.5, -0.25, 1.0, 2.0, -4.0))))
    data = texts("a b c", "a", "d e", "a b c d", "c")  # and a special token each
    found = fidelity_auc(model, data, methods={"own": noted}, max_tokens=4, steps=2)
    assert found.texts.tolist() == [0, 2] and found.notes == (
        "2 of 5 texts have a single token and are left out",
        "1 of 5 texts are longer than max_tokens and are left out",
        "own: beware",
    )
    one = fidelity_auc(model, data, methods={"own": noted}, max_tokens=3, steps=2)
    assert one.texts.tolist() == [2] and one.curve.shape == (2, 2, 3, 3)
    with pytest.raises(InputError, match=r"no text of toy \(test\) has between two tokens and 2: there is nothing"):
        fidelity_auc(model, data, methods={"own": noted}, max_tokens=2)
    few = fidelity_auc(model, data, methods={"own": noted}, limit=3, seed=1)
    assert few.provenance["data"]["examples"] == 3


def test_methods_of_one_ranking_beside_the_random_ones():
    model = reader()
    data = texts("a b c", "d e a b")
    own = by_word({word: float(at % 3) for at, word in enumerate("abcde")})
    found = fidelity_auc(model, data, methods={"own": own, "last": by_position}, steps=2, random_rankings=23)
    assert found.rankings.shape == (23, 5) and found.notes[0].startswith("own gives 50 % of the tokens a score")
    named = fidelity_auc(model, data, methods=["random", "gradxinput"], steps=2)
    assert named.methods == ("gradxinput",) and named.provenance["options"]["methods"] == ["gradxinput"]
    alone = fidelity_auc(model, texts("d e a b"), methods={"own": own}, steps=2)
    np.testing.assert_allclose(alone.values[0, 0], found.values[0, 1], atol=1e-6)


def test_options_of_methods_are_recorded():
    model, data = reader(), texts("a b c", "d e", rationales=[((0, 1),), ((0, 1),)])

    def sized(goal, size=1) -> Scores:
        return Scores(size * by_position(goal).scores)

    for option in (None, {"own": {"size": 2}}):
        given: Any = {"methods": {"own": sized}, "option": option}
        results = [
            fidelity_auc(model, data, steps=1, **given),
            plausibility(model, data, **given),
            explain(model, list(data.texts), **given),
            cascading_randomisation(model, list(data.texts), layers=[0], **given),
        ]
        for result in results:
            options = result.provenance["options"]
            assert options["option"] == (option or {}) and options["methods"] == ["own"]
        assert results[2][0].attributions[0].scores[1] == (-2 if option else -1)
