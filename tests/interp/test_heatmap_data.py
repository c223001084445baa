"""The heatmap over a data set: sums that stream against loops over the heatmaps of single texts, and its views."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from bags import tokenizer
from drawn import drawn, labels, outside, overlapping, said, texts_of
from examples import random_example
from matplotlib.figure import Figure
from seen import render

from ssmscope import cli
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.model import Model
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.interp.heatmap import over_data, selection_heatmap
from ssmscope.interp.heatmap.over_data import median_half_lives
from ssmscope.interp.heatmap.result import DataHeatmap, KeptGroup, KeptLayer
from ssmscope.interp.heatmap.words import MAX_HALF_LIFE, KeptWord, format_half_life, shown_words
from ssmscope.interp.paired import Paired
from ssmscope.render.blocks import Prose, TokenRows
from ssmscope.render.figure import COLOURS
from ssmscope.render.table import Table

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


def entries_of(words):
    """Entries of `Words` with one occurrence a text: word, text, score, 1."""
    rows = [(word, text, score, 1) for word, scores in enumerate(words) for text, score in enumerate(scores)]
    return np.array(rows, dtype=np.float64).T


def test_words_are_chosen_by_their_intervals_and_listed_by_their_means():
    wide, narrow, third = [12.0, 0, 0, 12, 0], [4.1, 4, 3.9, 4, 4], [4.4, 4, 4.4, 3.6, 4.1]
    low, lowest = [1.0, 1.2, 0.8, 1.1, 0.9], [-2.5, 3.5, -2.5, 3.5, 0.5]
    entries = entries_of([narrow, low, wide, third, lowest])
    assert over_data._chosen(entries, 5, 5, 9, 9).tolist() == [2, 3, 0, 1, 4]
    assert over_data._chosen(entries, 5, 5, 2, 1).tolist() == [3, 0, 1]  # the wide ones begin low and end high
    assert over_data._chosen(entries, 5, 6, 2, 1).tolist() == []


def test_views_show_words_that_are_surely_high_or_low(result):
    """The first, the last and every third of 20 words have wide intervals."""

    def word(at: int) -> KeptWord:
        wide = 9.0 if at in (0, 19) or at % 3 == 0 else 0.25
        return KeptWord(f"w{at}", 9, 9, Estimate(20.0 - at, 20 - at - wide, 20 - at + wide))

    many = dataclasses.replace(result, words=tuple(map(word, range(20))))
    high, low = [1, 2, 4, 5, 7, 8, 0, 10, 11, 3], [17, 16, 14, 13, 19]
    assert sorted(int(each.word[1:]) for each in shown_words(many.words)) == sorted(high + low)
    means = [each.kept.value for each in shown_words(many.words)]
    assert means == sorted(means, reverse=True) and means[0] == 20
    assert many.verdict().startswith("highest: “w0” 20.000 [11.000, 29.000]")
    ticks = [label.get_text() for label in many.figure().axes[0].get_yticklabels()]
    assert ticks == [each.word for each in shown_words(many.words)]


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


def test_groups_and_parts_are_means_over_texts(model, result):
    data = made_up()
    all_, negative, positive = result.groups[:3]
    assert (all_.texts, negative.texts + positive.texts) == (30, 30)
    strongest, commas, ends, parts = [], [], [], np.full((30, 10), np.nan)
    for row, text in enumerate(data.texts):
        (one,) = selection_heatmap(model, text)
        marks = np.array([token.strip() == "," for token in one.tokens[:-1]])  # the last one is special
        mean, n = one.mean[:-1], len(one) - 1
        strongest.append(mean[~marks].max())
        commas.append(mean[marks].sum())
        ends.append(mean[math.ceil(0.75 * n) :].sum())
        for part in range(10):
            inside = [mean[at] * n for at in range(n) if 10 * at // n == part]
            parts[row, part] = np.mean(inside) if inside else np.nan
    for found, slow in ((all_.strongest, strongest), (all_.punctuation, commas), (all_.end, ends)):
        assert found.value == pytest.approx(np.mean(slow), rel=1e-4)
    assert [each.value for each in result.tenths] == pytest.approx(np.nanmean(parts, axis=0).tolist(), rel=1e-4)
    labels = np.array(data.labels)
    assert negative.strongest.value == pytest.approx(np.mean(np.array(strongest)[labels == 0]), rel=1e-4)
    layers = np.mean([[each.value for each in layer.tenths] for layer in result.by_layer], axis=0)
    assert layers.tolist() == pytest.approx([each.value for each in result.tenths], rel=1e-4)


def test_half_lives_are_the_median_of_what_is_halved_in_time(model, result):
    """Kaplan and Meier by their definition, over the tokens of all texts."""
    data = made_up()
    times = {}
    for text in data.texts:
        for number, layer in enumerate(model.trace(text).layers):
            lives = [layer.half_lives()[0], *layer.half_lives(per_head=True)[0].T]
            for head, found in enumerate(lives):
                own = times.setdefault((number, head), [])
                own += [(min(float(d), len(found) - 1 - s), math.isfinite(d)) for s, d in enumerate(found[:-1])]
    for layer in result.by_layer:
        for head, shown in enumerate([layer.half_life, *layer.heads]):
            left, slow = 1.0, math.inf
            for d in range(MAX_HALF_LIFE):
                at_risk = sum(time >= d for time, _ in times[layer.number, head])
                left *= 1 - sum(time == d and halved for time, halved in times[layer.number, head]) / max(at_risk, 1)
                if left <= 0.5:
                    slow = d
                    break
            assert shown == slow
    assert any(math.isfinite(layer.half_life) for layer in result.by_layer)


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


def test_its_views(result, tmp_path, painted):
    paths = result.save(tmp_path, "heatmap-data")
    assert Result.load(paths["json"]) == result and isinstance(result, DataHeatmap)
    shown = render(result, width=120, color_system=None)
    assert len(shown.splitlines()) < 54 and "times an even share" in shown and "Texts at the extremes" in shown
    page = paths["html"].read_text()
    assert "answered" not in page and "class positive" in page and len(page) < 500_000
    frame = result.to_frame()
    assert set(frame["of"]) == {"word", "group", "part", "half-life"}
    assert len(result.examples[0]) == len(result.picked) == 4
    assert result.verdict().startswith("lowest: “")


def test_a_word_needs_texts(model):
    data = made_up(3)
    result = selection_heatmap(model, data)
    assert not result.words and "no word occurs in enough" in result.verdict()
    assert result.to_html() and str(result)


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


def test_a_figure_takes_a_title_and_a_size(result):
    assert "My words" in labels(result.figure(title="My words")) and result.headline not in said(
        result.figure(title="")
    )
    for size in ((0.1, 3), (5,), (math.nan, 3), (3, 1000), 0.1, "3"):
        with pytest.raises(InputError, match="allowed are a width, or a width and a height, from 0.5 to 100 inches"):
            result.figure(size=size)
    axes = Figure().subplots()
    with pytest.raises(InputError, match="give ax or size, not both"):
        result.figure(ax=axes, size=3.3)


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


def test_the_table_of_two_models_marks_words_whose_intervals_do_not_meet(result):
    pair = [
        dataclasses.replace(result, words=tuple(kept_word(name, value, 0.5) for name, value in named.items()))
        for named in ({"near": 2, "touching": 3, "apart": 1}, {"near": 1.5, "touching": 2, "apart": 2.25})
    ]
    table = DataHeatmap.differences(pair, ["A", "B"])
    rows = {label: cells for (label,), cells in table.rows}
    assert "in times an even share, for words in both results; the difference is A minus B, *" in table.note
    assert list(rows) == ["touching", "near", "apart"]
    assert [cells[2].text for cells in rows.values()] == ["+1.00", "+0.50", "−1.25 *"]
    assert [[cell.found.value for cell in cells[:2]] for cells in rows.values()] == [[3, 2], [2, 1.5], [1, 2.25]]


def made_by_hand(result: DataHeatmap, **changed) -> DataHeatmap:
    """Three words, two groups of texts and two layers, every number another one."""
    numbers = iter(0.125 * np.arange(1, 99))

    def number() -> Estimate:
        middle = float(next(numbers))
        return Estimate(middle, middle - 0.0625, middle + 0.0625)

    words = tuple(KeptWord(f"w{at}", 20 + at, 300 + at, Estimate(3.0 - at, 2.5 - at, 3.5 - at)) for at in range(3))
    groups = tuple(
        KeptGroup(name, texts, *(number() for _ in range(4)), ("one", "two", "three", "four"))
        for name, texts in (("all", 1200), ("class positive", 700))
    )
    heads = (tuple(range(1, 22)), (math.inf,) * 3)
    layers = [layer(number, life, *own) for number, life, own in ((3, 5.0, heads[0]), (7, math.inf, heads[1]))]
    layers[0] = dataclasses.replace(layers[0], words=("a", "b", "c", "d"))
    made = dict(words=words, groups=groups, by_layer=tuple(layers), timed=1000, named=40, least=5)
    return dataclasses.replace(result, **made | changed)


def cells_of(result: DataHeatmap, head: str) -> dict[str, list[str]]:
    (table,) = [table for table in result.tables() if table.heads == (head,)]
    return {label: [f"{cell.value} {cell.interval}".strip() for cell in cells] for (label,), cells in table.rows}


def test_tables_have_every_number_in_its_place(result):
    made = made_by_hand(result)
    assert cells_of(made, "word") == {
        "w0": ["3.000 [2.500, 3.500]", "20", "300"],
        "w1": ["2.000 [1.500, 2.500]", "21", "301"],
        "w2": ["1.000 [0.500, 1.500]", "22", "302"],
    }
    assert cells_of(made, "texts") == {
        "all": ["1,200", "0.12 [0.06, 0.19]", "0.25 [0.19, 0.31]", "0.38 [0.31, 0.44]", "0.50", "one · two · three"],
        "class positive": [
            "700", "0.62 [0.56, 0.69]", "0.75 [0.69, 0.81]", "0.88 [0.81, 0.94]", "1.00", "one · two · three",
        ],
    }  # fmt: skip
    tenths = ["1.00 [1.00, 3.00]", "2.12 [1.00, 3.00]"]
    assert cells_of(made, "layer") == {
        "3": [format_half_life(5.0), ", ".join(map(format_half_life, (2.0, 11.0, 20.0))), *tenths, "a · b · c"],
        "7": ["> 14", "> 14, > 14, > 14", *tenths, "good · bad"],
    }
    untimed = cells_of(made_by_hand(result, timed=0), "layer")
    assert untimed == {"3": [*tenths, "a · b · c"], "7": [*tenths, "good · bad"]}


@pytest.mark.parametrize("score", ["survival", "write"])
def test_what_is_said_of_the_tables(result, score):
    made = made_by_hand(result, score=score)
    unit = "times an even share" if score == "survival" else "write"
    words, groups, layers = made.tables()[:3]
    assert words.note.startswith(
        "Of 40 words in at least 5 texts, ranked by the inner end of their interval and ordered by their means over "
        f"occurrences, in {unit}."
    )
    assert groups.note.startswith(
        "Shares of the state held by a text's highest word" if score == "survival" else "Means over words: a text's"
    )
    assert layers.note.startswith(f"Half-lives in tokens. First and last tenth of a text: mean over words, in {unit}.")
    said = [block.text for block in made.blocks() if isinstance(block, Prose)]
    assert ": highest: “w0” 3.000 [" in said[0] and said[0].endswith(", 30 texts)") and f"({score}, " in said[0]
    assert any(" 1,000 texts: the Kaplan–Meier median" in each for each in said)
    assert not any("Kaplan" in block.text for block in made_by_hand(result, timed=0).blocks() if hasattr(block, "text"))
    many = made_by_hand(result, words=tuple(kept_word(f"w{at}", 30 - at, 0.25) for at in range(20)))
    assert many.tables()[0].note.startswith("The 10 highest and 5 lowest of 40 words")


def test_examples_are_said_to_be_what_they_were_picked_as(result):
    (rows,) = [block for block in result.blocks() if isinstance(block, TokenRows)]
    assert len(rows.texts) == len(result.picked) == 4 and rows.first == 1
    assert [text.about.partition(";")[0] for text in rows.texts] == list(result.picked)
    assert [text.tokens for text in rows.texts] == [text.tokens for text in result.examples[0]]
