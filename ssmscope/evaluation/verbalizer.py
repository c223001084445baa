"""Prompts and label words of a language model: their tokens, their likelihoods, and the word that an answer names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from ssmscope.data.prompts import CONTENT
from ssmscope.errors import InputError, nearest
from ssmscope.evaluation.forking import token_rows

if TYPE_CHECKING:
    from ssmscope.core.model import Model


FIELD = re.compile(r"\{[^{}]*\}?|\[[^\[\]]*\]|<[^<>]*>|[^\s{}]*\}")


@dataclass(frozen=True)
class Template:
    """Prompt that contains `{content}` once; other braces are plain text."""

    text: str

    def __post_init__(self) -> None:
        count = self.text.count(CONTENT)
        shown = self.text if len(self.text) <= 60 else self.text[:60] + "…"
        if count > 1:
            raise InputError(f"the template {shown!r} has {CONTENT} {count} times; it must have it once")
        if count:
            return
        fields = FIELD.findall(self.text)
        like = nearest(CONTENT, fields) or fields
        hint = f"; did you mean {CONTENT} by {like[0]!r}?" if like else ""
        raise InputError(f"the template {shown!r} has no {CONTENT}, the placeholder for the text{hint}")

    @property
    def before(self) -> str:
        return self.text.partition(CONTENT)[0]

    @property
    def after(self) -> str:
        return self.text.partition(CONTENT)[2]

    def fill(self, content: str) -> str:
        """Return the prompt with a text in it."""
        return self.text.replace(CONTENT, content)


@dataclass(frozen=True)
class LabelWords:
    """Word of each class, in the order of the classes, and the tokens that it adds to a text."""

    words: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]


def label_words(model: Model, words: Sequence[str], *, after: str) -> LabelWords:
    """Return the tokens that each class's word adds to a text: those of `after + " " + word` that follow `after`'s.

    No space is added if `after`, the end of the text, ends in white space. Raise InputError if the model is not a
    language model with a tokenizer; a word is empty, has no token or an unknown one, or merges with the text before it;
    or one class's tokens begin with another's.
    """
    return label_words_after(model, words, [after])[0]


def label_words_after(model: Model, words: Sequence[str], ends: Sequence[str]) -> list[LabelWords]:
    """Return `label_words` for many ends of texts at once."""
    words = checked_words(words)
    if model.is_classifier:
        raise InputError(f"{model.name} is {model.role} with its own classes: label words are for language models")
    texts = [end + what for end in ends for what in ("", *(" " * (not end[-1:].isspace()) + word for word in words))]
    rows = token_rows(model, texts, blank=True)
    each = len(words) + 1
    return [
        LabelWords(words, _added(model, words, rows[at], rows[at + 1 : at + each], end))
        for at, end in zip(range(0, len(rows), each), ends)
    ]


def _added(
    model: Model, words: tuple[str, ...], before: list[int], longer: Sequence[list[int]], end: str
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that each word adds to the row `before`; refuse words that cannot be told apart."""
    tokenizer, ids = model.tokenizer, tuple(tuple(row[len(before) :]) for row in longer)
    for word, row, own in zip(words, longer, ids):
        if row[: len(before)] != before:
            shown = end if len(end) <= 20 else f"…{end[-20:]}"
            what = "white space" if end[-1:].isspace() else "a letter"
            raise InputError(
                f"the label word {word!r} merges with the text before it, {shown!r}: end the text without {what}, e.g. "
                "with a colon"
            )
        if not own or (tokenizer.unk_token_id in own and word != tokenizer.unk_token):
            lacks = "a token that the tokenizer of {} does not know" if own else "no token for the tokenizer of {}"
            raise InputError(f"the label word {word!r} has {lacks.format(model.name)}; give another word")
    for (one, word), (other, second) in permutations(zip(ids, words), 2):
        if one == other:
            raise InputError(f"the label words {word!r} and {second!r} have the same tokens; give other words")
        if one == other[: len(one)]:
            raise InputError(
                f"the tokens of the label word {word!r} are the beginning of those of {second!r}, which could then "
                "never be likelier: give words that begin differently"
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
    """Matcher that finds the class an answer names: the one whose word comes first as a whole word, ignoring case. Of
    two words that begin at the same position the longer one counts. Words that differ only in case or spaces raise
    InputError."""

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


class LabelTree(NamedTuple):
    """Prefix tree of the tokens of every class's label word. `prefixes` are those after which a next token is read, the
    empty one first, `next_tokens` the tokens that may come after each. `steps` are, per class, the (prefix, index in
    `next_tokens`) of each of its tokens."""

    prefixes: tuple[tuple[int, ...], ...]
    next_tokens: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, words: LabelWords) -> LabelTree:
        tree: dict[tuple[int, ...], dict[int, int]] = {}  # Places of the next tokens after every prefix.
        for ids in words.ids:
            for at, token in enumerate(ids):
                places = tree.setdefault(ids[:at], {})
                places.setdefault(token, len(places))
        prefixes = tuple(tree)
        steps = tuple(
            tuple((prefixes.index(ids[:at]), tree[ids[:at]][token]) for at, token in enumerate(ids))
            for ids in words.ids
        )
        return cls(prefixes, tuple(map(tuple, tree.values())), steps)

    def scores(
        self, found: Float[np.ndarray, "rows prefixes next"], *, normalise: bool
    ) -> Float[np.ndarray, "rows classes"]:
        """Return Σ_j log P(token_j | text, earlier tokens) of every class, divided by their number with `normalise`."""
        columns = []
        for steps in self.steps:
            total = sum(found[:, prefix, place] for prefix, place in steps)
            columns.append(total / len(steps) if normalise else total)
        return np.stack(columns, axis=1)


def log_probabilities(logits: Float[Tensor, "rows vocabulary"], tokens: Int[Tensor, "rows next"]) -> Tensor:
    """Return log P of these next tokens, (rows, next) float64, natural, normalised over the vocabulary in float32 or
    more."""
    precise = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    return precise.gather(1, tokens).double() - precise.logsumexp(1, keepdim=True).double()


def padded_tokens(next_tokens: Sequence[Sequence[int]]) -> Int[np.ndarray, "prefixes next"]:
    """Return tokens as rows of equal length, padded with the last token of each."""
    longest = max(map(len, next_tokens))
    return np.array([[*each, *[each[-1]] * (longest - len(each))] for each in next_tokens], dtype=np.int64)
