"""Label words of a language model: their tokens after a text, and the word that comes first in an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssmscope.errors import InputError
from ssmscope.evaluation.encoded import token_rows

if TYPE_CHECKING:
    from ssmscope.core.model import Model


@dataclass(frozen=True)
class LabelWords:
    """Word of each class, in the order of the classes, and the tokens that it adds to a text."""

    words: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]


def label_words(model: Model, words: Sequence[str], *, after: str) -> LabelWords:
    """Return the tokens that each word adds to a text: those of `after + " " + word` that follow those of `after`.

    No space is added if `after` ends in white space.

    Args:
        model: a language model with a tokenizer.
        words: one for each class, in the order of the classes.
        after: the end of the text, e.g. of a template.

    Raises:
        InputError: for a classifier or a model without a tokenizer; for no words; for a word that is empty, has no
            token or an unknown one, or merges with the text before it; if two classes have the same tokens, or one
            class's are a prefix of another's, whose likelihood could then never be higher.
    """
    return label_words_after(model, words, [after])[0]


def label_words_after(model: Model, words: Sequence[str], ends: Sequence[str]) -> list[LabelWords]:
    """Return `label_words` for many ends of texts at once."""
    words = checked_words(words)
    if model.is_classifier:
        raise InputError(f"{model.name} is a classifier with its own classes: label words are for language models")
    texts = [end + what for end in ends for what in ("", *(_joint(end) + word for word in words))]
    rows = token_rows(model, texts, blank=True)
    each = len(words) + 1
    return [
        LabelWords(words, _added(model, words, rows[at], rows[at + 1 : at + each], end))
        for at, end in zip(range(0, len(rows), each), ends)
    ]


def _joint(end: str) -> str:
    return "" if end[-1:].isspace() else " "


def _added(
    model: Model, words: tuple[str, ...], before: list[int], longer: Sequence[list[int]], end: str
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that each word adds to the row without it; refuse words that cannot be told apart."""
    unknown = model.tokenizer.unk_token_id
    for word, row in zip(words, longer):
        own = row[len(before) :]
        if row[: len(before)] != before:
            shown = end if len(end) <= 20 else f"…{end[-20:]}"
            what = "white space" if end[-1:].isspace() else "a letter"
            raise InputError(
                f"the label word {word!r} merges with the text before it, {shown!r}: end the text without {what}, e.g. "
                "with a colon"
            )
        if not own:
            raise InputError(
                f"the label word {word!r} has no token for the tokenizer of {model.name}; give another word"
            )
        if unknown in own and word != model.tokenizer.unk_token:
            raise InputError(
                f"the label word {word!r} has a token that the tokenizer of {model.name} does not know; give another "
                "word"
            )
    ids = tuple(tuple(row[len(before) :]) for row in longer)
    for first, one in enumerate(ids):
        for second, other in enumerate(ids):
            if first < second and one == other:
                raise InputError(
                    f"the label words {words[first]!r} and {words[second]!r} have the same tokens; give other words"
                )
            if first != second and one == other[: len(one)]:
                raise InputError(
                    f"the tokens of the label word {words[first]!r} are the beginning of those of {words[second]!r}, "
                    "which could then never be likelier: give words that begin differently"
                )
    return ids


def checked_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words as a tuple; raise InputError, naming the class, if there are none or one is empty."""
    if isinstance(words, str) or not words:
        raise InputError(f"{words!r} was given for label words; give a list with one word for each class")
    for number, word in enumerate(words):
        if not isinstance(word, str) or not word.strip():
            raise InputError(f"the label word of class {number} is {word!r}; give every class a word")
    return tuple(words)


class WordMatcher:
    """Matcher that finds the class an answer names: the one whose word comes first as a whole word, ignoring case.

    Of two words that begin at the same position the longer one counts.

    Raises:
        InputError: when the words of two classes differ only in case and white space.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(" ".join(word.split()).casefold() for word in checked_words(words))
        for number, word in enumerate(self.words):
            if word in self.words[:number]:
                raise InputError(f"two classes have the label word {words[number]!r}; give words that differ")
        self._order = sorted(range(len(self.words)), key=lambda number: -len(self.words[number]))
        spelled = (r"\s+".join(map(re.escape, words[number].split())) for number in self._order)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(f'({each})' for each in spelled)})(?!\w)", re.IGNORECASE)

    def __call__(self, answer: str) -> int | None:
        """Return the index of the class, or None if no word is in the answer."""
        found = self._pattern.search(answer)
        return None if found is None or found.lastindex is None else self._order[found.lastindex - 1]
