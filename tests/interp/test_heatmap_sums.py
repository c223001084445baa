"""Sums of a heatmap over a data set, and its averages of tokens, against loops over made-up numbers."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bags import tokenizer
from examples import random_example
from faithful import lines, reader
from refusals import refuses
from ssmscope.core.bootstrap import estimate, ratio, resampled_means, resampled_sums
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.heatmap import check_heatmap, check_reads, measure, over_data, selection_heatmap
from ssmscope.interp.heatmap.measure import TokenAverages
from ssmscope.interp.heatmap.over_data import WordSums, extremes, half_life_counts, min_texts, summarise, text_measures

TOKENS = ("[CLS]", " Un", "able", " ,", " cat", " .", " sat", " on", "!", " mats", "[SEP]")
WORDS = (None, 0, 0, 1, 2, 3, 4, 5, 6, 7, None)
NAMES = ["unable", ",", "cat", ".", "sat", "on", "!", "mats"]
MARKS = np.array([0, 1, 0, 1, 0, 0, 1, 0], dtype=bool)


@pytest.mark.parametrize("score", ["survival", "write"])
def test_a_texts_measures_are_of_its_words(score):
    scores = np.random.default_rng(0).random((2, 11))
    found = text_measures(TOKENS, WORDS, scores, score)
    pieces = [[1, 2], *([at] for at in range(3, 10))]
    shares = score == "survival"
    words = np.stack([scores[:, own].sum(1) / (1 if shares else len(own)) for own in pieces], axis=1)
    mean, even = words.mean(0), words * (8 if shares else 1)
    held = np.sum if shares else np.mean
    assert found["names"] == NAMES and found["sizes"] == 8
    np.testing.assert_allclose(found["scores"], even)
    expected = [mean[~MARKS].max(), held(mean[MARKS]), held(mean[6:]), mean.std() / mean.mean()]
    assert found["measures"] == pytest.approx(expected)
    for row, own in zip(found["tenths"], (even.mean(0), *even)):
        parts = [[own[at] for at in range(8) if 10 * at // 8 == part] for part in range(10)]
        assert row == pytest.approx([np.mean(part) if part else math.nan for part in parts], nan_ok=True)


def test_measures_that_are_not_defined():
    scores = np.array([[0.25, 0.5, 0.25]])
    marks = text_measures((",", ".", "!"), (0, 1, 2), scores, "survival")["measures"]
    assert math.isnan(marks[0]) and marks[1] == 1 and marks[2] == 0  # the last quarter of three words has none
    assert text_measures(("a", "b", "c"), (0, 1, 2), scores, "survival")["measures"][1] == 0
    assert math.isnan(text_measures(("a", "b", "c"), (0, 1, 2), scores, "write")["measures"][1])
    four = text_measures(("a", "b", "c", "d"), (0, 1, 2, 3), np.array([[0.1, 0.2, 0.3, 0.4]]), "survival")
    assert four["measures"][2] == pytest.approx(0.4)  # of four words the last one
    nothing = text_measures(("a", "b"), (0, 1), np.zeros((2, 2)), "survival")["measures"]
    assert nothing == [0, 0, 0, 0]


def test_words_are_summed_text_by_text():
    sums, slow = WordSums(np.zeros((2, 0))), {}
    draw = np.random.default_rng(0)
    texts = [["b", "a", "b"], ["c"], ["a", "d", "e", "c", "a", "f", "g"], ["b", "g"]]
    for text, words in zip((4, 0, 7, 2), texts):
        scores = draw.random((2, len(words)))
        sums.add(text, words, scores)
        for word in dict.fromkeys(words):
            places = [at for at, each in enumerate(words) if each == word]
            slow[word, text] = scores[:, places].sum(1), len(places)
    assert list(sums.number) == ["b", "a", "c", "d", "e", "f", "g"]
    entries = np.concatenate(sums.entries, axis=1)
    assert entries.shape[1] == len(slow)
    for number, text, total, count in entries.T:
        own, times = slow[list(sums.number)[int(number)], int(text)]
        assert total == pytest.approx(own.mean()) and count == times
    for word, number in sums.number.items():
        expected = sum(own for (name, _), (own, _) in slow.items() if name == word)
        np.testing.assert_allclose(sums.layers[:, number], expected)
    assert not sums.layers[:, 7:].any() and sums.layers.shape[1] >= 7


def test_half_lives_are_counted_up_to_the_longest_that_is_measured(monkeypatch):
    monkeypatch.setattr(over_data, "MAX_HALF_LIFE", 3)
    model = Model(random_example("mamba2"), tokenizer(("a", "b", "c", "d", "e")), name="m")
    batch = model.encode(["a b c d e a b c", "d e"])
    found = half_life_counts(model, batch)
    assert list(found) == ["0", "1"]
    for layer, counts in found.items():
        expected = np.zeros((2, 7, 4), dtype=int)
        trace = model.trace(batch).layers[int(layer)]
        series = torch.cat([trace.half_lives().unsqueeze(2), trace.half_lives(per_head=True)], dim=2)
        for row, length in enumerate((9, 3)):
            for at in range(length - 1):  # the last one is special
                for number in range(7):
                    lives, seen = float(series[row, at, number]), min(length - 1 - at, 3)
                    expected[int(lives > seen), number, int(min(lives, seen))] += 1
        np.testing.assert_array_equal(counts, expected)
        assert counts[0].any() and counts[1].any()


def entries_of(draw, words: int, texts: int):
    rows = []
    for text in range(texts):
        for word in draw.permutation(words)[: draw.integers(1, words)]:
            count = draw.integers(1, 4)
            rows.append((word, text, count * draw.normal(loc=word % 5, scale=1 + word % 3), count))
    return np.array(rows, dtype=np.float64).T


def slow_ends(entries, word: int, least: int):
    own = [row for row in entries.T if row[0] == word]
    if len(own) < least:
        return None
    total = sum(count for *_, count in own)
    mean = sum(score for _, _, score, _ in own) / total
    error = math.sqrt(sum((score - mean * count) ** 2 for _, _, score, count in own)) / total
    return mean, mean - 2 * error, mean + 2 * error


@pytest.mark.parametrize(("highest", "lowest"), [(3, 2), (40, 20), (1, 40)])
def test_words_with_the_highest_and_the_lowest_ends_are_chosen(highest, lowest):
    entries = entries_of(np.random.default_rng(2), 13, 9)
    ends = {word: slow_ends(entries, word, 5) for word in range(14)}
    known = {word: own for word, own in ends.items() if own is not None}
    assert 6 < len(known) < 13
    upper = sorted(known, key=lambda word: -known[word][1])[: min(highest, math.ceil(len(known) / 2))]
    lower = [word for word in sorted(known, key=lambda word: known[word][2]) if word not in upper][:lowest]
    expected = sorted([*upper, *lower], key=lambda word: -known[word][0])
    assert over_data._chosen(entries, 14, 5, highest, lowest).tolist() == expected


def test_words_have_means_over_their_occurrences_with_intervals():
    entries = entries_of(np.random.default_rng(3), 6, 8)
    names = np.array(list("uvwxyz"))
    found = over_data._with_intervals(entries, [4, 1], names, 8, 5)
    assert [each.word for each in found] == ["y", "v"] and over_data._with_intervals(entries, [], names, 8, 5) == ()
    columns = np.zeros((8, 4))
    for word, text, score, count in entries.T:
        for place, chosen in enumerate((4, 1)):
            if word == chosen:
                columns[int(text), place], columns[int(text), 2 + place] = score, count
    rows = resampled_sums(columns, seed=5)
    for place, each in enumerate(found):
        own = columns[:, 2 + place]
        assert each.texts == (own > 0).sum() and each.count == own.sum() > each.texts
        assert each.kept == estimate(ratio(rows[:, place], rows[:, 2 + place]))


def test_a_named_word_occurs_in_5_texts_and_in_one_of_500():
    assert [min_texts(texts) for texts in (1, 2499, 2500, 2501, 3000, 3001)] == [5, 5, 5, 6, 6, 7]


def test_groups_are_the_most_frequent_classes_and_the_answers(monkeypatch):
    monkeypatch.setattr(over_data, "MAX_CLASSES", 2)
    names = ("w", "x", "y", "z", "none")
    labels = [3, 1, 0, 3, 2, 0, 3, 1, 1]
    data: Any = SimpleNamespace(labels=labels, label_names=names, name="d")
    found = {"rows": np.array([0, 1, 3, 4, 5, 6, 8])}  # labels 3, 1, 3, 2, 0, 3, 1
    groups, notes = over_data._groups(SimpleNamespace(is_classifier=False), data, found)
    assert list(groups) == ["all", "class x", "class z"] and notes == []
    assert groups["all"].all() and len(groups["all"]) == 7
    assert np.flatnonzero(groups["class z"]).tolist() == [0, 2, 5]
    assert np.flatnonzero(groups["class x"]).tolist() == [1, 6]
    model = reader(labels=3)
    three: Any = text_data("d", "all", list("abcde"), [2, 0, 1, 0, 2], ("class 0", "class 2", "class 1"))
    monkeypatch.setattr(over_data, "MAX_CLASSES", 6)
    found = {"rows": np.array([0, 1, 3, 4]), "answers": np.array([1, 0, 2, 2])}  # right are 1, 0, 0, 1
    groups, notes = over_data._groups(model, three, found)
    assert list(groups) == ["all", "class class 0", "class class 1", "answered right", "answered wrong"]
    assert groups["answered right"].tolist() == [True, True, False, False] and notes == []
    found["answers"] = np.array([1, 0, 0, 1])
    assert list(over_data._groups(model, three, found)[0])[-1] == "answered right"
    other: Any = text_data("d", "all", list("abcde"), [1, 0, 1, 0, 1], ("u", "v"))
    groups, (note,) = over_data._groups(model, other, found)
    assert list(groups) == ["all", "class u", "class v"] and note.startswith("no answer is right or wrong: d has the")


def test_example_texts_are_the_most_uneven_and_the_most_even_of_a_readable_length():
    spread = np.array([0.5, 9.0, 0.9, 0.1, math.nan, 0.2, 0.7, 0.0, 0.3])
    sizes = np.array([8, 7, 60, 20, 20, 9, 30, 61, 10])
    found = {"measures": np.stack([np.arange(9.0), np.arange(9.0), np.arange(9.0), spread], axis=1), "sizes": sizes}
    uneven, even = "among the most uneven", "among the most even"
    assert extremes(found) == [(2, uneven), (6, uneven), (3, even), (5, even)]
    few = {name: each[[0, 2, 3]] for name, each in found.items()}
    assert extremes(few) == [(1, uneven), (0, uneven), (2, even)]


def test_the_summary_is_that_of_its_groups_layers_and_words(monkeypatch):
    """Twelve texts, three layers of which two are shown, and words of which some are punctuation or rare."""
    monkeypatch.setattr(over_data, "OF_GROUP", 3)
    draw = np.random.default_rng(4)
    vocabulary = ["a", "b", ",", "c", "d", "rare", "!", "e"]
    labels = [0, 1, 2] * 4
    data: Any = SimpleNamespace(labels=labels, label_names=("x", "y", "z"), name="d")
    sums = WordSums(np.zeros((2, 0)))
    every: dict[str, list] = {}
    for text in range(12):
        words = [*draw.choice([w for w in vocabulary if w != "rare"], 6), *["rare"] * (text < 4)]
        scores = draw.random((2, len(words))) + np.array([vocabulary.index(word) % 4 for word in words])
        scores[1] = scores[1, ::-1]
        sums.add(text, words, scores)
        for word, own in zip(words, scores.T):
            every.setdefault(word, []).append((text, own))
    found = {
        "rows": np.arange(12),
        "measures": draw.random((12, 4)),
        "tenths": draw.random((12, 3, 10)),
        "answers": np.full(12, -1),
    }
    lives = {0: np.array([3.0, 4.0, 5.0])}
    given: Any = dict(punctuation=False, seed=2)
    result = summarise(SimpleNamespace(is_classifier=False), data, found, sums, lives, [0, 2], [1, 5], **given)
    assert result["least"] == 5 and result["notes"] == ()
    often = {word for word, own in every.items() if len({text for text, _ in own}) >= 5}
    shown = {word for word in often if word not in ",!"}
    assert result["named"] == len(shown) and {each.word for each in result["words"]} == shown and "rare" not in shown
    for each in result["words"]:
        assert each.kept.value == pytest.approx(np.mean([own.mean() for _, own in every[each.word]]))
    assert [(group.name, group.texts) for group in result["groups"]] == [
        *(("all", 12), ("class x", 4), ("class y", 4), ("class z", 4))
    ]
    chosen = [np.ones(12, dtype=bool), *(np.array(labels) == label for label in range(3))]
    for group, own in zip(result["groups"], chosen):
        values = [getattr(group, name).value for name in ("strongest", "punctuation", "end", "spread")]
        assert values == pytest.approx(found["measures"][own].mean(0).tolist())
    assert all(len(group.words) == (3 if group.name == "all" else 0) for group in result["groups"])
    groups = [np.where(own[:, None], found["measures"], math.nan) for own in chosen]
    rows = resampled_means(np.concatenate([*groups, found["tenths"].reshape(12, -1)], axis=1), seed=2)
    assert result["groups"][2].end == estimate(rows[:, 10])
    assert result["tenths"] == tuple(estimate(column) for column in rows.T[16:26])
    first, second = result["by_layer"]
    assert (first.number, first.half_life, first.heads.tolist()) == (1, 3, [4, 5]) and second.number == 5
    assert math.isnan(second.half_life) and not len(second.heads)
    for at, layer in enumerate((first, second)):
        assert layer.tenths == tuple(estimate(column) for column in rows.T[26 + 10 * at : 36 + 10 * at])
        means = {word: np.mean([own[at] for _, own in every[word]]) for word in shown}
        assert layer.words == tuple(sorted(means, key=lambda word: -means[word])[:3])
    given["punctuation"] = True
    with_marks = summarise(SimpleNamespace(is_classifier=False), data, found, sums, lives, [0, 2], [1, 5], **given)
    assert {each.word for each in with_marks["words"]} == often and with_marks["named"] == len(often)


def test_survival_is_compared_as_the_logarithm_of_its_share_in_units_of_an_even_spread(monkeypatch):
    monkeypatch.setattr("ssmscope.core.batching.TOKENS_AT_ONCE", 8)
    model = Model(random_example("mamba2"), tokenizer(("a", "b", "c", "d", "e", "f", "g", "h", "i", "j")), name="m")
    corpus = lines(5, shortest=2)
    averages = TokenAverages(model, corpus, "survival")
    seen: dict[int, list] = {}

    def compared(text):
        batch = model.encode([text])
        shares = model.trace(batch).survival()[:, 0].double().numpy()
        ids, ordinary = batch.input_ids[0].tolist(), [word is not None for word in batch.words[0]]
        values = np.log(np.maximum(shares * sum(ordinary), 1e-6))
        return [(token, values[:, at]) for at, (token, own) in enumerate(zip(ids, ordinary)) if own]

    for text in corpus:
        for token, value in compared(text):
            seen.setdefault(token, []).append(value)
    every = np.array(sum(seen.values(), []))
    spread = np.sqrt(sum(((np.array(own) - np.mean(own, axis=0)) ** 2).sum(0) for own in seen.values()) / len(every))
    assert averages.count.tolist() == [len(seen.get(token, ())) for token in range(model.vocabulary)]
    np.testing.assert_allclose(averages.spread, spread, rtol=1e-4)
    batch = model.encode(["a b", "c j a a"])
    scores = np.stack([np.nan_to_num(model.trace(batch).survival().double().numpy())])[0]
    z = averages.contrast(scores, batch)
    for row, text in enumerate(("a b", "c j a a")):
        for at, (token, value) in enumerate(compared(text)):
            mean = (np.sum(seen.get(token, [[0, 0]]), axis=0) + 5 * every.mean(0)) / (len(seen.get(token, ())) + 5)
            np.testing.assert_allclose(z[:, row, at], (value - mean) / spread, rtol=1e-3, atol=1e-3)
    assert np.isnan(z[:, 0, 2:]).all() and np.isnan(z[:, 1, 4]).all()  # the special token, and padding


@pytest.mark.parametrize(("options", "line"), [
    ({"score": "write", "at": 0}, "at=… applies to survival only, not to write"),
    ({"score": "write", "through": True, "half_lives": True}, "through=… applies to survival only"),
    ({"through": True, "half_lives": True}, "half_lives=… concerns each layer's own writes"),
    ({"contrast": "sst2", "at": 0}, "contrast=… compares whole layers at the end of texts"),
    ({"contrast": "sst2", "through": True}, "contrast=… compares whole layers at the end of texts"),
    ({"contrast": "sst2", "heads": "top"}, "contrast=… compares whole layers at the end of texts"),
])  # fmt: skip
def test_options_that_contradict_each_other(options, line):
    given = dict(score="survival", at=None, contrast=None, through=False, half_lives=False, heads=None)
    check_heatmap(**given)
    refuses(line, check_heatmap, **given | options)


def test_options_of_texts_and_of_data():
    alone = {"at": None, "heads": None, "through": False, "contrast": None, "scale": None, "merge": False}
    check_reads(True, limit=3, **alone)
    check_reads(False, limit=None, **alone | {"merge": True, "at": 0})
    for name, value in {
        "at": 0, "heads": "all", "through": True, "contrast": "x", "scale": "row", "merge": True,
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=f"{name}=… applies to single texts; leave it out with a data set"):
            check_reads(True, limit=None, **alone | {name: value})
    refuses("limit=… is the number of texts read from a data set", check_reads, False, limit=3, **alone)


def test_heads_are_shown_up_to_a_number_and_ties_by_layer(monkeypatch):
    found: Any = SimpleNamespace(selectivity={2: np.array([[0.5, 0.25], [0.5, 0.75]]), 0: np.array([[0.5], [0.75]])})
    monkeypatch.setattr(measure, "MAX_HEADS", 3)
    monkeypatch.setattr(measure, "TOP_HEADS", 2)
    shown = measure._heads(found, [2, 0], "all")
    assert [(each.layer, each.head, each.selectivity) for each in shown] == [(0, 0, 0.625), (2, 0, 0.5), (2, 1, 0.5)]
    assert measure._heads(found, [2, 0], "top") == shown[:2] and measure._heads(found, [2], None) == ()
    monkeypatch.setattr(measure, "MAX_HEADS", 2)
    refuses("there are 3 heads; give heads='top', or layers with up to 2 heads", measure._heads, found, [2, 0], "all")
    assert len(measure._heads(found, [2], "all")) == 2


def test_what_is_recorded_of_a_heatmap_of_data():
    model = Model(random_example("mamba2"), tokenizer(("a", "b", "c")), name="m")
    data = text_data("d", "all", ["a b c a b c a b c", "b a c", "c"] * 3, [0, 1, 1] * 3, ("x", "y"))
    found = selection_heatmap(model, data, layers=[1], limit=7, seed=2, top=4, score="write")
    assert found.provenance["options"] == {"score": "write", "layers": [1], "top": 4, "punctuation": False, "limit": 7}
    assert found.timed == 0 and found.layers == (1,) and found.texts == 7 and found.provenance["seed"] == 2
    assert found.examples[0].provenance["options"]["half_lives"] is False
    short = text_data("d", "all", ["a b", "b a c"], [0, 1], ("x", "y"))
    assert selection_heatmap(model, short).examples == () and selection_heatmap(model, short).picked == ()
    refuses("labelled texts need a model with a tokenizer", selection_heatmap, Model(random_example("mamba2")), short)
    refuses("^NoneType was given as a model; give", selection_heatmap, None, short)
