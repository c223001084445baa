"""Explanations: tables, round trips, and views that stay readable and safe at any size."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pandas as pd
import pytest
from drawn import drawn, outside, overlapping, panels_of, said, typed
from exhaustive import ALL
from matplotlib.colors import to_hex
from seen import render

from ssmscope.api.provenance import record_provenance
from ssmscope.api.results import Result
from ssmscope.errors import InputError
from ssmscope.interp.explain import views
from ssmscope.interp.explain.result import Explanation
from ssmscope.interp.explain.scored_text import Attribution, ExplainedText, kind_of
from ssmscope.interp.methods import METHODS
from ssmscope.render import colours as signed
from ssmscope.render import token_figure
from ssmscope.render.colours import BLUES, SHADES, ramp
from ssmscope.render.numbers import format_range, number
from ssmscope.render.token_figure import PIXEL_SHADES

WORDS = (
    "I went into this film expecting very little , and for twenty minutes that is what I got : a slow drama .".split()
)
HOSTILE = ("<script>alert('x')</script>", " $x$", "\n", "\x1b[31m", " 電影", "😀", "\u202eevil", "[bold]no", "&amp;")
SEVEN = ("ig", "gradxinput", "smoothgrad", "gradcam", "occlusion", "attention-gradient", "self-write")


def sentence(length: int) -> tuple[str, ...]:
    return ("<s>", *(" " + word for word in itertools.islice(itertools.cycle(WORDS), length - 1)))


def make(
    lengths=(9,), methods=("ig",), *, tokens=None, top=3, seed=0, answer="positive", target="positive", pixels=None
):
    """An explanation with random scores, the first token of each text a special one."""
    rng = np.random.default_rng(seed)
    texts = []
    for length in lengths:
        own = tokens or sentence(length)
        attributions = []
        for method in methods:
            scores = rng.normal(size=len(own)).astype(np.float32)
            whole = method == "ig"
            attributions.append(
                Attribution(
                    method,
                    scores if method not in ("gradcam", "self-write") else np.abs(scores),
                    0.25 if whole else None,
                    512 if whole else None,
                    False if whole else None,
                    kind=kind_of(METHODS[method] if method in METHODS else None),
                )
            )
        words = (None, *range(len(own) - 1))
        texts.append(ExplainedText(own, words, answer, 0.75, target, -1.25, tuple(attributions), pixels))
    provenance = record_provenance({"model": "demo/test"}, options={"top": top}, seed=seed)
    return Explanation(provenance=provenance, texts=tuple(texts), methods=tuple(methods), top=top)


def test_tables():
    result = make((9, 5), SEVEN)
    frame = result.to_frame()
    assert list(frame) == ["model", "text", "position", "token", "word", "method", "score", "in_top"]
    for table in (frame, result.summary(), result.highest()):
        assert set(table["model"]) == {"demo/test"}
    assert len(frame) == 7 * (9 + 5) and frame["word"].isna().sum() == 7 * 2
    for (at, method), part in frame.groupby(["text", "method"]):
        scores = result.attribution(at, method).scores
        np.testing.assert_array_equal(part["score"], scores)
        ordinary = part[part["word"].notna() & (part["score"] > 0)].sort_values("score", ascending=False)
        assert set(part[part["in_top"]]["position"]) == set(ordinary["position"][:3])
    summary = result.summary()
    columns = ["model", "text", "target", "value", "method", "delta", "steps", "converged", "error"]
    assert list(summary) == columns and len(summary) == 14
    first = summary.iloc[0]
    assert (first.delta, first.steps, first.converged) == (0.25, 512, False) and summary["delta"].isna().sum() == 12
    best = result.highest(2)
    assert (best["score"] > 0).all() and result.highest()["rank"].max() == 3
    assert [part["rank"].tolist() for _, part in best.groupby(["text", "method"])].count([1, 2]) == 13
    one = best[(best["text"] == 1) & (best["method"] == "occlusion")]
    scores = result.attribution(1, "occlusion").scores
    assert one["position"].tolist() == (np.argsort(-scores[1:])[:2] + 1).tolist()
    assert one["score"].tolist() == [float(scores[p]) for p in one["position"]]


def test_a_text_or_method_that_is_not_there():
    result = make((9,), SEVEN)
    assert result.attribution().method == "ig"
    with pytest.raises(InputError, match="no method 'occlusions'.*did you mean 'occlusion'"):
        result.attribution(0, "occlusions")
    with pytest.raises(InputError, match="no text 1"):
        result.attribution(1)
    with pytest.raises(InputError, match="no text 1 to start"):
        result.figure(start=1)


def test_it_comes_back_as_it_was(tmp_path):
    result = make((9, 5), SEVEN)
    paths = result.save(tmp_path, "explain")
    again = Result.load(paths["json"])
    assert type(again) is Explanation and again == result
    assert pd.read_csv(paths["csv"])["method"].nunique() == 7


def shade(scores, method="ig", words=None):
    own = Attribution(
        method,
        np.array(scores, dtype=np.float32),
        kind=kind_of(METHODS[method]),
        delta=None,
        steps=None,
        converged=None,
    )
    words = words if words is not None else tuple(range(len(scores)))
    text = ExplainedText(("a",) * len(scores), words, "x", 0.5, "x", 0.0, (own,))
    row = views._row(own, text, 0)
    return (row.shades() - (signed.STEPS if row.signed else 0)).tolist(), row.extent


def test_shades_are_around_zero_where_a_method_is_signed():
    assert shade([-1, 0, 0.5, 2]) == ([-8, 0, 4, 16], "±2")
    assert shade([0, 1, 2], "gradcam") == ([0, 16, 31], "0.000–2.000")
    assert shade([0.5, 0.5], "gradcam")[0] == [16, 16]
    assert shade([0, 0], "gradcam")[0] == [-1, -1] == [each + signed.STEPS for each in shade([0, 0])[0]]
    # A special token has no part in the range: beyond it, it has the colour of the end.
    assert shade([4, 1, -2], words=(None, 0, 1)) == ([16, 8, -16], "±2")
    assert shade([-1, 0, 2], "gradcam", (None, 0, 1)) == ([0, 0, 31], "0.000–2.000")
    assert shade([3, -3], words=(None, None)) == ([16, -16], "±3")


FLAT, VARIED = [0.9703, 0.9713, 0.9707, 0.5], [0.91, 0.97, 0.94, 0.5]  # the last token is a special one


@pytest.mark.parametrize(
    ("method", "scores", "flat"),
    [
        ("self-retention", FLAT, True),  # the share replaced, 0.0287 to 0.0297, varies by less than a tenth
        ("self-retention", VARIED, False),
        ("self-write", [0.0297, 0.0287, 0.0293, 0.5], True),
        ("survival", [0.25, 0.5, 0.125, 0.125], False),
        ("gradcam", FLAT, False),
        ("ig", FLAT, False),
    ],
)
def test_noise_of_the_gates_has_neither_colours_nor_names(method, scores, flat):
    own = Attribution(
        method,
        np.array(scores, dtype=np.float32),
        kind=kind_of(METHODS[method]),
        delta=None,
        steps=None,
        converged=None,
    )
    text = ExplainedText(("a", " b", " c", " d"), (0, 1, 2, None), "x", 0.5, "x", 0.0, (own,))
    result = Explanation({"model": "own"}, (text,), (method,), 2)
    (row,) = result.token_rows().texts[0].rows
    (line,) = result.lines()
    assert (row.remark, row.marked) == (("flat: noise", []) if flat else ("", [int(np.argmax(scores[:3]))]))
    assert (line.cells["highest scores"].text == "flat: noise") == flat
    assert (len(set(row.shades().tolist())) == 1) == flat and "d" in line.cells["special tokens"].text
    if flat:
        assert row.extent == format_range(float(own.scores[:3].min()), float(own.scores[:3].max()))
    pixels = dataclasses.replace(text, pixels=np.zeros((1, 3, 3), np.float32))
    (row,) = dataclasses.replace(result, texts=(pixels,)).token_rows().texts[0].rows
    assert row.remark == "" and len(set(row.shades().tolist())) > 1  # neighbouring pixels show what is no noise


def test_columns_stand_in_one_order_whatever_the_methods():
    found = [line.cells for line in make((9,), ("gradcam", "ig")).lines()]
    assert [list(cells)[:3] for cells in found] == [["highest scores", "strongest against", "special tokens"]] * 2
    assert found[0]["strongest against"].text == "" != found[1]["strongest against"].text
    assert "strongest against" not in make((9,), ("gradcam",)).lines()[0].cells


def test_terminal():
    result = make((9,), ("ig", "gradcam"))
    plain, coloured = str(result), render(result, force_terminal=True, color_system="truecolor", no_color=False)
    for shown in (plain, coloured):
        assert "positive" in shown and "f = −1.25" in shown and "misses 25.0%" in shown
        position = result[0].top(result[0].attributions[0], 1)[0]
        assert number(float(result[0].attributions[0].scores[position])) in shown
    assert "38;2" not in plain and "\x1b[1;4;38;2;" in coloured
    long = render(make((2000,)), force_terminal=True, color_system="truecolor", no_color=False)
    assert "48;2" not in long and "“positive”" in long  # too long to be written out


def test_hostile_tokens_are_harmless_everywhere():
    result = make(methods=("ig", "<i>own"), tokens=("<s>", *HOSTILE), top=20, answer="<i>bad\x1b", target="<b>\x1b[1m")
    for options in ({"color_system": None}, {"force_terminal": True, "color_system": "truecolor", "no_color": False}):
        shown = render(result, **options)
        assert "\x1b[31m" not in shown and "␛[31m" in shown and "[bold]no" in shown and "\u202e" not in shown
    page = result.to_html()
    assert "<script" not in page and "&lt;script&gt;" in page and "<i>bad" not in page and "<i>own" not in page
    assert not re.search(r"https?://|@import|url\(", page) and "<b>\x1b" not in page
    assert set(re.findall(r'src="([^"]{10})', page)) == {"data:image"}
    assert not {character for character in page if ord(character) < 32} - {"\n"} and "\u202e" not in page
    result.figure()


def test_every_token_of_the_page_shows_its_scores():
    result = make((9, 5), SEVEN)
    page = result.to_html()
    assert page.count('title="position') == 7 * (9 + 5) and "prefers-color-scheme: dark" in page
    for text in result:
        marked = [views._row(each, text, 3).marked for each in text.attributions]
        for position in range(len(text)):
            lines = "&#10;".join(
                f"{each.method}: {number(float(each.scores[position]), significant=6)}"
                + (f" (rank {own.index(position) + 1})" if position in own else "")
                for each, own in zip(text.attributions, marked)
            )
            assert page.count(lines) == 7
    assert "512" in page and "misses 25.0% of f(x) − f(baseline)" in page
    long = make((2100,)).to_html()
    assert long.count('title="position') == 2000 and "2,000 of 2,100 tokens, the end" in long
    assert 'title="position 2099' in long


def one_by_hand(method: str = "lrp", top: int = 3) -> Explanation:
    """An explanation whose every score is another number, a special token's the largest."""
    scores = np.array([5, 2, -3, 0.5, -0.25, 1, -0.75, 0.125], dtype=np.float32)
    tokens = ("<s>", *(f" {letter}" for letter in "abcdefg"))
    own = Attribution(
        method, scores if method == "lrp" else np.abs(scores), None, None, None, kind=kind_of(METHODS[method])
    )
    text = ExplainedText(tokens, (None, *range(7)), "good", 0.75, "good", 4.625, (own,))
    provenance = record_provenance({"model": "demo/test"}, options={}, seed=0)
    return Explanation(provenance=provenance, texts=(text,), methods=(method,), top=top)


def strongest_of(result: Explanation) -> list[dict[str, str]]:
    return [{name: cell.text for name, cell in line.cells.items()} for line in result.lines()]


def test_no_negative_score_is_called_high_and_no_text_is_wholly_marked():
    result = one_by_hand(top=5)
    assert strongest_of(result) == [
        {
            "highest scores": "a 2 · e 1 · c 0.500 · g 0.125",
            "strongest against": "b −3 · f −0.750 · d −0.250",
            "special tokens": "<s> 5 (40 % of all)",
        }
    ]
    assert result.highest()["score"].tolist() == [2, 1, 0.5, 0.125]
    assert np.flatnonzero(result.to_frame()["in_top"]).tolist() == [1, 3, 5, 7]
    row = result.token_rows().texts[0].rows[0]
    assert (row.marked, row.against, row.ends) == ([1, 5], [2], (-3.0, 3.0))  # 3 of 7 words, by |score|
    row = one_by_hand(top=2).token_rows().texts[0].rows[0]
    assert (row.marked, row.against) == ([1], [2])


def test_a_method_without_signs_has_nothing_against():
    result = one_by_hand("gradcam", top=5)
    (cells,) = strongest_of(result)
    assert cells["highest scores"] == "b 3 · a 2 · e 1 · f 0.750 · c 0.500" and "strongest against" not in cells
    row = result.token_rows().texts[0].rows[0]
    assert (row.marked, row.against, row.ends) == ([2, 1, 5], [], (0.125, 3.0))


def test_a_text_without_a_score_above_zero_has_no_highest():
    result = one_by_hand()
    text = result[0]
    text.attributions[0].scores[:] *= -np.sign(text.attributions[0].scores)
    (cells,) = strongest_of(result)
    assert cells["highest scores"] == "none" and cells["strongest against"] == "b −3 · a −2 · e −1"
    assert result.highest().empty and not result.to_frame()["in_top"].any()


@pytest.mark.parametrize(
    ("methods", "length"),
    itertools.product([("ig",), ("gradcam",), SEVEN], [1, 2, 8, 60, 61, 300, 1200])
    if ALL
    else [(("ig",), 8), (("gradcam",), 8), (SEVEN, 1200)],
)
def test_nothing_overlaps_in_the_figure(length, methods):
    long = {"answer": "w" * 60, "target": "t" * 90} if length == 8 else {}
    figure, texts = drawn(make((length, 3), methods, **long))
    assert not overlapping(texts) and not outside(figure, texts)
    shown = " ".join(text for text, _ in texts)
    assert all(word.strip() in shown for word in sentence(min(length, 1000)))
    assert all(method in shown for method in methods) and (("misses 25.0%" in shown) == ("ig" in methods))


def test_boxes_and_strips_have_the_colours_of_the_scores():
    around, upward = signed.signed_shades(), ramp(BLUES)
    short = make((6,), ("ig", "gradcam"))
    text = short[0]
    expected = [around[shade] for shade in views._row(text.attributions[0], text, 3).shades()]
    expected_other = [upward[shade] for shade in views._row(text.attributions[1], text, 3).shades()]
    (paper,) = typed(short.figure())
    patches = paper.collections
    faces = [[to_hex(colour) for colour in each.get_facecolor()][:6] for each in patches]
    assert faces == [expected, expected_other]
    assert [len(each.get_facecolor()) for each in patches] == [6 + 2, 6 + 2]  # of 5 tokens 2 are underlined
    long = make((401,), ("ig", "gradcam"))
    text = long[0]
    images = [image for axes in panels_of(long.figure()) for image in axes.get_images()]
    for image, each, colours in zip(images, text.attributions, (around, upward), strict=True):
        found = [to_hex(colour) for colour in image.get_array()[0]]
        assert found == [colours[shade] for shade in views._row(each, text, 3).shades()]
    assert SHADES == len(upward)


def test_images_have_a_map_per_method(monkeypatch):
    monkeypatch.setattr(token_figure, "MAX_TEXTS", 2)
    names = tuple(f"{at // 4},{at % 4}" for at in range(12))
    pixels = np.random.default_rng(0).random((3, 4, 3)).astype(np.float32)
    result = make((13,), SEVEN, tokens=(*names, "[class]"), pixels=pixels)
    text = result[0]
    words = (*range(12), None)
    result = Explanation(
        provenance=result.provenance,
        texts=(ExplainedText(**{**vars(text), "words": words}),) * 3,
        methods=SEVEN,
        top=3,
    )
    figure, texts = drawn(result)
    images = [image.get_array() for axes in figure.axes for image in axes.get_images() if image.get_array().ndim == 3]
    assert len(images) == 2 * 8 and "texts 0–1 of 3" in said(figure)
    np.testing.assert_allclose(images[0], pixels)
    shades = views._row(result[0].attributions[0], result[0], 3).shades(count=PIXEL_SHADES)
    expected = [ramp(signed.SIGNED, PIXEL_SHADES)[shade] for shade in shades[:12]]
    assert [to_hex(colour) for colour in images[1].reshape(12, 3)] == expected
    assert not overlapping(texts)
    assert "data:image/png;base64" in result.to_html() and result.of_images


def test_the_figure_leaves_no_global_state():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    make().figure()
    assert plt.get_fignums() == before
