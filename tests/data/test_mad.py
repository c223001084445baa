"""MAD's tasks: a slow solver that reads no further than the question answers each of them without a mistake."""

from __future__ import annotations

import functools
import inspect
import re

import numpy as np
import pytest
from refusals import refuses
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import did_you_mean
from ssmscope.zoo import mad

COUNTS = dict(train_examples=60, test_examples=40)


def sequences(data):
    """Each sequence and its questions in words, None where nothing is asked."""
    for ids, targets in zip(data.ids.tolist(), data.targets.tolist()):
        yield [data.tokens[i] for i in ids], [None if i == IGNORED else data.tokens[i] for i in targets]


@functools.cache
def kind(token):
    return re.sub(r"\d+$", "", token)


def runs(words):
    """`words` without noise and padding, cut where keys turn into values or values into keys."""
    cut = []
    for word in words:
        if kind(word) in ("k", "v"):
            if not cut or kind(cut[-1][0]) != kind(word):
                cut.append([])
            cut[-1].append(word)
    return [tuple(run) for run in cut]


def recalled(words):
    """Return the continuation of `words`, given that it is a known value: the last key's, from the token it has
    reached."""
    cut = runs(words)
    begun = cut.pop() if kind(cut[-1][0]) == "v" else ()
    asked = cut.pop()
    value = dict(zip(cut[0::2], cut[1::2]))[asked]
    assert value[: len(begun)] == begun
    return value[len(begun)]


def copied(words):
    content = [word for word in words if kind(word) == "t"]
    return content[words[::-1].index("copy") - 1]


def score(data, solver):
    """The share of questions that `solver` answers, from the words up to the question alone; and their number."""
    answers = [
        solver(words[: t + 1]) == target
        for words, targets in sequences(data)
        for t, target in enumerate(targets)
        if target is not None
    ]
    return np.mean(answers), len(answers)


def recalls_due(words):
    """Return where a known value begins or goes on, by a walk through the sequence."""
    due, known, key, value = [None] * len(words), {}, (), ()
    for t, word in enumerate(words):
        if kind(word) == "k":
            if value:
                known.setdefault(key, value)
                key, value = (), ()
            key += (word,)
        elif kind(word) == "v":
            if key in known:
                due[t - 1] = word
            value += (word,)
        elif kind(word) == "noise" and value:
            known.setdefault(key, value)
            key, value = (), ()
    return due


@pytest.mark.parametrize(("generator", "options"), [
    (mad.associative_recall, {}), (mad.associative_recall, dict(length=4, vocabulary=4)), (mad.noisy_recall, {}),
    (mad.noisy_recall, dict(length=40, vocabulary=12, noise_vocabulary=2, noise=0.8)), (mad.fuzzy_recall, {}),
    (mad.fuzzy_recall, dict(length=12)),
    (mad.fuzzy_recall, dict(length=60, vocabulary=9, key_tokens=1, value_tokens=4)),
    (mad.fuzzy_recall, dict(length=200, vocabulary=11, key_tokens=5, value_tokens=2)),
])  # fmt: skip
def test_recall_is_solved_by_a_dictionary_of_what_came_before(generator, options):
    for part in generator(**COUNTS, **options):
        correct, questions = score(part, recalled)
        assert correct == 1.0 and questions >= len(part)
        for words, targets in sequences(part):
            assert targets == recalls_due(words)  # every known value is asked, and nothing else
            assert targets[-2] == words[-1] and targets[-1] is None  # the last pair's key has come before
            assert [kind(run[0]) for run in runs(words)] == ["k", "v"] * (len(runs(words)) // 2)


@pytest.mark.parametrize("options", [{}, dict(length=32, pairs=8, vocabulary=16), dict(length=1024, pairs=256,
                         vocabulary=8192), dict(length=8, pairs=1, vocabulary=4)])  # fmt: skip
def test_mqar_asks_every_key_once_and_nothing_else(options):
    pairs = options.get("pairs", 4)
    for part in mad.mqar(train_examples=20, test_examples=10, **options):
        assert len(part.tokens) == options.get("vocabulary", 64) and part.ids.shape[1] == options.get("length", 64)
        for words, targets in sequences(part):
            known = dict(zip(words[0 : 2 * pairs : 2], words[1 : 2 * pairs : 2]))
            assert len(known) == len(set(known.values())) == pairs
            assert {kind(word) for word in known} == {"k"} and {kind(word) for word in known.values()} == {"v"}
            due = [known.get(word) if at >= 2 * pairs else None for at, word in enumerate(words)]
            assert targets == due and sorted(filter(None, due)) == sorted(known.values()) and not any(targets[1::2])


def test_mqars_keys_come_again_by_a_power_law():
    """One pair: the p-th place has the probability p^(power − 1) / their sum. Two: the second pair's, of the rest."""
    for power in (0.01, 1.0):
        train, _ = mad.mqar(length=22, pairs=1, vocabulary=8, power=power, train_examples=3000)
        weights = np.arange(1, 11) ** (power - 1)
        share = (train.targets[:, 2::2] != IGNORED).mean(0)
        assert abs(share - weights / weights.sum()).max() < 5 * np.sqrt(0.25 / 3000)
    train, _ = mad.mqar(length=10, pairs=2, vocabulary=8, train_examples=3000)
    first, second, third = chance = np.arange(1, 4) ** -0.99 / (np.arange(1, 4) ** -0.99).sum()
    taken = (train.ids[:, 4::2] == train.ids[:, 2, None]) & (train.targets[:, 4::2] != IGNORED)
    exact = [
        second * first / (1 - second) + third * first / (1 - third),
        first * second / (1 - first) + third * second / (1 - third),
        first * third / (1 - first) + second * third / (1 - second),
    ]
    assert sum(exact) == pytest.approx(1) and sum(chance) == pytest.approx(1)
    assert abs(taken.mean(0) - exact).max() < 5 * np.sqrt(0.25 / 3000)


def test_selective_copying_is_solved_in_order():
    for options in ({}, dict(length=9, vocabulary=4, copied=4), dict(length=60, vocabulary=30, copied=5)):
        for part in mad.selective_copying(**COUNTS, **options):
            asked = options.get("copied", 16)
            assert score(part, copied) == (1.0, len(part) * asked)
            assert ((part.targets != IGNORED).nonzero()[1].reshape(-1, asked) >= part.ids.shape[1] - asked).all()
            for words, _ in sequences(part):
                assert sum(kind(word) == "t" for word in words) == asked and words.count("copy") == 1
                assert words[-asked - 1] == "copy" and set(words[-asked:]) == {"blank"}


def test_the_places_to_copy_from_are_uniform():
    train, _ = mad.selective_copying(length=21, copied=4, train_examples=8000)
    found = (train.ids[:, :16] < 14).mean(0)
    assert abs(found - 4 / 16).max() < 5 * np.sqrt(0.25 * 0.75 / 8000)


def test_memorization_is_solved_by_the_dictionary_of_the_training_set():
    train, test = mad.memorization()
    dictionary = {}
    for words, targets in sequences(train):
        for key, insert, nothing, value in zip(words[0::2], words[1::2], targets[0::2], targets[1::2]):
            assert insert == "insert" and nothing is None and (kind(key), kind(value)) == ("k", "v")
            assert dictionary.setdefault(key, value) == value
    assert len(dictionary) == len(set(dictionary.values())) == 127
    assert score(test, lambda words: dictionary[words[-2]]) == (1.0, 1280 * 16)
    assert list(dictionary.values()) != sorted(dictionary.values())


def test_the_dictionary_is_of_the_seed_alone():
    def pairs(data):
        return set(zip(data.ids[:, 0::2].ravel(), data.targets[:, 1::2].ravel()))

    whole, few, other = mad.memorization(), mad.memorization(train_examples=3, length=8), mad.memorization(seed=1)
    assert pairs(few[0]) < pairs(whole[0]) and not pairs(other[0]) <= pairs(whole[0])


def test_compression_asks_for_every_token_but_the_last():
    for part in mad.compression(length=7, vocabulary=5, **COUNTS):
        assert isinstance(part, mad.CompressionData)
        for words, targets in sequences(part):
            assert words == [*targets[:-1], "compress"] and targets[-1] is None
            assert {kind(word) for word in words[:-1]} == {"t"}


@pytest.mark.parametrize("name", mad.GENERATORS)
def test_draws(name):
    generator = mad.GENERATORS[name]
    train, test = generator(**COUNTS)
    assert (len(train), len(test)) == (60, 40) and (train.split, test.split) == ("train", "test")
    assert (
        train.name == test.name == name and train.tokens == test.tokens and len(set(train.tokens)) == len(train.tokens)
    )
    for part in (train, test):
        assert isinstance(part, TokenData) and part.ids.dtype == part.targets.dtype == np.int64
        assert part.ids.shape == part.targets.shape and part.ids.min() >= 0 and part.ids.max() < len(part.tokens)
        assert set(np.unique(part.targets)) <= {IGNORED, *range(len(part.tokens))}
    again, other = generator(**COUNTS), generator(**COUNTS, seed=1)
    assert [part.fingerprint for part in again] == [train.fingerprint, test.fingerprint]
    assert not {part.fingerprint for part in other} & {train.fingerprint, test.fingerprint}
    fewer = generator(train_examples=7, test_examples=40)
    assert fewer[1].fingerprint == test.fingerprint  # whatever the size of the training set
    assert not set(map(tuple, train.ids.tolist())) & set(map(tuple, test.ids.tolist()))


DEFAULTS = {
    "associative-recall": (12800, 128, 16), "mqar": (12800, 64, 64), "fuzzy-recall": (12800, 128, 16),
    "noisy-recall": (12800, 128, 32), "selective-copying": (12800, 256, 16), "compression": (12800, 32, 16),
    "memorization": (256, 32, 256),
}  # fmt: skip


@functools.cache
def by_default(name):
    return mad.GENERATORS[name]()


@pytest.mark.parametrize("name", mad.GENERATORS)
def test_default_sizes_are_the_papers_and_every_option_is_documented(name):
    train, test = by_default(name)
    assert (*train.ids.shape, len(train.tokens)) == DEFAULTS[name] and len(test) == 1280
    options = inspect.signature(mad.GENERATORS[name]).parameters.values()
    assert all(o.kind is o.KEYWORD_ONLY and isinstance(o.default, int | float) for o in options)
    plain = ("length", "vocabulary", "train_examples", "test_examples", "seed", "every_token")
    assert all(f"`{o.name}`" in inspect.getdoc(mad.GENERATORS[name]) for o in options if o.name not in plain)
    assert {"train_examples", "test_examples", "seed"} < {o.name for o in options}


@pytest.mark.parametrize(("name", "chance"), [
    ("associative-recall", 1 / 8), ("noisy-recall", 1 / 8), ("fuzzy-recall", 1 / 8), ("selective-copying", 1 / 14),
    ("compression", 1 / 15), ("memorization", 1 / 127),
])  # fmt: skip
def test_no_constant_answer_beats_chance(name, chance):
    _, test = by_default(name)
    asked = np.bincount(test.targets[test.targets != IGNORED], minlength=len(test.tokens)) / (test.targets >= 0).sum()
    likely = asked[asked > 0]
    # sequences, not questions, are independent: a value once drawn is asked again and again
    assert len(likely) == round(1 / chance) and abs(likely - chance).max() < 5 * np.sqrt(chance / len(test))


@pytest.mark.parametrize("noise", [0.0, 0.2, 0.8])
def test_noise_takes_its_share_of_the_pairs(noise):
    train, _ = mad.noisy_recall(length=60, noise=noise, train_examples=3000)
    noisy = (train.ids >= 16).reshape(3000, 30, 2)
    assert (noisy[..., 0] == noisy[..., 1]).all() and not noisy[:, -1].any() and not noisy[:, :-1].all(1).any()
    share = noisy[:, :-1, 0].mean()
    assert abs(share - noise * 28 / 29) < 5 * np.sqrt(0.25 / 3000 / 29)
    if noise:
        assert abs(noisy[:, :-1, 0].mean(0) - noise * 28 / 29).max() < 5 * np.sqrt(0.25 / 3000)
        assert set(np.unique(train.ids[train.ids >= 16])) == set(range(16, 32))
        both = train.ids.reshape(3000, 30, 2)[noisy[..., 0]]
        assert abs((both[:, 0] == both[:, 1]).mean() - 1 / 16) < 0.01  # two draws, not one


def test_recall_without_noise_is_associative_recall():
    plain, _ = mad.associative_recall(vocabulary=16, **COUNTS)
    noiseless, _ = mad.noisy_recall(vocabulary=21, noise_vocabulary=5, noise=0.0, **COUNTS)
    assert (plain.ids == noiseless.ids).all() and (plain.targets == noiseless.targets).all()


def test_the_last_key_is_any_of_those_that_came():
    """Three pairs before it: keys a a b ask for a and b alike, as distinct keys are drawn, not pairs."""
    train, _ = mad.associative_recall(length=8, vocabulary=8, train_examples=20000)
    key = train.ids[:, 0::2]
    rows = key[(key[:, 0] == key[:, 1]) & (key[:, 1] != key[:, 2])]
    assert len(rows) > 2000 and abs((rows[:, 3] == rows[:, 2]).mean() - 0.5) < 5 * np.sqrt(0.25 / len(rows))


def test_fuzzy_runs_are_distinct_and_of_every_length():
    train, test = mad.fuzzy_recall(train_examples=400, test_examples=400)
    counts = {}
    for part in (train, test):
        for words, _ in sequences(part):
            assert not any(word == "pad" for word in words[words.index(next(w for w in words if w != "pad")) :])
            assert words.count("pad") < 11  # six that the longest last pair would need, and a pair that did not fit
            for run in runs(words):
                assert len(set(run)) == len(run)
                size = part.split, kind(run[0]), len(run)
                counts[size] = counts.get(size, 0) + 1
    assert {size for split, letter, size in counts if (split, letter) == ("test", "k")} == {3}
    for split, letter in (("train", "k"), ("train", "v"), ("test", "v")):
        sizes = np.array([counts[split, letter, size] for size in (1, 2, 3)])
        assert abs(sizes / sizes.sum() - 1 / 3).max() < 0.04
    first = np.array([int(runs(words)[0][0][1:]) for words, _ in sequences(train)])
    assert abs(np.bincount(first, minlength=7) / 400 - 1 / 7).max() < 5 * np.sqrt(6 / 49 / 400)


def test_fuzzy_runs_are_uniform_over_all_orders():
    train, _ = mad.fuzzy_recall(length=12, vocabulary=8, key_tokens=3, value_tokens=3, train_examples=20000)
    firsts = [runs([train.tokens[i] for i in ids])[0] for ids in train.ids.tolist()]
    three = [run for run in firsts if len(run) == 3]
    orders, counts = np.unique(three, axis=0, return_counts=True)
    assert len(orders) == 6 and abs(counts / len(three) - 1 / 6).max() < 5 * np.sqrt(5 / 36 / len(three))


@pytest.mark.parametrize("name", ["associative-recall", "fuzzy-recall", "noisy-recall"])
def test_every_token_asks_for_the_next_one_in_training(name):
    plain = mad.GENERATORS[name](**COUNTS)
    train, test = mad.GENERATORS[name](**COUNTS, every_token=True)
    assert (train.ids == plain[0].ids).all() and (train.targets[:, :-1] == train.ids[:, 1:]).all()
    assert (train.targets[:, -1] == IGNORED).all()
    asked = plain[0].targets != IGNORED
    assert (train.targets[asked] == plain[0].targets[asked]).all()
    assert test.fingerprint == plain[1].fingerprint


@pytest.mark.parametrize(("name", "options", "message"), [
    ("associative-recall", dict(length=2), "length is 2; allowed is a whole number from 4 on"),
    ("associative-recall", dict(length=7), "length is 7; give an even number, e.g. 8"),
    ("associative-recall", dict(vocabulary=2), "vocabulary is 2; give an even number of tokens, at least 4"),
    ("associative-recall", dict(vocabulary=15), "vocabulary is 15; give an even number of tokens, at least 4"),
    ("associative-recall", dict(train_examples=0), "train_examples is 0; allowed is a whole number from 1 on"),
    ("associative-recall", dict(seed=-1), "seed is -1; allowed is a whole number from 0 on"),
    ("noisy-recall", dict(vocabulary=16), "even number of tokens besides the 16 for noise, at least 20"),
    ("noisy-recall", dict(vocabulary=33), "vocabulary is 33"),
    ("noisy-recall", dict(noise_vocabulary=0), "noise_vocabulary is 0; allowed is a whole number from 1 on"),
    ("noisy-recall", dict(noise=1.0), "noise is 1.0; a probability from 0 to below 1"),
    ("noisy-recall", dict(noise=float("nan")), "noise is nan"),
    ("fuzzy-recall", dict(length=11), "length is 11; allowed is a whole number from 12 on"),
    ("fuzzy-recall", dict(key_tokens=0), "key_tokens is 0; allowed is a whole number from 1 on"),
    ("fuzzy-recall", dict(value_tokens=0), "value_tokens is 0; allowed is a whole number from 1 on"),
    ("fuzzy-recall", dict(vocabulary=6), "vocabulary is 6; allowed is a whole number from 7 on"),
    ("fuzzy-recall", dict(vocabulary=9, value_tokens=5), "vocabulary is 9; allowed is a whole number from 10 on"),
    ("mqar", dict(length=14), "length is 14; allowed is a whole number from 16 on"),
    ("mqar", dict(vocabulary=6), "vocabulary is 6; allowed is a whole number from 8 on"),
    ("mqar", dict(pairs=0), "pairs is 0; allowed is a whole number from 1 on"),
    ("mqar", dict(power=0), "power is 0; a number above 0 is allowed"),
    ("selective-copying", dict(length=32), "length is 32; allowed is a whole number from 33 on"),
    ("selective-copying", dict(vocabulary=3), "vocabulary is 3; allowed is a whole number from 4 on"),
    ("selective-copying", dict(copied=0), "copied is 0; allowed is a whole number from 1 on"),
    ("compression", dict(length=1), "length is 1; allowed is a whole number from 2 on"),
    ("compression", dict(vocabulary=2), "vocabulary is 2; allowed is a whole number from 3 on"),
    ("memorization", dict(length=31), "length is 31; give an even number, e.g. 32"),
    ("memorization", dict(vocabulary=4), "vocabulary is 4; allowed is a whole number from 5 on"),
    ("memorization", dict(test_examples=0), "test_examples is 0; allowed is a whole number from 1 on"),
])  # fmt: skip
def test_impossible_sizes_are_refused_in_one_line(name, options, message):
    refuses(re.escape(message), lambda: mad.GENERATORS[name](**options))


@pytest.mark.parametrize(("name", "options"), [
    ("fuzzy-recall", dict(vocabulary=7, length=12)), ("fuzzy-recall", dict(vocabulary=10, value_tokens=5, length=16)),
    ("noisy-recall", dict(vocabulary=20, length=4, noise=0.99)), ("mqar", dict(length=4, vocabulary=4, pairs=1)),
    ("selective-copying", dict(length=33, vocabulary=4)), ("compression", dict(length=2, vocabulary=3)),
    ("memorization", dict(length=2, vocabulary=5)),
])  # fmt: skip
def test_the_smallest_sizes_are_drawn(name, options):
    for part in mad.GENERATORS[name](**COUNTS, **options):
        assert part.ids.shape[1] == options["length"] and (part.targets != IGNORED).any(1).all()


def test_the_other_spelling_finds_its_task():
    assert "'memorization'" in did_you_mean("memorisation", mad.GENERATORS)
