"""How much a state can hold on to: accuracy against the length of filler between the evidence and the question.

A state-space model keeps what it has read in a state of fixed size. What stands between a text and the place where its
class is read takes room in it and decays it, and on contexts beyond those of training states can leave what the model
knows ("state collapse", Chen et al. 2024, Stuffed Mamba). Filler before the text is as long and as foreign, but read
first: what it costs is not forgetting. The two curves are a measurement, not a claim of that paper.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from ssmscope.attacks.curves import Questions, questions, true_log_odds, unknown_tokens
from ssmscope.attacks.position import percent
from ssmscope.bootstrap import Estimate, estimate, ratio, resampled_sums
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation.encoded import token_rows
from ssmscope.limits import ROW, refuse_above, refuse_reading
from ssmscope.results import Result, record_provenance
from ssmscope.tasks.filler import generated, sentences
from ssmscope.tasks.language import load_lines
from ssmscope.tasks.rows import SUFFIXES
from ssmscope.tasks.text import LINE_SOURCES, TextData

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model

WHERE = {"after": ("after",), "before": ("before",), "both": ("after", "before")}
"""Where filler can stand, and the curves that this gives."""

SENTENCES = 64
"""So many sentences are drawn at a time, whatever the lengths: the same seed begins with the same filler."""


def state_overflow(
    model: Model,
    data: TextData,
    *,
    filler: str | Sequence[str] | None = None,
    lengths: Sequence[int] = (0, 16, 32, 64, 128, 256, 512),
    where: str = "both",
    template: str | None = None,
    words: Sequence[str] | None = None,
    limit: int | None = None,
    cache: str | Path | None = None,
    seed: int = 0,
) -> StateOverflow:
    """Put filler of growing length between the texts and the place where their class is read, and measure what is left.

    A classifier reads at its last token: the filler follows the text. A language model reads at the end of its
    template: the filler stands between {content} and the rest. The control "before" has the same filler before the
    text, within the template. All examples have the same filler, and a longer one begins with the shorter.

    Every number has a 95 % bootstrap interval over examples, and all share their resamples. Chance is the share of the
    data's most frequent class. The half-length is the shortest of the measured lengths at which half of the accuracy
    above chance is gone. Its interval is over the resamples in which the clean accuracy is above chance; its upper end
    is infinite where too many of them never get there.

    Args:
        filler: a text, several (they are joined), the name of a file or "wikitext2"; by default generated neutral
            sentences. What is too short is repeated.
        lengths: of the filler, in tokens of the model's tokenizer. 0 is always measured.
        where: after the text, before it, or both.
        template: what a text is wrapped in, with {content} where the text goes. A language model has one: by default,
            with the words, the first of a known data set's own (`TASK_PROMPTS`).
        words: what a language model answers for each class of the data, in the order of `data.label_names`.
        limit: only so many examples, drawn by the seed.
        cache: a file that keeps the model's answers, so that a run can be resumed.
        seed: draws examples, generated filler and resamples.

    Raises:
        InputError: an empty filler, lengths that are no whole numbers from 0 on, an unknown place, data that does not
            fit the model, and what `Template` and `Evaluator` refuse.
    """
    if where not in WHERE:
        hint = did_you_mean(str(where), WHERE)
        raise InputError(f"unknown place {where!r}; allowed are {', '.join(map(repr, WHERE))}{hint}")
    steps = _lengths(lengths)
    refuse_above(ROW, lengths=steps[-1])
    examples = len(data) if limit is None else min(limit, len(data))
    tokens = len(WHERE[where]) * sum(steps) * examples
    refuse_reading(tokens, f"filler of these lengths for {examples:,} examples", "give shorter lengths, or a limit")
    asked = questions(model, data, template=template, words=words, limit=limit, cache=cache, seed=seed)
    given = None if filler is None else _given(filler)
    pieces = _pieces(asked, model, given, steps, seed)
    places = WHERE[where]
    texts = [text for place in places for piece in pieces for text in _filled(asked, place, piece)]
    scores = asked.evaluator.scores(texts).reshape(len(places), len(steps), len(asked.data), len(asked.classes))
    answers = asked.evaluator.answers(scores)
    measured = measure(asked.labels, answers, true_log_odds(scores, asked.labels), steps, len(asked.classes), seed)
    added = _tokens(model, texts).reshape(len(places), len(steps), -1)
    added = (added - added[:, :1]).mean(-1)
    curves = tuple(
        OverflowCurve(
            where=place,
            points=tuple(
                Filled(tokens=n, added=float(added[row, at]), **measured.points[row][at]) for at, n in enumerate(steps)
            ),
            half_length=measured.half_lengths[row],
        )
        for row, place in enumerate(places)
    )
    options: dict[str, Any] = {
        "filler": filler if filler is None or isinstance(filler, str) else list(filler),
        "lengths": list(steps),
        "where": where,
        "template": None if asked.template is None else asked.template.text,
        "words": None if asked.evaluator.words is None else list(asked.evaluator.words),
        "limit": limit,
    }
    return StateOverflow(
        provenance={**record_provenance(model.source, options=options, seed=seed), "data": asked.origin},
        classes=asked.classes,
        chance=measured.chance,
        clean=measured.clean,
        curves=curves,
        gaps=measured.gaps,
        filler=pieces[-1],
        notes=tuple(_notes(model, asked, given, pieces[-1], measured, curves)),
    )


# ---- filler


def _lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    allowed = "allowed are numbers of tokens from 0 on, such as (0, 64, 256)"
    if isinstance(lengths, str | int):
        raise InputError(f"lengths is {lengths!r}; {allowed}")
    given = list(lengths)
    wrong = [n for n in given if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if wrong:
        raise InputError(f"lengths has {wrong[0]!r}; {allowed}")
    steps = tuple(sorted({0, *given}))
    if len(steps) < 2:
        raise InputError(f"lengths names no filler; {allowed}")
    return steps


def _given(filler: str | Sequence[str]) -> str:
    """The user's filler as one text: of a file or a known text, or as it is."""
    if isinstance(filler, str) and filler in LINE_SOURCES:
        found = " ".join(sentences(load_lines(filler)))
    elif isinstance(filler, str) and _is_a_path(filler):
        found = " ".join(load_lines(filler))
    else:
        parts = [filler] if isinstance(filler, str) else list(filler)
        if not all(isinstance(part, str) for part in parts):
            raise InputError("filler holds something that is no text; give a text, several, or a file")
        found = " ".join(parts)
    if not found.strip():
        raise InputError("the filler is empty; give a text of at least one word, or none for generated sentences")
    return " ".join(found.split())


def _is_a_path(filler: str) -> bool:
    """Whether a filler names a file, be it absent, rather than being a text."""
    suffix = Path(filler).suffix.lower()
    in_a_folder = len(filler.split()) == 1 and any(mark in filler for mark in (os.sep, "/"))
    return suffix in (".txt", *SUFFIXES) or in_a_folder or os.path.lexists(filler)


def _pieces(asked: Questions, model: Model, given: str | None, steps: Sequence[int], seed: int) -> list[str]:
    """The filler cut at each number of tokens, as the first example's tokens count it."""
    example = asked.contents[0]

    def count(piece: str) -> int:
        plain, filled = (asked.before + text + asked.after for text in (example, _joined(example, piece)))
        return int(np.diff(_tokens(model, [plain, filled]))[0])

    random = np.random.default_rng(seed)
    words, size = (given or "").split(" "), steps[-1]
    while size < len(words) and count(" ".join(words[:size])) < steps[-1]:
        size *= 2
    whole = " ".join(words[:size])  # of a long text no more than is needed
    now, gained = count(whole), 0
    while now < steps[-1]:
        # of generated sentences nearly as many as are missing, so that the whole is not counted after every few
        times = max(1, int(0.9 * (steps[-1] - now) / gained)) if gained and not given else 1
        more = [whole] if given else [" ".join(generated(random, SENTENCES, spaced=False)) for _ in range(times)]
        whole = _joined(whole, " ".join(more))
        before, now = now, count(whole)
        if now <= before:
            raise InputError(f"the filler {more[0][:40]!r} adds no token to a text; give another")
        gained = (now - before) // times
    return [cut(whole, n, count) for n in steps]


def cut(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """The longest beginning of a text, of whole words, that has at most so many tokens by `count`; where it has fewer,
    with the part of the next word that comes closest to the number."""
    words = text.split(" ")
    number = bisect_right(range(len(words) + 1), tokens, key=lambda n: count(" ".join(words[:n]))) - 1
    piece = " ".join(words[:number])
    if number == len(words) or (least := count(piece)) == tokens:
        return piece
    word = words[number]

    def begun(end: int) -> int:
        return count(_joined(piece, word[:end]))

    # a longer part of a word may have fewer tokens than a shorter one, by as many characters as a token has
    middle = bisect_right(range(len(word)), tokens, key=begun)
    near = range(min(middle + 8, len(word) - 1), max(middle - 8, 0), -1)
    best = max(near, key=lambda end: found if (found := begun(end)) <= tokens else -1, default=0)
    return _joined(piece, word[:best]) if least < begun(best) <= tokens else piece


def _joined(first: str, second: str) -> str:
    return f"{first} {second}" if first and second else first or second


def _filled(asked: Questions, place: str, piece: str) -> list[str]:
    pairs = ((text, piece) if place == "after" else (piece, text) for text in asked.contents)
    return [asked.before + _joined(*pair) + asked.after for pair in pairs]


def _tokens(model: Model, texts: Sequence[str]) -> Int[np.ndarray, " texts"]:
    """Tokens of each text."""
    return np.array([len(row) for row in token_rows(model, texts, blank=True)])


# ---- numbers


@dataclass(frozen=True)
class Measured:
    """The numbers of all curves: `points` [place][length] by the names that `Filled` gives them."""

    clean: Estimate
    chance: float
    points: tuple[tuple[dict[str, Any], ...], ...]
    gaps: tuple[Estimate, ...]
    half_lengths: tuple[Estimate | None, ...]


def measure(
    labels: Int[np.ndarray, " examples"],
    answers: Int[np.ndarray, "places lengths examples"],
    odds: Float[np.ndarray, "places lengths examples"],
    lengths: Sequence[int],
    classes: int,
    seed: int,
) -> Measured:
    """All numbers from the class ids and the log-odds of the true class; the first length is 0, and the same at every
    place."""
    places, steps, examples = answers.shape
    most = int(np.bincount(labels, minlength=classes).argmax())
    hits = (answers == labels).reshape(places * steps, examples)
    given = (answers[..., None] == np.arange(classes)).swapaxes(-1, -2).reshape(places * steps * classes, examples)
    columns = [(labels == most)[None], hits, odds.reshape(places * steps, examples), given]
    means = resampled_sums(np.concatenate(columns).T.astype(np.float64), seed=seed) / examples
    chance, means = means[:, 0], means[:, 1:]
    accuracy, mean_odds, shares = np.split(means, [places * steps, 2 * places * steps], axis=1)
    accuracy = accuracy.reshape(-1, places, steps)
    mean_odds = mean_odds.reshape(-1, places, steps)
    shares = shares.reshape(-1, places, steps, classes)
    entropy = (shares * -np.log2(np.where(shares > 0, shares, 1.0))).sum(-1) + 0.0  # 0.0 + -0.0 is 0.0
    drops = 1 - ratio(accuracy, accuracy[:, :, :1])
    points = tuple(
        tuple(
            {
                "accuracy": estimate(accuracy[:, place, at]),
                "drop": estimate(drops[:, place, at]),
                "log_odds": estimate(mean_odds[:, place, at]),
                "shares": tuple(estimate(shares[:, place, at, c]) for c in range(classes)),
                "majority": estimate(shares[:, place, at].max(-1)),
                "entropy": estimate(entropy[:, place, at]),
            }
            for at in range(steps)
        )
        for place in range(places)
    )
    gaps = tuple(estimate(accuracy[:, 1, at] - accuracy[:, 0, at]) for at in range(steps)) if places == 2 else ()
    halves = tuple(half_length(accuracy[:, place], chance, lengths) for place in range(places))
    return Measured(estimate(accuracy[:, 0, 0]), float(chance[0]), points, gaps, halves)


def half_length(
    accuracy: Float[np.ndarray, "rows lengths"], chance: Float[np.ndarray, " rows"], lengths: Sequence[int]
) -> Estimate | None:
    """The shortest length at which accuracy − chance is at most half of what it is at the first one, from the first
    row, and its interval from the others; None where there is none, or nothing above chance to lose."""
    above = accuracy - chance[:, None]
    gone = above <= above[:, :1] / 2 + 1e-9  # just a half is gone, whatever rounding says
    first = np.where(gone.any(1), np.asarray(lengths, dtype=np.float64)[gone.argmax(1)], np.inf)
    defined = above[:, 0] > 0
    if not defined[0] or math.isinf(first[0]):
        return None
    # no interpolation: between a length and infinity there is nothing
    low, high = np.quantile(first[1:][defined[1:]], [0.025, 0.975], method="inverted_cdf")
    return Estimate(float(first[0]), float(low), float(high))


def _notes(
    model: Model, asked: Questions, given: str | None, longest: str, measured: Measured, curves: Sequence[OverflowCurve]
) -> Iterable[str]:
    if measured.clean.low <= measured.chance:
        yield (
            f"the clean accuracy, {measured.clean}, is not clearly above chance, {measured.chance:.3f}: there is "
            "little to forget"
        )
    half = (measured.clean.value + measured.chance) / 2
    for curve in curves:
        gone = math.inf if curve.half_length is None else curve.half_length.value
        back = [point.tokens for point in curve.points if point.tokens > gone and point.accuracy.value > half + 1e-9]
        if back:
            yield f"with filler {curve.where} the text, accuracy is above the half again at {back[0]:,} tokens"
    number, unknown = unknown_tokens(model, longest)
    if unknown:
        yield f"the tokenizer does not know {100 * unknown / number:.0f} % of the filler's tokens"
    if given is not None and len(longest) > len(given):
        yield "the filler is shorter than the longest length, and repeated"
    off = [(point, curve) for curve in curves for point in curve.points if abs(point.added - point.tokens) > 0.005]
    if off:
        point, curve = max(off, key=lambda pair: abs(pair[0].added - pair[0].tokens))
        yield (
            f"filler of {point.tokens} tokens adds {point.added:.2f} on average {curve.where} the texts: the tokenizer "
            "cuts no beginning of just that number, or joins it with what is beside it"
        )


# ---- the result


@dataclass(frozen=True)
class Filled:
    """What is measured with filler of one length at one place."""

    tokens: int
    added: float
    """Tokens by which the texts are longer than without filler, on average."""
    accuracy: Estimate
    drop: Estimate
    """1 − accuracy / clean accuracy."""
    log_odds: Estimate
    """The mean of log p / (1 − p) of the true class, in natural logarithms."""
    shares: tuple[Estimate, ...]
    """Of the examples, how many are given each class."""
    majority: Estimate
    """The largest of these shares: 1 for a model that gives every text the same class."""
    entropy: Estimate
    """−Σ share log₂ share, in bits: 0 for such a model."""


@dataclass(frozen=True)
class OverflowCurve:
    """Filler of growing length at one place."""

    where: str
    """"after" or "before" the text."""
    points: tuple[Filled, ...]
    """From no filler to the longest."""
    half_length: Estimate | None
    """The shortest measured length at which half of the accuracy above chance is gone; None where it never is. The
    upper end of its interval can be infinite: longer than what was measured, or never."""


@dataclass(frozen=True)
class StateOverflow(Result, kind="overflow"):
    """What a model still knows behind filler of growing length."""

    classes: tuple[str, ...]
    chance: float
    """The share of the data's most frequent class."""
    clean: Estimate
    curves: tuple[OverflowCurve, ...]
    gaps: tuple[Estimate, ...]
    """Per length the accuracy with filler before less that with filler after the texts, paired: what the place costs;
    empty for one place."""
    filler: str
    """The longest one that was put in."""
    notes: tuple[str, ...]

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        last = [f"{curve.points[-1].accuracy.value:.3f} with it {curve.where}" for curve in self.curves]
        return (
            f"State overflow of {model}: accuracy {self.clean.value:.3f} without filler; of "
            f"{self.curves[0].points[-1].tokens:,} tokens {' and '.join(last)} the text; chance {self.chance:.3f}"
        )

    def to_frame(self) -> DataFrame:
        """A row per place and length.

        Columns: where, tokens, added, accuracy, drop (relative, in percent), log_odds, majority, entropy (bits), the
        share of each class as "share CLASS", and with both places gap (accuracy before − after, in both places' rows);
        the 95 % interval of each is in columns ending in _low and _high.
        """
        import pandas as pd

        rows = []
        for curve in self.curves:
            for at, point in enumerate(curve.points):
                found = {"accuracy": point.accuracy, "drop": point.drop.times(100), "log_odds": point.log_odds}
                found |= {"majority": point.majority, "entropy": point.entropy}
                found |= {f"share {name}": share for name, share in zip(self.classes, point.shares)}
                found |= {"gap": self.gaps[at]} if self.gaps else {}
                row: dict[str, Any] = {"where": curve.where, "tokens": point.tokens, "added": point.added}
                for name, one in found.items():
                    row |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
                rows.append(row)
        return pd.DataFrame(rows)

    def figure(self) -> Figure:
        """Accuracy, mean log-odds and the largest share of a class against the length, a line for each place."""
        from ssmscope.attacks.overflow_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        yield Text(self.headline)
        for curve in self.curves:
            yield Text(f"\nfiller {curve.where} the text", style="bold")
            table = Table(box=None, pad_edge=False)
            for heading in ("tokens", "accuracy", "drop in %", "log-odds", "largest class", "entropy"):
                table.add_column(heading, justify="right", no_wrap=True)
            for point in curve.points:
                numbers = [str(point.accuracy), percent(point.drop), str(point.log_odds)]
                share, name = max(zip([e.value for e in point.shares], self.classes))
                table.add_row(f"{point.tokens:,}", *numbers, f"{name} {share:.2f}", f"{point.entropy.value:.2f}")
            yield table
            yield Text(f"Half of the accuracy above chance is gone: {half_name(curve)}.")
        if self.gaps:
            last = self.curves[0].points[-1].tokens
            yield Text(f"\nAccuracy before less after at {last:,} tokens: {self.gaps[-1]}.")
        data = self.provenance["data"]
        yield Text(f"\n{data['examples']:,} examples of {data['name']} ({data['split']}); 95 % bootstrap intervals.")
        yield from (Text(f"Note: {note}.") for note in self.notes)


def half_name(curve: OverflowCurve) -> str:
    """A half-length and its interval in words."""
    longest = curve.points[-1].tokens
    if curve.half_length is None:
        return f"never within {longest:,} tokens"
    ends = (curve.half_length.low, curve.half_length.high)
    low, high = (f"{end:,.0f}" if math.isfinite(end) else f"> {longest:,}" for end in ends)
    return f"at {curve.half_length.value:,.0f} tokens [{low}, {high}]"
