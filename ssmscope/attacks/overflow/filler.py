"""Filler: its source, its cut at a number of tokens, and its place next to a text."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from ssmscope.attacks.curves import Questions
from ssmscope.core.model import Model
from ssmscope.data.filler import generated, sentences
from ssmscope.data.language import load_lines
from ssmscope.data.rows import SUFFIXES
from ssmscope.data.text import LINE_SOURCES
from ssmscope.errors import InputError
from ssmscope.evaluation.encoded import token_rows

SENTENCES_PER_DRAW = 64
"""Sentences drawn at a time for all lengths, so that the same seed begins with the same filler."""


def filler_text(filler: str) -> str:
    """Return the user's filler as one text: a file's, a known text's, or the text itself."""
    if filler in LINE_SOURCES:
        found = " ".join(sentences(load_lines(filler)))
    else:
        found = " ".join(load_lines(filler)) if _is_a_path(filler) else filler
    if not found.strip():
        raise InputError("the filler is empty; give a text of at least one word, or none for generated sentences")
    return " ".join(found.split())


def _is_a_path(filler: str) -> bool:
    """Return True if a filler names a file, even an absent one."""
    suffix = Path(filler).suffix.lower()
    in_a_folder = len(filler.split()) == 1 and any(mark in filler for mark in (os.sep, "/"))
    return suffix in (".txt", *SUFFIXES) or in_a_folder or os.path.lexists(filler)


def pieces_of(asked: Questions, model: Model, given: str | None, steps: Sequence[int], seed: int) -> list[str]:
    """Cut the filler at each number of tokens, counted within the first example."""
    example = asked.contents[0]

    def count(piece: str) -> int:
        plain, filled = (asked.before + text + asked.after for text in (example, _joined(example, piece)))
        return int(np.diff(_tokens(model, [plain, filled]))[0])

    random = np.random.default_rng(seed)
    words, size = (given or "").split(" "), steps[-1]
    while size < len(words) and count(" ".join(words[:size])) < steps[-1]:
        size *= 2
    whole = " ".join(words[:size])  # A long text is tokenized only as far as needed.
    now, draws = count(whole), 1
    while now < steps[-1]:
        drawn = (sentence for _ in range(draws) for sentence in generated(random, SENTENCES_PER_DRAW, spaced=False))
        more = whole if given else " ".join(drawn)
        whole = _joined(whole, more)
        before, now, draws = now, count(whole), 2 * draws
        if now <= before:
            raise InputError(f"the filler {more[:40]!r} adds no token to a text; give another")
    return [cut(whole, n, count) for n in steps]


def cut(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """Return the longest beginning of a text, in whole words, that has at most so many tokens by `count`.

    If it has fewer, the part of the next word that comes closest to the number is added.
    """
    words = text.split(" ")
    number = bisect_right(range(len(words) + 1), tokens, key=lambda n: count(" ".join(words[:n]))) - 1
    piece = " ".join(words[:number])
    if number == len(words) or (least := count(piece)) == tokens:
        return piece
    word = words[number]

    def begun(end: int) -> int:
        return count(_joined(piece, word[:end]))

    # A longer part of a word can have fewer tokens than a shorter one, within about a token's length in characters.
    middle = bisect_right(range(len(word)), tokens, key=begun)
    near = range(min(middle + 8, len(word) - 1), max(middle - 8, 0), -1)
    best = max(near, key=lambda end: found if (found := begun(end)) <= tokens else -1, default=0)
    return _joined(piece, word[:best]) if least < begun(best) <= tokens else piece


def _joined(first: str, second: str) -> str:
    return f"{first} {second}" if first and second else first or second


def filled(asked: Questions, place: str, piece: str) -> list[str]:
    """Return all texts within their template, with the filler after or before them."""
    pairs = ((text, piece) if place == "after" else (piece, text) for text in asked.contents)
    return [asked.before + _joined(*pair) + asked.after for pair in pairs]


def added_tokens(model: Model, texts: Sequence[str], shape: tuple[int, int]) -> Float[np.ndarray, "places lengths"]:
    """Compute by how many tokens texts (by place, length and example) exceed those of the first length, on average."""
    numbers = _tokens(model, texts).reshape(*shape, -1)
    return (numbers - numbers[:, :1]).mean(-1)


def _tokens(model: Model, texts: Sequence[str]) -> Int[np.ndarray, " texts"]:
    """Count the tokens of each text."""
    return np.array([len(row) for row in token_rows(model, texts, blank=True)])
