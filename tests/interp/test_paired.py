"""Comparison of two models: by token, by word where their tokenizers differ, and on the command line.

Rows of two models and their difference, by hand: scales, named tokens, words of other tokens.
"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

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
from ssmscope.interp.paired import DIFFERENCE, MIN_NAMED_SHARE, Paired, differences, pair, paired_rows
from ssmscope.render.blocks import TokenRow, TokenRows, TokenText

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


NAMES = ("m", "n")


def row(scores: Any, ends: tuple[float, float] = (0.0, 1.0), name: str = "layer 1", **more: Any) -> TokenRow:
    return TokenRow(name, np.array(scores, np.float32), ends, **more)


def text(tokens: str, *rows: TokenRow, words: Any = None, **more: Any) -> TokenText:
    parts = tuple(tokens.split("|"))
    given = {"answer": "yes", "probability": 0.75, **more}
    return TokenText(parts, tuple(range(len(parts))) if words is None else words, rows, **given)


def block(*texts: TokenText, **more: Any) -> TokenRows:
    given = dict(of="layer", score="s", name="the score", around=("low", "high"), marked="kept", first=2, summed=False)
    return TokenRows(texts=texts, **{**given, **more})


def both(first: TokenText, other: TokenText, **more: Any) -> TokenText:
    return paired_rows(block(first, **more), block(other, **more), NAMES).texts[0]


def scores_of(found: TokenText) -> dict[str, list[float]]:
    return {each.name: [float(score) for score in np.round(each.scores, 6)] for each in found.rows}


def test_both_rows_are_on_the_wider_scale_and_the_difference_on_one_around_zero() -> None:
    first = text("a|b|c", row([0.5, 0.25, 0.0], (0.0, 0.5), own=(0.0, 0.5)))
    other = text("a|b|c", row([0.125, 0.75, 0.0], (0.125, 0.75)), answer="no", probability=0.5)
    found = both(first, other)
    assert [each.name for each in found.rows] == ["m\nlayer 1", "n\nlayer 1", "difference\nlayer 1"]
    assert [each.ends for each in found.rows] == [(0.0, 0.75), (0.0, 0.75), (-0.75, 0.75)]
    assert [each.signed for each in found.rows] == [False, False, True]
    assert found.rows[2].scores.tolist() == [0.375, -0.5, 0.0] and found.rows[2].scores.dtype == np.float64
    assert (found.rows[2].marked, found.rows[2].against) == ([0], [1])
    assert (found.answer, found.about) == ("yes", "n: “no” (p = 0.500)")
    assert both(first, text("a|b|c", *other.rows, probability=math.nan)).about == "n: “yes”"


def test_a_flat_row_keeps_its_own_scale() -> None:
    found = both(text("a|b", row([0.5, 0.5], (0.5, 0.5))), text("a|b", row([0.0, 1.0], (0.0, 1.0))))
    assert [each.ends for each in found.rows] == [(0.5, 0.5), (0.0, 1.0), (-1.0, 1.0)]


def test_signed_rows_differ_on_the_scale_of_the_larger() -> None:
    first, other = row([0.5, -1.0], (-1.0, 1.0), signed=True), row([-2.0, 0.0], (-2.0, 2.0), signed=True)
    found = paired_rows(block(text("a|b", first)), block(text("a|b", other)), NAMES)
    assert [each.ends for each in found.texts[0].rows] == [(-2.0, 2.0)] * 3
    assert found.texts[0].rows[2].scores.tolist() == [2.5, -1.0]
    assert found.around == ("low", "high") and found.first == 6
    plain = paired_rows(block(text("a", row([1])), first=None), block(text("a", row([1]))), NAMES)
    assert plain.around == ("less", "more") and (plain.first or 0) > 6
    assert (plain.name, plain.of, plain.score, plain.marked) == (
        "difference: m minus n; the score",
        "layer",
        "s",
        "kept",
    )
    assert not plain.summed and paired_rows(block(text("a"), summed=True), block(text("a")), NAMES).summed


def test_differences_are_named_from_a_tenth_of_the_scale_on_three_on_each_side() -> None:
    first = text(
        "a|b|c|d|e|f|g|h|i|j|k",
        row([0.25, 0.5, 0.125, 0.375, 0.0, 0.0, 0.0, 0.0, 0.0625, 0.0, 1.0], (0.0, 1.0)),
        words=(*range(10), None),
    )
    other = text(
        "a|b|c|d|e|f|g|h|i|j|k", row([0.0] * 4 + [0.25, 0.75, 0.125, 0.5, 0.0, 0.0, 0.0]), words=(*range(10), None)
    )
    difference = both(first, other).rows[2]
    assert difference.marked == [1, 3, 0] and difference.against == [5, 7, 4]  # k is special, i too small
    few = both(text("a|b|c", row([0.1, 0.0, 0.2], (0.0, 1.0))), text("a|b|c", row([0.0, 0.09, 0.2], (0.0, 1.0)))).rows[
        2
    ]
    assert few.marked == [0] and few.against == []
    low = both(text("a|b", row([0.0625, 0.0], (0.0, 0.5))), text("a|b", row([0.0, 0.03125], (0.0, 0.5)))).rows[2]
    assert low.marked == [0] and low.against == []  # a tenth of 0.5
    outside = row([1.0, 0.5, 0.25], outside=np.array([True, False, False]))
    others = row([0.0, 0.0, 0.0], outside=np.array([False, False, True]))
    found = both(text("a|b|c", outside), text("a|b|c", others)).rows[2]
    assert found.outside is not None and found.outside.tolist() == [True, False, True] and found.marked == [1]
    assert both(text("a|b|c", outside), text("a|b|c", row([0, 0, 0]))).rows[2].outside.tolist() == [True, False, False]
    assert both(text("a", row([0])), text("a", row([0]))).rows[2].outside is None


def test_the_table_names_both_sides_and_the_largest_difference_of_ordinary_tokens() -> None:
    words = (None, 0, 1, 2, None)
    first = text("<s>|a|b|c|</s>", row([0.0, 0.5, 0.25, 0.0, 0.0]), words=words)
    other = text("<s>|a|b|c|</s>", row([1.0, 0.0, 0.0, 0.75, 0.0]), words=words)
    second = text("a|b", row([0.5, 0.0], outside=np.array([True, False])), row([0.25, 0.0], name="layer 2"))
    same = text("a|b", row([0.0, 0.0]), row([0.25, 0.0], name="layer 2"))
    table = differences(paired_rows(block(first, second), block(other, same), NAMES), NAMES)
    assert table.heads == ("text", "layer") and table.columns == ("more in m", "more in n", "largest difference")
    assert [(*labels, *(cell.value for cell in cells)) for labels, cells in table.rows] == [
        ("0", "layer 1", "a 0.500 · b 0.250", "c 0.750", "0.750"),
        ("1", "layer 1", "–", "–", "0"),
        ("1", "layer 2", "–", "–", "0"),
    ]


def test_rows_are_matched_by_name_and_else_by_place() -> None:
    first = text("a|b", row([1, 0], name="x"), row([0.5, 0], name="y"))
    other = text("a|b", row([0.25, 0], name="y"), row([0, 0], name="z"))
    assert [each.name for each in both(first, other).rows] == ["m\ny", "n\ny", "difference\ny"]
    assert both(first, other).rows[2].scores.tolist() == [0.25, 0.0]
    placed = text("a|b", row([0.25, 0], name="u"), row([0, 0], name="v"))
    assert [each.name for each in both(first, placed).rows] == [
        f"{of}\n{name}" for name in "xy" for of in (*NAMES, "difference")
    ]
    queries = (row([1, 0], name="x", query=0), row([0.5, 0], name="y", query=1), row([0.25, 0], name="z", query=0))
    theirs = (row([0, 0], name="u", query=0), row([0, 0], name="v", query=0), row([0, 0], name="w"))
    found = both(text("a|b", *queries), text("a|b", *theirs))
    assert [each.name for each in found.rows[::3]] == ["m\nx", "m\nz"] and [
        each.query for each in found.rows[2::3]
    ] == [0, 0]
    named = both(text("a|b", *queries), text("a|b", row([0, 0], name="y", query=0), row([0, 0], name="v", query=1)))
    assert [each.name for each in named.rows[::3]] == ["m\ny"]  # though the first ones are of the same query
    with pytest.raises(
        InputError, match="text 0: the chosen rows belong to different words of the two models; give rows"
    ):
        both(text("a|b", queries[0]), text("a|b", row([0, 0], name="u", query=1)))
    assert both(text("a|b"), text("a|b")).rows == []


# ---- words of other tokens


def test_tokens_of_a_word_are_put_together() -> None:
    first = text("un|do| it|!", row([0.25, 0.75, 0.5, 0.0]), words=(0, 0, 1, 2))
    other = text("undo| i|t|!", row([0.5, 0.25, 0.5, 0.125]), words=(0, 1, 1, 2))
    found = both(first, other)
    assert found.tokens == ("undo", " it", "!") and found.words == (0, 1, 2) and found.span is None
    assert scores_of(found) == {
        "m\nlayer 1": [0.5, 0.5, 0.0],
        "n\nlayer 1": [0.5, 0.375, 0.125],
        "difference\nlayer 1": [0.0, 0.125, -0.125],
    }
    summed = both(first, other, summed=True)
    assert scores_of(summed)["m\nlayer 1"] == [1.0, 0.5, 0.0] and scores_of(summed)["n\nlayer 1"] == [0.5, 0.75, 0.125]


def test_pieces_end_where_words_of_both_end() -> None:
    first = text("ab| c|d", row([0.5, 0.25, 1.0]), words=(0, 1, 2))
    other = text("a|bc| d", row([0.125, 0.5, 0.0]), words=(0, 1, 2))
    found = both(first, other)
    assert found.tokens == ("ab c", "d") and scores_of(found)["m\nlayer 1"] == [0.375, 1.0]
    assert scores_of(found)["n\nlayer 1"] == [0.3125, 0.0]


def test_special_and_empty_tokens_belong_to_no_word_or_to_the_one_before() -> None:
    first = text("<s>|a||b|</s>", row([9.0, 0.5, 0.25, 1.0, 9.0], (0.0, 1.0)), words=(None, 0, 0, 1, None))
    other = text("A|B", row([0.0, 0.5]), words=(0, 1))
    found = both(first, other)
    assert found.tokens == (" a", " b") and scores_of(found)["m\nlayer 1"] == [0.375, 1.0]
    begins = text("|a|b", row([0.5, 0.25, 1.0]), words=(0, 0, 1))
    assert scores_of(both(begins, other))["m\nlayer 1"] == [0.375, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        paired_rows(block(other, other), block(other), NAMES)
    image = text("0|1", row([0, 0]), pixels=np.zeros((1, 2, 1)))
    for wrong in (text("a|c", row([0, 0])), text("a|b|b", row([0, 0, 0])), text("01", row([0])), image):
        with pytest.raises(InputError, match="text 0 is not read as the same characters by the two models"):
            both(wrong, text("0 1", row([0])) if wrong is image else other)


def test_scales_marks_and_queries_move_with_their_tokens() -> None:
    words = (0, 0, 1, 2)
    first = text(
        "a|b| c|d", row([0.5, 0.75, 0.25, 0.0], (0.0, 0.8), marked=[2, 1, 0], against=[3], query=1), words=words
    )
    other = text("ab|c|d", row([0.1, 0.2, 0.3], (0.0, 0.4), query=0))
    found = both(first, other, summed=True)
    mine, theirs, difference = found.rows
    assert found.tokens == ("ab", " c", "d") and mine.scores.tolist() == [1.25, 0.25, 0.0]
    assert mine.ends == theirs.ends == (0.0, 1.25) and difference.ends == (-1.25, 1.25)  # sums go beyond the scale
    assert (mine.marked, mine.against, mine.query, theirs.query, difference.query) == ([1, 0], [2], 0, 0, 0)
    mean = both(first, other)
    assert mean.rows[0].ends == (0.0, 0.8) and mean.rows[0].scores.tolist() == [0.625, 0.25, 0.0]


def test_scales_of_signed_rows_stay_symmetric_and_tokens_outside_do_not_count() -> None:
    words = (0, 0, 1, 2)
    signed = text("a|b| c|d", row([-1.0, -0.5, 0.5, 0.25], (-1.0, 1.0), signed=True), words=words)
    other = text("ab|c|d", row([0.0, 0.0, 0.0], (-0.5, 0.5), signed=True))
    found = both(signed, other, summed=True)
    assert found.rows[0].scores.tolist() == [-1.5, 0.5, 0.25] and found.rows[0].ends == (-1.5, 1.5)
    small = text("a|b| c|d", row([-0.25, -0.25, 0.5, 0.25], (-1.0, 1.0), signed=True), words=words)
    assert both(small, other, summed=True).rows[0].ends == (-1.0, 1.0)
    flat = text("a|b| c|d", row([0.5] * 4, (0.5, 0.5)), words=words)
    assert both(flat, text("ab|c|d", row([0.25] * 3, (0.25, 0.25))), summed=True).rows[0].ends == (0.5, 0.5)
    outside = np.array([True, True, True, False])
    apart = text("a|b| c|d", row([0.9, 0.9, 0.1, 0.2], (0.0, 0.5), outside=outside), words=words)
    found = both(apart, text("ab|c|d", row([0.0, 0.0, 0.0], (0.0, 0.1))), summed=True)
    assert found.rows[0].outside is not None and found.rows[0].outside.tolist() == [True, True, False]
    assert found.rows[0].ends == (0.0, 0.5)
    partly = text(
        "a|b| c|d", row([0.4, 0.4, 0.1, 0.2], (0.0, 0.5), outside=np.array([True, False, False, False])), words=words
    )
    found = both(partly, text("ab|c|d", row([0.0, 0.0, 0.0], (0.0, 0.1))), summed=True)
    assert found.rows[0].outside.tolist() == [False] * 3 and found.rows[0].ends == (0.0, pytest.approx(0.8))


# ---- the result


def of(name: str, *shown: TokenRows | None) -> Any:
    found = shown[0] if shown else None
    return SimpleNamespace(
        model_name=name, headline=f"Heat of {name}", token_rows=lambda: found, verdict=lambda: f"verdict of {name}"
    )


def pair_of(first: Any, other: Any) -> Paired:
    return Paired({"model": "m, n"}, (first, other))


def test_a_pair_has_rows_only_where_both_have() -> None:
    shown = block(text("a|b", row([1, 0])))
    assert pair_of(of("m", shown), of("n", shown)).rows() is not None
    for each in (pair_of(of("m", shown), of("n")), pair_of(of("m"), of("n", shown)), pair_of(of("m"), of("n"))):
        assert each.rows() is None


def test_what_a_pair_says_of_each_model() -> None:
    shown = block(text("a|b", row([1, 0])))
    pair = pair_of(of("m", shown), of("n", shown))
    assert pair.headline == "Heat of m, n: no token differs by a tenth of the scale (s, layer 1)"
    assert (pair.verdict(), pair.verdict(1)) == ("verdict of m", "verdict of n")
    assert pair.names == ["m", "n"] and pair_of(of("m", shown), of("m", shown)).names == ["m (1)", "m (2)"]


def test_the_frame_has_a_row_for_each_of_the_three_and_every_token() -> None:
    first = block(text("a|b", row([0.5, 0.25]), row([1, 0], name="layer 2")), text("c", row([0.125])))
    other = block(text("a|b", row([0.25, 0.5]), row([0, 1], name="layer 2")), text("c", row([1])))
    frame = pair_of(of("m", first), of("n", other)).to_frame()
    assert frame.index.tolist() == list(range(15))
    assert list(frame) == ["model", "text", "row", "position", "token", "score"]
    assert frame.values.tolist() == [
        *[["m", 0, "layer 1", 0, "a", 0.5], ["m", 0, "layer 1", 1, "b", 0.25]],
        *[["n", 0, "layer 1", 0, "a", 0.25], ["n", 0, "layer 1", 1, "b", 0.5]],
        *[["difference", 0, "layer 1", 0, "a", 0.25], ["difference", 0, "layer 1", 1, "b", -0.25]],
        *[["m", 0, "layer 2", 0, "a", 1], ["m", 0, "layer 2", 1, "b", 0]],
        *[["n", 0, "layer 2", 0, "a", 0], ["n", 0, "layer 2", 1, "b", 1]],
        *[["difference", 0, "layer 2", 0, "a", 1], ["difference", 0, "layer 2", 1, "b", -1]],
        *[
            ["m", 1, "layer 1", 0, "c", 0.125],
            ["n", 1, "layer 1", 0, "c", 1],
            ["difference", 1, "layer 1", 0, "c", -0.875],
        ],
    ]
