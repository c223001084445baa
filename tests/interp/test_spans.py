"""Spans of a text: words and positions, and the refusals of each form."""

import numpy as np
import pytest
import torch
from refusals import refuses
from ssmscope.core.encoding import Batch
from ssmscope.core.tokenizing import Spelled
from ssmscope.interp.spans import find_piece, fold_text, positions_of, span_name, spelling, words_at

TEXT = "Un  CAFÉ noir, un cafe\u0301 noirci ."
"""Two spaces, and a word twice: with its accent in the letter, and behind it."""
OFFSETS = ((0, 2), (4, 6), (6, 8), (9, 13), (13, 14), (15, 17), (18, 21), (21, 23), (24, 30), (31, 32))


def batch_of(*spelled: Spelled, tokens=None, words=None) -> Batch:
    tokens = tokens or tuple(tuple(each.text[a:b] for a, b in each.offsets) for each in spelled)
    words = words or tuple(tuple(range(len(row))) for row in tokens)
    ids = torch.zeros(len(tokens), max(map(len, tokens)), dtype=torch.int64)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), tokens, words, spelled=spelled)


FRENCH = Spelled(TEXT, OFFSETS)
SHORT_TEXT = Spelled("a b", ((0, 1), (2, 3)))


@pytest.mark.parametrize(("span", "places"), [
    ("café", None),  # twice, however its accent is written
    ("Cafe\u0301 NOIR,", (1, 2, 3, 4)),
    (" cafÉ ", None),
    (" un   cafe\u0301 noirci ", (5, 6, 7, 8)),
    ("noir", (3,)),  # and not the beginning of another word
    ("noirci", (8,)),
    ("noir, un", (3, 4, 5)),
    ("last", (9,)),
    (" last ", (9,)),
    ("0", (0,)),
    (" 9 ", (9,)),
    ("-1", (9,)),
    ("-10", (0,)),
    ("2:5", (2, 3, 4)),
    ("0:10", tuple(range(10))),
    ("-3:-1", (7, 8)),
    ("-10:2", (0, 1)),
    ("3,7,9", (3, 7, 9)),
    (" 7:9, 0 ,-1, 8", (0, 7, 8, 9)),
    (4, (4,)),
    (-2, (8,)),
    (np.int64(3), (3,)),
    (slice(7, None), (7, 8, 9)),
    (slice(None, None, 4), (0, 4, 8)),
    ([5, -9, 5, 2], (1, 2, 5)),
    ((0, 9), (0, 9)),
])  # fmt: skip
def test_positions(span, places):
    batch = batch_of(SHORT_TEXT, FRENCH)
    if places is None:
        refuses("occurs 2 times in text 2; give positions: it is at 1:3, 6:8$", positions_of, span, batch, 1)
    else:
        assert positions_of(span, batch, 1) == places


@pytest.mark.parametrize(("span", "line"), [
    ("10", "text 2 has no positions 10; it has the tokens 0 to 9"),
    ("-11", "text 2 has no positions -11; it has the tokens 0 to 9"), ("3:3", "text 2 has no positions 3:3"),
    ("5:11", "text 2 has no positions 5:11"), ("3,12", "text 2 has no positions 12; it has the tokens 0 to 9"),
    ("3,", "text 2 has no words '3,'; give words of it, positions such as 3, 3:5 or 3,7, or last"),
    ("caf", "text 2 has no words 'caf'; give words of it, positions such as 3, 3:5 or 3,7, or last"),
    ("oir", "text 2 has no words 'oir'"), ("\t ", "a span is empty"),
    (10, "text 2 has no position 10; it has the tokens 0 to 9"), (-11, "text 2 has no position -11"),
    ([0, 12, 11], "text 2 has no position 12"), (True, "the span True names no tokens"),
    (1.0, "the span 1.0 names no tokens"), ([], r"the span \[\] names no tokens"),
    ([1, "2"], "names no tokens; give words of the text, positions or last"), (slice(10, None), "names no tokens"),
])  # fmt: skip
def test_no_positions(span, line):
    refuses(line, positions_of, span, batch_of(SHORT_TEXT, FRENCH), 1)
    refuses(line.replace("text 2", "the text"), positions_of, span, batch_of(FRENCH))


def test_words_are_found_by_the_characters_of_their_tokens():
    """They are all tokens that have any part of them, also two that share a character."""
    skipped = Spelled("ab cd ef", ((0, 1), (1, 2), (6, 8), (6, 8)))
    batch = batch_of(skipped)
    assert positions_of("ab", batch) == (0, 1) and positions_of("ef", batch) == (2, 3)
    assert positions_of("ab cd", batch) == (0, 1)
    refuses("the tokenizer skips 'cd': no token covers it; give other words", positions_of, "cd", batch)
    many = Spelled("x " * 7, tuple((2 * at, 2 * at + 1) for at in range(7)))
    refuses("'X' occurs 7 times .* it is at 0:1, 1:2, 2:3, 3:4, 4:5$", positions_of, "X", batch_of(many))


def test_text_is_folded_with_the_place_of_every_character():
    assert fold_text("  Aé \t b") == ("ae\u0301 b", [2, 3, 3, 4, 7])
    assert fold_text("ßA b ", "") == ("ssab", [0, 0, 1, 3])
    assert fold_text("a  ") == ("a ", [0, 1])


def test_the_first_tokens_of_a_piece():
    assert find_piece("noir", FRENCH) == (3, 4) and find_piece("UN", FRENCH) == (0, 1)
    assert find_piece("ir,u", FRENCH) == (3, 6) and find_piece("é noi", FRENCH) == (2, 4)
    assert find_piece("cafe", Spelled("un cafe\u0301", ((0, 2), (3, 8)))) is None  # its last letter has a mark
    assert find_piece("cafe", Spelled("cafe\u0301 cafe", ((0, 5), (6, 10)))) == (1, 2)
    assert find_piece("cd", Spelled("ab cd", ((0, 2),))) is None and find_piece("", FRENCH) is None


def test_the_words_at_positions_are_as_the_text_has_them():
    batch = batch_of(FRENCH, SHORT_TEXT)
    assert words_at((1, 2), batch) == "CAFÉ" and words_at((3, 4, 5), batch) == "noir, un"
    assert words_at((9,), batch) == "."
    letter = "a\u0301\u0302\u0303"
    marked = Spelled(f"{letter}b  c", ((0, 1), (4, 5), (5, 6), (0, 0), (7, 7)))
    odd = batch_of(marked, tokens=(("a", "b", " ", " <s>", " "),))
    assert words_at((0,), odd) == letter  # the marks, which no token covers, belong to it
    assert words_at((2,), odd) == "␣" and words_at((0, 3), odd) == letter
    assert words_at((3,), odd) == "<s>" and words_at((4,), odd) == "␣"
    other = batch_of(Spelled("a\u0301b", ((0, 1), (1, 2), (2, 3))))
    assert words_at((0,), other) == "a"  # here another token has the mark


def test_ids_are_spelled_by_their_names():
    batch = Batch(
        torch.zeros(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.bool),
        (("5", "17", "3"), ("un", "able", " x")),
        ((0, 1, 2), (0, 0, 1)),
    )
    assert spelling(batch, 0) == Spelled("5 17 3", ((0, 1), (2, 4), (5, 6)))
    assert spelling(batch, 1) == Spelled("unable x", ((0, 2), (2, 6), (7, 8)))
    assert positions_of("17 3", batch) == (1, 2)
    assert spelling(batch_of(SHORT_TEXT, FRENCH), 1) == FRENCH


def test_spans_are_named_as_they_are_typed():
    spans = [slice(2, None), slice(None, -1), slice(3, 5), [4, 2], (1,), 7, "last", "3:5"]
    assert [span_name(each) for each in spans] == ["2:", ":-1", "3:5", "4, 2", "1", "7", "last", "3:5"]
