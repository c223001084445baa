"""The heatmap: survival of a real model, Baleen's Eq. 10 against a slow loop, words that stand out, and safe views."""

import re

import numpy as np
import pytest
import torch
from attended import HOSTILE
from attended import words as sentence
from drawn import drawn, outside, overlapping
from examples import random_example
from exhaustive import ALL
from refusals import refuses
from seen import render
from ssmscope.core.model import Model
from ssmscope.core.trace import Trace
from ssmscope.errors import InputError
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.interp.heatmap.text_result import rows, scale, strongest
from ssmscope.render.numbers import format_range


def make_trace(texts, *, words=None, layers=3, seed=0, answers=None):
    """A trace of given tokens, the first of each text a special one; the gates' means are random."""
    texts = [tuple(text) for text in texts]
    if words is None:
        words = [(None, *range(len(text) - 1)) for text in texts]
    shape = (len(texts), max(map(len, texts)))
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        mask[row, : len(text)] = True
    retention = torch.rand(layers, *shape, generator=torch.Generator().manual_seed(seed))
    return Trace(
        input_ids=torch.zeros(shape, dtype=torch.int64), mask=mask,
        retention=retention.masked_fill(~mask, float("nan")), logits=torch.zeros(len(texts), 2), tokens=tuple(texts),
        words=tuple(tuple(row) for row in words), answers=tuple(answers or [("positive", 0.75)] * len(texts)),
        source={"model": "demo/test", "architecture": "mamba", "fingerprint": "abc"}, layers=(),
    )  # fmt: skip


trace = pytest.fixture(lambda: make_trace([sentence(9), sentence(5)]))


def eq_10(trace, **options):
    return selection_heatmap(None, trace, **{"score": "retention", **options})


IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9, 1]]
model = pytest.fixture(scope="module")(lambda: Model(random_example("mamba2")))


class TestSurvival:
    def test_it_is_the_default_and_that_of_the_trace(self, model):
        batch = model.encode(ids=IDS)
        expected = model.trace(batch).survival().numpy()
        for given in (batch, model.trace(batch)):
            result = selection_heatmap(model, given)
            assert (result.score, result.layers, result.by_layer, result.reach) == ("survival", (0, 1), True, 4)
            for row, text in enumerate(result):
                np.testing.assert_allclose(text.scores, expected[:, row, : len(text)], atol=1e-5)
                np.testing.assert_allclose(text.mean, text.scores.mean(0), atol=1e-6)
                assert text.scores.sum(1) == pytest.approx(1, abs=1e-5) and text.half_lives is None

    def test_half_lives_are_the_layers_own(self, model):
        trace = model.trace(ids=IDS)
        expected = np.stack([layer.half_lives().numpy() for layer in trace.layers])
        for given in (trace, model.encode(ids=IDS)):
            result = selection_heatmap(model, given, half_lives=True)
            for row, text in enumerate(result):
                np.testing.assert_array_equal(text.half_lives[:, :-1], expected[:, row, : len(text) - 1])
                assert np.isnan(text.half_lives[:, -1]).all()  # nothing follows the last token
            assert "half-life in tokens" in str(result)

    def test_at_a_position_it_is_of_the_text_up_to_there(self, model):
        (text,) = selection_heatmap(model, model.encode(ids=IDS[:1]), at=4)
        (cut,) = selection_heatmap(model, model.encode(ids=[IDS[0][:5]]))
        np.testing.assert_allclose(text.scores[:, :5], cut.scores, atol=1e-5)
        assert not text.scores[:, 5:].any() and max(text.rationale, default=0) < 5
        with pytest.raises(InputError, match="no token 4 in every text; the shortest has the tokens 0 to 3"):
            selection_heatmap(model, model.encode(ids=IDS), at=4)

    def test_heads_are_ranked_by_how_selective_they_are(self, model):
        batch = model.encode(ids=IDS)
        result = selection_heatmap(model, batch, heads="all")
        trace = model.trace(batch)
        layers = list(trace.layers)
        assert len(result.heads) == sum(layer.recurrence.shape[2] for layer in layers)
        assert [head.selectivity for head in result.heads] == sorted(
            (h.selectivity for h in result.heads), reverse=True
        )
        for at, head in enumerate(result.heads):
            r = layers[head.layer].recurrence
            shares = layers[head.layer].survival(per_head=True)[0, :, head.head]
            np.testing.assert_allclose(result[0].heads[at], shares, atol=1e-5)
            replaced = [r.one_minus_mean_decay()[row, : len(ids), head.head] for row, ids in enumerate(IDS)]
            own = np.mean([float(w.std(correction=0) / w.mean()) for w in replaced])
            assert head.selectivity == pytest.approx(own, rel=1e-3)
        assert selection_heatmap(model, batch, heads="top").heads == result.heads[:8]
        for score in ("survival", "retention", "write"):
            one, other = (selection_heatmap(model, given, heads="all", score=score) for given in (batch, trace))
            assert one.heads == other.heads == result.heads
            for each, same in zip(one, other):
                np.testing.assert_allclose(each.heads, same.heads, atol=1e-6)
                np.testing.assert_allclose(each.scores, same.scores, atol=1e-6)
        lines = {line.labels: line.cells["stands out"].text for line in strongest(result)}
        for head, scores in zip(result.heads, result[0].heads):
            of_words = [at for at, word in enumerate(result[0].words) if word is not None]
            top = sorted(of_words, key=lambda at: -scores[at])[:3]
            said = " · ".join(f"{result[0].tokens[at].strip()} {result.written(float(scores[at]))}" for at in top)
            assert lines["0", f"layer {head.layer} head {head.head}"] == said
        frame = result.to_frame()
        assert set(frame["head"].dropna()) == {head.head for head in result.heads}

    def test_a_trace_without_inputs_has_none(self, model, trace):
        for given in (model.trace(ids=IDS, keep_inputs=False), trace):
            refuses("taken without its inputs", selection_heatmap, model, given)

    def test_through_layers_of_attention_nothing_is_followed(self):
        hybrid = Model(random_example("bamba"))
        assert selection_heatmap(hybrid, hybrid.encode(ids=IDS)).attends
        with pytest.raises(InputError, match="this model has other layers between them"):
            selection_heatmap(hybrid, hybrid.encode(ids=IDS), through=True)


def test_a_lift_is_the_score_over_the_median_around(model):
    result = selection_heatmap(model, model.encode(ids=[[5, 17, 3, 9, 22, 1, 4, 60], [7, 8, 9]]))
    lifts = result.lifts(window=2)
    assert lifts["lift"].is_monotonic_decreasing and len(lifts) == sum(len(text) for text in result) * len(
        result.layers
    )
    for number, text in enumerate(result):
        for row, layer in enumerate(result.layers):
            own = lifts[(lifts["text"] == number) & (lifts["layer"] == layer)].set_index("position")
            for at in range(len(text)):
                around = [text.scores[row, s] for s in range(max(0, at - 2), min(len(text), at + 3)) if s != at]
                assert own["lift"][at] == pytest.approx(text.scores[row, at] / np.median(around), rel=1e-5)
                assert own["token"][at] == text.tokens[at]


def test_the_lift_is_a_score_of_the_heatmap(model):
    texts = model.encode(ids=[[5, 17, 3, 9, 22, 1, 4, 60, 8, 2, 30, 31, 7, 6, 12, 13], [7]])
    for at in (None, 0):
        shares, found = (selection_heatmap(model, texts, score=score, at=at) for score in ("survival", "lift"))
        for text, lifted in zip(shares, found):
            last = len(text) if at is None else at + 1
            for own, row in zip(text.scores, lifted.scores):
                assert not row[last:].any()
                for here in range(last):
                    around = [own[place] for place in range(last) if 0 < abs(place - here) <= 12]
                    expected = own[here] / max(np.median(around), 1e-6 / last) if around else 1.0
                    assert row[here] == pytest.approx(expected, rel=1e-4)
    found = selection_heatmap(model, texts.rows([0]), score="lift")
    layer, at = np.unravel_index(found[0].scores.argmax(), found[0].scores.shape)
    assert f"(token {at}) has" in found.headline and f"in layer {found.layers[layer]}" in found.headline
    refuses("lifts already", found.lifts)
    with pytest.raises(InputError, match="lift compares a token with those around it"):
        selection_heatmap(model, texts, score="lift", contrast="sst2")


def test_one_scale_for_all_rows_and_texts(model):
    result = selection_heatmap(model, model.encode(ids=IDS))
    end = max(float(np.vstack([text.mean, text.scores]).max()) for text in result)
    assert scale(result) == (0.0, pytest.approx(end))
    assert {row.ends for text in rows(result).texts for row in text.rows} == {scale(result)}
    for row, scores in zip(rows(result).texts[0].rows[1:], result[0].scores):
        low, high = row.own
        assert (low, high) == (scores[~result[0].special].min(), scores[~result[0].special].max())
        assert row.extent == format_range(low, high)
    own = selection_heatmap(model, model.encode(ids=IDS), scale="row")
    assert len({row.ends for text in rows(own).texts for row in text.rows}) == 6
    assert rows(result).texts[0].span == (0, 3) and "the convolution's window begins" in render(result)


@pytest.mark.parametrize("score", ["retention", "write"])
@pytest.mark.parametrize("layers", ["mean", "all", [2, 0]])
def test_scores_are_equation_10(trace, score, layers):
    result = eq_10(trace, score=score, layers=layers, top=2)
    chosen = range(3) if isinstance(layers, str) else layers
    assert result.layers == tuple(chosen) and len(result) == 2
    for row, text in enumerate(result):
        assert len(text) == len(trace.tokens[row]) and text.scores.dtype == np.float32
        for position in range(len(text)):
            total = 0.0
            for index, layer in enumerate(chosen):
                gate = float(trace.retention[layer, row, position])
                importance = gate if score == "retention" else 1 - gate
                assert text.scores[index, position] == pytest.approx(importance, abs=1e-7)
                total += importance
            assert text.mean[position] == pytest.approx(total / len(chosen), abs=1e-7)


def test_special_tokens_never_explain(trace):
    special = Trace(**{**vars(trace), "words": ((None,) * 9, (None, 0, None, 1, None))})
    assert [text.rationale for text in eq_10(special, top=3)][0] == ()
    assert set(eq_10(special, top=3)[1].rationale) <= {1, 3}


def test_merging_averages_the_tokens_of_a_word(model):
    tokens = ("[CLS]", "gor", "ge", "ous", "film", "[SEP]", "[SEP]", "film")
    trace = make_trace([tokens], words=[(None, 0, 0, 0, 1, None, None, 0)])
    parts, merged = eq_10(trace)[0], eq_10(trace, merge=True, top=9)[0]
    assert merged.tokens == ("[CLS]", "gorgeous", "film", "[SEP]", "[SEP]", "film")
    assert merged.words == (None, 0, 1, None, None, 0)
    np.testing.assert_allclose(merged.scores[:, 1], parts.scores[:, 1:4].mean(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(merged.scores[:, 2:], parts.scores[:, 4:])
    batch = model.encode(ids=IDS[:1])
    batch = type(batch)(**{**vars(batch), "words": ((0, 0, 1, *range(2, 10)),)})
    shares, whole = selection_heatmap(model, batch)[0], selection_heatmap(model, batch, merge=True)[0]
    np.testing.assert_allclose(whole.scores[:, 0], shares.scores[:, :2].sum(1), rtol=1e-5)


def test_padding_never_appears_and_damage_is_refused(trace):
    result = eq_10(trace, layers="all")
    assert all(np.isfinite(text.scores).all() for text in result)
    assert not result.to_frame()["score"].isna().any() and "NaN" not in result.to_json()
    trace.retention[1, 0, 3] = float("nan")
    refuses("text 0 are not finite at layer 1", eq_10, trace)


@pytest.mark.parametrize(("options", "message"), [
    ({"score": "retension"}, "allowed are survival, readable, retention, write, lift; did you mean 'retention'"),
    ({"layers": "al"},
     "layers is 'al'; allowed are mean, all or a whole number from 0 on, or several; did you mean 'all'?"),
    ({"layers": [3]}, "no layer 3; this model has the layers 0 to 2"),
    ({"layers": [1, 1]}, "each once"),
])  # fmt: skip
def test_bad_options_are_named(trace, options, message):
    refuses(re.escape(message), eq_10, trace, **options)


def test_html_is_escaped_self_contained_and_complete():
    result = eq_10(make_trace([("<s>", *HOSTILE)], answers=[("<i>bad</i>", 0.5)]))
    page = result.to_html()
    assert "<script" not in page and "&lt;script&gt;" in page and "<i>bad" not in page
    assert not re.search(r"https?://|@import|url\(", page)
    assert not {character for character in page if ord(character) < 32} - {"\n"} and "\u202e" not in page
    assert page.count("title=") == 4 * len(result[0]) and f"layer 2: {result[0].scores[2, 1]:.6g}" in page
    assert "prefers-color-scheme: dark" in page


def test_terminal_shows_hostile_tokens_harmlessly():
    result = eq_10(make_trace([("<s>", *HOSTILE)]), layers="all", top=20)
    for options in ({"color_system": None}, {"force_terminal": True, "color_system": "truecolor", "no_color": False}):
        shown = render(result, **options)
        assert "\x1b[31m" not in shown and "\u202e" not in shown
    assert "␛[31m" in shown and "[bold]no" in shown


@pytest.mark.parametrize(("length", "layers"), [(1, 1), (5, 4), (61, 48), (400, 4)] if ALL else [(5, 4), (400, 4)])
def test_nothing_overlaps_in_the_figure(length, layers):
    result = eq_10(make_trace([sentence(length), sentence(3)], layers=layers))
    figure, texts = drawn(result)
    assert not overlapping(texts) and not outside(figure, texts)
    shown = " ".join(text for text, _ in texts)
    assert all(word.strip() in shown for word in sentence(min(length, 1000)))
