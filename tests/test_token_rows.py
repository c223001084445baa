"""Texts with coloured tokens have the same colours and marks in a terminal, on a page and in a picture."""

import re
from html import unescape

import numpy as np
import pytest
from drawn import typed
from matplotlib.colors import to_hex
from ssmscope.render import token_rows
from ssmscope.render.blocks import TokenRow, TokenRows, TokenText
from ssmscope.render.colours import BLUES, CIVIDIS, SIGNED
from ssmscope.render.figure import EMPTY, MARK, Frame
from ssmscope.render.token_figure import draw_rows

TOKENS = ("<s>", *(f" {letter}" for letter in "abcde"))
SCORES = np.array([0.0, 8, -8, 4, -2, 1])
AGAINST, FOR, NOTHING = "#6e2a03", "#08306b", "#f7f7f7"
"""The ends of the signed colours and their middle: orange, blue, white."""


def rows_of(*, signed: bool = True, outside: tuple[int, ...] = ()) -> TokenRows:
    ends = (-8.0, 8.0) if signed else (0.0, 8.0)
    hidden = np.isin(np.arange(len(TOKENS)), outside)
    row = TokenRow("own", SCORES if signed else np.abs(SCORES), ends, signed, hidden, marked=(1, 3), against=(2,))
    text = TokenText(TOKENS, (None, *range(5)), (row,), "good", 0.75)
    return TokenRows((text,), of="method", score="score", name="scores", marked="some")


def in_terminal(block: TokenRows) -> dict[str, str]:
    """The style of every token that has one."""
    line = list(token_rows.terminal(block, colours=True))[-1]
    return {line.plain[span.start : span.end]: str(span.style) for span in line.spans}


def on_page(block: TokenRows) -> list[tuple[str, str, str]]:
    """Every token with its classes and its level around zero."""
    (text,) = block.texts
    page = token_rows.tokens(text.rows[0], text)
    found = re.findall(r'<span class="([^"]*)"(?: data-l="(-?\d+)")?>([^<]*)</span>', page)
    return [(unescape(token), classes, level) for classes, level, token in found]


def in_picture(block: TokenRows) -> tuple[list[str], dict[int, str]]:
    """The colour of every token's box, and the colour of the line under those that have one."""
    (paper,) = typed(draw_rows(block, "demo/test", Frame()))
    (boxes,) = paper.collections
    colours = [to_hex(colour) for colour in boxes.get_facecolor()]
    lefts = [float(path.vertices[:, 0].min()) for path in boxes.get_paths()]
    count = len(TOKENS)
    lines = {lefts[:count].index(left): colour for left, colour in zip(lefts[count:], colours[count:], strict=True)}
    return colours[:count], lines


def test_signed_scores_are_blue_for_and_orange_against():
    block = rows_of()
    colours, lines = in_picture(block)
    assert (colours[0], colours[1], colours[2]) == (NOTHING, FOR, AGAINST) == (SIGNED[4], SIGNED[-1], SIGNED[0])
    assert colours[3] == SIGNED[6] and colours[4] == SIGNED[3] and len(set(colours)) == 6
    assert lines == {1: "#1b1f24", 3: "#1b1f24", 2: MARK}
    assert on_page(block) == [
        ("<s>", "special", "0"), ("a", "kept", "16"), ("b", "against", "-16"), ("c", "kept", "8"), ("d", "", "-4"),
        ("e", "", "2"),
    ]  # fmt: skip
    shown = in_terminal(block)
    assert shown["a"] == f"bold underline #ffffff on {FOR}" and shown["b"] == f"bold underline #ffffff on {AGAINST}"
    assert "<s>" not in shown  # zero has the terminal's own background
    assert [token for token, style in shown.items() if "underline" in style] == ["a", "b", "c"]


@pytest.mark.parametrize("outside", [(), (0,)])
def test_scores_without_signs_go_from_pale_to_dark(outside):
    block = rows_of(signed=False, outside=outside)
    colours, lines = in_picture(block)
    assert colours[0] == (EMPTY if outside else BLUES[0]) and colours[1] == colours[2] == BLUES[-1]
    assert lines == {1: "#1b1f24", 3: "#1b1f24", 2: MARK}
    classes = [set(classes.split()) for _, classes, _ in on_page(block)]
    assert classes[0] == ({"special", "out"} if outside else {"special", "v0"})
    assert classes[1:] == [{"v31", "kept"}, {"v31", "against"}, {"v16", "kept"}, {"v8"}, {"v4"}]
    shown = in_terminal(block)
    assert shown["a"] == f"bold underline #000000 on {CIVIDIS[-1]}"
    assert shown["<s>"] == ("dim" if outside else f"#ffffff on {CIVIDIS[0]}")


def test_a_query_is_set_apart_where_it_stands():
    row = TokenRow("own", SCORES, (-8.0, 8.0), True, query=3)
    text = TokenText(TOKENS, (None, *range(5)), (row,), "good", 0.75)
    block = TokenRows((text,), of="method", score="score", name="scores", marked="some")
    line = list(token_rows.terminal(block, colours=True))[-1]
    assert line.plain == "<s> a b ▸c d e"
    (paper,) = typed(draw_rows(block, "demo/test", Frame()))
    (frame,) = paper.patches
    (boxes,) = paper.collections
    assert len(boxes.get_paths()) == 4  # what the query cannot see is left out
    assert frame.get_x() == pytest.approx(float(boxes.get_paths()[3].vertices[:, 0].min()))


def test_long_texts_have_their_marks_at_their_positions():
    scores = np.linspace(-1, 1, 900)
    row = TokenRow("own", scores, (-1.0, 1.0), True, marked=(7, 650), against=(31,), query=800)
    text = TokenText(tuple(f" {n}" for n in range(900)), tuple(range(900)), (row,), "good", 0.75)
    figure = draw_rows(TokenRows((text,), of="m", score="s", name="n", marked="some"), "demo/test", Frame())
    (strip,) = [axes for axes in figure.axes if axes.get_xlabel() == "position"]
    middles = {round(each.get_x() + each.get_width() / 2, 6): to_hex(each.get_facecolor()) for each in strip.patches}
    assert middles == {7: "#1b1f24", 650: "#1b1f24", 31: MARK}
    (arrow,) = strip.lines
    assert arrow.get_xdata().tolist() == [800] and strip.get_xlim() == (-0.5, 899.5)
    (image,) = strip.get_images()
    assert image.get_extent() == [-0.5, 899.5, 0.76, 0]
    colours = image.get_array()[0]
    assert [to_hex(colours[at]) for at in (0, -1)] == [AGAINST, FOR]
