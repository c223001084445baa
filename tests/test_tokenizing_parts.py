"""Tokens, words and failures of tokenizers, case by case and by hand."""

from types import SimpleNamespace

import pytest
from refusals import refusal
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from ssmscope.core.tokenizing import (
    Spelled,
    failures_told,
    is_glue,
    is_within_word,
    names_of,
    token_texts,
    tokenize,
    word_numbers,
)
from ssmscope.errors import InputError

ACUTE, JOINER, VARIATION, SKIN = "\u0301", "\u200d", "\ufe0f", "\U0001f3fd"


def test_tokens_of_some_characters():
    spelled = Spelled("abcdefg", ((0, 2), (2, 5), (5, 7), (6, 7), (0, 0)))
    assert [spelled.tokens(*span) for span in ((2, 5), (1, 3), (4, 6), (6, 7), (3, 3))] == [
        *((1,), (0, 1), (1, 2), (2, 3), (1,))
    ]


def test_names_and_words_of_ids():
    """A continuing piece loses its mark and is of the word before it, if there is one and it has letters."""
    named = ["##a", "film", "##s", "##1", "##!", None, "[SEP]", "##x", "##", "#b"]
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda ids: [named[number - 70] for number in ids])
    names, words = names_of(tokenizer, range(70, 80), {76})
    assert names == ("##a", "film", "s", "1", "##!", "75", "[SEP]", "##x", "##", "#b")
    assert words == (0, 1, 1, 1, 4, 5, None, 7, 8, 9)


def test_ids_are_named_as_the_text_has_them():
    """Marks of vocabularies are spaces, and letters of bytes characters, but for parts of a character."""
    letters = {"benef": "benef", "Ã©": "é", "Ã": "\ufffd", "naïve": "naïve"}
    named = ["Ġbenef", "▁benef", "ĠĠ", "Ġ", "Ã©", "Ã", "▁naïve", "Ġspecial", ""]
    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=lambda ids: [named[number] for number in ids],
        convert_tokens_to_string=lambda pieces: "".join(
            f" {letters[piece[1:]]}" if piece[0] in "Ġ▁" else letters[piece] for piece in pieces
        ),
    )
    names, words = names_of(tokenizer, range(9), {7})
    assert names == (" benef", " benef", "  ", " ", "é", "Ã", " naïve", "Ġspecial", "")
    assert words == (0, 1, 2, 3, 4, 5, 6, None, 8)


@pytest.mark.parametrize(
    "character", ["\u0300", ACUTE, "\u093c", "\u200c", JOINER, VARIATION, "\U0001f3fb", SKIN, "\U0001f3ff"]
)
def test_what_belongs_to_the_character_before(character):
    assert is_glue(character)


@pytest.mark.parametrize("character", ["a", "é", "я", "\u02ff", "电", "👍", "\U0001f3fa", "\U0001f400", " ", "\u200b"])
def test_what_stands_alone(character):
    assert not is_glue(character)


@pytest.mark.parametrize(("text", "offsets", "names", "shown"), [
    ("ab c", [(0, 2), (2, 4)], ["ab", "Ġc"], ["ab", " c"]),
    ("ab c", [(0, 2), (3, 4)], ["ab", "Ġc"], ["ab", " c"]),  # a trimmed space
    ("ab   c", [(0, 2), (5, 6)], ["ab", "ĠĠĠc"], ["ab", "   c"]),
    ("ab   c", [(0, 2), (5, 6)], ["ab", "ĠĠc"], ["ab", "  c"]),
    ("ab c", [(0, 3), (3, 4)], ["abĠ", "Ġc"], ["ab ", "c"]),  # the space is shown once
    ("abxc", [(0, 2), (3, 4)], ["ab", "Ġc"], ["ab", "c"]),  # what is not a space is not taken
    ("ab  c", [(0, 2), (4, 5)], ["abĠ", "c"], ["ab ", "c"]),
    ("abx c", [(0, 2), (4, 5)], ["abĠ", "c"], ["ab", "c"]),
    ("a b", [(0, 1), (1, 1), (2, 3)], ["a", "Ġ", "b"], ["a", " ", "b"]),
    ("a  b", [(0, 1), (1, 1), (3, 4)], ["a", "ĠĠ", "b"], ["a", "  ", "b"]),
    ("film", [(0, 0), (0, 4)], ["▁", "film"], ["", "film"]),  # put before the text
    ("film", [(0, 1), (0, 4)], ["▁", "film"], ["", "film"]),
    (" film", [(0, 1), (1, 5)], ["▁", "film"], [" ", "film"]),
    ("a b", [(0, 1), (2, 3), (0, 0)], ["a", "b", "</s>"], ["a", "b", "</s>"]),
    ("€a", [(0, 1), (0, 1), (0, 1), (1, 2)], ["x", "y", "z", "a"], ["€", "", "", "a"]),
    ("€ab", [(0, 1), (0, 2), (2, 3)], ["x", "ya", "b"], ["€", "a", "b"]),
    (f"e{ACUTE}s", [(0, 1), (2, 3)], ["e", "s"], [f"e{ACUTE}", "s"]),  # no token has the mark
    (f"e{ACUTE}s", [(0, 1), (1, 3)], ["e", "?s"], ["e", f"{ACUTE}s"]),
    (f"e{ACUTE}{ACUTE}s", [(0, 1), (2, 3), (3, 4)], ["e", "?", "s"], [f"e{ACUTE}", ACUTE, "s"]),
    (f"e{ACUTE}", [(0, 1)], ["e"], [f"e{ACUTE}"]),
    (f"e{ACUTE}", [(0, 1), (0, 1)], ["x", "y"], ["e", ACUTE]),  # the last token of a character shows its marks
    (f"ae{ACUTE}{ACUTE}", [(0, 1), (1, 2), (0, 0)], ["a", "e", "</s>"], ["a", f"e{ACUTE}{ACUTE}", "</s>"]),
    ("a x", [(0, 1), (2, 3)], ["a", "x"], ["a", "x"]),  # other characters between tokens are left out
])  # fmt: skip
def test_texts_of_tokens(text, offsets, names, shown):
    assert token_texts(text, offsets, names) == tuple(shown)


@pytest.mark.parametrize(("text", "pieces", "words", "numbers"), [
    ("film music", ["film", " music"], [0, 1], [0, 1]),
    ("films", ["film", "s"], [0, 0], [0, 0]),
    ("films", ["film", "s"], [0, 1], [0, 1]),  # the tokenizer's words
    ("film music", ["film", " music"], [0, 0], [0, 1]),  # but for white space: within a token
    ("film music", ["film", "music"], [0, 0], [0, 1]),  # or between two
    (f"re{ACUTE}sume", ["re", ACUTE, "sume"], [0, 1, 2], [0, 0, 0]),
    (f"re{ACUTE} su", ["re", ACUTE, " su"], [0, 1, 2], [0, 0, 2]),
    (f"e{ACUTE}", ["e", ACUTE], [0, 1], [0, 0]),
    (f"👩{JOINER}👧", ["👩", JOINER, "👧"], [0, 1, 2], [0, 0, 0]),
    (f"👍{SKIN}ok", ["👍", SKIN, "ok"], [0, 1, 2], [0, 0, 2]),
])  # fmt: skip
def test_words_of_tokens(text, pieces, words, numbers):
    offsets, at = [], 0
    for piece in pieces:
        begin = text.index(piece, at)
        at = begin + len(piece)
        offsets.append((begin, at))
    found = word_numbers(words, text, offsets, pieces)
    places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    assert found == tuple(places[number] for number in numbers)


def test_special_tokens_are_of_no_word_and_end_one():
    text, offsets = "film ok", [(0, 0), (0, 4), (0, 0), (4, 4), (4, 7), (7, 7)]
    tokens = ["[CLS]", "film", "[X]", "", " ok", "[SEP]"]
    assert word_numbers([None, 0, None, 0, 0, None], text, offsets, tokens) == (None, 0, None, 1, 2, None)
    assert word_numbers([3, 3], "€", [(0, 1), (0, 1)], ["€", ""]) == (0, 0)
    assert word_numbers([3, 4], "€", [(0, 1), (0, 1)], ["€", ""]) == (0, 0)  # a part of a character that is shown


@pytest.mark.parametrize(("before", "after", "within"), [
    ("a", "b", True), ("a", "1", True), ("_", "a", True), ("a", "_", True), ("a", " ", False), (" ", "a", False),
    ("a", "-", False), (".", "a", False), ("e", ACUTE, True), (ACUTE, "s", True), (ACUTE, ".", False),
    (VARIATION, "a", False), ("👍", SKIN, True), (JOINER, "👧", True), ("👩", JOINER, True), ("电", "影", False),
    ("a", "影", False), ("电", "a", False), ("ก", "a", False), ("я", "ж", True),
])  # fmt: skip
def test_places_within_a_word(before, after, within):
    text = f"{before}{after}"
    assert is_within_word(text, 1) is within
    assert is_within_word(f"x {text} y", 3) is within
    assert not is_within_word(text, 0) and not is_within_word(text, 2) and not is_within_word(text, -1)


class PanicException(BaseException):
    """Exception as the tokenizers library raises it."""


class Broken:
    """Tokenizer that raises an error on some texts."""

    def __init__(self, error: BaseException, bad: str = "bad", together: bool = False) -> None:
        self.error, self.bad, self.together, self.calls = error, bad, together, []

    def __call__(self, texts, **options):
        self.calls.append((texts, options))
        if (self.together and isinstance(texts, list)) or (not self.together and self.bad in texts):
            raise self.error
        return texts


def test_a_failure_names_the_text_and_its_reason():
    long = "bad " * 20
    broken = Broken(ValueError("no\n  way " + "x" * 200), bad=long)
    reason = ("no way " + "x" * 200)[:120]
    said = f"the line ({long[:40]!r}) cannot be read by the tokenizer: {reason}; give another text or tokenizer"
    assert refusal(tokenize, broken, long, named="the line") == said
    assert refusal(tokenize, broken, [long], named="the line") == said
    assert refusal(tokenize, broken, ["ok", long], named="the line") == said.replace("the line", "text 1")
    assert refusal(tokenize, Broken(ValueError()), "bad") == (
        "the text ('bad') cannot be read by the tokenizer: ValueError; give another text or tokenizer"
    )
    assert tokenize(broken, "ok", add_special_tokens=False) == "ok"
    assert broken.calls[-1] == ("ok", {"verbose": False, "add_special_tokens": False})


def test_which_errors_are_told_and_which_are_raised_as_they_are():
    assert "cannot be read by the tokenizer: lost" in refusal(tokenize, Broken(PanicException("lost")), "bad")
    for error in (KeyboardInterrupt(), MemoryError(), InputError("as it is")):
        with pytest.raises(type(error)) as found:
            tokenize(Broken(error), "bad")
        assert found.value is error
    alone = ValueError("only together")
    with pytest.raises(ValueError, match="only together") as found:
        tokenize(Broken(alone, together=True), ["a", "b"])
    assert found.value is alone
    with pytest.raises(InputError, match="^the text"), failures_told(None, "some"):
        raise ValueError


def fast(model: object, **parts: object) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("count", [20, 21])
def test_a_small_vocabulary_is_listed_by_number(count):
    """Names are in the order of their numbers, at most twenty of them."""
    names = [f"n{(11 * place) % count}" for place in range(count)]
    model = models.WordLevel({name: place for place, name in enumerate(names)})
    word = "z" * 50
    listed = " ".join(names[:20]) + (" …" if count > 20 else "")
    said = f"the text has {word[:40]!r}, which is not a symbol of this tokenizer; its symbols are {listed}"
    for parts in ({"pre_tokenizer": pre_tokenizers.Whitespace()}, {}):
        text = f"n1 {word}" if parts else word
        assert refusal(tokenize, fast(model, **parts), text) == said
    normal = {"normalizer": normalizers.Lowercase(), "pre_tokenizer": pre_tokenizers.Whitespace()}
    assert refusal(tokenize, fast(model, **normal), f"N1 {word.upper()}") == said


def test_a_word_that_no_piece_spells():
    tokenizer = fast(models.WordPiece({"film": 0}, unk_token="[UNK]"), pre_tokenizer=pre_tokenizers.Whitespace())
    found = refusal(tokenize, tokenizer, f"film {'q' * 50}")
    assert found.startswith(
        f"the text has {'q' * 40!r}, which the tokenizer does not know, and it has no unknown token ("
    )
    assert found.endswith("); leave it out, or give a tokenizer that has one")
