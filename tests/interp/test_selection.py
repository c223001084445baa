"""The selection heatmap: Baleen's Eq. 10 against a slow loop, and views that stay readable and safe."""

from __future__ import annotations

import io
import itertools
import json
import re
import warnings

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from ssmscope.errors import InputError
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.interp.heatmap.result import SelectionHeatmap
from ssmscope.results import Result
from ssmscope.show.tokens import (
    BLUES,
    BLUES_ON_DARK,
    CIVIDIS,
    bounds,
    ink,
    numbers,
    ramp,
    visible,
    written,
)
from ssmscope.trace import Trace

SENTENCE = (
    "I went into this film expecting very little , and for the first twenty minutes that is what I got : "
    "a slow , talky drama about a lighthouse keeper and his estranged daughter . Then something happens ."
).split()
HOSTILE = (
    *("<script>alert('x')</script>", " $x$", "\n", "\t", "\x1b[31m", " 電影", "😀", "\u202eevil"),
    *("[bold]no", "&amp;"),
)


def make_trace(texts, *, words=None, layers=3, seed=0, answers=None):
    """A trace of given tokens, the first of each text a special one; the gates' means are random."""
    texts = [tuple(text) for text in texts]
    if words is None:
        words = [(None, *range(len(text) - 1)) for text in texts]
    shape = (len(texts), max(map(len, texts)))
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        mask[row, : len(text)] = True
    retention = torch.rand(layers, *shape, generator=torch.Generator().manual_seed(seed))
    return Trace(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        mask=mask,
        retention=retention.masked_fill(~mask, float("nan")),
        logits=torch.zeros(len(texts), 2),
        tokens=tuple(texts),
        words=tuple(tuple(row) for row in words),
        answers=tuple(answers or [("positive", 0.75)] * len(texts)),
        source={"model": "demo/test", "architecture": "mamba", "fingerprint": "abc"},
        layers=(),
    )


def sentence(length):
    words = itertools.islice(itertools.cycle(SENTENCE), length - 1)
    return ("<s>", *(" " + word if word[0].isalnum() else word for word in words))


@pytest.fixture
def trace():
    return make_trace([sentence(9), sentence(5)])


@pytest.mark.parametrize("score", ["retention", "write"])
@pytest.mark.parametrize("layers", ["mean", "all", [2, 0]])
def test_scores_are_equation_10(trace, score, layers):
    result = selection_heatmap(trace, score=score, layers=layers, top=2)
    chosen = range(3) if isinstance(layers, str) else layers
    assert result.layers == tuple(chosen) and len(result) == 2
    for row, text in enumerate(result):
        assert len(text) == len(trace.tokens[row]) and text.scores.dtype == np.float32
        for position in range(len(text)):
            total = 0.0
            for index, layer in enumerate(chosen):
                gate = float(trace.retention[layer, row, position])
                importance = gate if score == "retention" else 1 - gate
                assert text.scores[index, position] == pytest.approx(importance, abs=1e-7)
                total += importance
            assert text.mean[position] == pytest.approx(total / len(chosen), abs=1e-7)


def test_eq_10_is_the_mean_of_the_gates():
    gates = torch.rand(2, 1, 6, 4, 8, generator=torch.Generator().manual_seed(1))  # layers, batch, T, D, N
    trace = make_trace([sentence(6)], layers=2)
    text = selection_heatmap(Trace(**{**vars(trace), "retention": gates.mean(dim=(-2, -1))}))[0]
    for t in range(6):
        cells = itertools.product(range(2), range(4), range(8))
        slow = sum(float(gates[layer, 0, t, d, n]) for layer, d, n in cells) / (2 * 4 * 8)
        assert text.mean[t] == pytest.approx(slow, abs=1e-6)


def test_write_is_one_minus_retention_and_turns_the_ranking_around(trace):
    keep, write = (selection_heatmap(trace, score=score, top=99) for score in ("retention", "write"))
    for a, b in zip(keep, write, strict=True):
        np.testing.assert_allclose(a.scores + b.scores, 1, atol=1e-7)
        assert a.rationale == b.rationale[::-1] and 0 not in a.rationale


def test_ties_are_broken_by_position_and_special_tokens_never_explain(trace):
    flat = Trace(**{**vars(trace), "retention": torch.full_like(trace.retention, 0.5)})
    assert selection_heatmap(flat, top=3)[0].rationale == (1, 2, 3)
    special = Trace(**{**vars(trace), "words": ((None,) * 9, (None, 0, None, 1, None))})
    assert [text.rationale for text in selection_heatmap(special, top=3, score="retention")][0] == ()
    assert set(selection_heatmap(special, top=3)[1].rationale) == {1, 3}


def test_merging_averages_the_tokens_of_a_word():
    tokens = ("[CLS]", "gor", "##ge", "##ous", "film", "[SEP]", "[SEP]", "film")
    trace = make_trace([tokens], words=[(None, 0, 0, 0, 1, None, None, 0)])
    parts, merged = selection_heatmap(trace)[0], selection_heatmap(trace, merge=True, top=9)[0]
    assert merged.tokens == ("[CLS]", "gorgeous", "film", "[SEP]", "[SEP]", "film")
    assert merged.words == (None, 0, 1, None, None, 0)
    np.testing.assert_allclose(merged.scores[:, 1], parts.scores[:, 1:4].mean(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(merged.scores[:, 2:], parts.scores[:, 4:])
    assert set(merged.rationale) == {1, 2, 5}


def test_padding_never_appears_and_damage_is_refused(trace):
    result = selection_heatmap(trace, layers="all")
    assert all(np.isfinite(text.scores).all() for text in result)
    assert not result.to_frame()["score"].isna().any() and "NaN" not in result.to_json()
    trace.retention[1, 0, 3] = float("nan")
    with pytest.raises(InputError, match="text 0 is not finite at layer 1"):
        selection_heatmap(trace)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "retension"}, "allowed are retention, write; did you mean 'retention'"),
        (
            {"layers": "al"},
            "layers is 'al'; allowed are mean, all or a whole number from 0 on, or several; did you mean 'all'?",
        ),
        ({"layers": [3]}, "no layer 3; this model has the layers 0 to 2"),
        ({"layers": [-1]}, "layers is -1; allowed"),
        ({"layers": [True]}, "layers is True; allowed"),
        ({"layers": [1, 1]}, "each once"),
        ({"layers": []}, "layers is empty; allowed"),
        ({"layers": 1.5}, "layers is 1.5; allowed"),
        ({"top": 0}, "top is 0; allowed is a whole number"),
        ({"top": 2.5}, "top is 2.5"),
    ],
)
def test_bad_options_are_named(trace, options, message):
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        selection_heatmap(trace, **options)
    assert "\n" not in str(raised.value)


def test_frame_is_tidy(trace):
    result = selection_heatmap(trace, layers=[0, 2], top=2)
    frame = result.to_frame()
    assert list(frame) == ["text", "position", "token", "word", "layer", "score", "in_rationale"]
    assert len(frame) == 3 * (9 + 5) and frame["word"].isna().sum() == 3 * 2
    for row in frame.itertuples():
        text = result[row.text]
        scores = text.mean if row.layer == "mean" else text.scores[result.layers.index(int(row.layer))]
        assert row.score == scores[row.position] and row.token == text.tokens[row.position]
        assert row.in_rationale == (row.position in text.rationale)
    assert set(selection_heatmap(trace).to_frame()["layer"]) == {"mean"}
    top = result.top(3)
    assert top["rank"].tolist() == [1, 2, 3, 1, 2, 3] and top["score"].iloc[:3].is_monotonic_decreasing


def test_json_round_trip(tmp_path):
    first = selection_heatmap(make_trace([("<s>", *HOSTILE), sentence(4)]), layers=[0, 2])
    again = Result.load(first.save(tmp_path, "heatmap")["json"])
    assert isinstance(again, SelectionHeatmap) and again == first
    for a, b in zip(first, again, strict=True):
        assert a.tokens == b.tokens and a.words == b.words and a.rationale == b.rationale
        assert a.scores.tobytes() == b.scores.tobytes() and b.mean.dtype == np.float32
    assert json.loads(first.to_json())["provenance"]["options"] == {
        "score": "retention", "layers": [0, 2], "top": 5, "merge": False,
    }  # fmt: skip


def test_html_is_escaped_self_contained_and_complete():
    result = selection_heatmap(make_trace([("<s>", *HOSTILE)], answers=[("<i>bad</i>", 0.5)]))
    page = result.to_html()
    assert "<script" not in page and "&lt;script&gt;" in page and "<i>bad" not in page
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert not {character for character in page if ord(character) < 32} - {"\n"} and "\u202e" not in page
    assert page.count("title=") == len(result[0]) and f"layer 2: {result[0].scores[2, 1]:.6g}" in page
    assert "prefers-color-scheme: dark" in page


def render(result, **options):
    console = Console(file=io.StringIO(), width=100, force_jupyter=False, **options)
    console.print(result)
    return console.file.getvalue()


def test_terminal_is_coloured_where_there_is_colour(trace):
    result = selection_heatmap(trace, layers="all", top=2)
    coloured = render(result, force_terminal=True, color_system="truecolor", no_color=False)
    assert "\x1b[1;4;38;2;" in coloured and "retention E[A_t]" in coloured and "positive" in coloured
    assert bounds(result[0].mean, result[0].special) in coloured


@pytest.mark.parametrize("options", [{"color_system": None}, {"force_terminal": True, "no_color": True}])
def test_terminal_without_colour_still_informs(trace, options):
    result = selection_heatmap(trace, top=2)
    plain = render(result, **options)
    position = result[0].rationale[0]
    assert f"{result[0].mean[position]:.4f}" in plain and result[0].tokens[position].strip() in plain
    assert "38;2" not in plain


def test_terminal_shows_hostile_tokens_harmlessly():
    result = selection_heatmap(make_trace([("<s>", *HOSTILE)]), layers="all", top=20)
    for options in ({"color_system": None}, {"force_terminal": True, "color_system": "truecolor"}):
        shown = render(result, **options)
        assert "\x1b[31m" not in shown and "␛[31m" in shown and "[bold]no" in shown and "\u202e" not in shown


def drawn(result, **options):
    """The figure's texts with the boxes that the Agg renderer gives them; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = result.figure(**options)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    texts = [text for axes in figure.axes for text in axes.texts]
    for axis in (axis for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        texts += [axis.label, *(label for at, label in ticks if low <= at <= high)]
    texts = [text for text in texts if text.get_text().strip() and text.get_visible()]
    return figure, [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]


@pytest.mark.parametrize("length", [1, 2, 5, 40, 60, 61, 500, 1200])
@pytest.mark.parametrize("layers", [1, 4, 48])
def test_nothing_overlaps_in_the_figure(length, layers):
    result = selection_heatmap(make_trace([sentence(length), sentence(3)], layers=layers))
    figure, texts = drawn(result)
    for (one, a), (other, b) in itertools.combinations(texts, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, (one, other)
    for text, box in texts:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    shown = " ".join(text for text, _ in texts)
    assert all(word.strip() in shown for word in sentence(min(length, 1000)))


def test_figure_of_hostile_tokens_and_answers():
    long = make_trace([("<s>", *HOSTILE, "w" * 300)], answers=[("$\\frac{1}$ \x1b", 0.5)])
    _, texts = drawn(selection_heatmap(long))
    shown = [text for text, _ in texts]
    assert "$x$" in shown and any(text.startswith("www") and "…" in text for text in shown)


def test_figure_holds_eight_texts_and_says_so():
    result = selection_heatmap(make_trace([sentence(4)] * 11))
    _, texts = drawn(result)
    assert any("texts 1–8 of 11" in text for text, _ in texts)
    _, texts = drawn(result, start=8)
    assert any("texts 9–11 of 11" in text for text, _ in texts)
    with pytest.raises(InputError, match="no text 11"):
        result.figure(start=11)


def test_figure_leaves_no_global_state(trace):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    selection_heatmap(trace).figure()
    assert plt.get_fignums() == before


def test_how_tokens_are_written():
    tokens = ("\n", "\t", "\x1b", " ", "  ", " a", "a ", "a  b", "\u200b", "\ud800")
    shown = ("↵", "⇥", "␛", "␣", "␣␣", " a", "a␣", "a␣␣b", "⟨200B⟩", "�")
    assert tuple(map(visible, tokens)) == shown
    carried = written(("<s>", "The", " film", "s", "."), (None, 0, 1, 1, 1))
    assert carried == [(False, "<s>"), (False, "The"), (True, "film"), (False, "s"), (False, ".")]
    pieces = written(("[CLS]", "film", "##s", "end", "[SEP]"), (None, 0, 0, 1, None))
    assert [gap for gap, _ in pieces] == [False, True, False, True, True]
    assert numbers((0, 1, 2, 5)) == "0–2, 5" and numbers((3, 1)) == "3, 1"


def test_ranges_tell_their_ends_apart():
    low, high = bounds(np.array([0.99991, 0.99999]), np.array([False, False])).split("–")
    assert low != high


@pytest.mark.parametrize("stops", [BLUES, BLUES_ON_DARK, CIVIDIS])
def test_ink_reads_well_on_every_shade(stops):
    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    shades = ramp(stops)
    assert shades[0] == stops[0] and shades[-1] == stops[-1]
    for shade in shades:
        light, dark = sorted((luminance(shade), luminance(ink(shade))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
