"""The heatmap over a data set: sums that stream against loops over the heatmaps of single texts, and its views."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from bags import tokenizer
from drawn import drawn, labels, outside, overlapping
from examples import random_example

from ssmscope import cli
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.heatmap import over_data, selection_heatmap
from ssmscope.interp.heatmap.over_data import median_half_lives
from ssmscope.interp.heatmap.result import KeptLayer
from ssmscope.interp.heatmap.words import KeptWord, shown_words
from ssmscope.interp.paired import Paired
from ssmscope.render.blocks import TokenRows
from ssmscope.render.figure import COLOURS

WORDS = ("good", "bad", "film", "the", "dull", "fun", ",", "one", "two", "three")


def made_up(texts=30, seed=0):
    random = np.random.default_rng(seed)
    lines = [" ".join(random.choice(WORDS, random.integers(4, 15))) for _ in range(texts)]
    return text_data(
        "made-up", "test", lines, (random.random(texts) > 0.5).astype(int).tolist(), ("negative", "positive")
    )


@pytest.fixture(scope="module")
def model():
    return Model(random_example("mamba2"), tokenizer(WORDS), name="model")


@pytest.fixture(scope="module")
def result(model):
    return selection_heatmap(model, made_up())


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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--text", "good"], "--data cannot be combined with --text"),
        (["--at", "3"], "--at applies to single texts; leave it out with a data set"),
        (["--merge"], "--merge applies to single texts"),
    ],
)
def test_refusals(arguments, line, capsys):
    assert cli.run(["heatmap", "demo/sst2-mamba2", "--data", "sst2", *arguments]) == 2
    assert line in capsys.readouterr().err


def test_what_is_of_data_alone(model, capsys):
    assert cli.run(["heatmap", "demo/sst2-mamba2", "--text", "good", "--split", "test"]) == 2
    assert "--split needs --data" in capsys.readouterr().err
    with pytest.raises(InputError, match="limit=… is the number of texts read from a data set"):
        selection_heatmap(model, "good film", limit=3)
    with pytest.raises(InputError, match="heads=… applies to single texts"):
        selection_heatmap(model, made_up(), heads="top")
    bare = Model(random_example("mamba2"))
    with pytest.raises(InputError, match="need a model with a tokenizer"):
        selection_heatmap(bare, made_up())


def test_a_figure_says_how_high_it_must_be(result):
    with pytest.raises(InputError, match="too low for this figure; give a height of .* or the width alone") as error:
        result.figure(size=(3.3, 2.4))
    least = float(re.search(r"height of ([0-9.]+) inches", str(error.value))[1])
    with pytest.raises(InputError, match=f"give a height of {least:g} inches"):
        result.figure(size=(3.3, least - 0.1))
    figure, texts = drawn(result, size=(3.3, least))
    assert not overlapping(texts) and not outside(figure, texts)


def test_a_narrow_figure_says_all_that_a_wide_one_does(model):
    result = selection_heatmap(model, "good bad film", score="retention")
    wide, narrow = (result.figure(size=size) for size in (8, 3.3))
    assert all("…" not in each for each in labels(narrow)) and labels(wide)[:2] == labels(narrow)[:2]


def test_forty_texts_name_no_word_whose_interval_holds_an_even_share():
    recorded = Result.load(Path(__file__).parents[1] / "recorded" / "heatmap-data" / "heatmap.json")
    shown = shown_words(recorded.words)
    assert shown[0].kept.value > 1 > shown[0].kept.low
    assert recorded.groups[0].words == tuple(each.word for each in shown if each.kept.low > 1) == ()
    assert "lowest: “but”" in str(recorded) and "highest:" not in str(recorded)


def layer(number: int, half_life: float, *heads: float, tenths: float = 1.0) -> KeptLayer:
    parts = tuple(Estimate(tenths + part / 8, tenths, tenths + 2) for part in range(10))
    return KeptLayer(number, half_life, np.array(heads), ("good", "bad"), parts)


def placed(axis) -> list[tuple[float, str]]:
    return [(float(at), label.get_text()) for at, label in zip(axis.get_majorticklocs(), axis.get_ticklabels())]


@pytest.mark.parametrize(
    ("layers", "longest", "shown"),
    [
        ([layer(3, 3, 2, 24), layer(5, math.inf, math.inf, 1)], 48, [0, 1]),
        ([layer(0, math.inf, math.inf)], 16, [0]),
        ([layer(2 * at, 4.0 + at, 2.0) for at in range(25)], 56, list(range(0, 25, 2))),
    ],
    ids=["two layers", "nothing is halved", "many layers"],
)
def test_half_lives_are_drawn_at_their_layers(result, layers, longest, shown):
    """Half-lives beyond the horizon are drawn at the top, at twice the horizon."""
    *_, axes = dataclasses.replace(result, by_layer=tuple(layers)).figure().axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    wholes = [line for line in axes.lines if line.get_marker() != "o"]
    for at, (each, heads, whole) in enumerate(zip(layers, dots, wholes, strict=True)):
        seen = [min(value, longest) for value in each.heads]
        assert heads.get_ydata().tolist() == seen and abs(np.array(heads.get_xdata()) - at).max() < 0.25
        assert set(whole.get_ydata()) == {min(each.half_life, longest)}
        assert list(whole.get_xdata()) == pytest.approx([at - 0.32, at + 0.32])
    assert axes.get_ylim() == pytest.approx((0.8, 1.25 * longest)) and axes.get_yscale() == "log"
    powers = [2**k for k in range(7) if 2 * 2**k <= longest]
    assert placed(axes.yaxis) == [*((power, str(power)) for power in powers), (longest, "longer")]
    assert placed(axes.xaxis) == [(at, str(layers[at].number)) for at in shown]
    assert axes.get_xlim() == pytest.approx((-0.6, len(layers) - 0.4))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer (line) and its heads", "half-life in tokens")


def test_a_pictures_curves_are_the_average_and_layers_evenly_apart(result):
    layers = tuple(layer(10 + at, 4.0, 2.0, tenths=at) for at in range(9))
    words = tuple(kept_word(f"w{at}", 20 - at, 0.25) for at in range(15))
    words, parts, _ = (made := dataclasses.replace(result, by_layer=layers, words=words)).figure().axes
    assert [list(line.get_ydata()) for line in parts.lines[:6]] == [
        [each.value for each in tenths] for tenths in (made.tenths, *(layers[at].tenths for at in (0, 2, 4, 6, 8)))
    ]
    assert [at for at, _ in placed(parts.xaxis)] == list(range(1, 11)) and parts.get_ylim()[0] == 0
    assert parts.get_xlabel() == "tenth of the text" and parts.get_ylabel() == "times an even share"
    assert words.get_xlabel() == "survival, times an even share"
    dots = [line for line in words.lines if line.get_marker() == "o"]
    shown = shown_words(made.words)
    assert [line.get_xdata()[0] for line in dots] == [each.kept.value for each in shown]
    assert [line.get_color() for line in dots] == [COLOURS[at >= 10] for at in range(15)]
    for few, curves in ((layers[:1], 1), (layers[:2], 3)):  # one layer is the average
        parts = dataclasses.replace(made, by_layer=few).figure().axes[1]
        assert len([line for line in parts.lines if len(line.get_xdata()) == 10]) == curves
    assert len(dataclasses.replace(made, timed=0).figure().axes) == 2


def kept_word(name: str, value: float, half: float) -> KeptWord:
    return KeptWord(name, 9, 9, Estimate(value, value - half, value + half))


@pytest.mark.parametrize("longer", [False, True])
def test_two_models_are_drawn_side_by_side(result, longer):
    ours = [kept_word("level", 2, 0.5), kept_word("up", 3, 0.5), kept_word("down", 1, 0.25), kept_word("alone", 9, 1)]
    theirs = [kept_word("up", 1, 0.5), kept_word("down", 4, 0.125), kept_word("level", 3.25, 0.75)]
    first = dataclasses.replace(result, words=tuple(ours), by_layer=(layer(3, 5.0), layer(7, 9.0)))
    halved = math.inf if longer else 6.0
    other = dataclasses.replace(result, words=tuple(theirs), tenths=layer(0, 1.0).tenths, by_layer=(layer(4, halved),))
    figure = Paired(result.provenance, (first, other)).figure()
    words, parts, lives = figure.axes
    order = [("up", 3, 0.5, 1, 0.5), ("level", 2, 0.5, 3.25, 0.75), ("down", 1, 0.25, 4, 0.125)]
    assert placed(words.yaxis) == [(0, "up"), (1, "level"), (2, "down")] and words.get_ylim() == (2.6, -0.6)
    expected = []
    for at, place in enumerate((-0.125, 0.125)):
        for row, (middle, side) in enumerate(each[1 + 2 * at : 3 + 2 * at] for each in order):
            expected.append((row + place, COLOURS[at], [middle - side, middle + side]))
            expected.append((row + place, COLOURS[at], [middle]))
    drawn = [
        (line.get_ydata()[0], line.get_color(), list(line.get_xdata())) for line in words.lines[:-1]
    ]  # without that of an even share
    for ours_, theirs_ in zip(drawn, expected, strict=True):
        assert ours_[0] == pytest.approx(theirs_[0]) and ours_[1:] == theirs_[1:]
    notes = [(text.get_position()[1], text.get_text()) for text in words.texts]
    assert notes == [(0, "+2.00 *"), (1, "−1.25"), (2, "−3.00 *")]  # where they touch they meet
    for at, each in enumerate((first, other)):
        assert list(parts.lines[at].get_ydata()) == [tenth.value for tenth in each.tenths]
        assert list(parts.lines[at].get_xdata()) == list(range(1, 11)) == [x for x, _ in placed(parts.xaxis)]
        assert list(lives.lines[at].get_xdata()) == [found.number for found in each.by_layer]
        assert list(lives.lines[at].get_ydata()) == [found.half_life for found in each.by_layer]
        assert parts.lines[at].get_color() == lives.lines[at].get_color() == COLOURS[at]
    assert lives.get_ylabel() == "half-life in tokens" + ", longer ones omitted" * longer
    assert parts.get_ylim()[0] == 0 and (lives.get_xlabel(), parts.get_xlabel()) == ("layer", "tenth of the text")
    assert words.get_xlabel() == parts.get_ylabel() == "times an even share" and lives.get_yscale() == "log"
    near = [dataclasses.replace(first, by_layer=(layer(0, 42.0), layer(1, half))) for half in (22.0, 31.0)]
    lives = Paired(result.provenance, tuple(near)).figure().axes[2]
    shown = [at for at in (*lives.get_yticks(), *lives.get_yticks(minor=True)) if 20 < at < 45]
    assert [lives.yaxis.get_minor_formatter()(at) for at in shown] == ["30", "40"]
    both = [first, dataclasses.replace(other, timed=0)]  # half-lives are of both or not drawn
    assert len(Paired(result.provenance, tuple(both)).figure().axes) == 2


def test_examples_are_said_to_be_what_they_were_picked_as(result):
    (rows,) = [block for block in result.blocks() if isinstance(block, TokenRows)]
    assert len(rows.texts) == len(result.picked) == 4 and rows.first == 1
    assert [text.about.partition(";")[0] for text in rows.texts] == list(result.picked)
    assert [text.tokens for text in rows.texts] == [text.tokens for text in result.examples[0]]
