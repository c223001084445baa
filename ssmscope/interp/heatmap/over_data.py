"""Heatmap over a data set: what is kept of its words, positions and classes. Texts run batch by batch, and only sums
are held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ssmscope.api.options import chosen_layers
from ssmscope.api.provenance import record_provenance
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import estimate, ratio, resampled_means, resampled_sums
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.ties import descending
from ssmscope.core.trace import LayerTrace
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.interp.gates import TEXTS_JUDGED, note_on_gates
from ssmscope.interp.heatmap.measure import Score, layers_record, scored, scored_batch
from ssmscope.interp.heatmap.result import MEASURES, DataHeatmap, KeptGroup, KeptLayer, even_score
from ssmscope.interp.heatmap.scored_text import SHARES
from ssmscope.interp.heatmap.words import (
    MAX_HALF_LIFE,
    SHOWN_HIGHEST,
    UNKNOWN,
    KeptWord,
    is_punctuation,
    shown_words,
    word_groups,
    word_scores,
    word_text,
)
from ssmscope.interp.labelled import class_ids, read_texts

TENTHS = 10
"""Number of parts of equal length that a text is divided into."""
COLUMNS = ("answers", "measures", "tenths", "sizes", "unknown")
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


def scored_data(
    model: Model | None, data: TextData, options: Mapping[str, Any], *, limit: int | None, seed: int
) -> DataHeatmap:
    """Compute the heatmap of a data set, with the options of `selection_heatmap`."""
    if model is None or model.tokenizer is None:
        raise InputError("labelled texts need a model with a tokenizer; give one, or name one with tokenizer")
    model.check_recurrent_state("a heatmap")
    score, layers, punctuation = (options[name] for name in ("score", "layers", "punctuation"))
    places = chosen_layers(layers, model.layer_numbers)
    data = data if limit is None else data.sample(limit, seed=seed)
    numbers = tuple(model.layer_numbers[place] for place in places)
    recorded = {"score": score, "layers": layers_record(layers, numbers), "top": options["top"]}
    recorded |= {"punctuation": punctuation, "limit": limit}
    provenance = record_provenance(model.source, options=recorded, seed=seed, data=data)
    found, words, lives, (timed, longest) = measure(model, data, score, places, seed=seed, provenance=provenance)
    summary = summarise(
        model, data, found, words, lives, places, numbers, score=score, punctuation=punctuation, seed=seed
    )
    judged = model.encode([data.texts[row] for row in found["rows"][:TEXTS_JUDGED]])
    summary["notes"] += tuple(f"{note[0].upper()}{note[1:]}." for note in note_on_gates(model, judged, [score]))
    unknown, every = found["unknown"].sum(0).tolist()
    if unknown:
        summary["notes"] += (f"The tokenizer does not know {unknown:,} of {every:,} tokens ({UNKNOWN}).",)
    picked = extremes(found)
    shown = [data.texts[found["rows"][at]] for at, _ in picked]
    return DataHeatmap(
        provenance=provenance,
        score=score,
        layers=numbers,
        texts=len(found["rows"]),
        timed=timed,
        longest=longest,
        examples=(scored(model, shown, {**options, "half_lives": False}),) if shown else (),
        picked=tuple(what for _, what in picked),
        **summary,
    )


@dataclass(eq=False)
class WordSums:
    """Sums over the occurrences of words, text by text."""

    layers: np.ndarray
    """(layers, words), the sums of each word's scores."""
    number: dict[str, int] = field(default_factory=dict)
    """Index of every word, lower case, by first occurrence."""
    entries: list[np.ndarray] = field(default_factory=list)
    """Per text (word, text, sum of its scores averaged over layers, occurrences), a row for each word."""

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


def text_measures(
    tokens: Sequence[str], words: Sequence[int | None], scores: np.ndarray, of: Score, unknown: Sequence[int] = ()
) -> dict[str, Any]:
    """Measure a text with scores (layers, tokens) and the positions of unknown tokens, and return its words with their
    scores (layers, words) too."""
    groups = [group for group in word_groups(words) if words[group[0]] is not None]
    names = [word_text(tokens, group).strip().lower() for group in groups]
    whole = word_scores(scores, groups, summed=of in SHARES)
    share, even = whole.mean(0), whole * (len(groups) if of in SHARES else 1)
    marks = np.array([is_punctuation(name) for name in names])
    every = zip(names, groups, marks.tolist())
    names = [UNKNOWN if {*group} <= {*unknown} and not mark else name for name, group, mark in every]
    end = np.arange(len(groups)) >= (1 - END_SHARE) * len(groups)

    def held(chosen: np.ndarray) -> float:  # Scores that are not shares have a mean.
        if of in SHARES:
            return float(share[chosen].sum())
        return float(share[chosen].mean()) if chosen.any() else np.nan

    part = TENTHS * np.arange(len(groups)) // len(groups)
    sizes = np.bincount(part, minlength=TENTHS)
    tenths = [ratio(np.bincount(part, row, minlength=TENTHS), sizes) for row in (even.mean(0), *even)]
    measures = [
        share[~marks].max() if not marks.all() else np.nan,
        held(marks),
        held(end),
        share.std() / share.mean() if share.mean() else 0.0,
    ]
    found = {"measures": measures, "tenths": np.array(tenths, dtype=np.float32), "unknown": (len(unknown), len(tokens))}
    return {**found, "sizes": len(groups), "names": names, "scores": even}


def half_life_counts(model: Model, batch: Batch) -> dict[str, np.ndarray]:
    """Count by layer, (2, 1 + heads, `MAX_HALF_LIFE` + 1): tokens halved after d tokens, and seen for only d."""
    counts: dict[str, np.ndarray] = {}

    def visit(index: int, rows: Sequence[int], layer: LayerTrace) -> None:
        every = torch.cat([layer.half_lives().unsqueeze(2), layer.half_lives(per_head=True)], dim=2).cpu().numpy()
        series = np.arange(every.shape[2])
        table = counts.setdefault(str(index), np.zeros((2, len(series), MAX_HALF_LIFE + 1), dtype=np.int64))
        for found, words in zip(every, batch.rows(rows).words):
            ordinary = np.flatnonzero([word is not None for word in words])
            seen = np.minimum((len(words) - 1 - ordinary)[:, None], MAX_HALF_LIFE)
            done = found[ordinary] <= seen
            after = np.where(done, found[ordinary], seen).astype(int)
            np.add.at(table, (np.where(done, 0, 1), series, after), 1)

    model.trace(batch, keep_inputs=False, visit=visit)
    return counts


def median_half_lives(halved: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the median of Kaplan and Meier (1958) of the half-lives of what is written, from counts (series, 1 +
    longest) by time.

    What is written at s is observed for T − s tokens only, and often outlives its text: such a token is censored. S(d),
    the share that has more than half left after d tokens, is ∏_{j ≤ d} (1 − halved after j / seen and not halved before
    j); the half-life is the first d at which S(d) ≤ ½. Infinite where there is none.
    """
    both = halved + ended
    at_risk = both[:, ::-1].cumsum(1)[:, ::-1]
    left = np.cumprod(1 - np.divide(halved, at_risk, out=np.zeros(halved.shape), where=at_risk > 0), axis=1)
    below = left <= 0.5
    return np.where(below.any(1), below.argmax(1), np.inf)


def measure(
    model: Model, data: TextData, score: Score, places: Sequence[int], *, seed: int, provenance: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], WordSums, dict[int, np.ndarray], tuple[int, int]]:
    """Run the texts in batches of similar length and measure each; with survival, run some again for half-lives.

    Return columns of the texts: their rows in the data, answers (−1 without a classifier), measures, tenths (texts,
    1 + layers, `TENTHS`) with the average first, sizes (numbers of words); the sums of words; half-lives (1 + heads,)
    by layer; and the number of texts that these are taken over, with the largest that can be seen in them.
    """
    lengths, sizes, _ = read_texts(model, data)
    used = [row for row, size in enumerate(sizes) if size]
    if not used:
        raise InputError(f"no text of {data.name} ({data.split}) has a token that is not special")
    room = tokens_at_once(model.device)

    def look(rows: Sequence[int]) -> Columns:
        batch = model.encode([data.texts[row] for row in rows])
        trace, values = scored_batch(model, batch, score)
        texts = []
        for at, row in enumerate(rows):
            own = values[list(places), at, : len(batch.words[at])]
            if not np.isfinite(own).all():
                raise InputError(f"the scores of row {row + 1} of {data.name} are not finite: the model is damaged")
            unknown = batch.spelled[at].unknown if batch.spelled else ()
            texts.append(text_measures(batch.tokens[at], batch.words[at], own, score, unknown))
        found = {name: np.array([text[name] for text in texts]) for name in ("measures", "tenths", "sizes", "unknown")}
        found["answers"] = trace.logits.argmax(-1).cpu().numpy() if model.is_classifier else np.full(len(rows), -1)
        found["names"] = np.array([name for text in texts for name in text["names"]], dtype=str)
        return {**found, "scores": np.concatenate([text["scores"] for text in texts], axis=1)}

    line_of = {row: line for line, row in enumerate(used)}
    lines: list[int] = []
    parts: list[dict[str, np.ndarray]] = []
    words = WordSums(np.zeros((len(places), 0)))
    for rows, part in over(model, by_length(lengths, room, rows=used), look, provenance=provenance):
        own, ends = [line_of[row] for row in rows], np.cumsum(part["sizes"])[:-1]
        for line, names, scores in zip(own, np.split(part["names"], ends), np.split(part["scores"], ends, axis=1)):
            words.add(line, names.tolist(), scores)
        lines += own
        parts.append({name: part[name] for name in COLUMNS})
    columns = {name: np.concatenate([part[name] for part in parts])[np.argsort(lines)] for name in COLUMNS}
    columns["rows"] = np.array(used)
    timed = np.sort(np.random.default_rng(seed).permutation(used)[:MAX_TIMED_TEXTS]).tolist()
    timed = timed if score == "survival" else []
    longest = min(max((lengths[row] for row in timed), default=1) - 1, MAX_HALF_LIFE)
    counts: dict[str, np.ndarray] = {}
    batches = by_length(lengths, room, rows=timed)

    def time(rows: Sequence[int]) -> Columns:
        return half_life_counts(model, model.encode([data.texts[row] for row in rows]))

    for _, part in over(model, batches, time, provenance=provenance, what="texts timed") if timed else ():
        counts = {index: each + counts.get(index, 0) for index, each in part.items()}
    lives = {int(index): median_half_lives(*each) for index, each in counts.items()}
    return columns, words, lives, (len(timed), longest)


def summarise(
    model: Model,
    data: TextData,
    found: Mapping[str, np.ndarray],
    words: WordSums,
    lives: Mapping[int, np.ndarray],
    places: Sequence[int],
    numbers: Sequence[int],
    *,
    score: Score = "survival",
    punctuation: bool,
    seed: int,
) -> dict[str, Any]:
    """Return the numerical fields of a `DataHeatmap`, with intervals from one set of resamples."""
    groups, notes = _groups(model, data, found)
    total = len(found["rows"])
    columns = [np.where(chosen[:, None], found["measures"], np.nan) for chosen in groups.values()]
    columns += [found["tenths"].reshape(total, -1)]
    rows = resampled_means(np.concatenate(columns, axis=1), seed=seed)
    estimates = [estimate(column) for column in rows.T]
    width = len(MEASURES)
    names = np.array(list(words.number))
    entries, least = np.concatenate(words.entries, axis=1), min_texts(total)
    if not punctuation:
        marks = np.array([is_punctuation(name) for name in names])
        entries = entries[:, ~marks[entries[0].astype(int)]]
    every = _with_intervals(entries, _chosen(entries, len(names), least, HIGHEST, LOWEST).tolist(), names, total, seed)
    kept, tenths = [], estimates[width * len(groups) :]
    even = even_score(score, tenths[:TENTHS])
    for at, (name, chosen) in enumerate(groups.items()):
        own, size = entries[:, chosen[entries[1].astype(int)]], int(chosen.sum())
        highest = names[_chosen(own, len(names), min_texts(size), SHOWN_HIGHEST, 0, above=even)].tolist()
        if name == "all":
            highest = [each.word for each in shown_words(every) if each.kept.low > even]
        means = dict(zip(MEASURES, estimates[width * at : width * (at + 1)]))
        kept.append(KeptGroup(name, size, **means, words=tuple(highest[:OF_GROUP])))
    counts = np.bincount(entries[0].astype(int), entries[3], minlength=len(names))
    texts = np.bincount(entries[0].astype(int), minlength=len(names))
    layers = []
    for at, (place, number) in enumerate(zip(places, numbers)):
        halves = lives.get(place, np.full(1, np.nan))
        mean = ratio(words.layers[at, : len(names)], np.where(texts >= least, counts, 0))
        order = descending(mean)[:OF_GROUP]
        highest = tuple(str(names[word]) for word in order if not np.isnan(mean[word]))
        parts = tuple(tenths[TENTHS * (1 + at) : TENTHS * (2 + at)])
        layers.append(KeptLayer(number, float(halves[0]), halves[1:], highest, parts))
    return {
        "words": every,
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


def _groups(model: Model, data: TextData, found: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return masks by name of all texts, those of each class, and those answered right and wrong; and notes."""
    labels, names = np.asarray(data.labels), data.label_names
    made, notes, answered = {"all": np.ones(len(found["rows"]), dtype=bool)}, list[str](), dict[str, np.ndarray]()
    if model.is_classifier:
        try:
            labels, names = class_ids(model, data), tuple(model.labels or ())
            right = found["answers"] == labels[found["rows"]]
            answered = {"answered right": right, "answered wrong": ~right}
        except InputError as error:
            notes.append(f"no answer is right or wrong: {error}")
    labels = labels[found["rows"]]
    order = np.argsort(-np.bincount(labels, minlength=len(names)), kind="stable")[:MAX_CLASSES]
    groups = {f"class {names[label]}": labels == label for label in sorted(order.tolist())} | answered
    return made | {name: mask for name, mask in groups.items() if mask.any()}, notes


def _chosen(
    entries: np.ndarray, words: int, least: int, highest: int, lowest: int, *, above: float = -np.inf
) -> np.ndarray:
    """Return words that occur in at least `least` texts, by falling mean: the `highest` ones by the lower end of the
    mean's interval, which lies `above` a score, and the `lowest` ones by its upper end, so that rare words are not
    there by chance. Ends are two standard errors away, over texts."""
    number, _, sums, count = entries
    at = number.astype(int)
    total = np.bincount(at, count, minlength=words)
    mean = ratio(np.bincount(at, sums, minlength=words), total)
    error = np.sqrt(ratio(np.bincount(at, (sums - mean[at] * count) ** 2, minlength=words), total**2))
    common = np.flatnonzero(np.bincount(at, minlength=words) >= least)
    low, high = (mean - 2 * error)[common], (mean + 2 * error)[common]
    upper = common[descending(low)][: min(highest, -(-len(common) // 2), int((low > above).sum()))]
    lower = common[descending(-high)]
    chosen = np.concatenate([upper, lower[~np.isin(lower, upper)][:lowest]])
    return chosen[descending(mean[chosen])]


def _with_intervals(
    entries: np.ndarray, chosen: Sequence[int], names: np.ndarray, texts: int, seed: int
) -> tuple[KeptWord, ...]:
    """Return the mean scores of words over their occurrences, with intervals."""
    if not chosen:
        return ()
    columns = np.zeros((2, texts, len(chosen)))
    for at, word in enumerate(chosen):
        own = entries[:, entries[0] == word]
        columns[:, own[1].astype(int), at] = own[2:]
    rows = ratio(*np.split(resampled_sums(np.concatenate(columns, axis=1), seed=seed), 2, axis=1))
    counts = zip((columns[1] > 0).sum(0).tolist(), columns[1].sum(0).astype(int).tolist())
    return tuple(
        KeptWord(str(names[word]), *counted, estimate(column)) for word, counted, column in zip(chosen, counts, rows.T)
    )


def extremes(found: Mapping[str, np.ndarray]) -> list[tuple[int, str]]:
    """Return the two example texts whose scores are spread most unevenly, and the two most even."""
    spread, sizes = found["measures"][:, MEASURES.index("spread")], found["sizes"]
    low, high = EXAMPLE_WORDS
    allowed = np.flatnonzero((sizes >= low) & (sizes <= high) & np.isfinite(spread))
    order = allowed[descending(spread[allowed])]
    picked = [(int(at), "among the most uneven") for at in order[:2]]
    return picked + [(int(at), "among the most even") for at in order[2:][-2:][::-1]]
