"""Explanations: tables, round trips, and views that stay readable and safe at any size."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
from attended import HOSTILE
from attended import words as sentence
from drawn import drawn, outside, overlapping, panels_of, typed
from exhaustive import ALL
from matplotlib.colors import to_hex
from seen import render
from ssmscope.api.provenance import record_provenance
from ssmscope.interp.explain import views
from ssmscope.interp.explain.result import Explanation
from ssmscope.interp.explain.scored_text import Attribution, ExplainedText, kind_of
from ssmscope.interp.methods import METHODS
from ssmscope.render import colours as signed
from ssmscope.render.colours import BLUES, SHADES, ramp
from ssmscope.render.numbers import format_range

SEVEN = ("ig", "gradxinput", "smoothgrad", "gradcam", "occlusion", "attention-gradient", "self-write")


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
                    method, scores if method not in ("gradcam", "self-write") else np.abs(scores),
                    0.25 if whole else None, 512 if whole else None, False if whole else None,
                    kind=kind_of(METHODS[method] if method in METHODS else None),
                )
            )  # fmt: skip
        words = (None, *range(len(own) - 1))
        texts.append(ExplainedText(own, words, answer, 0.75, target, -1.25, tuple(attributions), pixels))
    provenance = record_provenance({"model": "demo/test"}, options={"top": top}, seed=seed)
    return Explanation(provenance=provenance, texts=tuple(texts), methods=tuple(methods), top=top)


def shade(scores, method="ig", words=None):
    own = Attribution(
        method, np.array(scores, dtype=np.float32), kind=kind_of(METHODS[method]), delta=None, steps=None,
        converged=None,
    )  # fmt: skip
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


@pytest.mark.parametrize(("method", "scores", "flat"), [
    ("self-retention", FLAT, True),  # the share replaced, 0.0287 to 0.0297, varies by less than a tenth
    ("self-retention", VARIED, False),
    ("self-write", [0.0297, 0.0287, 0.0293, 0.5], True),
    ("survival", [0.25, 0.5, 0.125, 0.125], False),
    ("gradcam", FLAT, False),
    ("ig", FLAT, False),
])  # fmt: skip
def test_noise_of_the_gates_has_neither_colours_nor_names(method, scores, flat):
    own = Attribution(
        method, np.array(scores, dtype=np.float32), kind=kind_of(METHODS[method]), delta=None, steps=None,
        converged=None,
    )  # fmt: skip
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
