"""Filler (source, cut at a number of tokens, place next to a text), and estimates from the answers to it."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float, Int
from ssmscope.attacks.curves import Questions, unknown_tokens
from ssmscope.attacks.overflow.result import Filled, OverflowCurve
from ssmscope.core.bootstrap import Estimate, estimate, ratio, resampled_sums
from ssmscope.core.model import Model
from ssmscope.data.filler import generated, sentences
from ssmscope.data.language import load_lines
from ssmscope.data.rows import SUFFIXES
from ssmscope.data.text import LINE_SOURCES
from ssmscope.errors import InputError
from ssmscope.evaluation.forking import token_rows

SENTENCES_PER_DRAW = 64
"""Sentences drawn at a time for all lengths, so that the same seed begins with the same filler."""


def filler_text(filler: str) -> str:
    """Return the user's filler as one text: a file's, a known text's, or the text itself."""
    if filler in LINE_SOURCES:
        found = " ".join(sentences(load_lines(filler)))
    else:
        found = " ".join(load_lines(filler)) if _is_a_path(filler) else filler
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
        return int(np.diff(_tokens(model, asked.wrapped([example, _joined(example, piece)])))[0])

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
    """Return the longest beginning of a text, in whole words, with at most `tokens` tokens by `count`. If it has fewer,
    the part of the next word that comes closest to the number is added."""
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
    return asked.wrapped(_joined(*pair) for pair in pairs)


def added_tokens(model: Model, texts: Sequence[str], shape: tuple[int, int]) -> Float[np.ndarray, "places lengths"]:
    """Compute the mean number of tokens by which texts (place, length, example) exceed those of the first length."""
    numbers = _tokens(model, texts).reshape(*shape, -1)
    return (numbers - numbers[:, :1]).mean(-1)


def _tokens(model: Model, texts: Sequence[str]) -> Int[np.ndarray, " texts"]:
    """Count the tokens of each text."""
    return np.array([len(row) for row in token_rows(model, texts, blank=True)])


def measure(
    labels: np.ndarray,
    answers: Int[np.ndarray, "places lengths examples"],
    odds: Float[np.ndarray, "places lengths examples"],
    places: Sequence[str],
    lengths: Sequence[int],
    added: Float[np.ndarray, "places lengths"],
    classes: int,
    seed: int,
) -> dict[str, Any]:
    """Compute the estimates by the fields of `StateOverflow`, from class ids and log-odds of the true class."""
    examples = len(labels)
    most = labels == np.bincount(labels, minlength=classes).argmax()
    given = np.moveaxis(answers[..., None] == np.arange(classes), -1, 0)
    every = np.concatenate([(answers == labels)[None], odds[None], given]).reshape(-1, examples)
    means = resampled_sums(np.concatenate([most[None], every]).T.astype(np.float64), seed=seed) / examples
    shape = {"places": len(places), "lengths": len(lengths)}
    chance, (accuracy, mean_odds, *rest) = (
        means[:, 0],
        rearrange(means[:, 1:], "rows (numbers places lengths) -> numbers rows places lengths", **shape),
    )
    shares = np.stack(rest)
    entropy = (shares * -np.log2(np.where(shares > 0, shares, 1.0))).sum(0) + 0.0  # 0.0 + -0.0 is 0.0
    drops = 1 - ratio(accuracy, accuracy[:, :, :1])
    # Of the class that is the largest in the data: the largest of every resample would be larger than the data's.
    (majority,) = np.take_along_axis(shares, shares[:, 0].argmax(0)[None, None], axis=0)
    parts = {"accuracy": accuracy, "drop": drops, "log_odds": mean_odds, "majority": majority, "entropy": entropy}

    def point(place: int, at: int) -> Filled:
        of = dict.fromkeys(("accuracy", "majority"), examples)
        own = {name: estimate(part[:, place, at], of=of.get(name)) for name, part in parts.items()}
        by_class = tuple(estimate(share[:, place, at], of=examples) for share in shares)
        return Filled(lengths[at], float(added[place, at]), shares=by_class, **own)

    curves = []
    for place, where in enumerate(places):
        points = tuple(point(place, at) for at in range(len(lengths)))
        curves.append(OverflowCurve(where, points, half_length(accuracy[:, place], chance, lengths)))
    gaps = tuple(map(estimate, (accuracy[:, 1] - accuracy[:, 0]).T)) if len(places) == 2 else ()
    clean = curves[0].points[0].accuracy
    return {"clean": clean, "chance": float(chance[0]), "curves": tuple(curves), "gaps": gaps}


def half_length(
    accuracy: Float[np.ndarray, "rows lengths"], chance: Float[np.ndarray, " rows"], lengths: Sequence[int]
) -> Estimate | None:
    """Compute the shortest length at which accuracy − chance is at most half of its value at the first length. The
    value is that of the first row, the interval that of the others. Return None if there is no such length, or if the
    first accuracy is not above chance."""
    above = accuracy - chance[:, None]
    gone = above <= above[:, :1] / 2 + 1e-9  # Exactly half counts, despite rounding.
    first = np.where(gone.any(1), np.asarray(lengths, dtype=np.float64)[gone.argmax(1)], np.inf)
    defined = above[:, 0] > 0
    if not defined[0] or math.isinf(first[0]):
        return None
    # Quantiles are not interpolated, because some lengths are infinite.
    low, high = np.quantile(first[1:][defined[1:]], [0.025, 0.975], method="inverted_cdf")
    return Estimate(float(first[0]), float(low), float(high))


def notes_on(
    model: Model, given: str | None, longest: str, clean: Estimate, chance: float, curves: Sequence[OverflowCurve]
) -> Iterable[str]:
    if clean.low <= chance:
        yield f"the clean accuracy, {clean}, is not clearly above chance, {chance:.3f}: there is little to forget"
    half = (clean.value + chance) / 2
    for curve in curves:
        gone = math.inf if curve.half_length is None else curve.half_length.value
        back = [point.tokens for point in curve.points if point.tokens > gone and point.accuracy.value > half + 1e-9]
        if back:
            yield f"with filler {curve.where} the text, accuracy is above half again at {back[0]:,} tokens"
    number, unknown = unknown_tokens(model, longest)
    if unknown:
        yield f"the tokenizer does not know {100 * unknown / number:.0f} % of the filler's tokens"
    if given is not None and len(longest) > len(given):
        yield "the filler is shorter than the longest length and is repeated"
    off = [(point, curve) for curve in curves for point in curve.points if abs(point.added - point.tokens) > 0.005]
    if off:
        point, curve = max(off, key=lambda pair: abs(pair[0].added - pair[0].tokens))
        yield (
            f"filler of {point.tokens} tokens adds {point.added:.2f} on average {curve.where} the texts, because token "
            "boundaries do not match or adjacent tokens merge"
        )
