"""Comparison of two models: by token, by word where their tokenizers differ, and on the command line."""

import json

import numpy as np
import pytest
from bags import tokenizer
from examples import random_example
from matplotlib.text import Text
from refusals import refuses
from seen import render
import ssmscope
from ssmscope import cli
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.interp.heatmap import result as data_result
from ssmscope.interp.heatmap.result import shared_words
from ssmscope.interp.paired import DIFFERENCE, MIN_NAMED_SHARE, Paired

TEXT = "A dull film , and good fun ."
WORDS = ("A", "dull", "film", ",", "and", "good", "fun", ".")


@pytest.fixture(scope="module")
def models():
    return [Model(random_example(kind), tokenizer(WORDS), name=f"demo/{kind}") for kind in ("mamba2", "mamba")]


def by_name(text):
    return {row.name: row for row in text.rows}


@pytest.mark.parametrize("analysis", [ssmscope.heatmap, ssmscope.explain, ssmscope.attention])
def test_the_difference_is_that_of_both_results(models, analysis):
    found = analysis(models, [TEXT, "good film"])
    alone = [analysis(model, [TEXT, "good film"]) for model in models]
    assert isinstance(found, Paired) and [result.verdict() for result in found.results] == [
        result.verdict() for result in alone
    ]
    shown, named = found.rows(), set()
    for text, first, other in zip(shown.texts, *(result.token_rows().texts for result in alone), strict=True):
        assert text.tokens == first.tokens
        rows = by_name(text)
        for mine, theirs in zip(first.rows, other.rows, strict=True):
            name = mine.name.replace("\n", " · ")
            difference = rows[f"{DIFFERENCE}\n{name}"]
            np.testing.assert_allclose(difference.scores, mine.scores - theirs.scores, atol=1e-5)
            both = [rows[f"demo/{kind}\n{name}"] for kind in ("mamba2", "mamba")]
            np.testing.assert_allclose(both[0].scores, mine.scores, atol=1e-5)
            for row in both:
                assert row.ends[0] == row.ends[1] or row.ends == (
                    min(mine.ends[0], theirs.ends[0]),
                    max(mine.ends[1], theirs.ends[1]),
                )
            told = [at for row in (mine, theirs) for at in (*row.marked, *row.against)]
            left = text.special & ~np.isin(np.arange(len(text.special)), told)
            left = left if difference.outside is None else left | difference.outside
            seen = [
                at for at, each in enumerate(difference.scores) if abs(each) >= MIN_NAMED_SHARE * difference.ends[1]
            ]
            seen = [at for at in seen if difference.scores[at] != 0 and not left[at]]
            seen.sort(key=lambda at: -abs(difference.scores[at]))
            assert difference.marked == [at for at in seen if difference.scores[at] > 0][:3]
            assert difference.against == [at for at in seen if difference.scores[at] < 0][:3]
            named.update("more" * bool(difference.marked), "less" * bool(difference.against))
    assert named  # some difference is large enough


def test_over_a_data_set_tables_stand_side_by_side(models, monkeypatch):
    data = text_data("made-up", "test", [TEXT] * 6, [0, 1] * 3, ("negative", "positive"))
    found = ssmscope.heatmap(models, data)
    assert found.rows() is None and set(found.to_frame()["model"]) == {"demo/mamba2", "demo/mamba"}
    assert "class positive" in render(found)
    words = shared_words(found.results)
    kept = [{each.word: each.kept for each in result.words} for result in found.results]
    assert {each.word for each in words} == set(kept[0]) & set(kept[1]) and len(words) > 3
    for each in words:
        first, other = (named[each.word] for named in kept)
        assert each.difference == first.value - other.value
        assert (each.gap > 0) == (min(first.high, other.high) < max(first.low, other.low))
    assert [each.difference for each in words] == sorted((each.difference for each in words), reverse=True)
    drawn = {each.get_text() for each in found.figure(size=(6, 5)).findobj(Text)}
    assert {each.word for each in words} <= drawn and {"demo/mamba2", "demo/mamba"} <= drawn
    for name in ("SHOWN_HIGHEST", "SHOWN_LOWEST"):
        monkeypatch.setattr(data_result, name, 1)
    few = shared_words(found.results)  # those that lie furthest apart
    assert len(few) == 2 and min(each.gap for each in few) >= max(each.gap for each in words if each not in few)


def test_one_in_a_list_is_one_and_three_are_refused(models):
    assert not isinstance(ssmscope.heatmap(models[:1], TEXT), Paired)
    refuses("heatmap takes one model, or two; 3 were given", ssmscope.heatmap, [*models, models[0]], TEXT)
    refuses("a batch, or a trace, is of one model", ssmscope.heatmap, models, models[0].encode(TEXT))


def test_a_command_line_takes_two(capsys):
    assert cli.run(["heatmap", "demo/sst2-mamba2", "demo/imdb-mamba2", "--text", "A dull film.", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "pair"
    assert cli.run(["heatmap", "a", "b", "c", "--text", "x"]) == 2
    assert "heatmap takes one model, or two" in capsys.readouterr().err
