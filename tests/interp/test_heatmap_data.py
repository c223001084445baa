"""The heatmap over a data set: sums that stream against loops over the heatmaps of single texts, and its views."""

import math
import re
from itertools import groupby

import numpy as np
import pytest
from bags import tokenizer
from drawn import drawn, labels, outside, overlapping, said, texts_of
from examples import random_example
from matplotlib.figure import Figure
from refusals import refuses
from ssmscope import cli
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.heatmap import over_data, selection_heatmap
from ssmscope.interp.heatmap.over_data import median_half_lives
from ssmscope.render.table import Table

WORDS = ("good", "bad", "film", "the", "dull", "fun", ",", "one", "two", "three")


def made_up(texts=30, seed=0):
    random = np.random.default_rng(seed)
    lines = [" ".join(random.choice(WORDS, random.integers(4, 15))) for _ in range(texts)]
    return text_data(
        "made-up", "test", lines, (random.random(texts) > 0.5).astype(int).tolist(), ("negative", "positive")
    )


model = pytest.fixture(scope="module")(lambda: Model(random_example("mamba2"), tokenizer(WORDS), name="model"))
result = pytest.fixture(scope="module")(lambda model: selection_heatmap(model, made_up()))


def occurrences(model, data, score="survival"):
    """(text, word, score averaged over layers) of every occurrence, from heatmaps of single texts."""
    found = []
    for row, text in enumerate(data.texts):
        (one,) = selection_heatmap(model, text, score=score)
        ordinary = [at for at, word in enumerate(one.words) if word is not None]
        words = [(one.tokens[at].strip(), float(one.mean[at])) for at in ordinary]
        size = len(words) if score == "survival" else 1
        found += [(row, word, size * value) for word, value in words]
    return found


@pytest.mark.parametrize("score", ["survival", "write"])
def test_words_are_means_over_their_occurrences(model, score):
    data = made_up()
    result = selection_heatmap(model, data, score=score, punctuation=True)
    every = sorted(occurrences(model, data, score), key=lambda each: each[1])
    slow = {word: list(group) for word, group in groupby(every, key=lambda each: each[1])}
    assert {each.word for each in result.words} == set(slow) == set(WORDS)
    for each in result.words:
        own = slow[each.word]
        assert each.count == len(own) and each.texts == len({row for row, *_ in own})
        assert each.kept.value == pytest.approx(np.mean([value for *_, value in own]), rel=1e-4)
        assert each.kept.low <= each.kept.value <= each.kept.high
    assert "," not in {each.word for each in selection_heatmap(model, data, score=score).words}


def test_no_word_stands_above_one_with_a_higher_mean(result):
    means = [each.kept.value for each in result.words]
    assert means == sorted(means, reverse=True) and len(set(means)) == len(means)
    (table,) = [block for block in result.blocks() if isinstance(block, Table) and block.heads == ("word",)]
    shown = [cells[0].found.value for _, cells in table.rows]
    assert shown == means and [label for (label,), _ in table.rows] == [each.word for each in result.words]
    first, *_, last = result.words
    assert first.kept.low < 1 < first.kept.high and "highest" not in result.verdict()
    assert result.verdict().startswith(f"lowest: “{last.word}” {last.kept.value:.3f} [")
    every = {group.name: group.words for group in result.groups}["all"]
    assert every == tuple(each.word for each in result.words)[: len(every)]


def test_the_median_of_what_is_seen_to_its_end_is_the_median():
    halved = np.array([[0, 1, 1, 3, 0, 0], [0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    ended = np.array([[0, 0, 0, 0, 0, 0], [0, 0, 3, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    assert median_half_lives(halved, ended).tolist() == [3, np.inf, np.inf]
    ended[1, :2] = 3, 0  # were these seen for longer, they might not be halved: 2 of the 5 that are at risk are
    assert median_half_lives(halved, ended)[1] == np.inf
    ended[1, 2] = 2
    assert median_half_lives(halved, ended)[1] == 1


def test_batches_and_layers_change_nothing(model, result, monkeypatch):
    monkeypatch.setattr(over_data, "tokens_at_once", lambda device: 20)
    small = selection_heatmap(model, made_up())
    for a, b in zip(result.words, small.words, strict=True):
        assert a.word == b.word and a.kept.value == pytest.approx(b.kept.value, rel=1e-4)
    (second,) = selection_heatmap(model, made_up(), layers=[1]).by_layer
    assert second.number == 1 and second.heads.tolist() == result.by_layer[1].heads.tolist()


def test_a_limit_draws_by_the_seed(model):
    few = selection_heatmap(model, made_up(), limit=12, seed=3)
    assert few.texts == few.timed == 12 and few.provenance["data"]["examples"] == 12
    assert few.provenance["options"]["limit"] == 12


def test_what_is_of_data_alone(model, capsys):
    assert cli.run(["heatmap", "demo/sst2-mamba2", "--text", "good", "--split", "test"]) == 2
    assert "--split needs --data" in capsys.readouterr().err
    refuses("limit=… is the number of texts read from a data set", selection_heatmap, model, "good film", limit=3)
    refuses("heads=… applies to single texts", selection_heatmap, model, made_up(), heads="top")
    bare = Model(random_example("mamba2"))
    refuses("need a model with a tokenizer", selection_heatmap, bare, made_up())


@pytest.mark.parametrize("size", [3.3, (3.3, 7.5), (5.1, 8.0)])
def test_a_figure_takes_a_size_and_its_letters_stay_readable(result, size):
    figure, texts = drawn(result, size=size)
    assert not overlapping(texts) and not outside(figure, texts)
    wide, high = figure.get_size_inches()
    assert (wide == size and high > wide) if size == 3.3 else (wide, high) == size
    assert min(text.get_fontsize() for text in texts_of(figure)) > 6.5


def test_a_figure_says_how_high_it_must_be(result):
    with pytest.raises(InputError, match="too low for this figure; give a height of .* or the width alone") as error:
        result.figure(size=(3.3, 2.4))
    least = float(re.search(r"height of ([0-9.]+) inches", str(error.value))[1])
    refuses(f"give a height of {least:g} inches", result.figure, size=(3.3, least - 0.1))
    figure, texts = drawn(result, size=(3.3, least))
    assert not overlapping(texts) and not outside(figure, texts)


def test_a_figure_takes_a_title_and_a_size(result):
    assert "My words" in labels(result.figure(title="My words")) and result.headline not in said(
        result.figure(title="")
    )
    for size in ((0.1, 3), (5,), (math.nan, 3), (3, 1000), 0.1, "3"):
        refuses("allowed are a width, or a width and a height, from 0.5 to 100 inches", result.figure, size=size)
    axes = Figure().subplots()
    refuses("give ax or size, not both", result.figure, ax=axes, size=3.3)
