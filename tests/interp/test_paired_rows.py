"""Rows of two models and their difference, by hand: scales, named tokens, words of other tokens."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ssmscope.errors import InputError
from ssmscope.interp.paired import Paired, differences, paired_rows
from ssmscope.render.blocks import TokenRow, TokenRows, TokenText

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


def test_a_special_token_is_named_where_a_row_names_it() -> None:
    """A token that attention reads may be special: the largest difference, dark in the picture, is then told too."""
    words, other = (0, 1, None), row([0.0, 0.5, 0.0])
    found = [
        both(
            text("a|b|[CLS]", row([0.25, 0.0, 1.0], marked=marked), words=words), text("a|b|[CLS]", other, words=words)
        )
        for marked in ([2], [0])
    ]
    assert [each.rows[2].marked for each in found] == [[2, 0], [0]]
    largest = [differences(block(each), NAMES).rows[0][1][-1].value for each in found]
    assert largest == ["1", "0.500"]


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
    for pair in (pair_of(of("m", shown), of("n")), pair_of(of("m"), of("n", shown)), pair_of(of("m"), of("n"))):
        assert pair.rows() is None


def test_what_a_pair_says_of_each_model() -> None:
    shown = block(text("a|b", row([1, 0])))
    pair = pair_of(of("m", shown), of("n", shown))
    assert pair.headline == "Heat of m, n: no token differs by a tenth of the scale (s, layer 1)"
    assert (pair.verdict(), pair.verdict(1)) == ("verdict of m", "verdict of n")
    assert pair.names == ["m", "n"] and pair_of(of("m", shown), of("m", shown)).names == ["m (1)", "m (2)"]
