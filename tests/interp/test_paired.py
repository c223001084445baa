"""Comparison of two models: by token, by word where their tokenizers differ, and on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bags import tokenizer
from drawn import said
from examples import random_example
from matplotlib.text import Text
from seen import render
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

import ssmscope
from ssmscope import cli
from ssmscope.api.results import Result
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.heatmap import result as data_result
from ssmscope.interp.heatmap.result import shared_words
from ssmscope.interp.paired import DIFFERENCE, MIN_NAMED_SHARE, Paired, pair

TEXT = "A dull film , and good fun ."
WORDS = ("A", "dull", "film", ",", "and", "good", "fun", ".")


def letters():
    """A tokenizer of which every character is a token, and that has no special ones."""
    vocabulary = {"[UNK]": 0, **{c: i for i, c in enumerate(sorted(set("".join(WORDS))), start=1)}}
    backend = Tokenizer(token_models.BPE(vocabulary, [], unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.fixture(scope="module")
def models():
    return [Model(random_example(kind), tokenizer(WORDS), name=f"demo/{kind}") for kind in ("mamba2", "mamba")]


@pytest.fixture(scope="module")
def spelled():
    return Model(random_example("mamba2"), letters(), name="demo/letters")


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
            left = text.special if difference.outside is None else text.special | difference.outside
            seen = [
                at for at, each in enumerate(difference.scores) if abs(each) >= MIN_NAMED_SHARE * difference.ends[1]
            ]
            seen = [at for at in seen if difference.scores[at] != 0 and not left[at]]
            seen.sort(key=lambda at: -abs(difference.scores[at]))
            assert difference.marked == [at for at in seen if difference.scores[at] > 0][:3]
            assert difference.against == [at for at in seen if difference.scores[at] < 0][:3]
            named.update("more" * bool(difference.marked), "less" * bool(difference.against))
    assert named  # some difference is large enough


def test_chosen_queries_are_compared(models, spelled):
    found = ssmscope.attention(models, TEXT, rows=[2, 5])
    (text,) = found.rows().texts
    assert [row.query for row in text.rows] == [2] * 3 + [5] * 3
    whole = [ssmscope.attention(model, TEXT)[0].maps for model in models]
    for row, query in zip(text.rows[2::3], (2, 5)):
        mine, theirs = (np.mean([np.abs(each.values[query]) for each in maps], axis=0) for maps in whole)
        np.testing.assert_allclose(row.scores, mine - theirs, atol=1e-6)
    assert "each chosen query" in found.rows().name and "query 2" in str(found) and "query 5" in str(found)
    assert "mean of |weight| over 2 maps · query 5 “good”" in said(found.figure())  # whole, however long
    both = [models[0], spelled]
    text = ssmscope.attention(both, "A dull", rows=[0]).rows().texts[0]  # of both it is the first word
    assert [row.query for row in text.rows] == [0] * 3
    with pytest.raises(InputError, match="text 0: the chosen rows belong to different words"):
        ssmscope.attention(both, TEXT, rows=[3])


def test_words_of_other_tokens_are_laid_beside(models, spelled):
    found = ssmscope.heatmap([models[0], spelled], TEXT)
    (first,), (other,) = found.results
    text = found.rows().texts[0]
    assert [token.strip() for token in text.tokens] == TEXT.split() and not text.special.any()
    rows = by_name(text)
    spelled_out = [len(word) for word in TEXT.split()]
    sums = np.add.reduceat(other.mean, np.cumsum([0, *spelled_out[:-1]]))
    np.testing.assert_allclose(rows["demo/letters\nmean"].scores, sums, atol=1e-6)
    np.testing.assert_allclose(rows["demo/mamba2\nmean"].scores, first.mean[:-1], atol=1e-6)  # without [CLS]
    np.testing.assert_allclose(rows[f"{DIFFERENCE}\nmean"].scores, first.mean[:-1] - sums, atol=1e-6)
    kept = ssmscope.heatmap([models[0], spelled], TEXT, score="retention")
    means = np.add.reduceat(kept.results[1][0].mean, np.cumsum([0, *spelled_out[:-1]])) / spelled_out
    np.testing.assert_allclose(by_name(kept.rows().texts[0])["demo/letters\nmean"].scores, means, atol=1e-6)


def test_words_that_are_cut_elsewhere_are_put_together(models):
    """If one model reads "good film" as a word, the other's two words are one."""
    joined = tokenizer(("A", "goodfilm", "."))
    apart = Model(random_example("mamba2"), tokenizer(("A", "good", "film", ".")), name="apart")
    together = Model(random_example("mamba2"), joined, name="together")
    results = [ssmscope.heatmap(apart, "A good film ."), ssmscope.heatmap(together, "A goodfilm .")]
    text = pair(results).rows().texts[0]
    assert [token.strip() for token in text.tokens] == ["A", "good film", "."]
    with pytest.raises(InputError, match="text 0 is not read as the same characters"):
        pair([ssmscope.heatmap(apart, "A film ."), results[1]])


def test_its_views_and_files(models, tmp_path):
    found = ssmscope.heatmap(models, [TEXT])
    paths = found.save(tmp_path, "pair")
    assert Result.load(paths["json"]) == found
    assert json.loads(paths["json"].read_text())["provenance"]["model"] == "demo/mamba2 and demo/mamba"
    assert "more in demo/mamba2" in render(found, width=120, color_system=None)
    assert "difference" in paths["html"].read_text() and found.headline.startswith(
        "Memory of demo/mamba2 and demo/mamba:"
    )
    assert set(found.to_frame()["model"]) == {"demo/mamba2", "demo/mamba", "difference"}


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
    drawn = {each.get_text() for each in found.figure(size=(6, 4)).findobj(Text)}
    assert {each.word for each in words} <= drawn and {"demo/mamba2", "demo/mamba"} <= drawn
    for name in ("SHOWN_HIGHEST", "SHOWN_LOWEST"):
        monkeypatch.setattr(data_result, name, 1)
    few = shared_words(found.results)  # those that lie furthest apart
    assert len(few) == 2 and min(each.gap for each in few) >= max(each.gap for each in words if each not in few)


def test_the_picture_of_a_short_text_says_whole_what_it_compares(models):
    found = ssmscope.heatmap(models, "A dull film")
    shown = said(found.figure())
    assert found.headline in shown and found.rows().name in shown


def test_one_in_a_list_is_one_and_three_are_refused(models):
    assert not isinstance(ssmscope.heatmap(models[:1], TEXT), Paired)
    with pytest.raises(InputError, match="heatmap takes one model, or two; 3 were given"):
        ssmscope.heatmap([*models, models[0]], TEXT)
    with pytest.raises(InputError, match="a batch, or a trace, is of one model"):
        ssmscope.heatmap(models, models[0].encode(TEXT))


def test_a_command_line_takes_two(capsys):
    assert cli.run(["heatmap", "demo/sst2-mamba2", "demo/imdb-mamba2", "--text", "A dull film.", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "pair"
    assert cli.run(["heatmap", "a", "b", "c", "--text", "x"]) == 2
    assert "heatmap takes one model, or two" in capsys.readouterr().err
