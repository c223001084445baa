"""Heatmap over a data set: what is kept of its words, positions and classes. Texts run a batch at a time, and only sums
are held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import estimate, ratio, resampled_means, resampled_sums
from ssmscope.errors import InputError
from ssmscope.interp.classes import class_ids
from ssmscope.interp.heatmap.kept import KeptGroup, KeptLayer, KeptWord
from ssmscope.interp.heatmap.measure import LayerScores, Score
from ssmscope.interp.heatmap.words import (
    MAX_HALF_LIFE,
    SHOWN_HIGHEST,
    SHOWN_LOWEST,
    is_punctuation,
    word_groups,
    word_scores,
    word_text,
)
from ssmscope.interp.labelled import read_texts

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.core.trace import LayerTrace, Trace
    from ssmscope.data.text import TextData

TENTHS = 10
"""Number of parts of equal length that a text is divided into."""
COLUMNS = ("answers", "measures", "tenths", "sizes")
TABLES = ("halved", "ended")
MEASURES = ("strongest", "punctuation", "end", "spread")
END_SHARE = 0.25
"""Share of a text's words that is its end."""
LEAST_TEXTS = (5, 1 / 500)
"""Smallest number of texts, and smallest share of them, in which a named word occurs."""
HIGHEST, LOWEST, OF_GROUP = 40, 20, 5
"""Number of words with intervals from the top and from the bottom, and number of words named per group and layer."""
MAX_CLASSES = 6
"""Largest number of classes, the most frequent ones, that form a group."""
MAX_TIMED_TEXTS = 200
"""Largest number of texts, drawn by the seed, whose half-lives are measured."""
EXAMPLE_WORDS = (8, 60)
"""Smallest and largest number of words in a text that is shown as an example."""


@dataclass(eq=False)
class WordSums:
    """Sums over the occurrences of words, text by text.

    Attributes:
        number: index of every word, lower case, by first occurrence.
        layers: (layers, words), the sums of each word's scores.
        entries: per batch (word, text, sum of its scores averaged over layers, occurrences), a row for each word of a
            text.
    """

    layers: np.ndarray
    number: dict[str, int] = field(default_factory=dict)
    entries: list[np.ndarray] = field(default_factory=list)

    def add(self, text: int, words: Sequence[str], scores: np.ndarray) -> None:
        """Add the scores (layers, words) of a text."""
        ids = np.array([self.number.setdefault(word, len(self.number)) for word in words], dtype=np.int64)
        if len(self.number) > self.layers.shape[1]:
            room = 2 * len(self.number) - self.layers.shape[1]
            self.layers = np.pad(self.layers, ((0, 0), (0, room)))
        for layer, row in zip(self.layers, scores):
            np.add.at(layer, ids, row)
        unique, place, count = np.unique(ids, return_inverse=True, return_counts=True)
        sums = np.bincount(place, scores.mean(0), minlength=len(unique))
        self.entries.append(np.stack([unique, np.full(len(unique), text), sums, count]).astype(np.float64))


@dataclass(eq=False)
class TextMeasures:
    """Measurements of the texts of a data set.

    Attributes:
        rows: (texts,), numbers of the texts in the data.
        answers: (texts,), the class that a classifier predicts; −1 for other models.
        measures: (texts, `MEASURES`).
        tenths: (texts, 1 + layers, `TENTHS`) float32, the average first: mean scores of the words in each part.
        sizes: (texts,), numbers of words.
    """

    rows: np.ndarray
    answers: np.ndarray
    measures: np.ndarray
    tenths: np.ndarray
    sizes: np.ndarray
    words: WordSums

    @classmethod
    def empty(cls, rows: Sequence[int], layers: int) -> TextMeasures:
        n = len(rows)
        shape = (n, 1 + layers, TENTHS)
        return cls(
            rows=np.array(rows),
            answers=np.full(n, -1),
            measures=np.full((n, len(MEASURES)), np.nan),
            tenths=np.full(shape, np.nan, dtype=np.float32),
            sizes=np.zeros(n, dtype=np.int64),
            words=WordSums(np.zeros((layers, 0))),
        )

    def put(
        self, text: int, tokens: Sequence[str], words: Sequence[int | None], scores: np.ndarray, of: Score
    ) -> tuple[list[str], np.ndarray]:
        """Measure a text, and return its words with their scores (layers, words).

        Args:
            text: its place among the texts.
            scores: (layers, tokens).
        """
        groups = [group for group in word_groups(words) if words[group[0]] is not None]
        names = [word_text(tokens, group).strip().lower() for group in groups]
        whole = word_scores(scores, groups, summed=of == "survival")
        share, even = whole.mean(0), whole * (len(groups) if of == "survival" else 1)
        marks = np.array([is_punctuation(name) for name in names])
        end = np.arange(len(groups)) >= (1 - END_SHARE) * len(groups)
        self.measures[text] = [
            share[~marks].max() if not marks.all() else np.nan,
            share_held(share, marks, of),
            share_held(share, end, of),
            share.std() / share.mean() if share.mean() else 0.0,
        ]
        self.sizes[text] = len(groups)
        part = TENTHS * np.arange(len(groups)) // len(groups)
        for row, values in zip(self.tenths[text], (even.mean(0), *even)):
            row[:] = ratio(np.bincount(part, values, minlength=TENTHS), np.bincount(part, minlength=TENTHS))
        return names, even

    def columns(self, texts: Sequence[tuple[list[str], np.ndarray]]) -> dict[str, np.ndarray]:
        """Return all measurements, and the words of these texts with their scores, for `take`."""
        own = {name: getattr(self, name) for name in COLUMNS}
        names = np.array([name for names, _ in texts for name in names], dtype=str)
        return {**own, "names": names, "scores": np.concatenate([scores for _, scores in texts], axis=1)}

    def take(self, lines: Sequence[int], part: Mapping[str, np.ndarray]) -> None:
        """Store the measurements of some texts in their lines."""
        for name in COLUMNS:
            getattr(self, name)[lines] = part[name]
        ends = np.cumsum(part["sizes"])[:-1]
        each = zip(np.split(part["names"], ends), np.split(part["scores"], ends, axis=1), strict=True)
        for line, (names, scores) in zip(lines, each, strict=True):
            self.words.add(line, names.tolist(), scores)


def share_held(share: np.ndarray, of: np.ndarray, score: Score) -> float:
    """Return the share of the states that some of a text's words hold together; for scores that are no shares, their
    mean."""
    if score == "survival":
        return float(share[of].sum())
    return float(share[of].mean()) if of.any() else np.nan


class HalfLives:
    """Half-lives of what layers and heads write, over the tokens of many texts: the median of Kaplan and Meier (1958).

    What is written at s is observed for T − s tokens only, and often outlives its text: such a token is censored. S(d),
    the share that has more than half left after d tokens, is ∏_{j ≤ d} (1 − halved after j / seen and not halved before
    j); the half-life is the first d at which S(d) ≤ ½. Infinite where there is none up to `MAX_HALF_LIFE`.

    Attributes:
        halved, ended: per layer (1 + heads, HORIZON + 1), the layer as a whole first: numbers of tokens that were
            halved after d tokens, or observed for only d.
    """

    def __init__(self) -> None:
        self.halved: dict[int, np.ndarray] = {}
        self.ended: dict[int, np.ndarray] = {}

    def visit(self, index: int, layer: LayerTrace, batch: Batch) -> None:
        """Count the tokens of a layer on a batch."""
        whole, heads = layer.half_lives(), layer.half_lives(per_head=True)
        every = torch.cat([whole.unsqueeze(2), heads], dim=2).cpu().numpy()
        series = np.arange(every.shape[2])[None, :]
        for tables in (self.halved, self.ended):
            tables.setdefault(index, np.zeros((every.shape[2], MAX_HALF_LIFE + 1), dtype=np.int64))
        for found, words in zip(every, batch.words):
            ordinary = np.array([word is not None for word in words])
            found = found[: len(words)][ordinary]
            seen = np.minimum((len(words) - 1 - np.flatnonzero(ordinary))[:, None], MAX_HALF_LIFE)
            done = found <= seen
            np.add.at(self.halved[index], (np.where(done, series, 0), np.where(done, found, 0).astype(int)), done)
            np.add.at(
                self.ended[index], (np.broadcast_to(series, done.shape), np.broadcast_to(seen, done.shape)), ~done
            )

    def columns(self) -> dict[str, np.ndarray]:
        """Return all counts, for `take`."""
        return {f"{name} {index}": each for name in TABLES for index, each in getattr(self, name).items()}

    def take(self, part: Mapping[str, np.ndarray]) -> None:
        """Add the counts of other tokens."""
        for key, each in part.items():
            name, index = key.split()
            tables = getattr(self, name)
            tables[int(index)] = tables.get(int(index), 0) + each

    def of(self, index: int) -> np.ndarray:
        """Return the half-lives of a layer, (1 + heads,) float64."""
        return median_half_lives(self.halved[index], self.ended[index])


def median_half_lives(halved: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the first d with S(d) ≤ ½ from counts (series, 1 + longest) by time, see `HalfLives`."""
    both = halved + ended
    at_risk = both[:, ::-1].cumsum(1)[:, ::-1]
    left = np.cumprod(1 - np.divide(halved, at_risk, out=np.zeros(halved.shape), where=at_risk > 0), axis=1)
    below = left <= 0.5
    return np.where(below.any(1), below.argmax(1), np.inf)


def measure(
    model: Model,
    data: TextData,
    score: Score,
    places: Sequence[int],
    *,
    half_lives: bool,
    seed: int,
    provenance: Mapping[str, Any],
) -> tuple[TextMeasures, HalfLives | None, int]:
    """Run the texts in batches of similar length and measure each; then run some again for half-lives.

    Returns:
        the measurements, the half-lives, and the number of texts that these are taken over.

    Raises:
        InputError: no text with an ordinary token, one that cannot be read, or scores that are not finite.
    """
    lengths, sizes, _ = read_texts(model, data)
    used = [row for row, size in enumerate(sizes) if size]
    if not used:
        raise InputError(f"no text of {data.name} ({data.split}) has a token that is not special")
    found, line_of = TextMeasures.empty(used, len(places)), {row: line for line, row in enumerate(used)}
    random = np.random.default_rng(seed)
    timed = np.sort(random.permutation(used)[:MAX_TIMED_TEXTS]).tolist() if half_lives else []
    lives = HalfLives() if half_lives else None
    room = tokens_at_once(model.device)

    def look(rows: Sequence[int]) -> Columns:
        batch = model.encode([data.texts[row] for row in rows])
        taken = LayerScores(model.num_layers, batch.mask, score, None)
        trace = model.trace(batch, keep_inputs=False, visit=taken.visit)
        values = taken.of(trace)[list(places)]
        part, texts = TextMeasures.empty(rows, len(places)), []
        for at, row in enumerate(rows):
            own = values[:, at, : len(batch.words[at])]
            if not np.isfinite(own).all():
                raise InputError(f"the scores of row {row + 1} of {data.name} are not finite: the model is damaged")
            texts.append(part.put(at, batch.tokens[at], batch.words[at], own, score))
        if model.is_classifier:
            part.answers[:] = _predicted(trace)
        return part.columns(texts)

    def time(rows: Sequence[int]) -> Columns:
        own, batch = HalfLives(), model.encode([data.texts[row] for row in rows])
        _time(model, batch, own)
        return own.columns()

    for rows, part in over(model, by_length(lengths, room, rows=used), look, provenance=provenance):
        found.take([line_of[row] for row in rows], part)
    if lives is not None:
        batches = by_length(lengths, room, rows=timed)
        for _, part in over(model, batches, time, provenance=provenance, what="texts timed"):
            lives.take(part)
    return found, lives, len(timed)


def _time(model: Model, batch: Batch, lives: HalfLives) -> None:
    def visit(index: int, rows: Sequence[int], layer: LayerTrace) -> None:
        lives.visit(index, layer, batch.rows(rows))

    model.trace(batch, keep_inputs=False, visit=visit)


def _predicted(trace: Trace) -> np.ndarray:
    return trace.logits.argmax(-1).cpu().numpy()


def summarise(
    model: Model,
    data: TextData,
    found: TextMeasures,
    lives: HalfLives | None,
    places: Sequence[int],
    numbers: Sequence[int],
    *,
    punctuation: bool,
    seed: int,
) -> dict[str, Any]:
    """Return the numerical fields of a `DataHeatmap`, with 95 % bootstrap intervals over texts from one set of
    resamples."""
    groups, notes = _groups(model, data, found)
    columns = [np.where(chosen[:, None], found.measures, np.nan) for chosen in groups.values()]
    columns += [found.tenths.reshape(len(found.rows), -1)]
    rows = resampled_means(np.concatenate(columns, axis=1), seed=seed)
    estimates = [estimate(column) for column in rows.T]
    width = len(MEASURES)
    names = np.array(list(found.words.number))
    entries, least = np.concatenate(found.words.entries, axis=1), min_texts(len(found.rows))
    if not punctuation:
        marks = np.array([is_punctuation(name) for name in names])
        entries = entries[:, ~marks[entries[0].astype(int)]]
    kept = []
    for at, (name, chosen) in enumerate(groups.items()):
        own = entries[:, chosen[entries[1].astype(int)]]
        highest = names[
            _chosen(own, len(names), min_texts(int(chosen.sum())), SHOWN_HIGHEST, SHOWN_LOWEST)[:OF_GROUP]
        ].tolist()
        means = dict(zip(MEASURES, estimates[width * at : width * (at + 1)]))
        kept.append(KeptGroup(name=name, texts=int(chosen.sum()), **means, words=tuple(highest)))
    tenths = estimates[width * len(groups) :]
    counts = np.bincount(entries[0].astype(int), entries[3], minlength=len(names))
    texts = np.bincount(entries[0].astype(int), minlength=len(names))
    layers = []
    for at, (place, number) in enumerate(zip(places, numbers)):
        halves = np.empty(0) if lives is None else lives.of(place)
        score = ratio(found.words.layers[at, : len(names)], np.where(texts >= least, counts, 0))
        order = np.argsort(-np.nan_to_num(score, nan=-np.inf), kind="stable")[:OF_GROUP]
        layers.append(
            KeptLayer(
                number=number,
                half_life=float(halves[0]) if lives is not None else float("nan"),
                heads=halves[1:],
                words=tuple(str(names[word]) for word in order if not np.isnan(score[word])),
                tenths=tuple(tenths[TENTHS * (1 + at) : TENTHS * (2 + at)]),
            )
        )
    return {
        "words": _with_intervals(
            entries, _chosen(entries, len(names), least, HIGHEST, LOWEST).tolist(), names, len(found.rows), seed
        ),
        "least": least,
        "named": int((texts >= least).sum()),
        "groups": tuple(kept),
        "tenths": tuple(tenths[:TENTHS]),
        "by_layer": tuple(layers),
        "notes": tuple(notes),
    }


def min_texts(texts: int) -> int:
    """Return the smallest number of texts, out of so many, in which a named word occurs."""
    return max(LEAST_TEXTS[0], math.ceil(LEAST_TEXTS[1] * texts))


def _groups(model: Model, data: TextData, found: TextMeasures) -> tuple[Mapping[str, np.ndarray], list[str]]:
    """Return masks by name of all texts, those of each class, and those answered right and wrong; and notes."""
    labels = np.asarray(data.labels)[found.rows]
    made, notes = {"all": np.ones(len(labels), dtype=bool)}, []
    order = np.argsort(-np.bincount(labels, minlength=len(data.label_names)), kind="stable")[:MAX_CLASSES]
    for label in sorted(order.tolist()):
        if (labels == label).any():
            made[f"class {data.label_names[label]}"] = labels == label
    if model.is_classifier:
        try:
            right = found.answers == class_ids(model, data)[found.rows]
            made |= {name: mask for name, mask in (("answered right", right), ("answered wrong", ~right)) if mask.any()}
        except InputError as error:
            notes.append(f"no answer is right or wrong: {error}")
    return made, notes


def _chosen(entries: np.ndarray, words: int, least: int, highest: int, lowest: int) -> np.ndarray:
    """Return words that occur in enough texts, by falling mean: so many with the highest lower ends of the mean's
    interval, and so many with the lowest upper ends, so that a rare word is not there by chance. Ends are two standard
    errors away, over texts."""
    number, _, sums, count = entries
    at = number.astype(int)
    total = np.bincount(at, count, minlength=words)
    mean = ratio(np.bincount(at, sums, minlength=words), total)
    error = np.sqrt(ratio(np.bincount(at, (sums - mean[at] * count) ** 2, minlength=words), total**2))
    common = np.flatnonzero(np.bincount(at, minlength=words) >= least)
    low, high = (mean - 2 * error)[common], (mean + 2 * error)[common]
    upper = common[np.argsort(-low, kind="stable")][: min(highest, -(-len(common) // 2))]
    lower = common[np.argsort(high, kind="stable")]
    chosen = np.concatenate([upper, lower[~np.isin(lower, upper)][:lowest]])
    return chosen[np.argsort(-mean[chosen], kind="stable")]


def _with_intervals(
    entries: np.ndarray, chosen: Sequence[int], names: np.ndarray, texts: int, seed: int
) -> tuple[KeptWord, ...]:
    """Return the mean scores of words over their occurrences, with intervals."""
    columns = np.zeros((texts, 2 * len(chosen)))
    stands = []
    for at, word in enumerate(chosen):
        own = entries[:, entries[0] == word]
        columns[own[1].astype(int), at] = own[2]
        columns[own[1].astype(int), len(chosen) + at] = own[3]
        stands.append((own.shape[1], int(own[3].sum())))
    if not chosen:
        return ()
    rows = ratio(*np.split(resampled_sums(columns, seed=seed), 2, axis=1))
    return tuple(
        KeptWord(str(names[word]), *stood, kept=estimate(column)) for word, stood, column in zip(chosen, stands, rows.T)
    )


def extremes(found: TextMeasures) -> list[tuple[int, str]]:
    """Return example texts with a description: the two whose scores are spread most unevenly, and the two most even,
    among those of few enough words."""
    spread = found.measures[:, MEASURES.index("spread")]
    low, high = EXAMPLE_WORDS
    allowed = np.flatnonzero((found.sizes >= low) & (found.sizes <= high) & np.isfinite(spread))
    order = allowed[np.argsort(-spread[allowed], kind="stable")]
    picked = [(int(at), "among the most uneven") for at in order[:2]]
    return picked + [(int(at), "among the most even") for at in order[2:][-2:][::-1]]
